"""Check the laboratory on a GPU, and time it, in pieces of a few minutes.

    python benchmarks/lab_gpu.py --out lab.jsonl [--minutes 9] [--device cuda] [--only checks]

Checks: recorded joint gradients in double precision against those of each worker alone; runs of all
methods with 64 workers, computed together and alone, which must have the same trace and, within
1e-9, the same losses; runs that must repeat. Then the rows of ``paceline bench lab``, those that
matter most first. Each check and row is written to ``--out`` when it is known; the same command
goes on with the others, and with those that had an error, and begins with none that would not end
in time. Prints a line for each, with the limit that a row misses. The exit code is 1 if a check or
a row has failed. ``--device cpu`` makes small ones of all, without recording.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.lab.bench.lab import JOINT, Case, timed
from paceline.lab.tasks.networks import GPT, make_network
from paceline.sim.batching.graphs import CudaGraphs
from paceline.sim.batching.joint import Arguments, Place, Program
from paceline.sim.batching.proof import Case as WorkerCase
from paceline.sim.batching.proof import alone, joint_of
from paceline.sim.batching.recorded import Recorded
from paceline.sim.batching.rows import Rows
from paceline.strategies import STRATEGIES

GRADIENTS, LOSSES = 1e-12, 1e-9
SASGD = "sasgd(interval=16)"


class Piece(NamedTuple):
    """A check, or a row of the benchmark.

    Attributes:
        seconds: how long it takes, at most, as far as that is known.
        act: makes its record.
    """

    name: str
    seconds: float
    act: Callable[[], dict[str, Any]]


class Options(NamedTuple):
    """The device, and how many workers there are."""

    device: str
    workers: int

    @property
    def is_small(self) -> bool:
        return self.device == "cpu"


# Gradients ---------------------------------------------------------------------------------------


def models(options: Options) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks, and the shape of a sample; () for text."""
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)
    )
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mlp": (mlp, (3, 4, 4)),
        "cnn": (cnn, (3, 4, 4)),
        "gpt": (GPT(width=32, layers=2, heads=4), ()),
    }
    if not options.is_small:
        found["resnet20"] = make_network("resnet20"), (3, 32, 32)
        found["resnet18"] = make_network("resnet18"), (3, 32, 32)
    return found


def check_gradients(name: str, options: Options) -> dict[str, Any]:
    """The largest relative distance of a worker's joint gradient from that alone."""
    torch.manual_seed(0)
    net, shape = models(options)[name]
    device, workers, batch = torch.device(options.device), 7, 4
    net = net.to(device).double()
    rows, places, start = Rows(workers), dict[str, Place](), 0
    for number, (key, parameter) in enumerate(net.named_parameters()):
        places[key] = Place(number, start, parameter.shape, parameter.stride())
        start += parameter.numel()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    if shape:
        x = torch.randn(workers, batch, *shape, device=device, dtype=torch.float64)
    else:
        x = torch.randint(256, (workers, batch, 16), device=device)
    cases = []
    for rank in range(workers):
        own = rows.allocate(rank, start, flat)
        own.copy_(flat * (1 + 0.1 * torch.rand_like(flat)))
        rows.allocate(rank, start, flat)
        rest = {key: rows.adopt(rank, key, buffer) for key, buffer in net.named_buffers()}
        cases.append(
            WorkerCase(own, {k: r.clone() for k, r in rest.items() if r is not None}, [x[rank]])
        )
    rows.fill_spare(flat)
    program = Program(net, places, Arguments.of((x[0],), {})[0], None)
    worst = max(_distances(program, rows, places, x, cases, device))
    return {"figure": worst, "ok": worst <= GRADIENTS}


def _distances(
    program: Program,
    rows: Rows,
    places: dict[str, Place],
    x: Tensor,
    cases: list[WorkerCase],
    device: torch.device,
) -> Iterator[float]:
    """How far each worker's joint gradient is from the one alone, relative to its norm."""
    workers = len(cases)
    told = [alone(program, case) for case in cases]
    given = [
        torch.arange(own.outputs[0].numel(), device=device).cos().double().view_as(own.outputs[0])
        for own in told
    ]
    if device.type == "cuda":
        recorded = Recorded(program, rows, 8, [x[0]], CudaGraphs(device))
        recorded.forward(range(workers), [[x[rank]] for rank in range(workers)])
        recorded.backward({rank: [given[rank]] for rank in range(workers)})
        assert rows.g is not None
        together = [recorded.parts(rows.g[rank], [given[rank]]) for rank in range(workers)]
    else:
        joint = joint_of(program, cases)
        together = [*map(list, joint.backward(range(workers), [[g] for g in given], again=False))]
    for own, joint_own in zip(told, together, strict=True):
        one = torch.cat([g.flatten() for g in own.gradients if g is not None])
        other = torch.cat([g.flatten() for g in joint_own if g is not None])
        yield float((one - other).norm() / one.norm())


# Runs --------------------------------------------------------------------------------------------


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, 4, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator))


def train(worker: pl.Worker, epochs: int, dropped: float = 0.0) -> None:
    torch.manual_seed(1)
    layers = nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropped)
    model: nn.Module = nn.Sequential(*layers, nn.Linear(16, 4)).double()
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, sgd = worker.setup(model, sgd)
    loader = DataLoader(data(4 * worker.size * 6), batch_size=4, shuffle=True)
    for _ in range(epochs):
        for x, y in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            sgd.step()
            worker.log(loss=loss)


def run(options: Options, strategy: str, batched: str, **more: Any) -> Any:
    return pl.simulate(
        train,
        workers=options.workers,
        strategy=strategy,
        cluster="ethernet-10g",
        device=options.device,
        batched=batched,
        arguments={"epochs": 2, **more},
    )


def losses(result: Any) -> list[tuple[int, float, float]]:
    """The losses of each worker, in order."""
    return sorted((record["rank"], record["t"], record["loss"]) for record in result.metrics)


def check_method(strategy: str, options: Options) -> dict[str, Any]:
    """A method with many workers: the same trace and losses as one at a time."""
    one, many = (run(options, strategy, batched) for batched in ("off", "on"))
    pairs = zip(losses(one), losses(many), strict=True)
    worst = max(abs(a[2] - b[2]) for a, b in pairs)
    same, facts = one.trace_hash == many.trace_hash, many.batched
    recorded = options.is_small or facts["recorded"] > 0
    ok = same and worst <= LOSSES and facts["share"] > 0.3 and recorded
    return {"figure": worst, "ok": ok, "same_trace": same, **facts}


def check_repeats(dropped: float, options: Options) -> dict[str, Any]:
    """Two runs have the same records."""
    one, other = (run(options, "gossip", "on", dropped=dropped) for _ in range(2))
    return {"figure": 0.0, "ok": losses(one) == losses(other), **one.batched}


# Rows --------------------------------------------------------------------------------------------


def cases(options: Options) -> Iterator[tuple[float, Case, float | None]]:
    """What is timed: how long that takes at most, and the limit of a row, if it has one."""

    def case(model: str, workers: int, method: str, precision: str = "default") -> Case:
        return Case(
            model=model, workers=workers, method=method, precision=precision, device=options.device
        )

    if options.is_small:
        yield 20, case("mlp", 4, JOINT), None
        yield 20, case("mlp", 4, SASGD), None
        return
    yield 40, case("resnet20", 256, JOINT), 1.25
    yield 45, case("resnet20", 256, SASGD), 625
    yield 30, case("resnet20", 256, JOINT, "bf16"), 1.0
    yield 20, case("resnet20", 64, SASGD), 700
    yield 45, case("resnet20", 256, "allreduce"), 625
    yield 60, case("resnet20", 256, "gossip"), 900
    yield 30, case("gpt", 64, JOINT, "bf16"), 1.5
    yield 40, case("resnet18", 64, JOINT), 2.2
    yield 30, case("resnet20", 64, JOINT), 1.25
    yield 45, case("resnet20", 256, SASGD, "bf16"), None
    yield 40, case("resnet18", 64, JOINT, "bf16"), None
    yield 30, case("gpt", 64, JOINT, "tf32"), None
    yield 60, case("gpt", 64, SASGD, "bf16"), None
    yield 20, case("resnet20", 64, "allreduce"), 700
    yield 100, case("resnet20", 1000, SASGD), None
    for strategy in STRATEGIES:
        if strategy not in ("sasgd", "allreduce"):
            yield 25, case("resnet20", 64, strategy), None
    yield 40, case("mlp", 256, SASGD), None


def time_case(case: Case, limit: float | None) -> dict[str, Any]:
    """A row, with whether it keeps to its limit: a ratio to the big batch, or microseconds."""
    row = timed(case)
    if limit is not None and "error" not in row:
        figure = row["ratio_to_big_batch"] if case.method == JOINT else row["batched_us"]
        row |= {"limit": limit, "keeps": figure <= limit}
    return row


# The command -------------------------------------------------------------------------------------


def pieces(options: Options) -> Iterator[Piece]:
    """All that is checked and timed, in order."""
    for name in models(options):
        yield Piece(f"gradients of {name}", 20, lambda name=name: check_gradients(name, options))
    for dropped in (0.0, 0.5):
        yield Piece(f"repeats, {dropped} dropped", 20, lambda d=dropped: check_repeats(d, options))
    for strategy in STRATEGIES:
        yield Piece(f"runs of {strategy}", 20, lambda s=strategy: check_method(s, options))
    for seconds, case, limit in cases(options):
        name = f"{case.model} {case.workers} {case.method} {case.precision}"
        yield Piece(name, seconds, lambda c=case, limit=limit: time_case(c, limit))


def made(piece: Piece) -> dict[str, Any]:
    """The record of a piece; one that fails has the error instead."""
    began_s = time.monotonic()
    try:
        record = piece.act()
    except Exception as error:
        traceback.print_exc()
        record = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
    return {"name": piece.name, **record, "took_s": round(time.monotonic() - began_s, 1)}


def line_of(record: dict[str, Any]) -> str:
    """A record in one line."""
    if "error" in record:
        said = f"FAIL {record['error']}"
    elif "ok" in record:
        said = f"{'ok  ' if record['ok'] else 'FAIL'} {record['figure']:.1e}"
        said += "" if "recorded" not in record else f", recorded {record['recorded']:.2f}"
    else:
        names = ("batched_us", "one_by_one_us", "big_batch_us")
        together, alone_us, big = (round(record[name]) for name in names)
        said = f"{together} us, alone {alone_us}, big batch {big}, ratio {together / big:.2f}"
        if record.get("device_gb") is not None:
            said += f", {record['device_gb']:.1f} GB"
        if record.get("keeps") is False:
            said += f"; MISSES {record['limit']}"
    return f"{record['name']:<40} {said} ({record['took_s']} s)"


def main() -> int:
    options = read_options()
    began_s, end_s = time.monotonic(), 60 * options.minutes
    known: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        records = map(json.loads, options.out.read_text().splitlines())
        known = {record["name"]: record for record in records if "error" not in record}
    chosen = Options(options.device, 64 if options.device != "cpu" else 6)
    left = 0
    for piece in pieces(chosen):
        is_check = piece.name.startswith(("gradients", "repeats", "runs"))
        if piece.name in known or options.only not in (None, "checks" if is_check else "rows"):
            continue
        if time.monotonic() - began_s + piece.seconds > end_s:
            left += 1
            continue
        record = known[piece.name] = made(piece)
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(line_of(record), flush=True)
    failed = [n for n, record in known.items() if "error" in record or record.get("ok") is False]
    print(f"{len(known)} done, {left} left, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def read_options() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--out", type=Path, default=Path("lab.jsonl"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", choices=["checks", "rows"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
