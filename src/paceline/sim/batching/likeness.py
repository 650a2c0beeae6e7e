"""What a model's forward depends on besides its registered tensors, as a value to compare.

Two workers' models may be computed together only while they are alike: in the numbers, texts and
tensors that their modules hold as plain attributes, also in containers, functions and objects.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.sim.batching.joint import Cannot

VALUES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, type(None), type, range, slice)
VALUES += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch keeps in every module."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DEEPEST = 8
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Likeness:
    """What one model is like.

    Args:
        model: the model.
        ignored: hooks of this type change nothing.
    """

    def __init__(self, model: nn.Module, ignored: type) -> None:
        self._model, self.ignored = model, ignored
        self._places: list[dict[str, Any]] = []
        self._seen: list[Any] = []
        self._changeable: list[tuple[str, Any]] = []
        self._parameters: list[nn.Parameter] = []
        self._fixed: Hashable = None
        self._inside: list[Hashable] = []
        self._requires: list[bool] = []
        self._value: Hashable = None

    def now(self) -> Hashable:
        """A value that is equal for models that act alike; raises Cannot if that is not known.

        While the model does not change, it is the same object.
        """
        if not self._is_as_seen():
            self._look()
        inside = [self._of(value, where) for where, value in self._changeable]
        requires = [*map(_REQUIRES_GRAD, self._parameters)]
        if self._value is None or inside != self._inside or requires != self._requires:
            self._inside, self._requires = inside, requires
            self._value = self._fixed, tuple(inside), tuple(requires)
        return self._value

    def _is_as_seen(self) -> bool:
        """Whether each attribute of each module, and each hook, is the object that it was.

        It is asked at each call of the model, and loops in C.
        """
        same = map(operator.is_, _values(self._places), self._seen)
        return bool(self._seen) and all(same) and sum(map(len, self._places)) == len(self._seen)

    def _look(self) -> None:
        """Look at all modules, and note which attributes can change without being replaced."""
        self._seen, self._value = [], None
        named = [*self._model.named_modules(remove_duplicate=False)]
        self._modules = {id(module) for _, module in named}
        self._tensors = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        fixed: list[Hashable] = [
            (name, self._of_class(_class_of(module))) for name, module in named
        ]
        self._changeable = []
        for name, module in self._model.named_modules():
            if isinstance(module, nn.RNNBase):
                kind = type(module).__name__.lower()
                raise Cannot(f"torch has no batching rule for {kind}, of module {name or 'model'}")
            if name and "forward" in vars(module):
                raise Cannot(f"forward of module {name} was replaced")
            for key, value in vars(module).items():
                where = f"{name}.{key}".lstrip(".")
                if key in OF_MODULES or where == "forward":
                    continue
                if _is_fixed(value):
                    fixed.append((where, self._of(value, where)))
                else:
                    self._changeable.append((f"attribute {where} of the model", value))
        self._fixed = tuple(fixed)
        self._refuse_hooks()
        self._parameters = [*self._model.parameters()]
        modules = [vars(module) for module in self._model.modules()]
        inner = [own[kind] for own in modules for kind in ("_modules", "_parameters", *HOOKS)]
        self._places = [*modules, *inner]
        self._seen = [*_values(self._places)]

    def _refuse_hooks(self) -> None:
        for name, module in self._model.named_modules():
            own = vars(module)
            hooks = [hook for kind in HOOKS for hook in own[kind].values()]
            if name and any(not isinstance(hook, self.ignored) for hook in hooks):
                raise Cannot(f"module {name} has hooks")

    def _of(self, value: Any, where: str, deep: int = 0) -> Hashable:
        """A value that is equal for things that act alike."""
        kind = type(value)
        if isinstance(value, VALUES):
            return kind, value
        if deep == DEEPEST:
            raise Cannot(f"{where} is nested too deeply to be compared")
        if isinstance(value, (nn.Module, Tensor)):
            return self._of_registered(value, where)
        inner = partial(self._of, where=where, deep=deep + 1)
        if isinstance(value, dict):
            return kind, tuple((inner(k), inner(v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return kind, tuple(map(inner, value))
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(inner, value))
        if isinstance(value, partial):
            return inner(value.func), inner(value.args), inner(value.keywords)
        if isinstance(value, MethodType):
            return value.__func__, inner(value.__self__)
        if isinstance(value, BuiltinFunctionType):
            return value.__module__, value.__qualname__
        if isinstance(value, property):
            return inner(value.fget)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, inner(cells), inner(value.__defaults__)
        if hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            return kind, inner(vars(value))
        raise Cannot(f"{where} ({kind.__name__}) cannot be compared with that of other workers")

    def _of_class(self, cls: type) -> Hashable:
        """The class itself, or its functions if each worker has made one like it."""
        top = vars(sys.modules[cls.__module__]).get(cls.__qualname__)
        if top is cls or cls is object:
            return cls
        own = vars(cls).items()
        parts = [(k, v) for k, v in own if isinstance(v, (FunctionType, property)) or _is_fixed(v)]
        inner = [(k, self._of(v, f"{cls.__qualname__}.{k}")) for k, v in parts]
        return cls.__qualname__, tuple(inner), tuple(map(self._of_class, cls.__bases__))

    def _of_registered(self, value: nn.Module | Tensor, where: str) -> Hashable:
        if id(value) in self._modules:
            return "module"
        if isinstance(value, nn.Module):
            raise Cannot(f"{where} holds a module that is not registered")
        if id(value) in self._tensors or value.requires_grad:
            raise Cannot(f"{where} holds a parameter or a buffer beside the registered one")
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return value.dtype, value.device, value.shape, raw.numpy().tobytes()


def _values(places: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, places))


def _class_of(module: nn.Module) -> type:
    """The class of a module; of one with parametrizations, which has its own, the former one."""
    return parametrize.type_before_parametrizations(module)


def _is_fixed(value: Any) -> bool:
    """Whether nothing inside of it can change."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, VALUES)
