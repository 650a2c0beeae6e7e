"""Deterministic fault testing: random runs with random faults in virtual time, and their laws.

A :class:`~paceline.lab.faulttest.schedule.Schedule` is one run, drawn from a seed or written down
as a line of text. :mod:`~paceline.lab.faulttest.trial` makes it and has observers watch what
happens; each observer knows one law (a push counts once, a replica equals the others, a batch is
given out once), and none of them sits in the code that they watch. A run that breaks a law is made
smaller by :mod:`~paceline.lab.faulttest.shrink` and printed as a command that makes it again.
"""
