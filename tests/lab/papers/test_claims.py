"""The claims: all of them are there, say what they do, and can come out each of four ways."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.common.seeds import MAX_SEED
from paceline.errors import UsageError
from paceline.lab.papers import CLAIMS, find_claim
from paceline.lab.papers.claim import LEAST_STEPS, Finding, Runs, Scope
from paceline.lab.papers.experiment import put_to_test
from paceline.lab.papers.rates import METHODS, OWN_COUNTS, RATES, Rates
from paceline.lab.papers.verdict import FAILS, HOLDS, LEAST_SEEDS, OPEN, SMALL
from paceline.lab.sweep import SEEDS
from paceline.lab.trials import Outcome
from paceline.record.result import Result

IDS = [
    "sasgd-convergence",
    "sasgd-communication",
    "sasgd-rate",
    "downpour-lr",
    "cyclic-same-accuracy",
    "cyclic-faster",
    "layered-equal",
    "layered-scaling",
    "gossip-small",
    "gossip-large",
    "gossip-faults",
    "ps-contention",
]
TASKS = ("bundled", "fashion-mnist", "cifar10", "banking77")
RECORD = {
    "held": {task: dict.fromkeys(METHODS, 0.1) for task in TASKS},
    "own": {
        task: {name: dict.fromkeys(map(str, counts), 0.2) for name, counts in OWN_COUNTS.items()}
        for task in TASKS
    },
}
SCOPE = Scope(rates=Rates(RECORD, "abc"))
WHOLE = Scope(rates=Rates(RECORD, "abc"), full=True, data=Path("data"))


def result(**known):
    """A result of which only some numbers are looked at."""
    nothing = dict.fromkeys(Result.__dataclass_fields__)
    return Result(**{**nothing, "metrics": [], "first_step_s": 0.0, **known})


# What they say of themselves ---------------------------------------------------------------------


def test_all_claims_are_there():
    assert list(CLAIMS) == IDS


@pytest.mark.parametrize("name", IDS)
def test_a_claim_says_what_it_is_how_it_is_tried_and_judged(name):
    words = find_claim(name).words()
    assert words["id"] == name
    assert words["source"] in ("abstract", "reported", "derived")
    assert all(len(words[key]) > 20 for key in ("paper", "claim", "setup", "rule"))
    assert "seeds" in words["setup"]
    assert any(word in words["rule"] for word in ("above", "below", "within"))


def test_a_claim_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match='did you mean "gossip-small"'):
        find_claim("gossip-smal")


@pytest.mark.parametrize("scope", [SCOPE, WHOLE], ids=["quick", "full"])
@pytest.mark.parametrize("name", IDS)
def test_every_run_has_at_least_three_seeds_and_none_of_the_sweeps(name, scope):
    seeds = {}
    for key, trial in find_claim(name).trials(scope).items():
        assert trial.seed == key[-1] and trial.seed not in SEEDS
        seeds.setdefault(key[:-1], set()).add(trial.seed)
        trial.config()  # can be told to another process
    assert min(map(len, seeds.values())) >= LEAST_SEEDS * (2 if scope.full else 1)


def test_another_seed_means_other_seeds_everywhere():
    assert not set(SCOPE.seeds(5)) & set(Scope(rates=SCOPE.rates, seed=1).seeds(5))
    assert not set(Scope(rates=SCOPE.rates, seed=10).seeds(5)) & set(SEEDS)
    assert max(Scope(rates=SCOPE.rates, seed=MAX_SEED, full=True).seeds(5)) <= MAX_SEED


def test_rates_are_given_to_every_run_so_that_the_recipes_factor_does_not_act():
    for name in ("sasgd-convergence", "gossip-large", "cyclic-faster"):
        for key, trial in find_claim(name).trials(SCOPE).items():
            column = 0.2 if "own" in key else 0.1
            shares = {column, column / 4, column / 8}  # a smaller step size, ssp that sums pushes
            assert trial.arguments["lr"] in shares, key


def test_claims_share_runs():
    same, faster = (find_claim(n).trials(SCOPE) for n in ("cyclic-same-accuracy", "cyclic-faster"))
    configs = [
        {json.dumps(t.config(), sort_keys=True) for t in plan.values()} for plan in (same, faster)
    ]
    assert configs[0] < configs[1]


def test_the_full_form_is_on_the_whole_data_sets():
    plan = find_claim("sasgd-convergence").trials(WHOLE)
    assert {trial.arguments["task"] for trial in plan.values()} == set(TASKS[1:])
    assert {trial.arguments["data"] for trial in plan.values()} == {"data"}


# How they judge ----------------------------------------------------------------------------------


def curve(level, seconds=1.0, alone=None):
    """A run whose accuracy rises to ``level`` in so many seconds."""
    records = [
        {
            "t": seconds * share,
            "rank": 0,
            "progress": share,
            "accuracy": level * share**0.25,
            "replica_accuracy": (level if alone is None else alone) * share**0.25,
        }
        for share in np.linspace(0.125, 1, 8).tolist()
    ]
    return result(metrics=records, accuracy=level, virtual_seconds=seconds)


def convergence(key, good):
    _, _, name, workers, _ = key
    lead = 0.02 * np.log2(workers) if name.startswith("sasgd") else 0.0
    return curve(0.8 + (lead if good else -lead))


def communication(key, good):
    place, name, interval, workers, _ = key
    cost = 1.0 / interval * (workers if name == "downpour" else 0.5 if good else 50 * workers)
    return result(virtual_seconds=1.0 + (0.0 if place.endswith("no cost") else cost))


def rate(key, good):
    _, interval, _ = key
    slow = interval if good else 16 / interval
    records = [
        {"square": 8.0 * np.exp(-step / 4 / slow).item(), "steps": step}
        for step in range(interval, 257, interval)
    ]
    return result(metrics=records)


def stable_rate(key, good):
    _, workers, lr, _ = key
    return result(loss=0.5 if lr <= (2.56 / workers if good else 0.16) else None)


def same_accuracy(key, good):
    return curve(0.8 if good or not key[2].startswith("cyclic") else 0.7)


def faster(key, good):
    dynamic = key[2] in ("cyclic", "cyclic-sum")
    return curve(0.8, 1.0 if dynamic == good else 2.0)


def equal(key, good):
    shift = 0.0 if good or key[0] == "allreduce" else 1e-3
    return result(metrics=[{"view_0": 1.0 + shift, "norm": 1.0, "rank": 0}] * 3)


def scaling(key, good):
    _, name, workers, _ = key
    lag = 0.1 * workers if workers > 1 and (name == "allreduce") == good else 0.0
    return result(metrics=[{"rank": 0, "t": step * (2.0 + lag)} for step in range(4)])


def few(key, good):
    return (
        curve(0.8, 2.0) if key[2] == "allreduce" else curve(*((0.85, 1.0) if good else (0.75, 3.0)))
    )


def many(key, good):
    return curve(0.8 if (key[2] == "allreduce") == good else 0.7)


def faults(key, good):
    name, fault, _ = key
    if (name, fault) == ("allreduce", "killed"):
        return Outcome(error="rank 3 is lost", exit_code=3)
    slowed = fault == "slow" and (name == "allreduce") == good
    told = curve(0.8, 4.0 if slowed else 1.0)
    return result(**{**vars(told), "lost_workers": int(fault == "killed")})


def contention(key, good):
    name, workers, _ = key
    limit = 8 if name == "one server" and good else 1000
    return result(steps=100, virtual_seconds=100 / min(workers, limit))


STORIES = dict(
    zip(
        IDS,
        [
            convergence,
            communication,
            rate,
            stable_rate,
            same_accuracy,
            faster,
            equal,
            scaling,
            few,
            many,
            faults,
            contention,
        ],
        strict=True,
    )
)


def found(name, good, scope=SCOPE, steps=LEAST_STEPS):
    """What a claim makes of made-up runs; ``good`` says of a seed whether they speak for it."""
    claim = find_claim(name)
    outcomes = {}
    for key, trial in claim.trials(scope).items():
        told = STORIES[name](key, good(key[-1]))
        if not isinstance(told, Outcome):
            known = {"workers": trial.workers, "steps": told.steps or steps * trial.workers}
            told = Outcome(result=replace(told, **known))
        outcomes[key] = told
    return Finding(claim, list(claim.judge(scope, Runs(outcomes))), "abc")


@pytest.mark.parametrize("name", IDS)
def test_a_claim_can_come_out_each_of_three_ways_where_the_set_up_can_decide_it(name):
    scope = WHOLE if name == "sasgd-convergence" else SCOPE  # momentum on both sides
    spoken_for = found(name, lambda seed: True, scope)
    assert (spoken_for.verdict, spoken_for.decides) == (HOLDS, "yes")
    against = found(name, lambda seed: False, scope)
    assert against.verdict == FAILS
    assert against.reasons and all(isinstance(reason, str) for reason in against.reasons)
    assert found(name, lambda seed: seed % 2 == 0, scope).verdict == OPEN


ABOUT_ACCURACY = [
    "sasgd-convergence",
    "cyclic-same-accuracy",
    "cyclic-faster",
    "gossip-small",
    "gossip-large",
]


@pytest.mark.parametrize("good", [True, False], ids=["for it", "against it"])
@pytest.mark.parametrize("name", ABOUT_ACCURACY)
def test_a_claim_about_accuracy_is_not_decided_by_few_steps(name, good):
    finding = found(name, lambda seed: good, WHOLE, steps=LEAST_STEPS - 1)
    assert finding.verdict == SMALL
    told = "99 steps a worker, where 100 are needed (--full has them)"
    assert finding.decides.count(told) == 1  # once for all figures
    assert f"at least {LEAST_STEPS} steps a worker" in finding.claim.words()["needs"].lower()
    assert not finding.reasons  # no figure stands against it: none can


@pytest.mark.parametrize("name", [name for name in IDS if name not in ABOUT_ACCURACY])
def test_a_claim_about_something_else_needs_no_number_of_steps(name):
    assert found(name, lambda seed: True, SCOPE, steps=1).verdict == HOLDS


def test_momentum_on_one_side_alone_decides_nothing():
    """In the quick form, whose file of rates has none for SASGD with momentum."""
    finding = found("sasgd-convergence", lambda seed: False, SCOPE)
    assert finding.verdict == SMALL
    assert "momentum is 0 in sasgd and 0.9 in eamsgd, where both need the same" in finding.decides
    verdicts = {f.verdict for f in finding.figures if f.decides and "eamsgd" in f.what}
    assert verdicts == {SMALL}
    assert finding.reasons  # against the lead over Downpour, which it can decide
    assert not any("eamsgd" in reason for reason in finding.reasons)


def test_the_full_form_gives_sasgd_the_momentum_of_its_rival():
    plan = find_claim("sasgd-convergence").trials(WHOLE)
    momenta = {
        (key[2], trial.workers > 1): trial.arguments.get("momentum", 0.0)
        for key, trial in plan.items()
    }
    assert momenta["sasgd-momentum", True] == 0.9
    assert sum(momenta.values()) == 0.9  # nobody else's SGD has any, nor has one learner's


@pytest.mark.parametrize(("own", "verdict"), [(0.05, HOLDS), (0.2, HOLDS), (0.4, SMALL)])
def test_a_held_rate_far_from_the_one_swept_at_that_number_decides_nothing(own, verdict):
    record = json.loads(json.dumps(RECORD))
    record["own"]["cifar10"]["allreduce"]["100"] = own
    scope = replace(WHOLE, rates=Rates(record, "abc"))
    finding = found("gossip-large", lambda seed: True, scope)
    assert finding.verdict == verdict
    told = "the rate of allreduce is 0.1, held from 8 workers, and 0.4 where it is swept at 100"
    assert (told in finding.decides) == (verdict == SMALL)
    second = {f.verdict for f in finding.figures if f.column == "own"} - {None}
    assert second == {HOLDS}  # rates swept there


@pytest.mark.parametrize("name", IDS)
def test_a_finding_is_told_in_json(name):
    told = json.loads(json.dumps(found(name, lambda seed: seed % 2 == 0).to_json()))
    keys = {"id", "paper", "claim", "source", "setup", "rule", "verdict", "figures", "rates_sha256"}
    keys |= {"needs", "decides"}
    assert keys <= told.keys()
    assert told["rates_sha256"] == "abc"
    deciding = [figure for figure in told["figures"] if figure["verdict"]]
    assert deciding and all(figure["wanted"] for figure in deciding)
    for figure in told["figures"]:
        low, high = figure["interval_90"]
        assert low <= figure["mean"] <= high and len(figure["values"]) >= LEAST_SEEDS


def test_a_killed_worker_that_stops_gossip_speaks_against_it():
    claim = find_claim("gossip-faults")
    outcomes = {key: Outcome(result=curve(0.8)) for key in claim.trials(SCOPE)}
    for key in outcomes:
        if key[1] == "killed":
            outcomes[key] = Outcome(error="rank 3 is lost", exit_code=3)
    assert Finding(claim, list(claim.judge(SCOPE, Runs(outcomes))), "").verdict == FAILS


# For real ----------------------------------------------------------------------------------------


def test_the_bound_holds_and_a_longer_interval_needs_more_samples_here():
    class Small(type(find_claim("sasgd-rate"))):
        workers, steps = 2, 96

    (finding,) = put_to_test([Small()], SCOPE, processes=1)
    assert finding.verdict == HOLDS


# The command -------------------------------------------------------------------------------------


def test_the_command_lists_the_claims(paceline):
    wrote = paceline("papers", "--list").out
    assert all(f"\n{name}\n" in wrote for name in IDS)
    told = json.loads(paceline("papers", "--list", "--json").out.splitlines()[-1])
    assert [claim["id"] for claim in told["claims"]] == IDS


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


def test_the_command_runs_one_claim_and_finds_its_runs_again(paceline, monkeypatch, kept):
    line = ("papers", "layered-equal", "--out", kept, "--seed", "2")
    told = json.loads(paceline(*line, "--json").out.splitlines()[-1])
    (claim,) = told["claims"]
    assert (claim["id"], claim["verdict"]) == ("layered-equal", HOLDS)
    worst = max(max(figure["values"]) for figure in claim["figures"])
    assert 0 < worst < 1e-13  # groups add up in another order: it is not the same run twice
    assert claim["rates_sha256"] == told["rates_sha256"] == Rates.read(RATES).sha256
    monkeypatch.setattr("paceline.lab.trials._make", None)
    again = json.loads(paceline(*line, "--json").out.splitlines()[-1])
    assert again["claims"] == told["claims"]
    shown = paceline(*line).out
    for words in (
        "claim   Layered SGD is",
        "source  abstract",
        "rule    The largest",
        "groups of 4",
    ):
        assert words in shown
    assert shown.count(HOLDS) >= 5  # four figures and the claim


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["nothing"], 'no claim "nothing"'),
        (["--full"], "--full needs --data"),
        (["--rates", "none.json"], "rates (none.json) cannot be read"),
        (["--seed", "-1"], "seed (-1) must be from 0"),
        (["--sweep", "--full"], "--full needs --data"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(line, complaint, paceline):
    assert complaint in paceline("papers", *line, code=2).err


def test_a_data_folder_is_looked_into_for_each_data_set(paceline, tmp_path, monkeypatch):
    nowhere = str(tmp_path / "nowhere")
    monkeypatch.setattr("paceline.lab.tasks.recipe.FOLDERS", (nowhere,))
    line = ("papers", "--full", "--data", ".")
    assert f"Fashion-MNIST was not found in {nowhere}" in paceline(*line, code=2).err
    images = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    images.parent.mkdir()
    images.touch()
    assert "data (.) must hold CIFAR-10" in paceline(*line, code=2).err
