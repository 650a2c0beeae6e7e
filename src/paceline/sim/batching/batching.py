"""Which calls of ``model(x)`` are computed together, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import torch
from torch.nn.utils import parametrize

from paceline.errors import UsageError
from paceline.sim.batching.apart import Apart
from paceline.sim.batching.enrollment import Enrollment
from paceline.sim.batching.joint import Arguments, Cannot, Joint, Program
from paceline.sim.batching.likeness import VALUES, Likeness
from paceline.sim.batching.member import Batch, Call, Member
from paceline.sim.batching.proof import (
    Case,
    drawn,
    first_line,
    joint_of,
    prove,
    prove_recorded,
    refuse_slower,
)
from paceline.sim.batching.recorded import Recorded
from paceline.sim.batching.rows import Rows

if TYPE_CHECKING:
    from paceline.sim.batching.graphs import Recorder
    from paceline.sim.generators import Generators

AT_MOST = 64
"""How many workers are computed together. More fall out of a processor's cache."""
LEAST = 4
"""A device takes as long for fewer, one by one."""
PROVEN = 16
"""How many workers the first joint computation of a kind has, which is compared."""
KINDS = 32
"""How many kinds of calls there may be: each has a copy of the model."""
RECORDED_AFTER = 2
"""How many joint forwards of a kind there are before one is recorded."""
MOST_RECORDED = 12
"""How many recorded computations of a kind there may be: each has memory of its own."""
_functorch: Any = torch._C._functorch
T = TypeVar("T")
Tell = Callable[[str], None]


class BatchedFacts(TypedDict):
    """How the gradients of a run were computed.

    Attributes:
        share: of the calls of a model that were computed together with others.
        mean: how many were computed together, on average.
        why_not: why some, or all from then on, were computed one at a time.
        recorded: the share of the joint computations that a GPU has repeated by itself.
        why_not_recorded: why some have to be told it each time.
    """

    share: float
    mean: float | None
    why_not: str | None
    recorded: float
    why_not_recorded: str | None


class Kind:
    """Calls that compute the same: what they compute, and what is known of it.

    Attributes:
        is_proven: whether its first joint forward was compared with what workers compute alone.
        is_random: whether its forward draws random numbers.
        calls: those that wait; ``parts``, those that are to be computed together.
        used: how many joint forwards there were.
        idle: recorded computations that wait for their next use, by their size; ``made``: how many
            there are.
        records: whether they are recorded.
    """

    def __init__(self, program: Program, likeness: Likeness) -> None:
        self.program, self.likeness = program, likeness
        self.like = likeness.now()
        self.is_proven = self.is_random = False
        self.calls: list[Call] = []
        self.parts: deque[list[Call]] = deque()
        self.used = self.made = 0
        self.idle: dict[int, list[Recorded]] = {}
        self.records = True

    def divide(self, at_most: int) -> None:
        """Have the calls that wait now computed together; too many, in parts of equal size."""
        calls, self.calls = self.calls, []
        each = -(-len(calls) // -(-len(calls) // at_most))
        self.parts += [calls[first : first + each] for first in range(0, len(calls), each)]


class Repeating(NamedTuple):
    """How joint computations are repeated without the host, where that can be.

    Attributes:
        recorder: records them.
        rows: what workers have, in fixed places.
        at_most: how many workers are computed together. With half of them each time, the device
            computes while the host is busy with the others.
        least: fewer are computed alone.
    """

    recorder: Recorder
    rows: Rows
    at_most: int = AT_MOST
    least: int = LEAST


class Batching:
    """Computes the gradients of many workers together, where that is the same.

    Args:
        mode: ``on``, or ``auto`` to compute them one at a time where a joint computation is not
            possible or not faster.
        generators: those of all ranks; the last set is that of joint computations.
        own_generators: the number of that set.
        tell: called with the reason for which workers compute one at a time from now on.
        device: where they compute.
        repeating: how they are repeated; None where the host does it each time.
    """

    def __init__(
        self,
        mode: str,
        generators: Generators,
        own_generators: int,
        tell: Tell,
        device: torch.device,
        repeating: Repeating | None = None,
    ) -> None:
        self._mode, self._tell = mode, tell
        self._generators, self._own_generators = generators, own_generators
        self._repeating, self._apart = repeating, Apart(device)
        self._at_most = AT_MOST if repeating is None else repeating.at_most
        self._least = 2 if repeating is None else repeating.least
        self._replays = self._probed = 0
        self._why_not_recorded: str | None = None
        self._members: list[Member] = []
        self._kinds: dict[Hashable, Kind] = {}
        self._opened: list[Batch] = []
        self._why_not: str | None = None
        self._stopped = False
        self._alone = self._together = self._joints = 0
        _functorch._set_vmap_fallback_warning_enabled(False)  # the probe sees what is slow

    # For the threads of workers ------------------------------------------------------------------

    def enroll(
        self, rank: int, park: Callable[[float], None], own: Enrollment
    ) -> Callable[[], float | None]:
        """From now on, compute the gradients of a worker with those of others.

        Returns what tells the norm of its gradient as it is then, if that is known.
        """
        torch.autograd.set_multithreading_enabled(False)  # a backward waits in its own thread
        if not self._stopped:
            rows = None if self._repeating is None else self._repeating.rows
            try:
                self._members.append(Member(self, rank, own, park, rows))
                return self._members[-1].size
            except Cannot as why:
                self.stop(str(why))
        return lambda: None

    def admit(self, member: Member, args: Any, kwargs: Any) -> Call | None:
        """A call to wait with for others; None if it must be computed alone."""
        if not self._stopped:
            call = Call(member, *Arguments.of(args, kwargs))
            if why := _why_alone(call):
                self._note(why)
            else:
                try:
                    self._kind(call).calls.append(call)
                    return call
                except Cannot as error:
                    self.stop(str(error))
        self._alone += 1
        return None

    def _kind(self, call: Call) -> Kind:
        member, arguments, inputs = call.member, call.arguments, call.inputs
        device = member.x.device.type
        casts = torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if casts else None
        shapes = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs])
        types = tuple(map(type, arguments.rest))
        own = arguments, types, shapes, autocast
        known = member.known_kinds()
        if own not in known:
            key = member.likeness.now(), tuple(member.trained.items()), own
            if key not in self._kinds:
                self._kinds[key] = self._new_kind(member, arguments, autocast)
            known[own] = self._kinds[key]
        return known[own]

    def _new_kind(self, member: Member, arguments: Arguments, autocast: Any) -> Kind:
        if len(self._kinds) == KINDS:
            raise Cannot(f"the calls of model(x) are of more than {KINDS} kinds")
        try:
            template = deepcopy(member.model)
        except Exception as error:
            raise Cannot(f"the model cannot be copied: {first_line(error)}") from None
        del template.forward
        for hooks in (template._forward_hooks, template._forward_pre_hooks):
            hooks.clear()  # those of the model itself run around the call of each worker
        program = Program(template, member.trained, arguments, autocast)
        return Kind(program, Likeness(template, member.likeness.ignored))

    # For the kernel ------------------------------------------------------------------------------

    def compute(self) -> list[int]:
        """Compute what some of the parked workers wait for; return these.

        Where a device computes by itself, it gets a second part of many workers before the host
        turns to those of the first one.
        """
        complete = [batch for batch in self._opened if batch.is_complete]
        ripe = next((kind for kind in self._kinds.values() if kind.parts), None)
        waiting = next((kind for kind in self._kinds.values() if kind.calls), None)
        ahead = 1 if self._repeating is None else 2
        if ripe is not None and len(complete) < ahead:
            return self._forward(ripe)
        if not complete and waiting is not None:
            waiting.divide(self._at_most)
            return self._forward(waiting)
        batch = complete[0] if complete else self._opened[0]
        self._opened.remove(batch)
        if not batch.computed:
            self._computed(batch.backward)
        calls, batch.computed = batch.computed, []
        return [call.member.rank for call in calls]

    def _completed(self, batch: Batch) -> None:
        """Have a device begin with the backward of a batch as soon as all calls have handed in."""
        if self._repeating is not None:
            self._computed(batch.backward)
            batch.end()

    def _forward(self, kind: Kind) -> list[int]:
        """Compute the next part of the calls of one kind."""
        calls = kind.parts.popleft()
        if len(calls) >= self._least and not self._stopped:
            try:
                joint = self._computed(lambda: self._joint(kind, calls))
            except Cannot as why:
                self.stop(str(why))
            else:
                self._hand_out(joint, kind, calls)
                return [call.member.rank for call in calls]
        self._alone += len(calls)
        return [call.member.rank for call in calls]

    def _hand_out(self, joint: Joint | Recorded, kind: Kind, calls: Sequence[Call]) -> None:
        self._together += len(calls)
        self._joints += 1
        batch = Batch(joint, calls, self._opened, self._completed)
        if isinstance(joint, Recorded):  # what it has changed lies in the workers' rows
            self._replays += 1
            batch.at_end(partial(kind.idle[joint.size].append, joint))
            return
        buffers = [(row, call.member.buffers()) for row, call in enumerate(calls)]
        if buffers[0][1]:
            into = [tensor for _, own in buffers for tensor in own.values()]
            new = [joint.rest[name][row] for row, own in buffers for name in own]
            with torch.no_grad():
                torch._foreach_copy_(into, new)

    def _computed(self, act: Callable[[], Any]) -> Any:
        """What ``act`` returns, in a thread and with random generators of its own."""
        self._generators.switch_to(self._own_generators)
        return self._apart(act)

    def _joint(self, kind: Kind, calls: Sequence[Call]) -> Joint | Recorded:
        """The joint forward; raises Cannot if it is not what each worker computes alone."""
        kind.used += 1
        if (recorded := self._recorded(kind, calls)) is not None:
            return recorded
        cases = [Case(call.member.x, call.member.rest(), call.inputs) for call in calls]
        try:
            if not kind.is_proven:
                kind.is_random = self._in_torch_alone(
                    kind, lambda: prove(kind.program, cases[:PROVEN])
                )
                kind.is_proven = True
            if self._mode == "auto" and self._repeating is None and len(cases) >= 2 * self._probed:
                self._probed = len(cases)
                refuse_slower(kind.program, cases, calls)
            return self._in_torch_alone(kind, lambda: joint_of(kind.program, cases))
        except Cannot:
            raise
        except Exception as error:
            raise Cannot(first_line(error)) from None

    def _recorded(self, kind: Kind, calls: Sequence[Call]) -> Recorded | None:
        """A recorded computation that has computed these calls; None if the host must do it."""
        repeating = self._repeating
        rows = [call.member.row for call in calls]
        if repeating is None or not kind.records or kind.used <= RECORDED_AFTER:
            return None
        if not all(row is not None and row.bind() for row in rows):
            return None
        size = min(1 << (len(calls) - 1).bit_length(), repeating.at_most)
        idle = kind.idle.setdefault(size, [])
        ranks, inputs = [call.member.rank for call in calls], [call.inputs for call in calls]
        if not idle:
            if kind.made == MOST_RECORDED:
                return None
            try:
                idle.append(self._record(kind, size, calls, repeating))
                kind.made += 1
            except Exception as error:
                kind.records = False
                self._why_not_recorded = self._why_not_recorded or first_line(error)
                return None
        recorded = idle.pop()
        recorded.forward(ranks, inputs)
        return recorded

    def _record(
        self, kind: Kind, size: int, calls: Sequence[Call], repeating: Repeating
    ) -> Recorded:
        """Record the computation of a kind; raises Cannot if it is another one then."""
        cases = [Case(call.member.x, call.member.rest(), call.inputs) for call in calls]
        rows, recorder = repeating.rows, repeating.recorder
        recorded = Recorded(kind.program, rows, size, calls[0].inputs, recorder)
        if not kind.is_random:
            prove_recorded(recorded, rows, kind.program, [c.member.rank for c in calls], cases)
        return recorded

    def _in_torch_alone(self, kind: Kind, act: Callable[[], T]) -> T:
        """What ``act`` returns; raises Cannot if it has changed something besides tensors."""
        before = drawn()
        try:
            return act()
        finally:  # these reasons say more than one that follows from them
            if kind.likeness.now() != kind.like:
                raise Cannot("forward() keeps state in Python")
            if drawn() != before:
                raise Cannot("forward() draws from the generators of Python or numpy")

    # Reasons -------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Compute one at a time from now on."""
        self._stopped = True
        self._note(why)

    def _note(self, why: str) -> None:
        if self._mode == "on":
            raise UsageError(f"batched (on) must be off or auto: {why}")
        if self._why_not is None:
            self._why_not = why
            self._tell(why)

    def facts(self) -> BatchedFacts:
        """How the gradients were computed."""
        calls = self._alone + self._together
        return {
            "share": self._together / calls if calls else 0.0,
            "mean": self._together / self._joints if self._joints else None,
            "why_not": self._why_not,
            "recorded": self._replays / self._joints if self._joints else 0.0,
            "why_not_recorded": self._why_not_recorded,
        }

    def close(self) -> None:
        """End the thread of joint computations, and leave the models as they were."""
        self._apart.close()
        for member in self._members:
            member.release()
        self._members.clear()
        self._kinds.clear()  # a device's memory
        self._opened.clear()
        _functorch._set_vmap_fallback_warning_enabled(True)


def _why_alone(call: Call) -> str | None:
    """Why this one call cannot be computed with others, if so."""
    if _functorch.peek_interpreter_stack() is not None:
        return "model(x) is called inside a function of torch.func"
    if parametrize._cache_enabled:
        return "model(x) is called inside parametrize.cached()"
    if any(tensor.requires_grad for tensor in call.inputs):
        return "an argument of model(x) requires a gradient"
    if any(tensor.layout is not torch.strided for tensor in call.inputs):
        return "an argument of model(x) is sparse"
    opaque = [rest for rest in call.arguments.rest if not isinstance(rest, (*VALUES, type(...)))]
    return f"an argument of model(x) holds a {type(opaque[0]).__name__}" if opaque else None
