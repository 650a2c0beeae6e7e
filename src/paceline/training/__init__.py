"""The objects that the user's training loop uses."""
