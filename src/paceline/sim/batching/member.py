"""One worker whose gradients are computed together with those of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.sim.batching.boundary import Boundary, Forward
from paceline.sim.batching.enrollment import Enrollment
from paceline.sim.batching.joint import (
    Arguments,
    Cannot,
    Joint,
    Place,
    Program,
    Tensors,
    tensors_in,
)
from paceline.sim.batching.likeness import Likeness
from paceline.sim.batching.proof import some_gradients
from paceline.sim.batching.recorded import Recorded
from paceline.sim.batching.row import Row

if TYPE_CHECKING:
    from paceline.sim.batching.batching import Batching, Kind
    from paceline.sim.batching.rows import Rows


class Member:
    """One worker; its ``model(x)`` waits for those of others.

    Args:
        batching: what computes them.
        rank: of the worker.
        own: its model.
        park: parks its rank, which acts only after the given time.
        rows: matrices that hold what the worker has; None where none do.

    Attributes:
        trained: the place of each trained parameter, by all of its names.
        row: its row of the matrices.
    """

    def __init__(
        self,
        batching: Batching,
        rank: int,
        own: Enrollment,
        park: Callable[[float], None],
        rows: Rows | None,
    ) -> None:
        self._batching, self._foresee_s, self._park = batching, own.foresee_s, park
        if own.why_not is not None:
            raise Cannot(own.why_not)
        self.rank, self.model, self.x = rank, own.model, own.x
        self.parameters = [parameter for parameter, _ in own.trained]
        numbers = {id(parameter): number for number, (parameter, _) in enumerate(own.trained)}
        named = [*own.model.named_parameters(remove_duplicate=False)]
        self.trained: dict[str, Place] = {
            name: Place(
                number := numbers[id(parameter)],
                own.trained[number][1],
                parameter.shape,
                parameter.stride(),
            )
            for name, parameter in named
            if id(parameter) in numbers
        }
        if {place.number for place in self.trained.values()} != {*numbers.values()}:
            raise Cannot("the optimizer trains a parameter that is not in the model")
        if "forward" in vars(own.model) or not isinstance(type(own.model).forward, FunctionType):
            raise Cannot("model.forward was replaced")
        self.likeness = Likeness(own.model, own.ignored)
        self._like: Hashable = None
        self._known: dict[Hashable, Kind] = {}
        places = sorted({*self.trained.values()})
        self.row = None if rows is None else Row(rows, rank, own, places)
        own.model.forward = Forward(own.model, self.forward)

    def release(self) -> None:
        """Give the model its plain forward back, and memory of its own."""
        del self.model.forward
        if self.row is not None:
            self.row.release()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the model, with those of others if that can be."""
        call = None
        if torch.is_grad_enabled() and self._foresee_s() is not None:
            if self.row is not None:
                self.row.check_steps()
            call = self._batching.admit(self, args, kwargs)
        if call is not None:
            self.park()
        if call is None or call.batch is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return call.result()

    def known_kinds(self) -> dict[Hashable, Kind]:
        """The kinds that calls of this model were of, while it has been like it is now."""
        like = self.likeness.now()
        if like is not self._like:
            self._like, self._known = like, {}
        return self._known

    def park(self) -> None:
        """Park this rank, which has a step to make."""
        self._park(self._foresee_s() or 0.0)

    def size(self) -> float | None:
        """The norm of the gradient as it is now, if a joint computation has told it."""
        return None if self.row is None else self.row.size()

    def rest(self) -> Tensors:
        """The buffers and frozen parameters, by all of their names."""
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {name: p.detach() for name, p in named if name not in self.trained}
        return {**frozen, **self.buffers()}

    def buffers(self) -> Tensors:
        """The buffers, by all of their names."""
        return dict(self.model.named_buffers(remove_duplicate=False))


class Call:
    """One call of a worker's model.

    Attributes:
        batch: the joint forward that it is a part of; None: it is computed alone.
        number: its place in that.
        grads: those of its outputs, from its backward; ``found``, those of the parameters.
        reached: where these are in the worker's row instead: which parameters have one.
        size: their norm, in the row.
        direct: whether they do not go through autograd.
    """

    def __init__(self, member: Member, arguments: Arguments, inputs: list[Tensor]) -> None:
        self.member, self.arguments, self.inputs = member, arguments, inputs
        self.batch: Batch | None = None
        self.number = 0
        self.grads: Sequence[Tensor | None] = ()
        self.found: Sequence[Tensor | None] = ()
        self.reached: Sequence[bool] | None = None
        self.size: Callable[[], float] | None = None
        self.direct = False

    def compute_alone(self, program: Program) -> None:
        """Compute the gradient as the worker would by itself, to see how long that takes."""
        model, buffers = self.member.model, [*self.member.buffers().values()]
        kept = [buffer.clone() for buffer in buffers]
        args, kwargs = self.arguments.with_tensors(self.inputs)
        with torch.enable_grad(), program.casting(self.member.x.device):
            outputs = tensors_in(type(model).forward(model, *args, **kwargs))
        outputs = [output for output in outputs if output.requires_grad]
        trained = [p for p in self.member.parameters if p.requires_grad]
        torch.autograd.grad(outputs, trained, some_gradients(outputs), allow_unused=True)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)

    def pass_through_autograd(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        found: Sequence[Tensor | None],
    ) -> None:
        """Have gradients go the way to the parameters, to see how long that takes."""
        rows, parameters = [output.data for output in outputs], self.member.parameters
        pairs = [*zip(rows, grads, strict=True)]
        fixed = [row for row, grad in pairs if grad is None]
        apply: Any = Boundary.apply
        own = apply(lambda _: found, rows, fixed, *parameters)
        ends = [end for end, grad in zip(own, grads, strict=True) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        torch.autograd.grad(ends, trained, given, allow_unused=True)

    def result(self) -> Any:
        """What the model returns to this worker."""
        batch, row = self.batch, self.member.row
        assert batch is not None
        rows = [output[self.number].data for output in batch.outputs]  # .data: own versions
        varying = zip(rows, batch.joint.varying, strict=True)
        fixed = [row for row, varies in varying if not varies]
        ends: Sequence[Tensor] = self.member.parameters
        if row is not None and row.is_direct():
            self.direct, ends = True, [row.anchor]
            row.note_direct()
        apply: Any = Boundary.apply
        return batch.joint.restored(apply(self._deliver, rows, fixed, *ends))

    def _deliver(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Hand in the gradients of the outputs, and wait for those of the parameters."""
        batch, row = self.batch, self.member.row
        assert batch is not None
        if all(grad is None for grad in grads):
            return [None] * (1 if self.direct else len(self.member.parameters))
        if row is not None:
            row.make_room()
        self.grads = grads
        batch.deliver(self)
        self.batch = None
        self.member.park()
        return self.found if row is None else self._taken(row)

    def _taken(self, row: Row) -> Sequence[Tensor | None]:
        """The gradients for autograd, where it takes them; else they are set."""
        if self.direct:
            if self.reached is None:
                row.take(self.found)
            else:
                row.show(self.reached, self.size)
            return [None]
        found = self.found if self.reached is None else row.parts(self.reached)
        row.watch(found)
        return found


class Batch:
    """A joint forward, until the last of its workers has had its backward.

    Args:
        joint: the computation.
        calls: those whose results it has.
        opened: the batches of which some calls have handed in gradients; it adds itself.
        completed: called with the batch when all have.

    Attributes:
        outputs: copies of the joint outputs, which workers may change.
        handed_in: the calls whose backward waits.
        computed: those whose gradients are computed already.
    """

    def __init__(
        self,
        joint: Joint | Recorded,
        calls: Sequence[Call],
        opened: list[Batch],
        completed: Callable[[Batch], None],
    ) -> None:
        self.joint, self._opened, self._left = joint, opened, len(calls)
        self._completed = completed
        self._finalizer: weakref.finalize[..., Batch] | None = None
        self.outputs = [output.detach().clone() for output in joint.outputs]
        self.handed_in: list[Call] = []
        self.computed: list[Call] = []
        for number, call in enumerate(calls):
            call.batch, call.number, call.inputs = self, number, []

    def at_end(self, act: Callable[[], None]) -> None:
        """Call ``act`` when no backward of this batch can come any more, also if none has come."""
        self._finalizer = weakref.finalize(self, act)
        self._finalizer.atexit = False

    def end(self) -> None:
        """No backward of this batch can come any more."""
        if self._finalizer is not None:
            self._finalizer()

    def deliver(self, call: Call) -> None:
        """Have a call wait for a joint backward."""
        self._left -= 1
        if not self.handed_in:
            self._opened.append(self)
        self.handed_in.append(call)
        if self.is_complete:
            self._completed(self)

    @property
    def is_complete(self) -> bool:
        """Whether no other worker's backward is to come."""
        return not self._left

    def backward(self) -> None:
        """Compute the gradients of all calls that wait."""
        calls, self.handed_in = self.handed_in, []
        if isinstance(self.joint, Recorded):
            self._replay(self.joint, calls)
        else:
            self._backward(self.joint, calls)
        for call in calls:
            call.grads = ()
        self.computed += calls

    def _replay(self, joint: Recorded, calls: Sequence[Call]) -> None:
        sizes = joint.backward({call.number: call.grads for call in calls})
        for call in calls:
            call.reached = joint.reached(call.grads)
            call.size = sizes.of(call.number)

    def _backward(self, joint: Joint, calls: Sequence[Call]) -> None:
        groups: dict[tuple[bool, ...], list[Call]] = {}
        for call in calls:
            groups.setdefault(tuple([g is None for g in call.grads]), []).append(call)
        left = len(groups)
        for group in groups.values():
            left -= 1
            numbers, grads = [call.number for call in group], [call.grads for call in group]
            found = joint.backward(numbers, grads, again=left > 0 or not self.is_complete)
            for call, own in zip(group, found, strict=True):
                call.found = own
