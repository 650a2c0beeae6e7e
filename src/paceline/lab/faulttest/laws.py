"""Laws that compare two runs: repeated, at half the speed, mirrored, solo, or resumed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paceline.common.faults import Fault, format_fault
from paceline.lab.faulttest.schedule import Schedule
from paceline.lab.faulttest.training import learn, model_of, optimizer_of, own_batches
from paceline.lab.faulttest.trial import RunOutcome, resume, run
from paceline.lab.faulttest.watched import Violation

_TURNS = 8
"""A second run takes time: each comparison is made for one seed in this many."""


def examine(schedule: Schedule) -> RunOutcome:
    """Run a schedule; if it breaks no law, compare it with the second run its seed asks for."""
    outcome = run(schedule)
    if outcome.violation is None:
        try:
            _compare(schedule, outcome)
        except Violation as violation:
            outcome.violation = violation
    return outcome


def _compare(schedule: Schedule, outcome: RunOutcome) -> None:
    turn = schedule.seed % _TURNS
    if turn == 0:
        _run_again(schedule, outcome)
    elif turn == 1:
        _run_slowly(schedule, outcome)
    elif turn == 2:
        _run_alone(schedule)
    elif turn == 3:
        _resume(schedule, outcome)
    elif turn == 4:
        _run_mirrored(schedule)
    elif turn == 5:
        _resume_after_losses(schedule, outcome)
    elif schedule.name == "layered" and not schedule.faults:
        _run_in_lockstep(schedule, outcome)


def _run_again(schedule: Schedule, outcome: RunOutcome) -> None:
    """A run is a function of its seed."""
    outcome.sites["run again"] += 1
    again = run(schedule)
    if again.trace_hash != outcome.trace_hash or not _equal(again.ends, outcome.ends):
        raise Violation("same seed, same run", f"{again.trace_hash} and {outcome.trace_hash}")


def _run_slowly(schedule: Schedule, outcome: RunOutcome) -> None:
    """If everything takes twice as long, the run takes twice as long and gives the same models."""
    if outcome.sites["succeeded"] or schedule.max_restarts or outcome.stopped:
        return  # the delay before a rank is restarted does not scale with the schedule
    outcome.sites["run slowly"] += 1
    slow = run(
        schedule.but(
            latency_s=2 * schedule.latency_s,
            bytes_per_s=schedule.bytes_per_s / 2,
            serving_bytes_per_s=schedule.serving_bytes_per_s / 2,
            step_s=2 * schedule.step_s,
            load_s=2 * schedule.load_s,
            dead_s=2 * schedule.dead_s,
            faults=tuple(format_fault(_slowed(fault)) for fault in schedule.script),
        )
    )
    if slow.violation is not None:
        raise slow.violation
    if slow.seconds != 2 * outcome.seconds or not _equal(slow.ends, outcome.ends):
        raise Violation(
            "doubling all times doubles the run",
            f"{slow.seconds} s at half the speed, {outcome.seconds} s at whole",
        )


def _slowed(fault: Fault) -> Fault:
    at_s = None if fault.at_s is None else 2 * fault.at_s
    for_s = None if fault.for_s is None else 2 * fault.for_s
    return dataclasses.replace(fault, at_s=at_s, for_s=for_s)


def _run_alone(schedule: Schedule) -> None:
    """A single worker trains like the plain optimizer, bit for bit."""
    alone = schedule.but(workers=1, faults=(), data="steps", bad_rank=None, bad_steps=())
    outcome = run(alone)
    if outcome.violation is not None:
        raise outcome.violation
    model = model_of(alone, 0)
    learn(alone, model, optimizer_of(alone, model), own_batches(alone, 0))
    x = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    if not torch.equal(x, outcome.ends[0]):
        raise Violation("one worker is the plain optimizer", f"{outcome.ends[0]}, not {x}")


def _resume(schedule: Schedule, outcome: RunOutcome) -> None:
    """A run that is resumed after a power failure ends like one that had none."""
    checkpointed = schedule.but(checkpoint_steps=schedule.checkpoint_steps or 2, faults=())
    original = outcome if checkpointed == schedule else run(checkpointed)
    if original.violation is not None:
        raise original.violation
    resumed = resume(checkpointed, original.images[0])
    outcome.sites["resumed"] += resumed.sites["resumed"]
    if resumed.violation is not None:
        raise resumed.violation
    if resumed.seconds != original.seconds or not _equal(resumed.ends, original.ends):
        raise Violation(
            "a resumed run equals an undisturbed one",
            f"{resumed.ends} after {resumed.seconds} s,"
            f" and not {original.ends} after {original.seconds} s",
        )


def _resume_after_losses(schedule: Schedule, outcome: RunOutcome) -> None:
    """A run that lost workers can be resumed: the lost ones join again, and all finish."""
    if not schedule.faults or not schedule.losses.goes_on or outcome.stopped:
        return
    checkpointed = schedule.but(checkpoint_steps=schedule.checkpoint_steps or 2)
    original = outcome if checkpointed == schedule else run(checkpointed)
    if original.violation is not None:
        raise original.violation
    resumed = resume(checkpointed.but(faults=()), original.images[0])
    if resumed.violation is not None:
        raise resumed.violation
    outcome.sites["resumed after losses"] += resumed.sites["joined"]
    if schedule.method.synchronous:
        _resume_with_those_left(checkpointed, original, outcome)


def _resume_with_those_left(schedule: Schedule, original: RunOutcome, outcome: RunOutcome) -> None:
    """A run that is resumed after its last loss ends as it did, if nobody joins."""
    resumed = resume(schedule.but(faults=()), original.images[-1], without_lost=True)
    if resumed.violation is not None:
        raise resumed.violation
    workers = {*range(schedule.workers)}
    if resumed.resumed_with is None or resumed.resumed_with & workers != original.ends.keys():
        return  # others were lost, or came, after the checkpoint
    outcome.sites["resumed with those left"] += len(original.ends) < schedule.workers
    if not _equal(resumed.ends, original.ends):
        raise Violation(
            "a resumed run equals one that went on", f"{resumed.ends}, and not {original.ends}"
        )


def _run_mirrored(schedule: Schedule) -> None:
    """In a synchronous method, reversing the order of the ranks does not change the result."""
    depends_on_rank = schedule.data != "steps" or schedule.objective == "still"
    if schedule.name not in ("allreduce", "sasgd", "diloco") or depends_on_rank:
        return
    calm = schedule.but(faults=(), bad_rank=None, bad_steps=(), checkpoint_steps=None)
    mirrored = calm.but(mirrored=True, factors=_factor_of_each(calm)[::-1])
    plain, other = run(calm), run(mirrored)
    for outcome in (plain, other):
        if outcome.violation is not None:
            raise outcome.violation
    if not torch.allclose(plain.ends[0], other.ends[0], rtol=1e-9, atol=1e-12):
        raise Violation("ranks are interchangeable", f"{plain.ends[0]}, mirrored {other.ends[0]}")


def _factor_of_each(schedule: Schedule) -> tuple[float, ...]:
    """The speed factor of each worker; a cluster repeats its factors in turn."""
    factors = schedule.factors
    return tuple(factors[rank % len(factors)] for rank in range(schedule.workers))


def _run_in_lockstep(schedule: Schedule, outcome: RunOutcome) -> None:
    """Layered SGD is synchronous SGD."""
    outcome.sites["run in lockstep"] += 1
    plain = run(schedule.but(strategy="allreduce"))
    if plain.violation is not None:
        raise plain.violation
    for rank, x in outcome.ends.items():
        if not torch.allclose(x, plain.ends[rank], rtol=1e-9, atol=1e-12):
            raise Violation("layered equals allreduce", f"rank {rank}: {x} and {plain.ends[rank]}")


def _equal(ends: dict[int, Tensor], others: dict[int, Tensor]) -> bool:
    same = ends.keys() == others.keys()
    return same and all(torch.equal(x, others[rank]) for rank, x in ends.items())
