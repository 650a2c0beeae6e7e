"""How a run starts, goes on, and ends: real processes and simulated ones."""
