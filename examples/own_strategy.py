"""Your own method in one file: workers on a ring, each averaging with one neighbor.

It is compared with two built-in methods on eight simulated workers.
"""

from dataclasses import dataclass

import paceline as pl
from paceline.common.options import at_least
from paceline.lab.tasks.fashion import train


@dataclass(kw_only=True)
class Ring(pl.Strategy):
    r"""Ring: local steps, and after every ``interval`` of them an average with the left neighbor.

    .. math:: x_i \leftarrow (x_i + x_{i-1}) / 2

    Every model goes into two averages, its own and its right neighbor's, so the mean of all models
    does not change.

    Faults: a slow worker slows its neighbors, and a dead one ends the run. All workers must make
    the same number of steps, as they do with the shards of a synchronous method.
    """

    interval: int = 4

    uses_gradient = False  # the local optimizer reads the gradients from the parameters
    state = ("steps",)

    def __post_init__(self):
        at_least("interval", self.interval, 1)
        self.steps = 0

    def step(self, x, g):
        self.local_update(g)
        self.steps += 1
        if self.steps % self.interval == 0:
            rank, size = self.comm.rank, self.comm.size
            left = self.comm.exchange(x, dst=(rank + 1) % size, src=(rank - 1) % size)
            x.lerp_(left, 0.5)

    def finish(self, x):
        self.comm.all_reduce(x, factor=lambda workers: 1 / workers)


if __name__ == "__main__":
    task = {"model": "mlp", "epochs": 2, "lr": 0.02}
    print("strategy           accuracy  virtual s  MB sent  distance")
    for strategy in ("allreduce", "sasgd(interval=4)", Ring(interval=4)):
        run = pl.simulate(
            train, workers=8, strategy=strategy, cluster="ethernet-1g", arguments=task
        )
        print(
            f"{strategy!s:18} {run.accuracy:8.3f} {run.virtual_seconds:10.2f}"
            f" {run.bytes_sent / 1e6:8.0f} {run.consensus_distance:9.3f}"
        )
