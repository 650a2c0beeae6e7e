"""Check that all ranks agree on model, seed, method and version, before they exchange data.

A rank that differs would at best be refused later, and at worst be averaged with the others. The
ranks sum a digest of these facts. Only when the digests differ do they exchange the facts as text,
to name the first difference.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain, zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline._version import __version__
from paceline.comm.comm import Comm
from paceline.errors import UsageError
from paceline.model.replica import Replica
from paceline.strategies.base import Strategy

_LIMBS = 4
_MAX_BYTES = 1 << 24


def facts_of(model: nn.Module, replica: Replica, strategy: Strategy, seed: int) -> list[str]:
    """The facts that must be the same on every rank, one line each."""
    trained = {id(span.parameter) for span in replica.flat.spans}
    others = chain(model.named_parameters(), model.named_buffers())
    return [
        f"paceline {__version__}",
        f"seed {seed}",
        f"strategy {_describe_strategy(strategy)}",
        *map(_describe_optimizer, replica.optimizers),
        *(_layout(f"parameter {span.name}", span.parameter) for span in replica.flat.spans),
        *(_layout(f"fixed {name}", tensor) for name, tensor in others if id(tensor) not in trained),
    ]


def _describe_strategy(strategy: Strategy) -> str:
    """The method and its options, without those that have no plain text, such as functions."""
    plain = (bool, int, float, str, type(None))
    options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    texts = [f"{name}={value!r}" for name, value in options.items() if isinstance(value, plain)]
    return f"{type(strategy).__name__}({', '.join(texts)})"


def _describe_optimizer(optimizer: Optimizer) -> str:
    return (
        f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"
    )


def _layout(what: str, tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{what} of {kind} {tuple(tensor.shape)}, strides {tensor.stride()}"


def check_agreement(comm: Comm, facts: Sequence[str]) -> None:
    """Raise the same error on every rank if the facts of any rank differ."""
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=2 * _LIMBS).digest()
    limbs = struct.unpack(f"<{_LIMBS}H", digest)
    sums = torch.tensor([*limbs, *(limb**2 for limb in limbs)])
    count = comm.all_reduce(sums).weight
    totals = sums.tolist()
    squares = zip(totals[:_LIMBS], totals[_LIMBS:], strict=True)
    if all(count * square == total**2 for total, square in squares):
        return
    raise UsageError(f"all ranks must agree in worker.setup: {_difference(comm, facts)}")


def _difference(comm: Comm, facts: Sequence[str]) -> str:
    """The first difference between the first rank and the first rank that differs from it."""
    first = _broadcast_text(comm, "\n".join(facts), 0).split("\n")
    pairs = zip_longest(first, facts, fillvalue="nothing more")
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    differs = torch.zeros(comm.size, dtype=torch.int64)
    differs[comm.rank] = unequal is not None
    comm.all_reduce(differs)
    differing = int(differs.argmax())
    theirs, ours = unequal or ("", "")
    text = f"{theirs} on rank {comm.ranks[0]}, {ours} on rank {comm.ranks[differing]}"
    return _broadcast_text(comm, text, differing)


def _broadcast_text(comm: Comm, text: str, src: int) -> str:
    """The text of rank ``src``, on every rank."""
    data = text.encode()[:_MAX_BYTES]
    length = torch.tensor([len(data)])
    comm.broadcast(length, src)
    received = torch.zeros(int(length), dtype=torch.uint8)
    if comm.rank == src:
        received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(received, src)
    return bytes(received.tolist()).decode(errors="replace")
