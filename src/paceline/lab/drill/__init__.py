"""Drills: faults that are done to real processes on purpose, and what came of them."""
