"""One worker whose gradients are computed together with those of others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.sim.batching.boundary import Boundary, Forward
from paceline.sim.batching.enrollment import Enrollment
from paceline.sim.batching.joint import Arguments, Cannot, Joint, Place, Tensors
from paceline.sim.batching.likeness import Likeness

if TYPE_CHECKING:
    from paceline.sim.batching.batching import Batching, Kind


class Member:
    """One worker; its ``model(x)`` waits for those of others.

    Args:
        batching: what computes them.
        rank: of the worker.
        own: its model.
        park: parks its rank, which acts only after the given time.

    Attributes:
        trained: the place of each trained parameter, by all of its names.
    """

    def __init__(
        self, batching: Batching, rank: int, own: Enrollment, park: Callable[[float], None]
    ) -> None:
        self._batching, self._foresee_s, self._park = batching, own.foresee_s, park
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
        own.model.forward = Forward(own.model, self.forward)

    def release(self) -> None:
        """Give the model its plain forward back."""
        del self.model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the model, with those of others if that can be."""
        call = None
        if torch.is_grad_enabled() and self._foresee_s() is not None:
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
        row: its place in that.
        grads: those of its outputs, from its backward; ``found``, those of the parameters.
    """

    def __init__(self, member: Member, arguments: Arguments, inputs: list[Tensor]) -> None:
        self.member, self.arguments, self.inputs = member, arguments, inputs
        self.batch: Batch | None = None
        self.row = 0
        self.grads: Sequence[Tensor | None] = ()
        self.found: Sequence[Tensor | None] = ()

    def result(self) -> Any:
        """What the model returns to this worker."""
        batch = self.batch
        assert batch is not None
        rows = [output[self.row].data for output in batch.outputs]  # .data: versions of its own
        varying = zip(rows, batch.joint.outputs, strict=True)
        fixed = [row for row, output in varying if not output.requires_grad]
        apply: Any = Boundary.apply
        out = apply(self._deliver, rows, fixed, *self.member.parameters)
        return batch.joint.restored(out)

    def _deliver(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Hand in the gradients of the outputs, and wait for those of the parameters."""
        batch = self.batch
        assert batch is not None
        if all(grad is None for grad in grads):
            return [None] * len(self.member.parameters)
        self.grads = grads
        batch.deliver(self)
        self.batch = None
        self.member.park()
        return self.found


class Batch:
    """A joint forward, until the last of its workers has had its backward.

    Attributes:
        outputs: copies of the joint outputs, which workers may change.
        handed_in: the calls whose backward waits.
    """

    def __init__(self, joint: Joint, calls: Sequence[Call], opened: list[Batch]) -> None:
        self.joint, self._opened, self._left = joint, opened, len(calls)
        self.outputs = [output.detach().clone() for output in joint.outputs]
        self.handed_in: list[Call] = []
        for row, call in enumerate(calls):
            call.batch, call.row, call.inputs = self, row, []

    def deliver(self, call: Call) -> None:
        """Have a call wait for a joint backward."""
        self._left -= 1
        if not self.handed_in:
            self._opened.append(self)
        self.handed_in.append(call)

    @property
    def is_complete(self) -> bool:
        """Whether no other worker's backward is to come."""
        return not self._left

    def backward(self) -> list[Call]:
        """Compute the gradients of all calls that wait; return them."""
        calls, self.handed_in = self.handed_in, []
        groups: dict[tuple[bool, ...], list[Call]] = {}
        for call in calls:
            groups.setdefault(tuple([g is None for g in call.grads]), []).append(call)
        left = len(groups)
        for group in groups.values():
            left -= 1
            rows, grads = [call.row for call in group], [call.grads for call in group]
            found = self.joint.backward(rows, grads, again=left > 0 or not self.is_complete)
            for call, own in zip(group, found, strict=True):
                call.found, call.grads = own, ()
        return calls
