"""Trainers of other packages on workers of Paceline; each module needs its package, and no other.

``paceline.integrations.lightning``, ``.fabric`` and ``.huggingface``; docs/how-to/trainers.md shows
them.
"""
