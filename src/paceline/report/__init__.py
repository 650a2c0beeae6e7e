"""One HTML file from a comparison, or from the folders of runs; it needs no network."""
