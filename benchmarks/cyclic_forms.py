"""What the two forms of cyclic come to, with and without a token that is served at once.

    python benchmarks/cyclic_forms.py [equal] [mixed] [slow4] [slow10] [--seed 1]

``equal``: 16 workers; the others: 4, of speeds 1, 1, 1/2 and 1/4, or with one that is 4 or 10 times
slower. All of it is in virtual time on 10 Gbit/s Ethernet, on the built-in network with its recipe.
*At once* is an experiment: a worker looks for the token 16 times while its gradient is computed,
and takes its turn if it has a batch to bring. In virtual time that is a loop; a process that is
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

LOOKS = 16
FORMS = ("cyclic", "cyclic(form=gradient)", "cyclic(form=gradient, max_accumulated=4)")


def places() -> dict[str, tuple[int, Cluster]]:
    """How many workers, and where."""
    plain = load_cluster("ethernet-10g")
    slower: dict[str, dict[str, Any]] = {
        "mixed": {"factors": (1.0, 1.0, 2.0, 4.0)},
        "slow4": {"slow": {3: 4.0}},
        "slow10": {"slow": {3: 10.0}},
    }
    computes = {name: replace(plain.compute, **how) for name, how in slower.items()}
    made = {name: (4, replace(plain, compute=compute)) for name, compute in computes.items()}
    return {"equal": (16, plain), **made}


def looks_for_the_token(stepper: Any, samples: int) -> float:
    """Instead of ``Stepper._begin``: let the time of the gradient pass in small parts."""
    stepper._transport.step_begins(stepper.steps)
    strategy, seconds = stepper.strategy, stepper._costs.gradient_s(samples or stepper._full_batch)
    for _ in range(LOOKS):
        stepper._transport.compute(seconds / LOOKS)
        if strategy.pending:
            strategy._look_for_token()
        if strategy.pending and strategy.token is not None:
            strategy._take_turn(stepper.replica.flat.x, last=False)
    charged_s: float = stepper._transport.meter.charged_s
    return charged_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=list(places()))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = Stepper._begin
    print("| workers | form | token | accuracy | batches a push | samples/s |")
    print("|---|---|---|---|---|---|")
    for place in options.places:
        workers, cluster = places()[place]
        for form in FORMS:
            for token, begin in (("", plain), ("at once", looks_for_the_token)):
                Stepper._begin = begin
                how: dict[str, Any] = {"cluster": cluster, "seed": options.seed}
                run = pl.simulate(train, workers=workers, strategy=form, **how)
                pushes = sum(count for _, count in run.staleness_counts)
                print(
                    f"| {place} | `{form}` | {token} | {run.accuracy:.3f}"
                    f" | {run.steps / pushes:.1f}"
                    f" | {run.samples / (run.virtual_seconds or 1):,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
