"""The sweep: a grid that widens at its edges, three seeds, and the file of rates."""

import json
import math
from itertools import pairwise

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.lab.papers.rates import METHODS, OWN_COUNTS, RATES, LearningRates
from paceline.lab.papers.sweeping import make_rates
from paceline.lab.papers.tasks import SETTINGS
from paceline.lab.sweep import GRID, SEEDS, Arm, accuracy_of
from paceline.lab.trials import TrialOutcome


def swept(accuracy, grid=GRID):
    """An arm whose sweep is complete, and all (rate, seed) that it tried."""
    arm, tried = Arm("it", lambda rate, seed: None, grid), []
    while runs := arm.next_runs():
        tried += runs
        for rate, seed in runs:
            arm.add(rate, accuracy(rate, seed))
    return arm, tried


def peak(at, width=2.0):
    """An accuracy that falls with the distance of a rate from the best, in octaves."""
    return lambda rate, seed: max(0.1, 0.8 - abs(math.log2(rate / at)) / width * 0.05)


def test_the_grid_goes_from_0_005_up_to_0_8_by_factors_of_2():
    assert GRID[0] == 0.005 and GRID[-1] <= 0.8 < 2 * GRID[-1]
    assert all(b == 2 * a for a, b in pairwise(GRID))


def test_a_best_rate_inside_the_grid_is_found_without_widening_it():
    arm, tried = swept(peak(0.08))
    assert arm.best == pytest.approx(0.08)
    assert {rate for rate, _ in tried} == set(GRID)


@pytest.mark.parametrize("octaves", [-3, -1, 1, 3])
def test_a_best_rate_beyond_an_edge_widens_the_grid(octaves):
    best = (GRID[0] if octaves < 0 else GRID[-1]) * 2.0**octaves
    arm, tried = swept(peak(best))
    assert arm.best == pytest.approx(best)
    beyond = best / 2 if octaves < 0 else best * 2
    assert any(rate == pytest.approx(beyond) for rate, _ in tried)  # so the best lies inside


def test_a_short_grid_widens_as_well():
    arm, _ = swept(peak(0.04), (0.005, 0.01, 0.02))
    assert arm.best == pytest.approx(0.04)


def test_every_rate_near_the_best_is_tried_with_three_seeds():
    arm, tried = swept(peak(0.08))
    assert len(tried) == len(set(tried))
    for rate, values in arm.accuracies.items():
        far = peak(0.08)(rate, 0) < 0.7
        assert len(values) == (1 if far else len(SEEDS))
    assert len(arm.accuracies[arm.best]) == len(SEEDS)


def test_the_mean_over_seeds_decides_not_the_best_seed():
    def accuracy(rate, seed):
        if rate == 0.02:
            return 0.80
        return 0.85 if rate == 0.04 and seed == SEEDS[0] else 0.76

    assert swept(accuracy, (0.01, 0.02, 0.04, 0.08))[0].best == 0.02


def test_of_equals_the_smaller_rate_wins():
    assert swept(lambda rate, seed: 0.8 if rate in (0.02, 0.04) else 0.7)[0].best == 0.02


def test_a_sweep_can_have_one_seed_and_a_bound_on_its_rates():
    arm, tried = Arm("it", lambda rate, seed: None, (1, 4, 16), seeds=(7,), most=5, factor=4), []
    while runs := arm.next_runs():
        tried += runs
        for rate, _ in runs:
            arm.add(rate, -rate)  # smaller is always better
    assert tried == [(rate, 7) for rate in (1, 4, 16, 1 / 4, 1 / 16)]
    assert arm.best == 1 / 16


def test_a_run_that_fails_ends_the_sweep():
    with pytest.raises(PacelineError, match="rank 3 is gone"):
        accuracy_of(TrialOutcome(error="rank 3 is gone", exit_code=3))


# The file ----------------------------------------------------------------------------------------


@pytest.fixture
def quick_sweep(monkeypatch):
    """Replaces the runs: the best rate is 0.04 at 8 workers, and falls with their number."""

    def run_trials(trials, *, folder, processes, on_done):
        outcomes = []
        for trial in trials:
            best = 0.04 * 8 / trial.workers
            accuracy = peak(best)(trial.arguments["lr"], trial.seed)
            outcomes.append(TrialOutcome(result=type("Result", (), {"accuracy": accuracy})()))
        return outcomes

    monkeypatch.setattr("paceline.lab.sweep.run_trials", run_trials)


def test_the_file_has_a_rate_for_8_workers_and_a_second_column(quick_sweep, monkeypatch, tmp_path):
    path = tmp_path / "rates.json"
    monkeypatch.setitem(SETTINGS, "other", SETTINGS["bundled"])
    make_rates(["bundled"], path=path, folder=tmp_path, say=lambda text: None)
    rates = LearningRates.read(path)
    assert rates.held("bundled", "gossip") == pytest.approx(0.04)
    assert rates.own("bundled", "gossip", 32) == pytest.approx(0.01)
    assert rates.own("bundled", "gossip", 8) == rates.held("bundled", "gossip")
    assert rates.own("bundled", "sasgd", 1) == rates.own("bundled", "eamsgd", 1)  # plain SGD
    before = path.read_bytes()
    make_rates(["other"], path=path, folder=tmp_path, say=lambda text: None)
    assert LearningRates.read(path).held("bundled", "gossip") == pytest.approx(0.04)
    assert LearningRates.read(path).own("other", "sasgd", 16) == pytest.approx(0.02)
    assert path.read_bytes() != before and LearningRates.read(path).sha256 != rates.sha256


def test_the_command_writes_the_file_and_prints_its_hash(quick_sweep, paceline, tmp_path):
    printed = json.loads(paceline("papers", "--sweep", "--rates", "r.json", "--json").out)
    assert printed["rates"] == "r.json"
    assert printed["rates_sha256"] == LearningRates.read(tmp_path / "r.json").sha256


def test_the_recorded_file_has_every_rate_that_the_claims_need():
    rates = LearningRates.read(RATES)
    assert rates.record["sweep"]["seeds"] == list(SEEDS)
    for name in METHODS:
        if name != "sgd":
            assert rates.held("bundled", name) > 0
        for workers in OWN_COUNTS.get(name, ()):
            assert rates.own("bundled", name, workers) > 0


def test_the_recorded_rates_are_the_best_tried_and_not_at_an_edge():
    record = json.loads(RATES.read_text())
    for name, best in record["held"]["bundled"].items():
        table = record["accuracy"]["bundled"][name]
        arm = Arm(name, lambda rate, seed: None)
        arm.accuracies = {float(rate): values for rate, values in table.items()}
        assert arm.best == best
        assert min(arm.accuracies) < best < max(arm.accuracies)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"held": {}}'])
def test_a_file_that_is_not_a_file_of_rates_is_refused(content, tmp_path):
    (tmp_path / "rates.json").write_text(content)
    with pytest.raises(UsageError, match="must be a file made by papers --sweep"):
        LearningRates.read(tmp_path / "rates.json")


def test_the_error_for_a_missing_rate_names_it():
    with pytest.raises(UsageError, match="none for held, cifar10, gossip"):
        LearningRates({"held": {"bundled": {"gossip": 0.1}}, "own": {}}, "").held(
            "cifar10", "gossip"
        )
