"""Which method, on how many workers, for a task on a cluster: predicted by simulations."""
