"""The optimizer of a server, on its part of the model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model.hyperparameters import write_hyperparameters
from paceline.model.replica import Replica

MOMENTUM = 0.9
"""That of ``server_optimizer="momentum"``, where the user's own has none."""


class ShardOptimizer:
    """A shard of the model, stepped in place by an optimizer with the user's parameter groups.

    Weight decay belongs to each gradient, so that workers have added theirs; only one that is no
    part of a gradient (AdamW's) is left to the server.

    Args:
        w: the shard.
        part: its place in the vector of all parameters.
        replica: this rank's model, with the user's optimizer.
        kind: of the optimizer, as ``server_optimizer`` names it.
        coupled: whether weight decay is in the gradients.

    Attributes:
        optimizer: that steps it.
    """

    def __init__(self, w: Tensor, part: slice, replica: Replica, kind: str, coupled: bool) -> None:
        self._user, self._kind, self._coupled = replica.optimizer, kind, coupled
        self._spans = [
            (w[_overlap(slice(span.start, span.end), part)], span.group)
            for span in replica.flat.spans
        ]
        self._parts = [_overlap(group, part) for group in replica.flat.groups]
        self._parameters = [nn.Parameter(w[own]) for own in self._parts]
        groups = [
            {**self._options(group), "params": [parameter]}
            for group, parameter in zip(self._user.param_groups, self._parameters, strict=True)
        ]
        self.optimizer = self._make(groups)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        if self._kind == "user":
            return {name: group[name] for name in self._user.defaults}
        options = {"lr": group["lr"], "maximize": group.get("maximize", False)}
        if self._kind == "momentum":
            options["momentum"] = group.get("momentum") or MOMENTUM
        return options

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        kinds: dict[str, Any] = {"user": type(self._user), "adagrad": torch.optim.Adagrad}
        kind = kinds.get(self._kind, torch.optim.SGD)
        try:
            made: torch.optim.Optimizer = kind(groups)
        except TypeError as error:
            raise UsageError(
                f"server_optimizer (user) must be sgd, momentum or adagrad: {kind.__name__} cannot"
                f" be made from its parameter groups alone ({error})"
            ) from None
        return made

    def step(self, gradient: Tensor, hyperparameters: Sequence[float], times: float) -> None:
        """Step along ``gradient`` with the hyperparameters that came with it.

        It counts for so many gradients. Where weight decay is not in it, the server makes the decay
        so many ``times``; after the hyperparameters stands, for each parameter, the share of the
        gradients that it has one in.
        """
        write_hyperparameters(self._user, hyperparameters)
        for group, theirs in zip(self.optimizer.param_groups, self._user.param_groups, strict=True):
            names = self._user.defaults if self._kind == "user" else ("lr",)
            group.update({name: theirs[name] for name in names if name in theirs})
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        if not self._coupled:
            self._decay(hyperparameters[-len(self._spans) :], times)
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            parameter.grad = gradient[part] if parameter.numel() else None
        self.optimizer.step()

    def _decay(self, shares: Sequence[float], times: float) -> None:
        for (w, number), share in zip(self._spans, shares, strict=True):
            group = self._user.param_groups[number]
            w.mul_(1 - float(group["lr"]) * group["weight_decay"] * share * times)

    def buffers(self) -> Tensor | None:
        """What the optimizer remembers, as one vector beside the shard; None for nothing.

        On a GPU, the number of steps that most optimizers count lies on the CPU all the same.
        """
        state = self._state()
        if not state:
            return None
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in state))
        sizes, like = [tensor.numel() for tensor in state], self._parameters[0].detach()
        vector = like.new_empty(sum(sizes), dtype=dtype)
        for part, tensor in zip(vector.split(sizes), state, strict=True):
            part.copy_(tensor.reshape(-1))
        return vector

    def load_buffers(self, vector: Tensor) -> None:
        """Have the optimizer remember what another's :meth:`buffers` gave."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
        kept = [parameter.detach().clone() for parameter in self._parameters]
        self.optimizer.step()  # which makes the buffers
        for parameter, before in zip(self._parameters, kept, strict=True):
            parameter.detach().copy_(before)
        state = self._state()
        for tensor, part in zip(state, vector.split([t.numel() for t in state]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _state(self) -> list[Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self._parameters]
        return [t for state in states for _, t in sorted(state.items()) if isinstance(t, Tensor)]


def _overlap(group: slice, part: slice) -> slice:
    """What of ``group`` lies in ``part``, counted from its start; empty where they do not meet."""
    start, stop = max(group.start, part.start), min(group.stop, part.stop)
    return slice(start - part.start, max(start, stop) - part.start)
