"""Random faults in virtual time: the laws hold, and the fault tests find planted bugs."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import warm

from paceline.errors import UsageError
from paceline.lab.faulttest.campaign import campaign, read_corpus, try_one
from paceline.lab.faulttest.hosts.schedule import HOSTS
from paceline.lab.faulttest.schedule import Schedule, draw
from paceline.lab.faulttest.shrink import shrink, simpler
from paceline.lab.faulttest.trial import run
from paceline.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
CORPUS = list(read_corpus(ROOT / "tests" / "corpus" / "faults.txt"))
SEEDS = 30
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


# All laws hold -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", CORPUS, ids=lambda schedule: schedule.name)
def test_a_schedule_of_the_corpus_breaks_no_law(schedule):
    _, failure = try_one(schedule)
    assert failure is None, failure.text


@pytest.fixture(scope="module")
def report(warm_pool):
    return campaign(list(STRATEGIES), range(SEEDS))


@pytest.mark.timeout(1000)
def test_every_law_holds_under_random_faults(report):
    assert report.runs == dict.fromkeys(STRATEGIES, SEEDS)
    assert not report.failures, "\n".join(f"{f.text}\n  {f.command}" for f in report.failures)


@pytest.mark.parametrize("site", SITES)
def test_a_campaign_covers(report, site):
    """Each event happens in 1 % of the runs of the methods that can have it."""
    methods = [method for method, sites in report.sites.items() if sites[site]]
    count = sum(report.sites[method][site] for method in methods)
    assert count >= 0.01 * SEEDS * max(1, len(methods)), f"{site}: {count}"


# Schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_schedule_is_a_function_of_its_seed_and_parses_from_its_text(method):
    drawn = [draw(method, seed) for seed in range(20)]
    assert drawn == [draw(method, seed) for seed in range(20)]
    assert [Schedule.parse(str(schedule)) for schedule in drawn] == drawn
    assert len(set(map(str, drawn))) == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gossip", "must be like"),
        ('{"strategy": "gosip"}', 'did you mean "gossip"'),
        ('{"strategy": "gossip", "wokers": 2}', 'did you mean "workers"'),
        ('{"strategy": "gossip", "workers": 0}', "workers (0) must be at least 1"),
        ('{"strategy": "gossip", "faults": ["kill()"]}', "rank is missing"),
    ],
)
def test_an_invalid_schedule_is_refused(text, message):
    with pytest.raises(UsageError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)


# Bugs are found ----------------------------------------------------------------------------------


def test_a_failing_schedule_is_shrunk(monkeypatch):
    """A bug that needs a late joiner: the late joiner, one other worker and few steps remain."""
    monkeypatch.setattr("paceline.sim.world.World.arrive", lambda world, rank: None)
    failing = Schedule(
        strategy="downpour(push_interval=2)",
        workers=4,
        steps=9,
        optimizer="momentum",
        latency_s=0.003,
        faults=("slow(rank=2, factor=2.0).at(seconds=0.3)", "join(rank=1).at(seconds=0.31)"),
    )
    violation = run(failing).violation
    assert violation is not None
    smallest = shrink(failing, violation.law)
    assert len(smallest.faults) == 1 and smallest.faults[0].startswith("join(rank=")
    assert smallest.workers == 2 and smallest.steps < 9 and smallest.optimizer == "sgd"
    assert run(smallest).violation.law == violation.law


def test_simpler_schedules_are_valid():
    """Whichever worker is removed, the faults name ranks that exist."""
    for seed in range(30):
        for smaller in simpler(draw("layered", seed)):
            assert all((fault.rank or 0) < smaller.size for fault in smaller.script)


planted = load("planted_bugs")


@pytest.mark.parametrize("bug", planted.bugs([]), ids=lambda bug: bug.path.stem)
def test_a_planted_bug_still_fits_the_source(bug, tmp_path):
    if shutil.which("patch") is None:
        pytest.fail("these tests need the command patch")
    planted.plant(bug, tmp_path)
    assert set(bug.methods) <= {*STRATEGIES, HOSTS}


@pytest.mark.parametrize("name", ["03", "06", "16", "22", "23", "40"])
def test_a_planted_bug_is_found(name, monkeypatch):
    monkeypatch.setattr(planted, "sys", SimpleNamespace(executable=warm.python()))
    (bug,) = planted.bugs([name])
    assert planted.find(bug, seeds=20).seeds is not None


# The command -------------------------------------------------------------------------------------


def test_the_command_prints_how_many_seeds_it_ran(paceline):
    printed = paceline("faulttest", "--method", "sasgd", "--seeds", 3)
    assert "3 runs in" in printed.out and "seeds per second" in printed.out


def test_the_command_replays_a_schedule(paceline):
    assert "all laws hold" in paceline("faulttest", "--replay", '{"strategy": "gossip"}').out


def test_a_violation_exits_1_and_prints_the_command_that_repeats_it(paceline, monkeypatch):
    monkeypatch.setattr("paceline.strategies.toolbox.token.next_in", lambda ring, worker: worker)
    printed = paceline("faulttest", "--replay", '{"strategy": "cyclic", "workers": 3}', code=1)
    assert "ring: after rank 0 comes 0" in printed.out
    assert 'paceline faulttest --replay \'{"strategy": "cyclic"' in printed.out
