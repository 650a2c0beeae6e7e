"""The full form of the claims: fair runs, what matters most first, and pieces of any length."""

import itertools
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import asdict, fields
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.lab.papers import CLAIMS
from paceline.lab.papers.claim import LEAST_STEPS
from paceline.lab.papers.full import FULL_CLAIMS, find_full
from paceline.lab.papers.full.setup import MOST, RUNS, SETTINGS, Extent, Way
from paceline.lab.papers.full.study import Study
from paceline.lab.papers.training import even
from paceline.lab.papers.verdict import FAILS, HOLDS, SMALL, UNFINISHED
from paceline.lab.sweep import SEEDS
from paceline.lab.tasks.fashion import load_images
from paceline.lab.trials import TrialOutcome
from paceline.record.result import Result
from paceline.strategies import make_strategy
from paceline.strategies.packing import pack_strategy


def made_up(level, workers, seconds=1.0, steps=LEAST_STEPS):
    """A run whose accuracy rises to ``level`` in this many seconds."""
    names = ("accuracy", "replica_accuracy")
    records = [
        {"t": seconds * x, "rank": 0, "progress": x, "distance": 0.1}
        | dict.fromkeys(names, level * x**0.25)
        for x in np.linspace(0.125, 1, 8).tolist()
    ]
    empty = dict.fromkeys(field.name for field in fields(Result))
    known = {"metrics": records, "accuracy": level, "workers": workers, "steps": steps * workers}
    clocks = {"first_step_s": 0.0, "seconds": 3.0, "startup_seconds": 1.0}
    return Result(**{**empty, **known, **clocks, "virtual_seconds": seconds})


OURS = ("gossip", "easgd")
"""The methods that lead if gossip-small holds."""


@pytest.fixture
def tried(monkeypatch):
    """Replaces the runs by made-up ones: with it, all are fast, and their order is known."""
    jobs = []
    how = SimpleNamespace(tried=jobs, best=middle_of, lead=0.1, steps=LEAST_STEPS)
    how.fails = lambda config: False

    def run(job):
        config = json.loads(job)
        jobs.append(config)
        if how.fails(config):
            return json.dumps(asdict(TrialOutcome(error="it broke", exit_code=1)))
        octaves = abs(math.log2(config["arguments"]["lr"] / how.best(config)))
        name = config["strategy"]["class"]["name"].lower()
        ours = name.startswith(OURS)
        level = 0.6 + how.lead * ours - 0.01 * octaves + 1e-4 * (config["seed"] % 7)
        seconds = 1 / (1 + 5 * how.lead * ours)
        result = made_up(level, config["workers"], seconds, how.steps)
        return json.dumps(asdict(TrialOutcome(result=result)))

    monkeypatch.setattr("paceline.lab.papers.full.study.run_trial", run)
    return how


def middle_of(config):
    """The middle rate of the grid that a run belongs to."""
    momentum, workers = config["arguments"]["momentum"], config["workers"]
    factor = 1 / workers if adds_up(config) else 1.0
    return SETTINGS["bundled"].recipe.lr * factor * (1 if momentum else 10)


def adds_up(config):
    fields = config["strategy"]["fields"]
    name = config["strategy"]["class"]["name"]
    return name in ("Downpour", "SSP") or fields.get("scale") == "sum" or name == "Cyclic"


def study(names, folder, seconds=math.inf, extent=Extent()):  # noqa: B008 - it is frozen
    return Study([find_full(name) for name in names], extent, folder, seconds)


def finish(names, folder):
    made = study(names, folder)
    made.run(1, lambda text: None)
    return {finding.claim.id: finding for finding in made.findings()}


# The runs ----------------------------------------------------------------------------------------


def test_the_claims_about_accuracy_have_a_full_form_and_others_are_refused():
    assert set(FULL_CLAIMS) < set(CLAIMS)
    for name in FULL_CLAIMS:
        texts = find_full(name).description()
        assert texts["id"] == name and "seeds" in texts["setup"]
        assert all(len(texts[key]) > 20 for key in ("paper", "claim", "setup", "rule"))
    with pytest.raises(UsageError, match=r"claim \(layered-equal\) must be one of gossip-small"):
        find_full("layered-equal")


@pytest.mark.parametrize("name", FULL_CLAIMS)
def test_only_rate_seed_and_method_differ_between_runs_that_are_compared(name):
    extent = Extent(scale=0.5)
    for way in find_full(name).ways:
        config = extent.trial(way, 0.1, 3).config()
        assert config["strategy"] == pack_strategy(make_strategy(way.method))
        assert config["arguments"] == {
            "task": "bundled", "epochs": 30, "lr": 0.1, "momentum": way.momentum
        }  # fmt: skip
    assert len({way.contended for way in find_full(name).ways}) == 1


def test_every_way_is_swept_with_one_seed_and_run_with_three_others(tried, tmp_path):
    finish(FULL_CLAIMS, tmp_path)
    runs = {}
    for config in tried.tried:
        key = (json.dumps(config["strategy"]), config["workers"], config["arguments"]["momentum"])
        runs.setdefault((*key, json.dumps(config["cluster"])), []).append(config)
    ways = {way for name in FULL_CLAIMS for way in (*find_full(name).ways, *find_full(name).beside)}
    assert len(runs) == len(ways)
    for configs in runs.values():
        assert len(configs) == len({json.dumps(config) for config in configs})
        sweep = [config for config in configs if config["seed"] in SEEDS]
        assert len({config["seed"] for config in sweep}) == 1
        assert 3 <= len({config["arguments"]["lr"] for config in sweep}) <= MOST
        assert len({config["seed"] for config in configs} - set(SEEDS)) == RUNS


def test_what_matters_most_is_done_first(tried, tmp_path):
    finish(FULL_CLAIMS, tmp_path)
    seeds = [None if config["seed"] in SEEDS else config["seed"] for config in tried.tried]
    first, second, third = (seeds.index(seed) for seed in Extent().seeds)
    assert first < second < third
    core = {(str(way.method), way.workers) for name in FULL_CLAIMS for way in find_full(name).ways}
    before = tried.tried[:second]
    begun = {json.dumps([c["strategy"], c["workers"]]) for c in before if c["seed"] not in SEEDS}
    assert len(begun) == len(core)  # one seed of everything before the second seed of anything
    claims = [find_full(name).ways[0] for name in FULL_CLAIMS]
    places = [
        next(n for n, c in enumerate(tried.tried) if _is_of(c, way, Extent().seeds[0]))
        for way in claims[:3]
    ]
    assert places == sorted(places)
    shown = pack_strategy(make_strategy("gossip(interval=10)"))
    assert all(config["strategy"] != shown for config in tried.tried[: third + 1])


def _is_of(config, way, seed):
    packed = pack_strategy(make_strategy(way.method))
    return (config["strategy"], config["workers"], config["seed"]) == (packed, way.workers, seed)


def test_a_rate_at_the_edge_is_not_taken_for_the_best(tried, tmp_path):
    tried.best = lambda config: 16 * middle_of(config)
    (finding,) = finish(["gossip-large"], tmp_path).values()
    lockstep = Way("allreduce", 128)
    assert finding.rates[str(lockstep)] == pytest.approx(16 * 0.02)
    rates = {c["arguments"]["lr"] for c in tried.tried if c["seed"] in SEEDS and is_lockstep(c)}
    assert max(rates) > 16 * 0.02 and len(rates) == MOST


def is_lockstep(config):
    return config["strategy"] == pack_strategy(make_strategy("allreduce"))


def test_no_sample_is_in_a_short_batch():
    for workers in (8, 16, 32, 128):
        count = len(even(load_images(), 15).x_train)
        assert count == 3840 and count % (workers * 15) == 0


# In pieces ---------------------------------------------------------------------------------------


def test_a_study_that_is_stopped_goes_on_where_it_was(tried, tmp_path, monkeypatch):
    whole = finish(["gossip-large"], tmp_path / "whole")["gossip-large"]
    count = len(tried.tried)
    tried.tried.clear()
    now = itertools.count(0.0, 5.0)  # a run takes 4 s, by its own clock
    monkeypatch.setattr(
        "paceline.lab.papers.full.study.time", SimpleNamespace(monotonic=lambda: next(now))
    )
    pieces = 0
    while (piece := study(["gossip-large"], tmp_path / "pieces", 60.0)).left:
        done = len(tried.tried)
        piece.run(1, lambda text: None)
        assert 0 < len(tried.tried) - done < count
        pieces += 1
    assert pieces > 1 and len(tried.tried) == count
    (finding,) = piece.findings()
    assert finding.to_json() == whole.to_json()
    assert finding.minutes == pytest.approx(4 * count / 60)


def test_no_run_begins_that_would_end_too_late(tried, tmp_path, monkeypatch):
    now = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr("paceline.lab.papers.full.study.time", clock)
    made = study(["gossip-large"], tmp_path, 8.0)  # each look at the clock takes a second
    made.run(1, lambda text: None)
    assert len(tried.tried) == 4  # at 1, 2, 3 and 4 s; a run takes 4 s: at 5 s it is too late


def test_a_claim_without_all_its_runs_is_not_finished_but_shows_what_is_known(tried, tmp_path):
    names = ["gossip-small", "gossip-large"]
    made = study(names, tmp_path)
    second = Extent().seeds[1]
    tried.fails = lambda config: config["seed"] == second
    made.run(1, lambda text: None)
    small, large = made.findings()
    assert {small.verdict, large.verdict} == {UNFINISHED} and small.missing and large.missing
    assert all(figure.verdict is None for figure in large.figures)
    assert any(figure.what.endswith("2 of 3 seeds") for figure in large.figures)


def test_runs_that_fail_are_told_and_made_again_next_time(tried, tmp_path):
    tried.fails = lambda config: config["arguments"]["lr"] > 4 * middle_of(config) / 1.01
    made = study(["gossip-large"], tmp_path)
    made.run(1, lambda text: None)
    assert made.failures and set(made.failures.values()) == {"it broke"}
    (finding,) = made.findings()
    assert finding.verdict != UNFINISHED  # a rate at which a run breaks is not the best
    count = len(tried.tried)
    study(["gossip-large"], tmp_path).run(1, lambda text: None)
    assert len(tried.tried) == count + len(made.failures)


# Verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gossip-small", ("gossip", "easgd")),
        ("gossip-large", ("allreduce",)),
        ("sasgd-convergence", ("sasgd",)),
        ("cyclic-faster", ("cyclic",)),
    ],
)
def test_a_claim_holds_where_its_methods_lead_and_not_where_they_lag(
    name, ours, tried, tmp_path, monkeypatch
):
    monkeypatch.setattr(f"{__name__}.OURS", ours)
    growing(name, tried)
    finding = finish([name], tmp_path / "good")[name]
    if name == "cyclic-faster":  # the dynamic and the fixed form are of one class: equally fast
        assert finding.verdict == FAILS and "fixed" in finding.reasons[0]
        assert any(f.verdict == HOLDS and "ssp" in f.what for f in finding.figures)
    else:
        assert (finding.verdict, finding.decides) == (HOLDS, "yes")
    tried.lead = -0.1
    assert finish([name], tmp_path / "bad")[name].verdict == FAILS


def growing(name, tried):
    """A lead that is large enough; for sasgd, the line from no lead at one learner rises, too."""
    tried.lead = 0.2 if name == "sasgd-convergence" else 0.1


def test_equal_accuracies_are_the_same(tried, tmp_path):
    tried.lead = 0.0
    findings = finish(["cyclic-same-accuracy", "gossip-large"], tmp_path)
    assert findings["cyclic-same-accuracy"].verdict == HOLDS
    assert findings["gossip-large"].verdict == FAILS


def test_runs_of_few_steps_decide_nothing(tried, tmp_path):
    tried.steps = LEAST_STEPS - 1
    finding = finish(["gossip-large"], tmp_path)["gossip-large"]
    assert finding.verdict == SMALL and "a larger --scale" in finding.decides


# The command -------------------------------------------------------------------------------------


def test_the_command_tells_how_to_go_on_and_draws_the_curves(tried, paceline, tmp_path):
    line = ("papers", "gossip-large", "--full", "--scale", "0.5", "--processes", "1")
    stopped = paceline(*line, "--minutes", "1e-06", "--out", "f")
    go_on = "paceline papers gossip-large --full --scale 0.5 --minutes 1e-06 --processes 1 --out f"
    assert f"To go on, type: {go_on}\n" in stopped.out and UNFINISHED in stopped.out
    assert not tried.tried
    report = json.loads(paceline(*line, "--out", "f", "--json").out.splitlines()[-1])
    assert report == json.loads((tmp_path / "f" / "claims.json").read_text())
    assert report["left"] == 0 and report["go_on"] is None and report["epochs"] == 30
    (claim,) = report["claims"]
    assert claim["verdict"] == FAILS and claim["minutes"] > 0  # made up: gossip leads
    drawn = ET.parse(tmp_path / "f" / "gossip-large.svg").getroot()
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"mean model, 128 nodes", "single worker, 128 nodes", "allreduce"} <= set(texts)


def test_the_command_ends_with_1_if_runs_failed(tried, paceline):
    tried.fails = is_lockstep
    ended = paceline("papers", "gossip-large", "--full", "--processes", "1", code=1)
    assert (
        "failed: allreduce, 128 workers, momentum 0.9, lr 0.005, seed 1001: it broke" in ended.out
    )


def test_the_command_lists_the_full_set_ups(paceline):
    printed = paceline("papers", "--full", "--list").out
    assert all(f"\n{name}\n" in printed for name in FULL_CLAIMS) and "128 nodes" in printed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--minutes", "3"], "--minutes must not be given without --full"),
        (["--device", "cuda"], "--device must not be given without --full"),
        (["--full", "--sweep"], "--sweep must not be given with --full"),
        (["--full", "--rates", "r.json"], "--rates must not be given with --full"),
        (["--full", "--scale", "0"], "scale (0.0) must be above 0"),
        (["--full", "--processes", "0"], "processes (0) must be at least 1"),
        (["--full", "--data", "."], "data (.) must hold CIFAR-10"),
        (["layered-equal", "--full"], "claim (layered-equal) must be one of"),
    ],
)
def test_bad_input_is_refused(line, message, paceline):
    assert message in paceline("papers", *line, code=2).err


# Real runs ---------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch):
    """Few images."""
    few = load_images()
    few = few._replace(
        x_train=few.x_train[:240], y_train=few.y_train[:240], x_test=few.x_test[:50],
        y_test=few.y_test[:50],
    )  # fmt: skip
    monkeypatch.setattr("paceline.lab.papers.training.load", lambda task, folder: few)
    monkeypatch.setattr("paceline.lab.papers.training.MOST_WORKERS", 8)


@pytest.mark.usefixtures("brief")
def test_a_run_is_the_same_together_and_one_by_one():
    way = Way("gossip", 8)
    one, together = (
        Extent(scale=0.05, batched=batched).trial(way, 0.02, 0).run().result
        for batched in ("off", "on")
    )
    assert one.trace_hash == together.trace_hash and together.batched["share"] > 0.5
    assert one.steps == 3 * 2 * 8
    last = one.metrics[-1]
    assert last["progress"] > 0.9 and {"accuracy", "replica_accuracy"} <= last.keys()
    assert all(0 < record["distance"] < 1 for record in one.metrics[:-1])


@pytest.mark.usefixtures("brief")
def test_in_lockstep_a_worker_is_at_no_distance_from_the_answer():
    run = Extent(scale=0.05).trial(Way("allreduce", 8), 0.02, 0).run().result
    assert {record["distance"] for record in run.metrics[:-1]} == {0.0}
