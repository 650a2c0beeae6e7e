"""Check every method on a GPU against the same run on the CPU.

    python benchmarks/gpu.py [--device cuda] [--strategies "sasgd,easgd(sync=true)"]
        [--optimizers momentum,adam] [--transport distributed] [--amp]

A small MLP trains from fixed seeds on fixed data, with SGD with momentum and with Adam, by one
worker on the device and by two that share it. One worker, and two of a synchronous method, must end
with the parameters of the CPU: the norm of a tensor's difference is at most 1e-4 of its own norm.
The messages of two asynchronous workers may arrive in any order: their loss must be within 0.4 of
that on the CPU, which falls from 1.5 to less than 0.4. So must be that of each case with ``--amp``:
half precision on the device, with a gradient scaler. Prints one line for each case, and a summary;
the exit code is 1 if one has failed. ``--device cpu`` compares the CPU with itself.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.cli.compare import split_specs
from paceline.launcher.transports import TRANSPORTS
from paceline.strategies import make_strategy, strategy_names

SEED, EPOCHS, BATCH = 3, 16, 16
FEATURES, HIDDEN, CLASSES, SAMPLES = 16, 32, 4, 256
PARAMETERS_TOLERANCE, LOSS_TOLERANCE = 1e-4, 0.4
PATIENCE = pl.Limits(progress_limit_s=60)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


class Case(NamedTuple):
    """One run to check."""

    strategy: str
    workers: int
    optimizer: str

    @property
    def deterministic(self) -> bool:
        """Whether the run is deterministic: repeated, it ends with the same parameters."""
        return self.workers == 1 or make_strategy(self.strategy).synchronous

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ' '}"
        return f"{self.strategy:<18} {workers}  {self.optimizer:<8}"


class Outcome(NamedTuple):
    """The result of a run; a loss that is not finite is None."""

    loss: float | None
    parameters: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        numbers = all(bool(tensor.isfinite().all()) for tensor in self.parameters.values())
        return numbers and self.loss is not None


class Verdict(NamedTuple):
    passed: bool
    reason: str


# The training ------------------------------------------------------------------------------------


def train(worker: pl.Worker, optimizer: str, amp: bool) -> None:
    """Train on a fixed shard, and log the loss of the method's answer on all of the data."""
    scaler = torch.amp.GradScaler(worker.device.type, enabled=amp)
    torch.manual_seed(SEED)
    net: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )
    net, stepper = worker.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    data = samples()
    loader = DataLoader(data, batch_size=BATCH)
    for _ in range(EPOCHS):
        for x, y in worker.setup_dataloaders(loader, data="static", epochs=EPOCHS):
            stepper.zero_grad()
            with torch.autocast(worker.device.type, torch.float16, enabled=amp):
                loss = cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(stepper)
            scaler.update()
    worker.finish()
    if worker.rank == 0:
        x, y = (tensor.to(worker.device) for tensor in data.tensors)
        worker.log(loss=cross_entropy(net(x), y))


def samples() -> TensorDataset:
    """Random points, labeled by the fixed direction with the largest product."""
    random = torch.Generator().manual_seed(SEED)
    x = torch.randn(SAMPLES, FEATURES, generator=random)
    directions = torch.randn(FEATURES, CLASSES, generator=random)
    return TensorDataset(x, (x @ directions).argmax(1))


def outcome(case: Case, device: str, transport: str, amp: bool) -> Outcome:
    """Run a case in processes of its own."""
    with TemporaryDirectory() as folder:
        result = pl.launch(
            train,
            workers=case.workers,
            strategy=case.strategy,
            transport=transport,
            device=device,
            seed=SEED,
            limits=PATIENCE,
            arguments={"optimizer": case.optimizer, "amp": amp},
            out=folder,
        )
        return Outcome(result.loss, load_file(Path(folder) / "model.safetensors"))


# The comparison ----------------------------------------------------------------------------------


def check(case: Case, device: str, transport: str, amp: bool) -> Verdict:
    """Run a case on the device and on the CPU, and compare the parameters or the losses."""
    try:
        ours = outcome(case, device, transport, amp)
    except pl.PacelineError as error:
        return Verdict(False, f"on {device}: {' '.join(str(error).split())[:300]}")
    cpu = outcome(case, "cpu", transport, amp=False)
    if not (ours.finite and cpu.finite):
        return Verdict(False, "not finite")
    exact = case.deterministic and not amp
    return compare_parameters(ours, cpu) if exact else compare_losses(ours, cpu)


def compare_parameters(ours: Outcome, cpu: Outcome) -> Verdict:
    gap = max(
        relative_gap(ours.parameters[name], theirs) for name, theirs in cpu.parameters.items()
    )
    return Verdict(gap <= PARAMETERS_TOLERANCE, f"finite, parameters differ by {gap:.1e}")


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference, relative to the norm of ``theirs``."""
    gap, size = (ours.double() - theirs.double()).norm(), theirs.double().norm()
    if size:
        return float(gap / size)
    return math.inf if gap else 0.0


def compare_losses(ours: Outcome, cpu: Outcome) -> Verdict:
    assert ours.loss is not None and cpu.loss is not None, "both are finite"
    gap = abs(ours.loss - cpu.loss)
    return Verdict(gap <= LOSS_TOLERANCE, f"finite, loss {ours.loss:.3f} differs by {gap:.1e}")


# The command -------------------------------------------------------------------------------------


def main() -> int:
    options = read_options()
    device = use_one_gpu(options.device)
    precision = "half precision, " if options.amp else ""
    print(f"{name_of(device)}, torch {torch.__version__}, {precision}transport {options.transport}")
    began_s, failed = time.monotonic(), 0
    cases = list(cases_of(options.strategies, options.optimizers))
    for case in cases:
        verdict = check(case, device, options.transport, options.amp)
        failed += not verdict.passed
        print(f"{case} {'PASS' if verdict.passed else 'FAIL'}  {verdict.reason}", flush=True)
    passed, seconds = len(cases) - failed, time.monotonic() - began_s
    print(f"{passed} of {len(cases)} passed, {failed} failed, in {seconds:.0f} s")
    return int(failed > 0)


def read_options() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strategies", default=",".join(strategy_names()))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--transport", default="distributed", choices=TRANSPORTS)
    parser.add_argument("--amp", action="store_true")
    return parser.parse_args()


def cases_of(strategies: str, optimizers: str) -> Iterator[Case]:
    for strategy in split_specs([strategies]):
        for workers in (1, 2):
            for optimizer in optimizers.split(","):
                yield Case(strategy, workers, optimizer)


def use_one_gpu(device: str) -> str:
    """Hide all GPUs but one from this process and its ranks, so that two workers share it."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = visible.split(",")[int(number or 0)] if visible else number or "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    return kind


def name_of(device: str) -> str:
    """The name of the device; exits if there is no GPU."""
    if device != "cuda":
        return device
    if not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU here; --device cpu compares the CPU with itself")
    return torch.cuda.get_device_name(device)


if __name__ == "__main__":
    sys.exit(main())
