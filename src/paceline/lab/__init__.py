"""The laboratory: comparisons, papers, benchmarks, calibration, fault tests and drills."""
