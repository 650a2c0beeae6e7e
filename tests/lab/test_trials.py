"""Many simulated runs: in several processes, each run once and cached in a folder."""

import pytest

from paceline.common.faults import kill
from paceline.errors import UsageError
from paceline.lab.trials import Trial, run_trials
from paceline.sim.cluster import load_cluster
from paceline.strategies import make_strategy


def trial(strategy="allreduce", seed=0, **more):
    return Trial(
        strategy=make_strategy(strategy),
        workers=2,
        cluster=load_cluster("mixed-lab"),
        seed=seed,
        arguments={"model": "mlp", "steps": 2, "lr": 0.01},
        **more,
    )


@pytest.fixture(scope="module")
def batch(tmp_path_factory, warm_pool):
    """Three trials, one of them twice, run in two processes."""
    folder = tmp_path_factory.mktemp("trials")
    trials = [trial(), trial(seed=1), trial("sasgd(interval=2)"), trial()]
    done = []
    outcomes = run_trials(
        trials, folder=folder, processes=2, on_done=lambda index, outcome: done.append(index)
    )
    return folder, trials, outcomes, done


def test_the_outcomes_are_those_of_simulate_in_the_order_of_the_trials(batch):
    _, trials, outcomes, done = batch
    hashes = [outcome.result.trace_hash for outcome in outcomes]
    assert hashes == [each.run().result.trace_hash for each in trials]
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    assert sorted(done) == [0, 1, 2, 3]


def test_equal_trials_are_run_once_and_cached(batch):
    folder, _, outcomes, _ = batch
    assert len(list(folder.iterdir())) == 3
    assert outcomes[0].result.metrics == outcomes[3].result.metrics


def test_a_trial_whose_outcome_is_in_the_folder_is_not_run_again(batch, monkeypatch):
    folder, trials, outcomes, _ = batch
    monkeypatch.setattr("paceline.lab.trials.run_trial", None)
    assert run_trials(trials, folder=folder) == outcomes


def test_an_error_is_an_outcome():
    (outcome,) = run_trials([trial(faults=(kill(rank=1).at(step=1),))])
    assert outcome.result is None and outcome.exit_code == 3
    assert "rank 1" in outcome.error


def test_a_trial_equals_the_one_made_from_its_config():
    original = trial("easgd(alpha=0.3)", faults=(kill(rank=1).at(seconds=2.0),))
    assert Trial.from_config(original.config()) == original


def test_arguments_that_are_not_json_are_refused():
    with pytest.raises(UsageError, match="arguments"):
        run_trials([Trial(**{**vars(trial()), "arguments": {"model": object()}})])
