"""Laws that take a second run: of the same, half as fast, mirrored, of one alone, resumed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paceline.common.faults import Fault, say_fault
from paceline.lab.faulttest.schedule import Schedule
from paceline.lab.faulttest.training import learn, model_of, optimizer_of, own_batches
from paceline.lab.faulttest.trial import Outcome, run, run_on
from paceline.lab.faulttest.watched import Violation

_TURNS = 8
"""Of so many seeds one is run again, one at half the speed, one alone, one resumed, and
one with the ranks mirrored."""


def examine(schedule: Schedule) -> Outcome:
    """Run a schedule; where it is its turn, and no law was broken, look at a second run as well."""
    outcome = run(schedule)
    if outcome.violation is None:
        try:
            _compare(schedule, outcome)
        except Violation as violation:
            outcome.violation = violation
    return outcome


def _compare(schedule: Schedule, outcome: Outcome) -> None:
    turn = schedule.seed % _TURNS
    if turn == 0:
        _run_again(schedule, outcome)
    elif turn == 1:
        _run_slowly(schedule, outcome)
    elif turn == 2:
        _run_alone(schedule)
    elif turn == 3:
        _run_on(schedule, outcome)
    elif turn == 4:
        _run_mirrored(schedule)
    elif turn == 5:
        _run_on_after_losses(schedule, outcome)
    elif schedule.name == "layered" and not schedule.faults:
        _run_in_lockstep(schedule, outcome)


def _run_again(schedule: Schedule, outcome: Outcome) -> None:
    """A run is a function of its seed."""
    outcome.sites["run again"] += 1
    again = run(schedule)
    if again.trace_hash != outcome.trace_hash or not _equal(again.ends, outcome.ends):
        raise Violation("same seed, same run", f"{again.trace_hash} and {outcome.trace_hash}")


def _run_slowly(schedule: Schedule, outcome: Outcome) -> None:
    """When all takes twice as long, the run does, and nothing else changes."""
    if outcome.sites["succeeded"] or schedule.max_restarts or outcome.stopped:
        return  # how long it takes until a rank is started again is not the schedule's to say
    outcome.sites["run slowly"] += 1
    slow = run(
        schedule.but(
            latency_s=2 * schedule.latency_s,
            bytes_per_s=schedule.bytes_per_s / 2,
            serving_bytes_per_s=schedule.serving_bytes_per_s / 2,
            step_s=2 * schedule.step_s,
            load_s=2 * schedule.load_s,
            dead_s=2 * schedule.dead_s,
            faults=tuple(say_fault(_later(fault)) for fault in schedule.script),
        )
    )
    if slow.violation is not None:
        raise slow.violation
    if slow.seconds != 2 * outcome.seconds or not _equal(slow.ends, outcome.ends):
        raise Violation(
            "time is a unit", f"{slow.seconds} s at half the speed, {outcome.seconds} s at whole"
        )


def _later(fault: Fault) -> Fault:
    at_s = None if fault.at_s is None else 2 * fault.at_s
    for_s = None if fault.for_s is None else 2 * fault.for_s
    return dataclasses.replace(fault, at_s=at_s, for_s=for_s)


def _run_alone(schedule: Schedule) -> None:
    """A single worker is the plain optimizer, bit for bit."""
    alone = schedule.but(workers=1, faults=(), data="steps", bad_rank=None, bad_steps=())
    outcome = run(alone)
    if outcome.violation is not None:
        raise outcome.violation
    model = model_of(alone, 0)
    learn(alone, model, optimizer_of(alone, model), own_batches(alone, 0))
    x = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    if not torch.equal(x, outcome.ends[0]):
        raise Violation("one worker is the plain optimizer", f"{outcome.ends[0]}, not {x}")


def _run_on(schedule: Schedule, outcome: Outcome) -> None:
    """A run that loses its power, and is resumed, is the one that was not disturbed."""
    saved = schedule.but(checkpoint_steps=schedule.checkpoint_steps or 2, faults=())
    whole = outcome if saved == schedule else run(saved)
    if whole.violation is not None:
        raise whole.violation
    rest = run_on(saved, whole.images[0])
    outcome.sites["resumed"] += rest.sites["resumed"]
    if rest.violation is not None:
        raise rest.violation
    if rest.seconds != whole.seconds or not _equal(rest.ends, whole.ends):
        raise Violation(
            "resumed is undisturbed",
            f"{rest.ends} after {rest.seconds} s, and not {whole.ends} after {whole.seconds} s",
        )


def _run_on_after_losses(schedule: Schedule, outcome: Outcome) -> None:
    """A run that has lost workers can be resumed, too: those join it, and all come to the end."""
    if not schedule.faults or not schedule.losses.goes_on or outcome.stopped:
        return
    saved = schedule.but(checkpoint_steps=schedule.checkpoint_steps or 2)
    whole = outcome if saved == schedule else run(saved)
    if whole.violation is not None:
        raise whole.violation
    rest = run_on(saved.but(faults=()), whole.images[0])
    if rest.violation is not None:
        raise rest.violation
    outcome.sites["resumed after losses"] += rest.sites["joined"]


def _run_mirrored(schedule: Schedule) -> None:
    """To whom the ranks are given makes no difference where all wait for all."""
    apart = schedule.data != "steps" or schedule.objective == "still"
    if schedule.name not in ("allreduce", "sasgd", "diloco") or apart:
        return
    calm = schedule.but(faults=(), bad_rank=None, bad_steps=(), checkpoint_steps=None)
    mirrored = calm.but(mirrored=True, factors=_of_each(calm)[::-1])
    plain, other = run(calm), run(mirrored)
    for outcome in (plain, other):
        if outcome.violation is not None:
            raise outcome.violation
    if not torch.allclose(plain.ends[0], other.ends[0], rtol=1e-9, atol=1e-12):
        raise Violation("ranks are names", f"{plain.ends[0]}, mirrored {other.ends[0]}")


def _of_each(schedule: Schedule) -> tuple[float, ...]:
    """The factor of each worker; those of a cluster go round."""
    factors = schedule.factors
    return tuple(factors[rank % len(factors)] for rank in range(schedule.workers))


def _run_in_lockstep(schedule: Schedule, outcome: Outcome) -> None:
    """Layered SGD is synchronous SGD."""
    outcome.sites["run in lockstep"] += 1
    plain = run(schedule.but(strategy="allreduce"))
    if plain.violation is not None:
        raise plain.violation
    for rank, x in outcome.ends.items():
        if not torch.allclose(x, plain.ends[rank], rtol=1e-9, atol=1e-12):
            raise Violation("layers are lockstep", f"rank {rank}: {x} and {plain.ends[rank]}")


def _equal(ends: dict[int, Tensor], others: dict[int, Tensor]) -> bool:
    same = ends.keys() == others.keys()
    return same and all(torch.equal(x, others[rank]) for rank, x in ends.items())
