"""Watch a run from its folder, while it goes on and after it: in a terminal, or on a page."""
