"""Tasks that need no download, for demonstrations, comparisons and benchmarks."""
