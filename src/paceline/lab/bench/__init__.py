"""Benchmarks against torch and gloo: each compares in one run, interleaved, by medians."""
