"""What all ranks must have in common, compared before they exchange anything else.

A rank with another model, seed, method or version would at best be refused later, and at worst be
averaged with the others. The ranks add up a digest of their facts; only when it is not the same
everywhere do they spell them out, as text, to name the first difference.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import torch

from paceline._version import __version__
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from paceline.comm.base import Comm
    from paceline.model.replica import Replica
    from paceline.strategies.base import Strategy

_LIMBS = 4
_LONGEST = 1 << 24


def facts_of(model: nn.Module, replica: Replica, strategy: Strategy, seed: int) -> list[str]:
    """What must be the same on every rank, a line each."""
    trained = {id(span.parameter) for span in replica.flat.spans}
    rest = chain(model.named_parameters(), model.named_buffers())
    groups = len(replica.optimizer.param_groups)
    return [
        f"paceline {__version__}",
        f"seed {seed}",
        f"strategy {_plainly(strategy)}",
        f"optimizer {type(replica.optimizer).__name__} with {groups} parameter groups",
        *(_told(f"parameter {span.name}", span.parameter) for span in replica.flat.spans),
        *(_told(f"fixed {name}", tensor) for name, tensor in rest if id(tensor) not in trained),
    ]


def _plainly(strategy: Strategy) -> str:
    """The method and its options, less those that no text tells, such as functions."""
    plain = (bool, int, float, str, type(None))
    options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    told = [f"{name}={value!r}" for name, value in options.items() if isinstance(value, plain)]
    return f"{type(strategy).__name__}({', '.join(told)})"


def _told(what: str, tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{what} of {kind} {tuple(tensor.shape)}, strides {tensor.stride()}"


def check_agreement(comm: Comm, facts: Sequence[str]) -> None:
    """Refuse to go on, on every rank alike, when the facts of one are not those of the first."""
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=2 * _LIMBS).digest()
    limbs = struct.unpack(f"<{_LIMBS}H", digest)
    sums = torch.tensor([*limbs, *(limb**2 for limb in limbs)])
    count = comm.all_reduce(sums)
    totals = sums.tolist()
    squares = zip(totals[:_LIMBS], totals[_LIMBS:], strict=True)
    if all(count * square == total**2 for total, square in squares):
        return
    raise UsageError(f"all ranks must have the same in worker.setup: {_difference(comm, facts)}")


def _difference(comm: Comm, facts: Sequence[str]) -> str:
    """The first thing that is not the same, on the first rank and on the first that differs."""
    first = _say(comm, "\n".join(facts), 0).split("\n")
    pairs = zip_longest(first, facts, fillvalue="nothing more")
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    differs = torch.zeros(comm.size, dtype=torch.int64)
    differs[comm.rank] = unequal is not None
    comm.all_reduce(differs)
    odd = int(differs.argmax())
    theirs, mine = unequal or ("", "")
    told = f"{theirs} on rank {comm.members[0]}, {mine} on rank {comm.members[odd]}"
    return _say(comm, told, odd)


def _say(comm: Comm, text: str, src: int) -> str:
    """What ``src`` says, on every rank."""
    data = text.encode()[:_LONGEST]
    length = torch.tensor([len(data)])
    comm.broadcast(length, src)
    told = torch.zeros(int(length), dtype=torch.uint8)
    if comm.rank == src:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(told, src)
    return bytes(told.tolist()).decode(errors="replace")
