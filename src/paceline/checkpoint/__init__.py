"""Checkpoints: what a run needs to resume, in files that hold data and no code.

- :mod:`~paceline.checkpoint.disk`: crash-safe writes, and failpoints that test them.
- :mod:`~paceline.checkpoint.states`: a nested state as one safetensors file.
- :mod:`~paceline.checkpoint.store`: the checkpoints of a run, each verified before it is used.
- :mod:`~paceline.checkpoint.weights`: weights from, and for, plain PyTorch.
"""
