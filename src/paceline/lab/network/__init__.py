"""Several hosts on one machine: namespaces, and a network with rate, delay and faults."""
