"""The record of a run: its folder, its trace, its result."""
