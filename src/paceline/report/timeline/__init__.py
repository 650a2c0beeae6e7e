"""Where each rank's time went, from the trace of a run: for Perfetto, and as a picture."""
