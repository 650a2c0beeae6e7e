"""Random faults in virtual time: the laws hold, and the tests that say so can fail."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.lab.faulttest.campaign import campaign, read_corpus, try_one
from paceline.lab.faulttest.schedule import Schedule, draw
from paceline.lab.faulttest.shrink import shrink, simpler
from paceline.lab.faulttest.trial import run
from paceline.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
CORPUS = list(read_corpus(ROOT / "tests" / "corpus" / "faults.txt"))
SEEDS = 200
SITES = [
    "kill",
    "short freeze",
    "long freeze",
    "slow",
    "cut",
    "degrade",
    "arrived late",
    "came too late",
    "rejoined",
    "server kill",
    "server short freeze",
    "server long freeze",
    "succeeded",
    "post refused",
    "push asked again",
    "push refused",
    "token made anew",
    "batch given again",
    "stopped",
    "run again",
    "run slowly",
    "dropped",
    "set_aside",
    "checkpoint looked at",
    "resumed",
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The laws hold -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", CORPUS, ids=lambda schedule: schedule.strategy)
def test_what_once_broke_a_law_does_so_no_more(schedule):
    _, failure = try_one(schedule)
    assert failure is None, failure.text


@pytest.fixture(scope="module")
def report():
    return campaign(list(STRATEGIES), range(SEEDS))


@pytest.mark.timeout(1000)
def test_every_law_holds_whatever_goes_wrong(report):
    assert report.runs == dict.fromkeys(STRATEGIES, SEEDS)
    assert not report.failures, "\n".join(f"{f.text}\n  {f.command}" for f in report.failures)


@pytest.mark.parametrize("site", SITES)
def test_it_was_tried(report, site):
    """Each thing happens in one of a hundred runs; what only some methods know, in theirs."""
    knowing = [method for method, sites in report.sites.items() if sites[site]]
    seen = sum(report.sites[method][site] for method in knowing)
    assert seen >= 0.01 * SEEDS * max(1, len(knowing)), f"{site}: {seen}"


# Schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_schedule_is_a_function_of_its_seed_and_survives_being_printed(method):
    drawn = [draw(method, seed) for seed in range(20)]
    assert drawn == [draw(method, seed) for seed in range(20)]
    assert [Schedule.parse(str(schedule)) for schedule in drawn] == drawn
    assert len(set(map(str, drawn))) == 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gossip", "must be like"),
        ('{"strategy": "gosip"}', 'did you mean "gossip"'),
        ('{"strategy": "gossip", "wokers": 2}', 'did you mean "workers"'),
        ('{"strategy": "gossip", "workers": 0}', "workers (0) must be at least 1"),
        ('{"strategy": "gossip", "faults": ["kill()"]}', "rank is missing"),
    ],
)
def test_a_schedule_that_is_none_is_refused(text, told):
    with pytest.raises(UsageError) as caught:
        Schedule.parse(text)
    assert told in str(caught.value)


# They can fail -----------------------------------------------------------------------------------


def test_a_failing_schedule_is_made_smaller(monkeypatch):
    """A bug that needs a late worker: what is left is that one, few others and few steps."""
    monkeypatch.setattr("paceline.sim.world.World.arrive", lambda world, rank: None)
    failing = Schedule(
        strategy="downpour(push_interval=2)",
        workers=4,
        steps=9,
        optimizer="momentum",
        latency_s=0.003,
        faults=("slow(rank=2, factor=2.0).at(seconds=0.3)", "join(rank=1).at(seconds=0.31)"),
    )
    broken = run(failing).violation
    assert broken is not None
    smallest = shrink(failing, broken.law)
    assert len(smallest.faults) == 1 and smallest.faults[0].startswith("join(rank=")
    assert smallest.workers == 2 and smallest.steps < 9 and smallest.optimizer == "sgd"
    assert run(smallest).violation.law == broken.law


def test_simpler_schedules_are_whole():
    """Whoever is taken out, the faults of the others still name them."""
    for seed in range(30):
        for smaller in simpler(draw("layered", seed)):
            assert all((fault.rank or 0) < smaller.size for fault in smaller.script)


planted = load("planted_bugs")


@pytest.mark.parametrize("bug", planted.bugs([]), ids=lambda bug: bug.path.stem)
def test_a_planted_bug_still_fits_the_source(bug, tmp_path):
    if shutil.which("patch") is None:
        pytest.fail("these tests need the command patch")
    planted.plant(bug, tmp_path)
    assert set(bug.methods) <= set(STRATEGIES)


@pytest.mark.parametrize("name", ["03", "06", "16"])
def test_a_planted_bug_is_found(name):
    (bug,) = planted.bugs([name])
    assert planted.find(bug, seeds=20).seeds is not None


# The command -------------------------------------------------------------------------------------


def test_the_command_tells_how_many_seeds_it_tried(paceline):
    wrote = paceline("faulttest", "--method", "sasgd", "--seeds", 3)
    assert "3 runs in" in wrote.out and "seeds a second" in wrote.out


def test_the_command_replays_a_schedule(paceline):
    assert "all laws hold" in paceline("faulttest", "--replay", '{"strategy": "gossip"}').out


def test_the_command_fails_with_a_command_that_shows_why(paceline, monkeypatch):
    monkeypatch.setattr("paceline.strategies.cyclic.Cyclic._after", lambda self, src: src)
    wrote = paceline("faulttest", "--replay", '{"strategy": "cyclic", "workers": 3}', code=1)
    assert "ring: after rank 0 comes 0" in wrote.out
    assert 'paceline faulttest --replay \'{"strategy": "cyclic"' in wrote.out
