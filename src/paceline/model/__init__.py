"""The user's model and optimizer, as vectors that strategies can work on."""
