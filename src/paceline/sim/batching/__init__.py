"""The gradients of many virtual workers in one computation, behind each worker's own loop."""
