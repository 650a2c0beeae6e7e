"""Whether a joint computation is what its workers compute alone, and whether it is faster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.sim.batching.joint import Cannot, Joint, Program, Tensors, tensors_in
from paceline.sim.batching.recorded import Recorded, generator_of
from paceline.sim.batching.rows import Rows

if TYPE_CHECKING:
    from paceline.sim.batching.member import Call

TOLERANCES = {torch.float64: 1e-9, torch.float32: 0.02}
"""How far a norm may be off. A number near 0 that a ReLU cuts off may be cut off in one alone."""
COARSE = 0.05
LIKE = 3
"""Beyond that: how many times as far from the result in double precision as what is computed alone.
A GPU's convolutions (TF32) and autocast round so coarsely that two right gradients differ much."""
ALONE = 8
"""How many gradients are computed alone, to time them."""
PARKED_S = 50e-6
"""What it takes at least to stop a worker twice, and to go on with it."""
WORTH = 0.9
"""The share of the time alone that a joint gradient may take, to be worth it."""


class Case(NamedTuple):
    """What one worker gives to a joint forward."""

    x: Tensor
    rest: Tensors
    inputs: Sequence[Tensor]


class Alone(NamedTuple):
    """What one worker computes by itself."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    rest: Tensors


Values = Sequence[Tensor | None]
PARTS: dict[str, Callable[[Alone], Values]] = {
    "result": lambda found: found.outputs,
    "gradient": lambda found: found.gradients,
    "buffers": lambda found: [*found.rest.values()],
}
"""What is compared."""


def joint_of(program: Program, cases: Sequence[Case]) -> Joint:
    """The joint forward of these workers."""
    xs, rests, inputs = zip(*cases, strict=True)
    return Joint(program, xs, rests, inputs)


def prove(program: Program, cases: Sequence[Case]) -> bool:
    """Compare the first and the last worker with what they compute alone; raises Cannot.

    Returns whether the forward is random; then this only tries the backward.
    """
    generator = generator_of(cases[0].x.device)
    before = generator.get_state()
    joint = joint_of(program, cases)
    is_random = not torch.equal(generator.get_state(), before)
    rows = sorted({0, len(cases) - 1})
    _refuse_changes(program, joint, cases)
    grads = [some_gradients([output[row] for output in joint.outputs]) for row in rows]
    try:
        found = joint.backward(rows, grads, again=True)
    except Exception as error:
        why = first_line(error)
        raise Cannot(f"the joint backward fails, as it does with checkpointing: {why}") from None
    if is_random:
        return True
    tolerance = _tolerance(program, cases[0].x.dtype)
    for row, gradients in zip(rows, found, strict=True):
        own = alone(program, cases[row])
        after = {name: joint.rest[name][row] for name in own.rest}
        together = Alone([o[row] for o in joint.outputs], [*gradients], after)
        refuse_another(together, own, tolerance, program, cases[row])
    return False


def prove_recorded(
    recorded: Recorded, rows: Rows, program: Program, ranks: Sequence[int], cases: Sequence[Case]
) -> None:
    """Compare a recorded computation with one that is told each time; changes nothing."""
    joint, tolerance = joint_of(program, cases), _tolerance(program, cases[0].x.dtype)
    numbers = range(len(cases))
    grads = [some_gradients([output[n] for output in joint.outputs]) for n in numbers]
    found = joint.backward(numbers, grads, again=False)
    assert rows.g is not None
    places = torch.tensor(ranks, device=rows.g.device)
    changed = [rows.g, *rows.rest.values()]
    before = [matrix.index_select(0, places) for matrix in changed]
    recorded.forward(ranks, [case.inputs for case in cases])
    results = [output.clone() for output in recorded.outputs]
    recorded.backward(dict(enumerate(grads)))
    g, *rest = [matrix.index_select(0, places) for matrix in changed]
    for matrix, kept in zip(changed, before, strict=True):
        matrix.index_copy_(0, places, kept)
    after = dict(zip(rows.rest, rest, strict=True))
    for n in numbers:
        buffers = {name: after[name][n] for name in joint.rest}
        replayed = Alone([r[n] for r in results], [*recorded.parts(g[n], grads[n])], buffers)
        buffers = {name: own[n] for name, own in joint.rest.items()}
        told = Alone([o[n] for o in joint.outputs], [*found[n]], buffers)
        refuse_another(replayed, told, tolerance, program, cases[n])


def _tolerance(program: Program, dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, COARSE) if program.autocast is None else COARSE


def _refuse_changes(program: Program, joint: Joint, cases: Sequence[Case]) -> None:
    """Refuse a forward that has changed parameters."""
    with torch.no_grad():
        before = program.leaves(torch.stack([case.x for case in cases]))
    same = all(map(torch.equal, joint.leaves, before))
    for name, _ in program.template.named_parameters(remove_duplicate=False):
        if name not in program.trained:
            frozen = torch.stack([case.rest[name] for case in cases])
            same = same and torch.equal(joint.rest[name], frozen)
    if not same:
        raise Cannot("forward() changes parameters")


def alone(program: Program, case: Case) -> Alone:
    """What one worker computes by itself; changes nothing."""
    with torch.no_grad():
        stacked = program.leaves(case.x.detach().clone()[None])
    leaves = [leaf.detach()[0].requires_grad_() for leaf in stacked]
    rest = {name: tensor.clone() for name, tensor in case.rest.items()}
    with torch.enable_grad(), program.casting(case.x.device):
        out, after = program.run(program.named(leaves), rest, case.inputs)
    outputs = tensors_in(out)
    grads = some_gradients(outputs)
    used = [i for i, grad in enumerate(grads) if grad is not None]
    given = [grads[i] for i in used]
    wanted = [outputs[i] for i in used]
    found = torch.autograd.grad(wanted, leaves, given, allow_unused=True)
    return Alone(outputs, [*found], after)


def in_double(program: Program, case: Case) -> Alone | None:
    """What a worker computes alone in double precision; None if its model does not do that."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    rest = {name: wide(tensor) for name, tensor in case.rest.items()}
    wider = Case(wide(case.x), rest, [*map(wide, case.inputs)])
    try:
        return alone(program._replace(autocast=None), wider)
    except Exception:
        return None


def refuse_slower(program: Program, cases: Sequence[Case], calls: Sequence[Call]) -> None:
    """Raise Cannot if a joint gradient takes about as long as one alone, or longer.

    It is timed with as many workers as there are: what fits into a cache may not with more.
    """

    def together() -> None:
        joint = joint_of(program, cases)
        rows = range(len(cases))
        outputs = [[output[row] for output in joint.outputs] for row in rows]
        grads = [some_gradients(own) for own in outputs]
        found = joint.backward(rows, grads, again=False)
        for row, call in zip(rows, calls, strict=True):
            call.pass_through_autograd(outputs[row], grads[row], found[row])

    def one_by_one() -> None:
        for call in calls[:ALONE]:
            call.compute_alone(program)

    joint_s = PARKED_S + _seconds(together, cases[0].x) / len(cases)
    alone_s = _seconds(one_by_one, cases[0].x) / len(calls[:ALONE])
    if joint_s > WORTH * alone_s:
        raise Cannot(
            f"a gradient takes {joint_s * 1e6:.0f} us together with {len(cases) - 1} others,"
            f" and {alone_s * 1e6:.0f} us alone"
        )


def drawn() -> tuple[Any, ...]:
    """The states of the global generators of Python and numpy."""
    kind, keys, *more = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *more


def first_line(error: Exception) -> str:
    """The first line of an error, with its kind."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _seconds(act: Callable[[], None], x: Tensor) -> float:
    """The less of two times."""
    return min(_once(act, x), _once(act, x))


def _once(act: Callable[[], None], x: Tensor) -> float:
    """The time that ``act`` takes; on a CPU, whatever else runs on it."""
    clock = time.perf_counter if x.is_cuda else time.thread_time
    begin_s = clock()
    act()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return clock() - begin_s


def some_gradients(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """A gradient for each output that has one, the same every time."""
    return [
        torch.arange(output.numel(), device=output.device).cos().to(output.dtype).view_as(output)
        if output.requires_grad
        else None
        for output in outputs
    ]


def refuse_another(
    together: Alone, own: Alone, tolerance: float, program: Program, case: Case
) -> None:
    """Raise Cannot if what a worker gets is not what it computes by itself."""
    exact: Alone | None = None
    for what, get in PARTS.items():
        a, b = get(together), get(own)
        _refuse_other_forms(what, a, b)
        off = _off(a, b)
        if off <= tolerance:
            continue
        exact = exact or in_double(program, case)
        if exact is None or not _off(a, get(exact)) <= LIKE * _off(b, get(exact)):
            raise Cannot(f"the {what} is another one if workers compute together ({off:.1e} off)")


def _refuse_other_forms(what: str, one: Values, other: Values) -> None:
    if [t is None for t in one] != [t is None for t in other]:
        raise Cannot(f"the {what} of other parameters exist if workers compute together")
    for a, b in zip(one, other, strict=True):
        if a is not None and b is not None and (a.shape != b.shape or a.dtype is not b.dtype):
            raise Cannot(f"the {what} has another shape or dtype if workers compute together")


def _off(one: Values, other: Values) -> float:
    """The distance of the one, relative to the norm of the other; 0 if the other is not finite."""
    both = zip(one, other, strict=True)
    pairs = [(a.detach(), b.detach()) for a, b in both if a is not None and b is not None]
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    away = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    if not size < float("inf") or away == 0:
        return 0.0
    return (away / size) ** 0.5 if size else float("inf")
