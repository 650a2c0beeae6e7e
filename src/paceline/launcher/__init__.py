"""Start, supervise and end runs, in real processes and simulated."""
