"""Many simulated runs: on several processes, each made once, and found again in a folder."""

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
def batch(tmp_path_factory):
    """Three trials and one of them again, made by two processes."""
    folder = tmp_path_factory.mktemp("trials")
    trials = [trial(), trial(seed=1), trial("sasgd(interval=2)"), trial()]
    heard = []
    outcomes = run_trials(
        trials, folder=folder, processes=2, on_done=lambda place, outcome: heard.append(place)
    )
    return folder, trials, outcomes, heard


def test_the_outcomes_are_those_of_simulate_in_the_order_of_the_trials(batch):
    _, trials, outcomes, heard = batch
    hashes = [outcome.result.trace_hash for outcome in outcomes]
    assert hashes == [one.run().result.trace_hash for one in trials]
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    assert sorted(heard) == [0, 1, 2, 3]


def test_equal_trials_are_run_once_and_kept(batch):
    folder, _, outcomes, _ = batch
    assert len(list(folder.iterdir())) == 3
    assert outcomes[0].result.metrics == outcomes[3].result.metrics


def test_what_is_in_the_folder_is_not_made_again(batch, monkeypatch):
    folder, trials, outcomes, _ = batch
    monkeypatch.setattr("paceline.lab.trials._make", None)
    assert run_trials(trials, folder=folder) == outcomes


def test_an_error_is_an_outcome():
    (outcome,) = run_trials([trial(faults=(kill(rank=1).at(step=1),))])
    assert outcome.result is None and outcome.exit_code == 3
    assert "rank 1" in outcome.error


def test_a_trial_survives_being_written_down():
    told = trial("easgd(alpha=0.3)", faults=(kill(rank=1).at(seconds=2.0),))
    assert Trial.of(told.config()) == told


def test_arguments_that_cannot_be_written_down_are_refused():
    with pytest.raises(UsageError, match="arguments"):
        run_trials([Trial(**{**vars(trial()), "arguments": {"model": object()}})])
