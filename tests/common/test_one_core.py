"""A simulation's threads are on one core, as batch work; afterwards all is as it was."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from paceline.common.one_core import on_one_core, take_back_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these policies")


def placed():
    """The cores and the policy of the calling thread."""
    return os.sched_getaffinity(0), os.sched_getscheduler(0)


def of_a_thread(act):
    """What ``act`` returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_are_on_one_core_and_afterwards_as_before():
    before = placed()
    with on_one_core():
        cores, policy = of_a_thread(placed)
        assert len(cores) == 1 and policy == os.SCHED_BATCH
        assert of_a_thread(lambda: take_back_cores() or placed()) == before
    assert placed() == before


def test_only_those_that_may_leave_their_core_are_watched():
    before = threading.active_count()
    with on_one_core():
        assert threading.active_count() == before + 1
    with on_one_core(for_good=True):
        assert threading.active_count() == before
        assert len(of_a_thread(placed)[0]) == 1
