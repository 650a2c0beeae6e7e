"""The trace of a run: its hash is the run's fingerprint, and its file can be read again."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import paceline as pl
from paceline.record.trace import Trace, merge, read

times, ranks = st.floats(0, 1e6), st.integers(0, 999)
FIELDS = {
    "time_s": times,
    "rank": ranks,
    "event": st.sampled_from(["send", "recv", "post", "publish", "step", "all_reduce"]),
    "peer": st.none() | ranks,
    "nbytes": st.integers(0, 2**40),
}
records = st.fixed_dictionaries(FIELDS)


def hash_of(events, path=None, **more):
    trace = Trace(path)
    for event in events:
        trace.record(**event, **more)
    return trace.close()


@given(st.lists(records, max_size=8))
def test_the_same_records_have_the_same_hash(events):
    assert hash_of(events) == hash_of(events)
    assert len(bytes.fromhex(hash_of(events))) == 32


@given(st.lists(records, min_size=1, max_size=8), st.sampled_from(list(FIELDS)), st.data())
def test_another_value_of_any_field_is_another_hash(events, name, data):
    where = data.draw(st.integers(0, len(events) - 1))
    old = events[where][name]
    new = data.draw(FIELDS[name].filter(lambda value: value != old))
    changed = [*events[:where], {**events[where], name: new}, *events[where + 1 :]]
    assert hash_of(changed) != hash_of(events)


@given(st.lists(records, min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_another_order_is_another_hash(events, random):
    other = random.sample(events, len(events))
    assume(other != events)
    assert hash_of(other) != hash_of(events)


@given(st.lists(records, max_size=8), records)
def test_one_more_record_is_another_hash(events, one):
    assert hash_of([*events, one]) != hash_of(events)


@given(st.lists(records, min_size=1, max_size=8))
def test_other_fields_of_an_event_are_not_in_the_hash(events):
    assert hash_of(events, version=3, note="x") == hash_of(events, tag=0) == hash_of(events)


@given(st.lists(st.tuples(records, st.booleans()), max_size=20))
def test_the_hash_does_not_depend_on_when_the_buffer_is_written(events):
    trace = Trace()
    for event, flush in events:
        trace.record(**event)
        if flush:
            trace.flush()
    assert trace.close() == hash_of([event for event, _ in events])


def test_more_records_than_the_buffer_holds_are_all_written(tmp_path):
    events = [{"time_s": n / 8, "rank": n % 3, "event": "step"} for n in range(10_000)]
    digest = hash_of(events, tmp_path / "trace.jsonl")
    assert digest == hash_of(events)
    assert [line["t"] for line in read(tmp_path / "trace.jsonl")] == [n / 8 for n in range(10_000)]


def test_a_file_reads_back_as_what_was_recorded(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl")
    trace.record(0.1 + 0.2, 3, "send", 4, 512, tag=7, note='"quoted", {}\n')
    trace.record(1e-9, 0, "step", step=2, version=None)
    trace.close()
    first, second = read(tmp_path / "trace.jsonl")
    common = {"t": 0.1 + 0.2, "rank": 3, "event": "send", "peer": 4, "bytes": 512}
    assert first == {**common, "tag": 7, "note": '"quoted", {}\n'}
    common = {"t": 1e-9, "rank": 0, "event": "step", "peer": None, "bytes": 0}
    assert second == {**common, "step": 2, "version": None}


def test_what_is_flushed_can_be_read_before_the_end(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl")
    trace.record(0.5, 0, "step")
    trace.flush()
    assert [record["t"] for record in read(tmp_path / "trace.jsonl")] == [0.5]
    trace.close()


@pytest.mark.parametrize("lost", [1, 5, 30])
def test_a_last_line_that_a_crash_cut_off_is_skipped(tmp_path, lost):
    path = tmp_path / "trace.jsonl"
    hash_of([{"time_s": float(n), "rank": 0, "event": "step"} for n in range(3)], path, more={})
    path.write_text(path.read_text()[:-lost])
    assert [record["t"] for record in read(path)] == [0.0, 1.0]


@given(st.lists(st.lists(times, max_size=6).map(sorted), min_size=1, max_size=4))
def test_a_merge_is_sorted_by_time_and_keeps_each_ranks_order(times_by_rank):
    with TemporaryDirectory() as name:
        folder = Path(name)
        parts = [folder / f"trace.{rank}.jsonl" for rank in range(len(times_by_rank))]
        for rank, rank_times in enumerate(times_by_rank):
            trace = Trace(parts[rank])
            for number, time_s in enumerate(rank_times):
                trace.record(time_s, rank, "step", number=number)
            trace.close()
        merge(parts, folder / "trace.jsonl")
        merged = list(read(folder / "trace.jsonl"))
        assert [path.name for path in folder.iterdir()] == ["trace.jsonl"]
    assert [record["t"] for record in merged] == sorted(chain(*times_by_rank))
    for rank, rank_times in enumerate(times_by_rank):
        mine = [(record["number"], record["t"]) for record in merged if record["rank"] == rank]
        assert mine == list(enumerate(rank_times))


def test_ranks_without_a_trace_do_not_stop_a_merge(tmp_path):
    trace = Trace(tmp_path / "trace.1.jsonl")
    trace.record(2.0, 1, "step")
    trace.close()
    parts = [tmp_path / f"trace.{rank}.jsonl" for rank in range(3)]
    merge(parts, tmp_path / "trace.jsonl")
    assert [record["rank"] for record in read(tmp_path / "trace.jsonl")] == [1]


def test_the_hash_of_a_run_is_that_of_its_file(tmp_path):
    """The trace file of a simulation, recorded again, has the run's fingerprint."""

    def train(worker):
        for _ in range(3):
            worker.comm.clock.charge(0.1 * (1 + worker.rank))
            worker.comm.barrier()

    run = pl.simulate(train, workers=3, cluster="mixed-lab", out=tmp_path)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    again = Trace()
    for line in map(json.loads, lines):
        again.record(line["t"], line["rank"], line["event"], line["peer"], line["bytes"])
    assert len(lines) >= 3 * 3 * 2
    assert again.close() == run.trace_hash


def test_the_trace_of_a_killed_rank_lacks_only_the_last_moments(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl")
    for number in range(100):
        trace.record(number / 50, 0, "batch")
    written = [record["t"] for record in read(tmp_path / "trace.jsonl")]
    trace.close()  # a killed rank does not do this
    assert 1.7 <= written[-1] < 1.98
    assert written == [number / 50 for number in range(len(written))]


@pytest.mark.parametrize("kept", range(1, 40, 3))
def test_a_line_that_was_cut_off_before_the_next_incarnation_is_skipped(tmp_path, kept):
    path = tmp_path / "trace.0.jsonl"
    for incarnation in range(2):
        trace = Trace(path, append=incarnation > 0)
        trace.record(float(incarnation), 0, "batch")
        trace.record(incarnation + 0.5, 0, "step")
        trace.close()
        if incarnation == 0:
            first, second = path.read_text().splitlines(keepends=True)
            path.write_text(first + second[:kept])
    merge([path], tmp_path / "trace.jsonl")
    assert [record["t"] for record in read(tmp_path / "trace.jsonl")] == [0.0, 1.0, 1.5]
