"""What a model must be to be trained here, and why others are refused."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.model.flat import Span

MIXED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What the parameters of one model may be of together."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch that exchange gradients or parameters by themselves."""


def plain_model(model: Any) -> Any:
    """The module itself, where torch.compile was given it."""
    return getattr(model, "_orig_mod", model)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that exchanges something by itself."""
    for module in model.modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        if wrapper := next((name for name in WRAPPERS if name in names), None):
            raise UsageError(
                f"the model ({wrapper}) must be a plain one: {wrapper} exchanges gradients or"
                " parameters by itself, and here the strategy does. Give worker.setup the model"
                " without it"
            )


def check_sync_batchnorm(model: nn.Module, in_step: bool) -> None:
    """Refuse SyncBatchNorm where its forward would wait in vain; warn where it does not wait.

    ``in_step``: all processes make the same steps.
    """
    if not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        warnings.warn(
            "SyncBatchNorm normalizes each worker's batch by itself here, as BatchNorm does; the"
            " answer has the statistics of all workers",
            stacklevel=4,
        )
    elif not in_step:
        raise UsageError(
            "SyncBatchNorm waits for all processes in each forward, and with this strategy they do"
            " not make the same steps: use BatchNorm; the answer has the statistics of all workers"
        )


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be a view of one dense vector."""
    if isinstance(parameter, UninitializedParameter):
        raise UsageError(f"parameter {name} has no shape yet: run one forward before worker.setup")
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise UsageError(f"parameter {name} ({type(parameter).__name__}) must be a plain parameter")
    if parameter.is_meta:
        raise UsageError(f"parameter {name} is on the meta device: give it memory first")
    if not parameter.is_floating_point():
        raise UsageError(f"parameter {name} ({parameter.dtype}) must be of a real floating dtype")
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if not dense:
        raise UsageError(f"parameter {name} has gaps or overlaps (strides {parameter.stride()})")


def check_device(spans: Sequence[Span]) -> None:
    """Refuse parameters on several devices."""
    kinds = Counter(str(span.parameter.device) for span in spans)
    if len(kinds) > 1:
        counts = ", ".join(f"{kind} ({count} parameters)" for kind, count in kinds.items())
        raise UsageError(f"all trained parameters must be on one device, got {counts}")


def widest_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """A dtype that holds every number of these parameters.

    >>> halves = [nn.Parameter(torch.ones(1, dtype=kind)) for kind in (torch.half, torch.bfloat16)]
    >>> widest_dtype(halves), widest_dtype(halves[:1])
    (torch.float32, torch.float16)
    """
    kinds = {parameter.dtype for parameter in parameters}
    if len(kinds) > 1 and not kinds <= {*MIXED}:
        names = ", ".join(str(kind) for kind in sorted(kinds, key=str))
        raise UsageError(f"parameters of several dtypes ({names}) must be of {_listed(MIXED)}")
    return functools.reduce(torch.promote_types, kinds)


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_separate(spans: Sequence[Span]) -> None:
    """Refuse two parameters that share memory; tied weights that are one parameter are fine."""
    ordered = sorted(spans, key=lambda span: span.parameter.data_ptr())
    for before, after in itertools.pairwise(ordered):
        if before.parameter.data_ptr() + before.parameter.nbytes > after.parameter.data_ptr():
            raise UsageError(
                f"parameters {before.name} and {after.name} share memory: tie weights by using"
                " one nn.Parameter in both places"
            )
