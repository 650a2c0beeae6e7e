"""What the user's training loop touches."""
