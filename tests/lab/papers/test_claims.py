"""The claims: all exist, describe themselves, and can get each of four verdicts."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from paceline.common.seeds import MAX_SEED
from paceline.errors import UsageError
from paceline.lab.papers import CLAIMS, find_claim
from paceline.lab.papers.claim import LEAST_STEPS, ClaimResult, Runs, Scope
from paceline.lab.papers.experiment import run_claims
from paceline.lab.papers.rates import METHODS, OWN_COUNTS, RATES, LearningRates
from paceline.lab.papers.verdict import FAILS, HOLDS, LEAST_SEEDS, OPEN, SMALL
from paceline.lab.sweep import SEEDS
from paceline.lab.trials import TrialOutcome
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
RECORD = {
    "held": {"bundled": dict.fromkeys(METHODS, 0.1)},
    "own": {
        "bundled": {
            name: dict.fromkeys(map(str, counts), 0.2) for name, counts in OWN_COUNTS.items()
        }
    },
}
SCOPE = Scope(rates=LearningRates(RECORD, "abc"))


def result(**needed):
    """A result with only the fields that a test needs."""
    empty = dict.fromkeys(field.name for field in fields(Result))
    return Result(**{**empty, "metrics": [], "first_step_s": 0.0, **needed})


# Descriptions ------------------------------------------------------------------------------------


def test_all_claims_exist():
    assert list(CLAIMS) == IDS


@pytest.mark.parametrize("name", IDS)
def test_a_claim_describes_itself_its_set_up_and_its_rule(name):
    texts = find_claim(name).description()
    assert texts["id"] == name
    assert texts["source"] in ("abstract", "reported", "derived")
    assert all(len(texts[key]) > 20 for key in ("paper", "claim", "setup", "rule"))
    assert "seeds" in texts["setup"]
    assert any(word in texts["rule"] for word in ("above", "below", "within"))


def test_an_unknown_claim_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match='did you mean "gossip-small"'):
        find_claim("gossip-smal")


@pytest.mark.parametrize("name", IDS)
def test_every_run_has_at_least_three_seeds_and_none_of_the_sweeps(name):
    seeds = {}
    for key, trial in find_claim(name).trials(SCOPE).items():
        assert trial.seed == key[-1] and trial.seed not in SEEDS
        seeds.setdefault(key[:-1], set()).add(trial.seed)
        trial.config()  # can be sent to another process
    assert min(map(len, seeds.values())) >= LEAST_SEEDS


def test_another_seed_gives_other_seeds_to_all_runs():
    assert not set(SCOPE.seeds(5)) & set(Scope(rates=SCOPE.rates, seed=1).seeds(5))
    assert not set(Scope(rates=SCOPE.rates, seed=10).seeds(5)) & set(SEEDS)
    assert max(Scope(rates=SCOPE.rates, seed=MAX_SEED).seeds(5)) <= MAX_SEED


def test_every_run_gets_its_rate_so_that_the_default_of_the_task_does_not_apply():
    for name in ("sasgd-convergence", "gossip-large", "cyclic-faster"):
        for key, trial in find_claim(name).trials(SCOPE).items():
            column = 0.2 if "own" in key else 0.1
            shares = {
                column,
                column / 4,
                column / 8,
            }  # smaller step sizes, and ssp, which sums pushes
            assert trial.arguments["lr"] in shares, key


def test_claims_share_runs():
    same, faster = (find_claim(n).trials(SCOPE) for n in ("cyclic-same-accuracy", "cyclic-faster"))
    configs = [
        {json.dumps(t.config(), sort_keys=True) for t in plan.values()} for plan in (same, faster)
    ]
    assert configs[0] < configs[1]


# Judging -----------------------------------------------------------------------------------------


def curve(level, seconds=1.0):
    """A run whose accuracy rises to ``level`` in this many seconds."""
    records = [
        {
            "t": seconds * share,
            "rank": 0,
            "progress": share,
            "accuracy": level * share**0.25,
            "replica_accuracy": level * share**0.25,
        }
        for share in np.linspace(0.125, 1, 8).tolist()
    ]
    return result(metrics=records, accuracy=level, virtual_seconds=seconds)


def convergence(key, good):
    _, _, name, workers, _ = key
    lead = 0.02 * np.log2(workers) if name.startswith("sasgd") else 0.0
    return curve(0.8 + (lead if good else -lead))


def communication(key, good):
    cluster, name, interval, workers, _ = key
    cost = 1.0 / interval * (workers if name == "downpour" else 0.5 if good else 50 * workers)
    return result(virtual_seconds=1.0 + (0.0 if cluster.endswith("no cost") else cost))


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
        return TrialOutcome(error="rank 3 is lost", exit_code=3)
    slowed = fault == "slow" and (name == "allreduce") == good
    run = curve(0.8, 4.0 if slowed else 1.0)
    return result(**{**vars(run), "lost_workers": int(fault == "killed")})


def contention(key, good):
    name, workers, _ = key
    limit = 8 if name == "one server" and good else 1000
    return result(steps=100, virtual_seconds=100 / min(workers, limit))


MADE_UP_RUNS = dict(
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


def judge(name, good, scope=SCOPE, steps=LEAST_STEPS):
    """Judge a claim by made-up runs; ``good(seed)`` tells whether they support it."""
    claim = find_claim(name)
    outcomes = {}
    for key, trial in claim.trials(scope).items():
        outcome = MADE_UP_RUNS[name](key, good(key[-1]))
        if not isinstance(outcome, TrialOutcome):
            fields = {"workers": trial.workers, "steps": outcome.steps or steps * trial.workers}
            outcome = TrialOutcome(result=replace(outcome, **fields))
        outcomes[key] = outcome
    return ClaimResult(claim, list(claim.judge(scope, Runs(outcomes))))


@pytest.mark.parametrize("name", [name for name in IDS if name != "sasgd-convergence"])
def test_a_claim_can_hold_fail_or_stay_open_where_the_set_up_can_decide_it(name):
    supported = judge(name, lambda seed: True)
    assert (supported.verdict, supported.decides) == (HOLDS, "yes")
    contradicted = judge(name, lambda seed: False)
    assert contradicted.verdict == FAILS
    assert contradicted.reasons and all(isinstance(r, str) for r in contradicted.reasons)
    assert judge(name, lambda seed: seed % 2 == 0).verdict == OPEN


ABOUT_ACCURACY = [
    "sasgd-convergence",
    "cyclic-same-accuracy",
    "cyclic-faster",
    "gossip-small",
    "gossip-large",
]


@pytest.mark.parametrize("good", [True, False], ids=["supported", "contradicted"])
@pytest.mark.parametrize("name", ABOUT_ACCURACY)
def test_a_claim_about_accuracy_is_not_decided_by_few_steps(name, good):
    claim_result = judge(name, lambda seed: good, steps=LEAST_STEPS - 1)
    assert claim_result.verdict == SMALL
    reason = "99 steps a worker, where 100 are needed (--full has them)"
    assert claim_result.decides.count(reason) == 1  # once for all figures
    assert (
        f"at least {LEAST_STEPS} steps a worker"
        in claim_result.claim.description()["needs"].lower()
    )
    assert not claim_result.reasons  # no figure can contradict it


@pytest.mark.parametrize("name", [name for name in IDS if name not in ABOUT_ACCURACY])
def test_a_claim_about_something_else_needs_no_number_of_steps(name):
    assert judge(name, lambda seed: True, SCOPE, steps=1).verdict == HOLDS


def test_momentum_on_one_side_alone_decides_nothing():
    """In the quick form: its file of rates has none for SASGD with momentum."""
    claim_result = judge("sasgd-convergence", lambda seed: False, SCOPE)
    assert claim_result.verdict == SMALL
    assert (
        "momentum is 0 in sasgd and 0.9 in eamsgd, where both need the same" in claim_result.decides
    )
    verdicts = {f.verdict for f in claim_result.figures if f.decides and "eamsgd" in f.what}
    assert verdicts == {SMALL}
    assert claim_result.reasons  # about the lead over Downpour, which it can decide
    assert not any("eamsgd" in reason for reason in claim_result.reasons)


@pytest.mark.parametrize(("own", "verdict"), [(0.05, HOLDS), (0.2, HOLDS), (0.4, SMALL)])
def test_a_held_rate_far_from_the_one_swept_at_that_number_decides_nothing(own, verdict):
    record = json.loads(json.dumps(RECORD))
    record["own"]["bundled"]["allreduce"]["100"] = own
    scope = replace(SCOPE, rates=LearningRates(record, "abc"))
    claim_result = judge("gossip-large", lambda seed: True, scope)
    assert claim_result.verdict == verdict
    reason = "the rate of allreduce is 0.1, held from 8 workers, and 0.4 where it is swept at 100"
    assert (reason in claim_result.decides) == (verdict == SMALL)
    second = {f.verdict for f in claim_result.figures if f.column == "own"} - {None}
    assert second == {HOLDS}  # with rates swept at 100


@pytest.mark.parametrize("name", IDS)
def test_a_claim_result_is_json(name):
    data = json.loads(json.dumps(judge(name, lambda seed: seed % 2 == 0).to_json()))
    keys = {"id", "paper", "claim", "source", "setup", "rule", "verdict", "figures"}
    keys |= {"needs", "decides"}
    assert keys <= data.keys()
    deciding = [figure for figure in data["figures"] if figure["verdict"]]
    assert deciding and all(figure["wanted"] for figure in deciding)
    for figure in data["figures"]:
        low, high = figure["interval_90"]
        assert low <= figure["mean"] <= high and len(figure["values"]) >= LEAST_SEEDS


def test_a_killed_worker_that_stops_gossip_contradicts_the_claim():
    claim = find_claim("gossip-faults")
    outcomes = {key: TrialOutcome(result=curve(0.8)) for key in claim.trials(SCOPE)}
    for key in outcomes:
        if key[1] == "killed":
            outcomes[key] = TrialOutcome(error="rank 3 is lost", exit_code=3)
    assert ClaimResult(claim, list(claim.judge(SCOPE, Runs(outcomes)))).verdict == FAILS


# A real run --------------------------------------------------------------------------------------


def test_the_bound_of_sasgd_holds_in_a_real_run():
    class Small(type(find_claim("sasgd-rate"))):
        workers, steps = 2, 96

    (claim_result,) = run_claims([Small()], SCOPE, processes=1)
    assert claim_result.verdict == HOLDS


# The command -------------------------------------------------------------------------------------


def test_the_command_lists_the_claims(paceline):
    printed = paceline("papers", "--list").out
    assert all(f"\n{name}\n" in printed for name in IDS)
    data = json.loads(paceline("papers", "--list", "--json").out.splitlines()[-1])
    assert [claim["id"] for claim in data["claims"]] == IDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.usefixtures("warm_pool")
def test_the_command_runs_one_claim_and_does_not_repeat_its_runs(paceline, monkeypatch, folder):
    line = ("papers", "layered-equal", "--out", folder, "--seed", "2")
    data = json.loads(paceline(*line, "--json").out.splitlines()[-1])
    (claim,) = data["claims"]
    assert (claim["id"], claim["verdict"]) == ("layered-equal", HOLDS)
    worst = max(max(figure["values"]) for figure in claim["figures"])
    assert 0 < worst < 1e-13  # groups sum in another order: not zero
    assert data["rates_sha256"] == LearningRates.read(RATES).sha256
    monkeypatch.setattr("paceline.lab.trials.run_trial", None)
    again = json.loads(paceline(*line, "--json").out.splitlines()[-1])
    assert again["claims"] == data["claims"]
    shown = paceline(*line).out
    for text in (
        "claim   Layered SGD is",
        "source  abstract",
        "rule    The largest",
        "groups of 4",
    ):
        assert text in shown
    assert shown.count(HOLDS) >= 5  # four figures and the claim


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["nothing"], 'no claim "nothing"'),
        (["--rates", "none.json"], "rates (none.json) cannot be read"),
        (["--seed", "-1"], "seed (-1) must be from 0"),
    ],
)
def test_bad_input_is_refused_with_a_message(line, message, paceline):
    assert message in paceline("papers", *line, code=2).err
