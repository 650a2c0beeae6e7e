"""The file for Perfetto, checked against the trace-event format; and the picture."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.runs import train

import paceline as pl
from paceline.report.timeline.chrome import LANES
from paceline.report.timeline.items import KINDS
from paceline.report.timeline.picture import COLORS, LEFT, RIGHT, WIDTH

FIELDS = {
    "X": {"cat", "dur", "args"},
    "M": {"args"},
    "s": {"cat", "id"},
    "f": {"cat", "id", "bp"},
    "C": {"args"},
}
NAMED = {"process_name": "name", "thread_name": "name", "process_labels": "labels"}
NAMED |= {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs, by method and cluster."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method, cluster in [
        ("sync", "allreduce", "ethernet-1g"),
        ("served", "easgd", "mixed-lab"),
        ("gossip", "gossip", "wan"),
    ]:
        pl.simulate(train, workers=3, strategy=method, cluster=cluster, out=folder / name)
    return folder


@pytest.fixture
def outcome(paceline, runs):
    """Run ``paceline timeline`` on runs by name; the object on its last line."""

    def make(*names, more=()):
        folders = [runs / name for name in names]
        done = paceline("timeline", *folders, *more, "--json")
        assert len(done.out.splitlines()) == 1
        return json.loads(done.out)

    return make


def events_of(path):
    """The events of a file, after checking its format."""
    raw = Path(path).read_bytes()
    trace = json.loads(gzip.decompress(raw) if str(path).endswith(".gz") else raw)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert_well_formed(event)
    return trace["traceEvents"]


def assert_well_formed(event):
    assert set(event) == {"ph", "name", "pid", "tid", "ts"} | FIELDS[event["ph"]]
    assert type(event["pid"]) is type(event["tid"]) is int and event["tid"] > 0 < event["pid"]
    assert type(event["ts"]) is float and event["ts"] >= 0 and event["name"]
    if event["ph"] == "X":
        assert type(event["dur"]) is float and event["dur"] >= 0
        assert event["cat"] in LANES
    if event["ph"] == "M":
        assert set(event["args"]) == {NAMED[event["name"]]}
    if event["ph"] == "C":
        assert all(type(value) is float for value in event["args"].values())


def slices_of(events):
    """The complete events of each track, as (begin, end, name) in the order of the file."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            tracks[event["pid"], event["tid"]].append((begin, end, event["name"]))
    return tracks


@pytest.mark.parametrize("names", [["sync"], ["served"], ["gossip"], ["sync", "gossip"]])
def test_the_file_keeps_to_the_trace_event_format(names, outcome):
    output = outcome(*names)
    events = events_of(output["path"])
    assert output["events"] == len(events)
    tracks = slices_of(events)
    for slices in tracks.values():
        for (_, end, _), (begin, _, _) in pairwise(slices):
            assert begin >= end, "slices of a lane are in order and do not overlap"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(event["pid"], event["tid"]) for event in events}
    assert len(named) == sum(event["name"] == "thread_name" for event in events)
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == sorted({event["pid"] for event in events})
    assert len({tid for _, tid in named}) == len(named), "a tid belongs to one process"
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == sorted(processes)


@pytest.mark.parametrize("name", ["sync", "served", "gossip"])
def test_an_arrow_leads_from_a_slice_that_sends_to_one_that_receives(name, outcome):
    events = events_of(outcome(name)["path"])
    tracks, lanes = slices_of(events), {}
    for event in events:
        if event["name"] == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]["name"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert bool(starts) == (name != "sync")
    for flow, start in starts.items():
        assert start["ts"] <= ends[flow]["ts"]
        for event, lane in ((start, "send"), (ends[flow], "receive")):
            track, ns = (event["pid"], event["tid"]), round(event["ts"] * 1e3)
            assert lanes[track] == lane
            assert any(begin <= ns <= end for begin, end, _ in tracks[track])


def test_each_rank_is_a_process_with_a_lane_for_each_kind_of_time(outcome):
    events = events_of(outcome("served")["path"])
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1", "rank 2", "rank 3 (serves)"]
    lanes = defaultdict(set)
    for event in events:
        if event["name"] == "thread_name":
            lanes[names[event["pid"]]].add(event["args"]["name"])
    assert lanes["rank 0"] == {"step", "compute", "wait", "send", "receive", "I/O"}
    assert lanes["rank 3 (serves)"] == {"wait", "send", "receive"}


def test_two_runs_alternate_and_start_with_the_same_gradient(outcome, runs):
    events = events_of(outcome("sync", "gossip", more=["--out", "both.json"])["path"])
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        f"rank {rank}, simulated ({runs / name})"
        for rank in range(3)
        for name in ("sync", "gossip")
    ]
    ready = defaultdict(list)
    for pid in names:
        step = next(e for e in events if (e["pid"], e["name"]) == (pid, "step 0"))
        first = next(
            e for e in events if (e["pid"], e["name"]) == (pid, "compute") and e["ts"] >= step["ts"]
        )
        ready[pid % 2].append(first["ts"] + first["dur"])
    assert min(ready[0]) == pytest.approx(min(ready[1]), abs=0.01)


def test_what_was_logged_is_a_counter(outcome, runs):
    events = events_of(outcome("sync")["path"])
    counted = [event["args"]["loss"] for event in events if event["ph"] == "C"]
    logged = [json.loads(line) for line in (runs / "sync/metrics.jsonl").read_text().splitlines()]
    assert sorted(counted) == sorted(record["loss"] for record in logged)


def test_the_reported_seconds_are_those_of_the_slices(outcome):
    output = outcome("served")
    slices = defaultdict(float)
    events = events_of(output["path"])
    named = [event for event in events if event["name"] == "process_name"]
    (server,) = [e["pid"] for e in named if e["args"]["name"] == "rank 3 (serves)"]
    for event in events:
        if event["ph"] == "X" and event["pid"] == server:
            slices[event["cat"]] += event["dur"] / 1e6
    (row,) = [row for row in output["rows"] if row["rank"] == 3]
    assert row["worker"] is False and set(row["seconds"]) == set(KINDS)
    for kind in KINDS:
        assert row["seconds"][kind] == pytest.approx(slices[kind], abs=1e-6)
    assert [row["worker"] for row in output["rows"]] == [True, True, True, False]


def test_a_part_of_the_time_can_be_shown_and_packed(outcome):
    whole = outcome("sync")
    part = outcome("sync", more=["--from", 0.01, "--to", 0.02, "--out", "part.json.gz"])
    assert part["path"] == "part.json.gz" and part["events"] < whole["events"]
    slices = [end for track in slices_of(events_of("part.json.gz")).values() for end in track]
    assert max(end for _, end, _ in slices) == 10**7 and min(s for s, _, _ in slices) == 0
    for row in part["rows"]:
        assert sum(row["seconds"].values()) == pytest.approx(0.01, rel=1e-6)


def test_a_run_into_the_same_folder_removes_the_timeline(outcome, runs, tmp_path):
    pl.simulate(train, workers=2, out=tmp_path / "again")
    outcome(tmp_path / "again")
    assert (tmp_path / "again/timeline.json").exists()
    pl.simulate(train, workers=2, out=tmp_path / "again")
    assert not (tmp_path / "again/timeline.json").exists()


def test_the_output_shows_how_the_time_was_spent(paceline, runs):
    done = paceline("timeline", runs / "served", "--svg", "picture.svg")
    assert re.search(r"simulated rank 3 \(serves\) +0.0 ms +[\d.]+ m?s", done.out)
    assert "timeline.json" in done.out and "picture.svg" in done.out


# Bad input ---------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused_in_a_sentence(paceline, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/trace.jsonl").write_text('{"t": 0.0, "rank": 0, "event": "step"}\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other/trace.jsonl").write_text("{nonsense}\n")
    (tmp_path / "stepless").mkdir()
    line = '{"t": 0.0, "rank": 0, "event": "send", "peer": 1, "bytes": 4}\n'
    (tmp_path / "stepless/trace.jsonl").write_text(line)
    for name, why in {
        "nowhere": "it has no trace.jsonl",
        "empty": "it has no trace.jsonl",
        "broken": "its trace has no durations: an older version wrote it",
        "other": "its trace cannot be read: UsageError: other/trace.jsonl: not a trace",
        "stepless": "no worker has made a step in its trace.jsonl",
    }.items():
        done = paceline("timeline", name, code=2)
        assert done.err.startswith(f"paceline: run ({name}) must be the folder of a run")
        assert why in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--from", 9], "--from (9.0 s) must be before the last step of the runs, at 0."),
        (["--to", -9], "--to (-9.0 s) must be after the first step of the runs, at -0."),
        (["--from", 0.02, "--to", 0.01], "--from (0.02 s) must be before --to (0.01 s)"),
        (["--out", "no/such/folder.json"], "out (no/such/folder.json) must be a writable file"),
        (["--svg", "no/such.svg"], "svg (no/such.svg) must be a writable file"),
    ],
)
def test_a_bad_option_is_refused_in_a_sentence(more, why, paceline, runs):
    done = paceline("timeline", runs / "sync", *more, code=2)
    assert why in done.err and done.err.count("\n") == 1


# The picture -------------------------------------------------------------------------------------


def drawn(path):
    """The texts of a picture, and its bars by color: left, top, width."""
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(text.itertext()) for text in root.iter(f"{space}text")]
    bars = defaultdict(list)
    for path_ in root.iter(f"{space}path"):
        found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v\d+h-[\d.]+z", path_.get("d"))
        if found:
            bars[path_.get("fill")] += [tuple(map(float, bar)) for bar in found]
    return root, texts, bars


def test_a_picture_has_a_bar_for_each_rank_and_no_moment_is_missing(outcome):
    outcome("served", more=["--svg", "picture.svg"])
    root, texts, bars = drawn("picture.svg")
    assert {"rank 0", "rank 1", "rank 2", "rank 3 (serves)"} <= set(texts)
    rows = defaultdict(float)
    for bar in (bar for some in bars.values() for bar in some):
        assert bar[0] >= LEFT - 0.1 and bar[0] + bar[2] <= WIDTH - RIGHT + 0.1
        rows[bar[1]] += bar[2]
    assert len(rows) == 4
    assert max(rows.values()) == pytest.approx(WIDTH - LEFT - RIGHT, abs=1.0)
    assert set(bars) <= set(COLORS.values())
    assert float(root.get("width")) == WIDTH


def test_two_runs_are_drawn_on_one_scale(outcome, runs):
    output = outcome("sync", "served", more=["--svg", "picture.svg"])
    _, texts, bars = drawn("picture.svg")
    assert sum(text.startswith("simulated (") for text in texts) == 2
    wide = defaultdict(float)
    for left, top, width in (bar for some in bars.values() for bar in some):
        wide[top] = max(wide[top], left + width)
    assert len(wide) == 7, "three workers, then three and a server"
    assert max(wide.values()) == pytest.approx(WIDTH - RIGHT, abs=0.2)
    ends = [wide[top] for top in sorted(wide)]
    assert min(ends[:3]) == max(ends[:3]) != max(ends[3:])
    assert output["svg"] == "picture.svg"


def test_a_picture_of_many_ranks_says_what_it_leaves_out_and_escapes_names(outcome, tmp_path):
    folder = tmp_path / "<many> & more"
    pl.simulate(train, workers=60, strategy="gossip", out=folder, arguments={"epochs": 1})
    outcome(folder, folder, more=["--svg", "picture.svg"])
    _, texts, _ = drawn("picture.svg")
    assert texts.count("and 12 more ranks") == 2
    assert any("<many> & more" in text for text in texts)
