"""How many bytes all ranks of a run hand to Comm, in closed form: a law for methods to keep."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Strategy
from paceline.strategies.cyclic import Cyclic
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.downpour import Downpour
from paceline.strategies.easgd import EASGD
from paceline.strategies.easgd_sync import EASGDSync
from paceline.strategies.elastic import Elastic
from paceline.strategies.gossip_sync import GossipSync
from paceline.strategies.hierarchical import Hierarchical
from paceline.strategies.layered import Layered
from paceline.strategies.sasgd import SASGD
from paceline.strategies.served import ServerStrategy
from paceline.strategies.service import Reply
from paceline.strategies.ssp import SSP

NOTE_BYTES = 16
"""Beside each model of a gossip."""
TOKEN_BYTES = 16


class Size(NamedTuple):
    """A calm run: steps of each worker, the bytes of the model, and the workers."""

    steps: int
    nbytes: int
    workers: int


@singledispatch
def payload(method: Strategy, run: Size) -> int | None:
    """The bytes of a run of ``method``; None where they depend on chance or timing."""
    return None


@payload.register
def _(method: AllReduce, run: Size) -> int:
    return run.nbytes * run.workers * (1 + run.steps)


@payload.register
def _(method: DiLoCo, run: Size) -> int:
    return run.nbytes * run.workers * (1 + -(-run.steps // method.interval))


@payload.register
def _(method: SASGD, run: Size) -> int:
    warm = min(run.steps, method.warmup)
    times = warm + -(-(run.steps - warm) // method.interval)
    vectors = 1 + (len(method.replica.moments()) if method.momentum == "average" else 0)
    counts = 0 if method.global_lr is None else times * method.replica.flat.x.element_size()
    return run.workers * (run.nbytes * (1 + times * vectors) + counts)


@payload.register
def _(method: Hierarchical, run: Size) -> int:
    contributions = in_group = in_all = 0
    last = -(-run.steps // method.interval) * (method.interval // method.group_interval)
    for number in range(1, last + 1):
        taken = min(run.steps, number * method.group_interval)
        is_for_all = number * method.group_interval % method.interval == 0
        contributions += taken > (in_all if is_for_all else in_group)
        in_group, in_all = taken, taken if is_for_all else in_all
    return run.nbytes * run.workers * (1 + contributions)


@payload.register
def _(method: GossipSync, run: Size) -> int | None:
    if method.probability is not None:
        return None
    first = int(method.order == "mix_first")
    gossips = sum(step % method.interval == 0 for step in range(first, run.steps + first))
    flags = 8 * run.workers * run.steps
    return run.workers * (2 * run.nbytes + flags + gossips * (run.nbytes + NOTE_BYTES))


@payload.register
def _(method: Layered, run: Size) -> int:
    communicators = len(method.roles(run.workers)) - run.workers
    message = run.nbytes + 8 * method.request_numbers
    rounds = run.steps + 1  # in the last one, all say that they have come to their end
    up_and_down = 2 * run.workers * rounds * message
    return up_and_down + run.nbytes * (communicators * run.steps + run.workers + communicators)


# Methods with a center ---------------------------------------------------------------------------


@payload.register
def _(method: EASGDSync, run: Size) -> int:
    return run.nbytes * run.workers * (1 + _elastic_exchanges(method, run.steps))


@payload.register
def _(method: EASGD, run: Size) -> int:
    exchanges = _elastic_exchanges(method, run.steps) * _exchange(method, run)
    return run.workers * exchanges + _beginning(method, run)


@payload.register
def _(method: SSP, run: Size) -> int:
    return run.workers * (run.steps + 1) * _exchange(method, run) + _beginning(method, run)


@payload.register
def _(method: Cyclic, run: Size) -> int | None:
    if method.max_accumulated > 1:
        return None
    turns = run.workers * (run.steps + 1)
    return turns * _exchange(method, run) + TOKEN_BYTES * (turns - 1) + _beginning(method, run)


@payload.register
def _(method: Downpour, run: Size) -> int:
    full = method.phase == "full"
    pushed = {step for step in range(run.steps) if (step + full) % method.push_interval == 0}
    fetched = {step for step in range(run.steps) if (step + 1) % method.fetch_interval == 0}
    last = max(pushed, default=-1)
    rest = run.steps > last + 1 or (last >= 0 and last not in fetched)
    published = 8 * method.shards * (len(Reply._fields) + 2 * run.workers + 1)  # with the ledger
    requests = (len(pushed) + rest) * _request(method, run)
    replies = (len(pushed & fetched) + rest) * _reply(method, run)
    looks = len(fetched - pushed) * (run.nbytes + published)
    return run.workers * (requests + replies + looks) + _beginning(method, run)


def _elastic_exchanges(method: Elastic, steps: int) -> int:
    return -(-steps // method.interval) + (steps > 0)


def _request(method: ServerStrategy, run: Size) -> int:
    return run.nbytes + 8 * method.shards * method.request_numbers


def _reply(method: ServerStrategy, run: Size) -> int:
    return run.nbytes + 8 * method.shards * len(Reply._fields)


def _exchange(method: ServerStrategy, run: Size) -> int:
    return _request(method, run) + _reply(method, run)


def _beginning(method: ServerStrategy, run: Size) -> int:
    """Every rank is given the first model."""
    return run.nbytes * (run.workers + method.shards)
