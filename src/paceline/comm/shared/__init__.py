"""Ranks of one host that talk through memory they share."""
