"""The laboratory: comparisons, papers, benchmarks, calibration, faults."""
