"""Drills: inject faults into real processes on purpose, and check what happens."""
