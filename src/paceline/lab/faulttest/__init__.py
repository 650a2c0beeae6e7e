"""Deterministic fault testing: random runs with random faults in virtual time, and their laws.

A :class:`~paceline.lab.faulttest.schedule.Schedule` describes one run; it is drawn from a seed or
parsed from a line of text. :mod:`~paceline.lab.faulttest.trial` runs it while observers watch. Each
observer checks one law (a push counts once, replicas are equal, a batch is given out once), and
none is part of the code that it watches. :mod:`~paceline.lab.faulttest.shrink` reduces a run that
breaks a law to a smaller one, and prints the command that repeats it.
"""
