"""How each rank spent its time, from the trace of a run: for Perfetto, and as a picture."""
