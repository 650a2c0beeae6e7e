"""The optimizer of a server, on its part of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.model.hyperparameters import write_hyperparameters
from paceline.model.joint_step import ELEMENTWISE
from paceline.model.part import Part
from paceline.model.replica import Replica

MOMENTUM = 0.9
"""That of ``server_optimizer="momentum"``, where the user's own has none."""


class ShardOptimizer:
    """A shard of the model, stepped in place by optimizers with the user's parameter groups.

    Weight decay belongs to each gradient, so that workers have added theirs; only one that is no
    part of a gradient (AdamW's) is left to the server.

    Args:
        w: the shard.
        shard: its place in the vector of all parameters.
        replica: this rank's model, with the user's optimizer, or several.
        kind: of the optimizers, as ``server_optimizer`` names it.
        coupled: of each optimizer, whether its weight decay is in the gradients.

    Attributes:
        parts: what steps the parameters of each of the user's optimizers.
    """

    def __init__(
        self, w: Tensor, shard: slice, replica: Replica, kind: str, coupled: Sequence[bool]
    ) -> None:
        self._user, self._coupled, self._several = replica.optimizer, coupled, replica.several
        self._spans = len(replica.flat.spans)
        self.parts = [PartOptimizer(w, shard, replica, part, kind) for part in replica.parts]
        self._began: set[int] = set()

    def step(self, gradient: Tensor, told: Sequence[float], times: float | None) -> None:
        """Step along ``gradient`` with the hyperparameters that it came with.

        It counts for so many gradients, or is a mean (None). After the hyperparameters stands, for
        each parameter, the share of the gradients that it has one in, if the server makes some
        weight decay: once for each. With several optimizers, their shares stand at the end; one
        without a gradient makes no step.
        """
        write_hyperparameters(self._user, told)
        shares = told[-len(self.parts) :] if self._several else [1.0]
        given = told[: -len(self.parts)] if self._several else told
        for part, share, coupled in zip(self.parts, shares, self._coupled, strict=True):
            if not share:
                continue
            if not coupled:
                scale = 1 / share if times is None else times
                part.decay([own * scale for own in given[-self._spans :]])
            part.step(gradient)
            self._began.add(id(part))

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, or of several."""
        states = [part.optimizer.state_dict() for part in self.parts]
        return {"optimizers": states} if self._several else states[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        states = state["optimizers"] if self._several else [state]
        for part, own in zip(self.parts, states, strict=True):
            part.optimizer.load_state_dict(own)
        self._began = {id(part) for part in self.parts if part.optimizer.state}

    def buffers(self) -> Tensor | None:
        """What the optimizers remember, as one vector beside the shard; None for nothing.

        Also None before each of them has made a step: the vector has one size. On a GPU, the number
        of steps that most optimizers count lies on the CPU all the same.
        """
        state = self._state()
        if not state or len(self._began) < len(self.parts):
            return None
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in state))
        sizes, like = [tensor.numel() for tensor in state], self.parts[0].w
        vector = like.new_empty(sum(sizes), dtype=dtype)
        for part, tensor in zip(vector.split(sizes), state, strict=True):
            part.copy_(tensor.reshape(-1))
        return vector

    def load_buffers(self, vector: Tensor) -> None:
        """Have the optimizers remember what another's :meth:`buffers` gave."""
        for part in self.parts:
            part.make_state()
            self._began.add(id(part))
        state = self._state()
        for tensor, part in zip(state, vector.split([t.numel() for t in state]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _state(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.state()]


class Piece(NamedTuple):
    """What a server steps as one parameter: where it is in the shard, and its shape."""

    place: slice
    shape: Sequence[int]
    stride: Sequence[int]

    def of(self, vector: Tensor) -> Tensor:
        """This piece of a vector that is laid out like the shard."""
        if len(self.shape) == 1:
            return vector[self.place]
        first = vector.storage_offset() + self.place.start
        return vector.as_strided(self.shape, self.stride, first)


class PartOptimizer:
    """What steps the parameters of one of the user's optimizers that are in a shard.

    An optimizer that treats every number by itself steps each parameter group as one vector. Others
    step each parameter in its shape, which no shard may cut.

    Args:
        w: the shard.
        shard: its place in the vector of all parameters.
        replica: this rank's model.
        part: which of the user's optimizers.
        kind: of the optimizer, as ``server_optimizer`` names it.

    Attributes:
        w: the shard.
        optimizer: that steps it.
    """

    def __init__(self, w: Tensor, shard: slice, replica: Replica, part: Part, kind: str) -> None:
        self.w, self._user, self._kind = w, replica.optimizers[part.number], kind
        self._shard, self._flat, self._part = shard, replica.flat, part
        numbers = range(part.first_group, part.first_group + len(self._user.param_groups))
        each = kind == "user" and type(self._user) not in ELEMENTWISE
        pieces = [[*(self._parameters(n) if each else self._group(n))] for n in numbers]
        self._pieces = [piece for group in pieces for piece in group]
        self._stepped = [nn.Parameter(piece.of(w)) for piece in self._pieces]
        remaining = iter(self._stepped)
        self.optimizer = self._make(
            [
                {**self._options(group), "params": [next(remaining) for _ in own]}
                for group, own in zip(self._user.param_groups, pieces, strict=True)
            ]
        )

    def _group(self, number: int) -> Iterator[Piece]:
        own = _overlap(self._flat.place(number), self._shard)
        yield Piece(own, (own.stop - own.start,), (1,))

    def _parameters(self, number: int) -> Iterator[Piece]:
        for span in self._flat.spans:
            own = _overlap(slice(span.start, span.end), self._shard)
            if span.group != number or own.stop == own.start:
                continue
            if own.stop - own.start < span.end - span.start:
                name = type(self._user).__name__
                raise UsageError(
                    f"shards must be 1 with server_optimizer (user), where that is {name}: it may"
                    f" need whole parameters, and the shards cut {span.name}; or server_optimizer"
                    " must be sgd, momentum or adagrad"
                )
            yield Piece(own, span.parameter.shape, span.parameter.stride())

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        if self._kind == "user":
            return {name: group[name] for name in self._user.defaults}
        options = {"lr": group["lr"], "maximize": group.get("maximize", False)}
        if self._kind == "momentum":
            options["momentum"] = group.get("momentum") or MOMENTUM
        return options

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        kinds: dict[str, Any] = {"user": type(self._user), "adagrad": torch.optim.Adagrad}
        kind = kinds.get(self._kind, torch.optim.SGD)
        try:
            made: Optimizer = kind(groups)
        except TypeError as error:
            raise UsageError(
                f"server_optimizer (user) must be sgd, momentum or adagrad: {kind.__name__} cannot"
                f" be made from its parameter groups alone ({error})"
            ) from None
        return made

    def step(self, gradient: Tensor) -> None:
        """Step along a gradient, with the user's hyperparameters as they are now."""
        for group, theirs in zip(self.optimizer.param_groups, self._user.param_groups, strict=True):
            names = self._user.defaults if self._kind == "user" else ("lr",)
            group.update({name: theirs[name] for name in names if name in theirs})
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        for parameter, piece in zip(self._stepped, self._pieces, strict=True):
            parameter.grad = piece.of(gradient) if parameter.numel() else None
        self.optimizer.step()

    def decay(self, times: Sequence[float]) -> None:
        """Make weight decay, for each of all parameters so many times."""
        own = [*zip(self._flat.spans, times, strict=True)][self._part.spans]
        for span, number in own:
            group = self._user.param_groups[span.group - self._part.first_group]
            w = self.w[_overlap(slice(span.start, span.end), self._shard)]
            w.mul_(1 - float(group["lr"]) * group["weight_decay"] * number)

    def make_state(self) -> None:
        """Have the optimizer make its buffers, and leave the shard as it is."""
        for parameter in self._stepped:
            parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
        kept = [parameter.detach().clone() for parameter in self._stepped]
        self.optimizer.step()
        for parameter, before in zip(self._stepped, kept, strict=True):
            parameter.detach().copy_(before)

    def state(self) -> list[Tensor]:
        """The tensors that the optimizer remembers."""
        states = [self.optimizer.state[parameter] for parameter in self._stepped]
        return [t for state in states for _, t in sorted(state.items()) if isinstance(t, Tensor)]


def _overlap(group: slice, part: slice) -> slice:
    """What of ``group`` lies in ``part``, counted from its start; empty where they do not meet."""
    start, stop = max(group.start, part.start), min(group.stop, part.stop)
    return slice(start - part.start, max(start, stop) - part.start)
