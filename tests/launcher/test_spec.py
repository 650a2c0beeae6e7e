"""The options of a run: each is declared once, and every way to start a run takes it."""

from __future__ import annotations

import inspect

import pytest

import paceline as pl


@pytest.mark.parametrize("start", [pl.launch, pl.simulate, pl.init], ids=lambda s: s.__name__)
def test_what_starts_a_run_documents_each_of_its_arguments(start):
    names = list(inspect.signature(start).parameters)
    assert "strategy" in names and "seed" in names
    documented = [line.strip() for line in inspect.getdoc(start).splitlines()]
    for name in names:
        assert any(line.startswith(f"{name}: ") for line in documented), name


@pytest.mark.parametrize(
    ("start", "wrong", "near"),
    [
        (pl.launch, {"train": print, "worker": 2}, 'pl.launch "worker"; did you mean "workers"?'),
        (pl.simulate, {"train": print, "clustr": 2}, 'simulate "clustr"; did you mean "cluster"?'),
        (pl.init, {"strateg": "gossip"}, 'pl.init "strateg"; did you mean "strategy"?'),
    ],
    ids=["launch", "simulate", "init"],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_nearest(start, wrong, near):
    with pytest.raises(pl.UsageError) as caught:
        start(**wrong)
    assert near in str(caught.value)
