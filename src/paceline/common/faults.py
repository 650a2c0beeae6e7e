"""Faults as expressions: ``kill(rank=2).at(step=10)``, or the same in a cluster file.

.. code-block:: toml

    [[faults]]
    kind = "freeze"
    rank = 1
    at_s = 2.0
    for_s = 3.0
"""

from __future__ import annotations

import ast
import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from paceline.common.options import above, at_least, build, one_of
from paceline.errors import UsageError, unknown

KINDS = ("kill", "freeze", "slow", "join", "cut", "degrade")
LINK_KINDS = ("cut", "degrade")
EXAMPLE = "kill(rank=1).at(step=40)"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a rank or a link, at a time or before one of the rank's steps.

    Args:
        kind: ``kill`` ends the rank, ``freeze`` stops it, ``slow`` makes it compute longer,
            ``join`` delays its start; ``cut`` and ``degrade`` affect links.
        rank: the rank that is affected, or one end of the link.
        peer: the other end of the link, a rank or a node as this end is; None: all links.
        node: in place of a rank: the links between this node and others.
        at_s: when, in seconds of virtual time.
        at_step: in place of a time: before which of the rank's optimizer steps, from 0.
        for_s: how long it lasts; None: until the end of the run.
        factor: for ``slow``, how many times longer computing takes; for ``degrade``, the share of
            its bandwidth that the link keeps.
    """

    kind: Literal["kill", "freeze", "slow", "join", "cut", "degrade"]
    rank: int | None = None
    peer: int | None = None
    node: int | None = None
    at_s: float | None = None
    at_step: int | None = None
    for_s: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        for name in ("rank", "peer", "node", "at_s", "at_step"):
            at_least(name, getattr(self, name) or 0, 0)
        if self.at_s is not None and self.at_step is not None:
            raise UsageError(f"{self.kind} takes at_s or at_step, not both")
        if self.for_s is not None:
            above("for_s", self.for_s, 0)
        if self.kind in LINK_KINDS:
            self._check_link()
        else:
            self._check_rank()
        self._check_kind()

    def _check_rank(self) -> None:
        if self.rank is None:
            raise UsageError(f"{self.kind}: rank is missing")
        for name in ("peer", "node"):
            if (value := getattr(self, name)) is not None:
                raise UsageError(
                    f"{name} ({value}) is an option of cut and degrade, not of {self.kind}"
                )
        if self.kind == "join" and self.at_step is not None:
            raise UsageError("join takes at_s: a rank has made no steps before it joins")

    def _check_link(self) -> None:
        if (self.rank is None) == (self.node is None):
            raise UsageError(f"{self.kind} takes a rank or a node, and maybe its peer")
        if self.peer is not None and self.peer in (self.rank, self.node):
            end = "node" if self.rank is None else "rank"
            raise UsageError(f"peer ({self.peer}) must differ from {end} ({self.peer})")
        if self.at_step is not None:
            raise UsageError(f"{self.kind} takes at_s: a link has no steps")

    def _check_kind(self) -> None:
        if self.for_s is not None and self.kind in ("kill", "join"):
            raise UsageError(f"for_s ({self.for_s}) is no option of {self.kind}: it is permanent")
        takes_factor = self.kind in ("slow", "degrade")
        if takes_factor and self.factor is None:
            raise UsageError(f"{self.kind}: factor is missing")
        if not takes_factor and self.factor is not None:
            raise UsageError(f"factor ({self.factor}) is an option of slow and degrade only")
        above("factor", 1.0 if self.factor is None else self.factor, 0)
        if self.kind == "degrade" and self.factor is not None and self.factor >= 1:
            raise UsageError(
                f"factor ({self.factor}) must be below 1: the share of the bandwidth that remains"
            )

    def at(self, *, seconds: float | None = None, step: int | None = None) -> Fault:
        """The same fault, at a time or a step."""
        if (seconds is None) == (step is None):
            raise UsageError("a fault happens at(seconds=...) or at(step=...)")
        return dataclasses.replace(self, at_s=seconds, at_step=step)


def rank_of(fault: Fault) -> int:
    """The rank that a fault affects."""
    assert fault.rank is not None, "only links have faults without a rank"
    return fault.rank


def kill(*, rank: int) -> Fault:
    """End ``rank`` at once, as ``kill -9`` does.

    >>> fault = kill(rank=2).at(step=10)
    >>> fault.kind, fault.rank, fault.at_step
    ('kill', 2, 10)
    """
    return Fault(kind="kill", rank=rank)


def freeze(*, rank: int, for_s: float | None = None) -> Fault:
    """Stop ``rank``, as SIGSTOP does, and continue it after ``for_s``."""
    return Fault(kind="freeze", rank=rank, for_s=for_s)


def slow(*, rank: int, factor: float, for_s: float | None = None) -> Fault:
    """Make computing on ``rank`` take ``factor`` times longer, for ``for_s`` or for good."""
    return Fault(kind="slow", rank=rank, factor=factor, for_s=for_s)


def join(*, rank: int) -> Fault:
    """Start ``rank`` late, at the given time."""
    return Fault(kind="join", rank=rank)


def cut(
    *,
    rank: int | None = None,
    peer: int | None = None,
    node: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Cut all links of ``rank`` or of ``node``, or only that to ``peer``, a rank or a node."""
    return Fault(kind="cut", rank=rank, peer=peer, node=node, for_s=for_s)


def degrade(
    *,
    factor: float,
    rank: int | None = None,
    peer: int | None = None,
    node: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Reduce the bandwidth of such links to ``factor`` of it, for ``for_s`` or for good."""
    return Fault(kind="degrade", rank=rank, peer=peer, node=node, factor=factor, for_s=for_s)


def parse_fault(text: str) -> Fault:
    """The fault that an expression describes; the text is parsed, never executed.

    >>> parse_fault("freeze(rank=1, for_s=3).at(seconds=2)").at_s
    2.0
    """
    where = f"fault ({text})"
    try:
        with warnings.catch_warnings(action="ignore"):  # SyntaxWarning for odd literals
            call: ast.expr = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"{where} must be like {EXAMPLE}") from None
    when: dict[str, Any] = {}
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        when = _when(call, call.func.attr, where)
        call = call.func.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(f"{where} must be like {EXAMPLE}")
    if call.func.id not in KINDS:
        raise UsageError(f"{where}: {unknown('fault', call.func.id, KINDS)}")
    return build(Fault, {"kind": call.func.id, **_numbers(call, where), **when}, where)


def format_fault(fault: Fault) -> str:
    """The expression that :func:`parse_fault` reads as ``fault``.

    >>> format_fault(freeze(rank=1, for_s=3.0).at(seconds=2.0))
    'freeze(rank=1, for_s=3.0).at(seconds=2.0)'
    """
    names = ("rank", "peer", "node", "for_s", "factor")
    given = [f"{name}={value}" for name in names if (value := getattr(fault, name)) is not None]
    when = "" if fault.at_s is None else f".at(seconds={fault.at_s})"
    when = when if fault.at_step is None else f".at(step={fault.at_step})"
    return f"{fault.kind}({', '.join(given)}){when}"


def _when(call: ast.Call, verb: str, where: str) -> dict[str, Any]:
    """The time or step in ``.at(...)``."""
    fields = {"seconds": "at_s", "step": "at_step"}
    numbers = _numbers(call, where)
    if verb != "at" or len(numbers) != 1 or not fields.keys() >= numbers.keys():
        raise UsageError(f"{where}: a fault happens at(seconds=...) or at(step=...)")
    return {fields[name]: number for name, number in numbers.items()}


def _numbers(call: ast.Call, where: str) -> dict[str, Any]:
    """The arguments of a call: names and plain numbers."""
    if call.args:
        raise UsageError(f"{where}: options have names, as in {EXAMPLE}")
    numbers = {}
    for keyword in call.keywords:
        if keyword.arg is None or not isinstance(keyword.value, ast.Constant):
            raise UsageError(f"{where}: options are plain numbers, as in {EXAMPLE}")
        numbers[keyword.arg] = keyword.value.value
    return numbers
