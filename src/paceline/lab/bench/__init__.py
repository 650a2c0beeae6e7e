"""The benchmarks against the peers: each compares in one run, interleaved, by medians."""
