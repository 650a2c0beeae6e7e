"""What a run leaves behind: its folder, its trace, its result."""
