"""The sweep: a grid that widens at its edges, three seeds, and a file of what it found."""

import json
import math
from itertools import pairwise

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.lab.papers.rates import OWN_COUNTS, RATES, Rates, names_for
from paceline.lab.papers.sweeping import make_rates
from paceline.lab.sweep import GRID, SEEDS, Arm, accuracy_of
from paceline.lab.trials import Outcome


def swept(accuracy, grid=GRID):
    """An arm, tried until it wants no more; and all that it has wanted."""
    arm, asked = Arm("it", lambda rate, seed: None, grid), []
    while wanted := arm.wanted():
        asked += wanted
        for rate, seed in wanted:
            arm.take(rate, accuracy(rate, seed))
    return arm, asked


def peak(at, width=2.0):
    """The accuracy of a rate, by how many octaves it lies from the best."""
    return lambda rate, seed: max(0.1, 0.8 - abs(math.log2(rate / at)) / width * 0.05)


def test_the_grid_goes_from_0_005_up_to_0_8_by_factors_of_2():
    assert GRID[0] == 0.005 and GRID[-1] <= 0.8 < 2 * GRID[-1]
    assert all(b == 2 * a for a, b in pairwise(GRID))


def test_the_best_inside_the_grid_is_found_and_nothing_beyond_it_is_tried():
    arm, asked = swept(peak(0.08))
    assert arm.best == pytest.approx(0.08)
    assert {rate for rate, _ in asked} == set(GRID)


@pytest.mark.parametrize("octaves", [-3, -1, 1, 3])
def test_where_the_best_lies_beyond_an_edge_the_grid_is_widened(octaves):
    best = (GRID[0] if octaves < 0 else GRID[-1]) * 2.0**octaves
    arm, asked = swept(peak(best))
    assert arm.best == pytest.approx(best)
    beyond = best / 2 if octaves < 0 else best * 2
    assert any(rate == pytest.approx(beyond) for rate, _ in asked)  # and so the best is inside


def test_a_short_grid_widens_as_well():
    arm, _ = swept(peak(0.04), (0.005, 0.01, 0.02))
    assert arm.best == pytest.approx(0.04)


def test_every_rate_in_question_is_tried_with_three_seeds():
    arm, asked = swept(peak(0.08))
    assert len(asked) == len(set(asked))
    for rate, values in arm.found.items():
        far = peak(0.08)(rate, 0) < 0.7
        assert len(values) == (1 if far else len(SEEDS))
    assert len(arm.found[arm.best]) == len(SEEDS)


def test_the_mean_over_seeds_decides_not_the_luckiest():
    def accuracy(rate, seed):
        if rate == 0.02:
            return 0.80
        return 0.85 if rate == 0.04 and seed == SEEDS[0] else 0.76

    assert swept(accuracy, (0.01, 0.02, 0.04, 0.08))[0].best == 0.02


def test_of_equals_the_smaller_rate_wins():
    assert swept(lambda rate, seed: 0.8 if rate in (0.02, 0.04) else 0.7)[0].best == 0.02


def test_a_run_that_fails_ends_the_sweep():
    with pytest.raises(PacelineError, match="rank 3 is gone"):
        accuracy_of(Outcome(error="rank 3 is gone", exit_code=3))


# The file ----------------------------------------------------------------------------------------


@pytest.fixture
def quick_sweep(monkeypatch):
    """Instead of runs: all methods like 0.04 at 8 workers, and less as they grow."""

    def outcomes(trials, *, folder, processes, on_done):
        told = []
        for trial in trials:
            best = 0.04 * 8 / trial.workers
            accuracy = peak(best)(trial.arguments["lr"], trial.seed)
            told.append(Outcome(result=type("Result", (), {"accuracy": accuracy})()))
        return told

    monkeypatch.setattr("paceline.lab.sweep.run_trials", outcomes)


def test_the_file_has_a_rate_for_8_workers_and_a_second_column(quick_sweep, tmp_path):
    path = tmp_path / "rates.json"
    make_rates(["bundled"], path=path, folder=tmp_path, data=None, say=lambda text: None)
    rates = Rates.read(path)
    assert rates.held("bundled", "gossip") == pytest.approx(0.04)
    assert rates.own("bundled", "gossip", 32) == pytest.approx(0.01)
    assert rates.own("bundled", "gossip", 8) == rates.held("bundled", "gossip")
    assert rates.own("bundled", "sasgd", 1) == rates.own("bundled", "eamsgd", 1)  # plain SGD
    before = path.read_bytes()
    make_rates(["cifar10"], path=path, folder=tmp_path, data=tmp_path, say=lambda text: None)
    assert Rates.read(path).held("bundled", "gossip") == pytest.approx(0.04)
    assert Rates.read(path).own("cifar10", "sasgd-momentum", 16) == pytest.approx(0.02)
    assert "sasgd-momentum" not in Rates.read(path).record["held"]["bundled"]
    assert path.read_bytes() != before and Rates.read(path).sha256 != rates.sha256


def test_the_command_makes_the_file_and_says_its_hash(quick_sweep, paceline, tmp_path):
    told = json.loads(paceline("papers", "--sweep", "--rates", "r.json", "--json").out)
    assert told["rates"] == "r.json"
    assert told["rates_sha256"] == Rates.read(tmp_path / "r.json").sha256


def test_the_recorded_file_has_every_rate_that_claims_ask_for():
    rates = Rates.read(RATES)
    assert rates.record["sweep"]["seeds"] == list(SEEDS)
    for name in names_for("bundled"):
        if name != "sgd":
            assert rates.held("bundled", name) > 0
        for workers in OWN_COUNTS.get(name, ()):
            assert rates.own("bundled", name, workers) > 0


def test_the_recorded_rates_are_the_best_of_what_was_tried_and_not_at_an_edge():
    record = json.loads(RATES.read_text())
    for name, best in record["held"]["bundled"].items():
        table = record["accuracy"]["bundled"][name]
        arm = Arm(name, lambda rate, seed: None)
        arm.found = {float(rate): values for rate, values in table.items()}
        assert arm.best == best
        assert min(arm.found) < best < max(arm.found)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"held": {}}'])
def test_what_is_no_file_of_rates_is_refused(content, tmp_path):
    (tmp_path / "rates.json").write_text(content)
    with pytest.raises(UsageError, match="must be a file made by papers --sweep"):
        Rates.read(tmp_path / "rates.json")


def test_a_rate_that_is_not_there_is_refused_by_name():
    with pytest.raises(UsageError, match="none for held, cifar10, gossip"):
        Rates({"held": {"bundled": {"gossip": 0.1}}, "own": {}}, "").held("cifar10", "gossip")
