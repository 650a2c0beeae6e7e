"""Measure this machine into a cluster file, and the simulator's predictions against real runs."""
