"""A cluster in one process: virtual time, simulated links, injected faults."""
