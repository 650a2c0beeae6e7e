"""Compare the two forms of cyclic, with and without a token that is taken at once.

    python benchmarks/cyclic_forms.py [equal] [mixed] [slow4] [slow10] [--seed 1]

``equal``: 16 workers; the others: 4, of speeds 1, 1, 1/2 and 1/4, or with one that is 4 or 10 times
slower. All runs are in virtual time on 10 Gbit/s Ethernet, with the built-in network and its
recipe. *At once* is an experiment: a worker checks for the token 16 times while it computes its
gradient, and takes its turn if it has a batch to push. In virtual time that is a loop; a process
inside ``backward()`` would need a thread that pushes for it, and a second model to read into.
The table is in docs/defense-of-design.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

import paceline as pl
from paceline.lab.tasks.fashion import train
from paceline.sim.cluster import Cluster, load_cluster
from paceline.training.stepper import Stepper

CHECKS = 16
FORMS = ("cyclic", "cyclic(form=gradient)", "cyclic(form=gradient, max_accumulated=4)")


def clusters() -> dict[str, tuple[int, Cluster]]:
    """The number of workers and the cluster, by name."""
    plain = load_cluster("ethernet-10g")
    slower: dict[str, dict[str, Any]] = {
        "mixed": {"factors": (1.0, 1.0, 2.0, 4.0)},
        "slow4": {"slow": {3: 4.0}},
        "slow10": {"slow": {3: 10.0}},
    }
    computes = {name: replace(plain.compute, **options) for name, options in slower.items()}
    uneven = {name: (4, replace(plain, compute=compute)) for name, compute in computes.items()}
    return {"equal": (16, plain), **uneven}


def begin_with_token_checks(stepper: Any, samples: int) -> float:
    """Replaces ``Stepper._begin``: charges the time of the gradient in small parts."""
    stepper._clock.begin_step(stepper.steps)
    strategy, seconds = stepper.strategy, stepper._costs.gradient_s(samples or stepper._full_batch)
    for _ in range(CHECKS):
        stepper._clock.charge(seconds / CHECKS)
        if strategy.pending:
            strategy.seat.look()
        if strategy.pending and strategy.seat.has_token:
            strategy._take_turn(stepper.replica.flat.x, last=False)
    charged_s: float = stepper._clock.charged_s
    return charged_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clusters", nargs="*", default=list(clusters()))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = Stepper._begin
    print("| workers | form | token | accuracy | batches a push | samples/s |")
    print("|---|---|---|---|---|---|")
    for name in options.clusters:
        workers, cluster = clusters()[name]
        for form in FORMS:
            for token, begin in (("", plain), ("at once", begin_with_token_checks)):
                Stepper._begin = begin
                run = pl.simulate(
                    train, workers=workers, strategy=form, cluster=cluster, seed=options.seed
                )
                pushes = sum(count for _, count in run.staleness_counts)
                print(
                    f"| {name} | `{form}` | {token} | {run.accuracy:.3f}"
                    f" | {run.steps / pushes:.1f}"
                    f" | {run.samples / (run.virtual_seconds or 1):,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
