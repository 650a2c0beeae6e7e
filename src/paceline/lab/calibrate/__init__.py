"""Describe this machine as a cluster file, and compare predictions with real runs."""
