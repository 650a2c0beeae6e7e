"""Checkpoints: what a run needs to go on, as files that hold numbers and nothing else.

- :mod:`~paceline.checkpoint.disk`: writing that a crash leaves whole or undone; failpoints.
- :mod:`~paceline.checkpoint.states`: a nested state as one safetensors file.
- :mod:`~paceline.checkpoint.store`: the checkpoints of a run, each verified before it is used.
- :mod:`~paceline.checkpoint.weights`: weights from, and for, plain PyTorch.
"""
