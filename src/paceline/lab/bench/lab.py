"""``paceline bench lab``: what the gradients of many virtual workers take, together and alone.

The whole simulator, with a user's loop: microseconds for one step of one worker, computed together
and one at a time. The joint computation alone: a forward, a loss, a backward and an update of all
workers. Beside both, the same samples in one large batch of one network, which no laboratory of
many networks is expected to beat. Each row is written down when it is known, so that the next call
goes on where this one was stopped.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.lab.bench.device import finish
from paceline.lab.tasks.characters import CHARACTERS, CONTEXT
from paceline.lab.tasks.fashion import make_model
from paceline.lab.tasks.networks import make_network
from paceline.launcher.simulate import simulate
from paceline.record.result import Result
from paceline.sim.batching.batching import AT_MOST
from paceline.sim.batching.graphs import CudaGraphs, Recorder
from paceline.sim.batching.joint import Arguments, Place, Program
from paceline.sim.batching.proof import Case as Worker_s
from paceline.sim.batching.proof import joint_of
from paceline.sim.batching.recorded import Recorded
from paceline.sim.batching.rows import Rows
from paceline.training.worker import Worker

CLUSTER = "ethernet-10g"
MODELS = ("mlp", "cnn", "resnet20", "resnet18", "gpt")
PRECISIONS = ("default", "tf32", "bf16")
WARM_UP, STEPS = 8, 16
"""Of each worker: in the first steps, computations are compared and recorded."""
FEW = 16
"""One at a time, more workers would tell no more; and a processor needs no larger batch."""
MOST_SAMPLES = 65_536
MOMENTUM = 0.9
JOINT = "joint step"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed.

    Attributes:
        model: one of :data:`MODELS`.
        workers: how many there are.
        method: of the simulated run; :data:`JOINT` for the joint computation alone.
        precision: one of :data:`PRECISIONS`.
        device: of all.
        batched: how the run is told to compute.
    """

    model: str
    workers: int
    method: str
    precision: str = "default"
    device: str = "cpu"
    batched: str = "on"

    @property
    def batch_size(self) -> int:
        """Of one worker."""
        return 16 if self.model == "gpt" else 32

    @property
    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward runs in."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def bench_lab(
    cases: Sequence[Case],
    file: Path | None = None,
    seconds: float = float("inf"),
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row for each case; those in ``file`` are not timed again, and new ones added there.

    Begins with no case after so many ``seconds``.
    """
    began_s, rows = time.monotonic(), known_rows(file)
    for case in cases:
        if case in rows:
            continue
        if time.monotonic() - began_s > seconds:
            break
        row = rows[case] = timed(case)
        on_row(row)
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
    return [rows[case] for case in cases if case in rows]


def known_rows(file: Path | None) -> dict[Case, dict[str, Any]]:
    """The rows that a file has, without those of cases that have failed."""
    if file is None or not file.exists():
        return {}
    names = Case.__dataclass_fields__
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {Case(**{name: row[name] for name in names}): row for row in rows if "error" not in row}


def timed(case: Case) -> dict[str, Any]:
    """The row of a case; one that fails has the error instead."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else precision)
    began_s = time.monotonic()
    try:
        facts = _joint(case) if case.method == JOINT else _simulated(case)
        facts["own_gb"] = own_gb(case)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        gc.collect()
    return {**asdict(case), **facts, "seconds": time.monotonic() - began_s}


# The whole simulator -----------------------------------------------------------------------------


class Timed(NamedTuple):
    """Microseconds for one step of one worker, and the run that they are of."""

    us: float
    result: Result


def _simulated(case: Case) -> dict[str, Any]:
    _forget_peaks(case.device)
    together = _run(case, case.workers, case.batched)
    memory = _memory(case.device)
    few = case.workers if case.device == "cpu" else min(FEW, case.workers)
    alone = _run(case, few, "off")
    return {
        "batched_us": together.us,
        "one_by_one_us": alone.us,
        "big_batch_us": _big_batch_us(case),
        **(together.result.batched or {}),
        "trace_hash": together.result.trace_hash,
        **memory,
    }


def _run(case: Case, workers: int, batched: str) -> Timed:
    """A run, timed from after the first steps of all workers to before their last ones."""
    clock = time.process_time if case.device == "cpu" else time.perf_counter
    begun: list[float] = []
    last = WARM_UP + STEPS + 1
    data = _samples(case, min(max(4096, 2 * workers * case.batch_size), MOST_SAMPLES))

    def train(worker: Worker) -> None:
        torch.manual_seed(0)
        net: nn.Module = make(case.model)
        net, optimizer = worker.setup(net, make_optimizer(case.model, net))
        loader = DataLoader(data, batch_size=case.batch_size, shuffle=True)
        batches = worker.setup_dataloaders(loader)
        while worker.steps < last:
            for x, y in batches:
                if len(begun) == workers * (last - 1):
                    finish(worker.device)
                begun.append(clock())
                optimizer.zero_grad()
                with case.autocast:
                    outputs = net(x)
                loss_of(outputs, y).backward()
                optimizer.step()
                if worker.steps == last:
                    break

    result = simulate(
        train,
        workers=workers,
        strategy=case.method,
        cluster=CLUSTER,
        device=case.device,
        batched=batched,
    )
    seconds = begun[workers * (last - 1)] - begun[workers * WARM_UP]
    return Timed(1e6 * seconds / (workers * STEPS), result)


def make(model: str) -> nn.Module:
    """A network of the benchmark."""
    return make_model(model) if model in ("mlp", "cnn") else make_network(model)


def make_optimizer(model: str, net: nn.Module) -> torch.optim.Optimizer:
    """What it is trained with."""
    if model == "gpt":
        return torch.optim.AdamW(net.parameters(), lr=1e-3)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=MOMENTUM)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch, of images or of characters."""
    if labels.dim() == 1:
        return cross_entropy(outputs.float(), labels)
    return cross_entropy(outputs.float().flatten(0, -2), labels.flatten())


def _samples(case: Case, count: int) -> TensorDataset:
    """Random samples, the same each time, with random labels."""
    generator = torch.Generator().manual_seed(1)
    if case.model == "gpt":
        text = torch.randint(CHARACTERS, (count, CONTEXT + 1), generator=generator)
        return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    shape = (1, 28, 28) if case.model in ("mlp", "cnn") else (3, 32, 32)
    images = torch.randn(min(count, 4096), *shape, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(images.repeat(-(-count // len(images)), 1, 1, 1)[:count], labels)


# The joint computation alone ---------------------------------------------------------------------


def _joint(case: Case) -> dict[str, Any]:
    _forget_peaks(case.device)
    device = torch.device(case.device)
    step, rows = joint_step(case, None if device.type == "cpu" else CudaGraphs(device))
    together = _median_us(step, case.device) / case.workers
    memory = _memory(case.device)
    del step, rows
    gc.collect()
    alone, big = _one_us(case), _big_batch_us(case)
    return {
        "batched_us": together,
        "one_by_one_us": alone,
        "big_batch_us": big,
        "ratio_to_big_batch": together / big,
        **memory,
    }


def joint_step(case: Case, recorder: Recorder | None) -> tuple[Callable[[], None], Rows]:
    """One step of all workers: forward, loss, backward and update, in parts of many workers.

    Where there is no ``recorder``, torch is told each time what to compute.
    """
    device, workers, size = torch.device(case.device), case.workers, min(AT_MOST, case.workers)
    net, rows = make(case.model).to(device), Rows(case.workers)
    flat, places = _flat(net)
    for rank in range(workers):
        rows.allocate(rank, len(flat), flat).copy_(flat * (1 + 0.01 * torch.rand_like(flat)))
        rows.allocate(rank, len(flat), flat)
        for name, buffer in net.named_buffers():
            rows.adopt(rank, name, buffer)
    rows.fill_spare(flat)
    assert rows.x is not None and rows.g is not None
    x, y = (each.to(device) for each in _samples(case, size * case.batch_size).tensors)
    inputs, labels = (each.view(size, case.batch_size, *each.shape[1:]) for each in (x, y))
    arguments, given = Arguments.of((inputs[0],), {})
    program = Program(net, places, arguments, torch.bfloat16 if case.precision == "bf16" else None)
    compute: Callable[[Sequence[int]], None]
    if recorder is not None:
        recorded = Recorded(program, rows, size, given, recorder)
        compute = _replayed(recorded, inputs, labels)
    else:
        compute = _told(program, rows, inputs, labels)
    moment = torch.zeros_like(rows.x)
    parts = [range(first, min(first + size, workers)) for first in range(0, workers, size)]
    x_all, g_all = rows.x, rows.g

    def step() -> None:
        for part in parts:
            compute(part)
        moment.mul_(MOMENTUM).add_(g_all)
        x_all.add_(moment, alpha=-0.01)

    return step, rows


def _flat(net: nn.Module) -> tuple[Tensor, dict[str, Place]]:
    """The parameters of a network as a vector, and where each of them is in it."""
    places, start = {}, 0
    for number, (name, parameter) in enumerate(net.named_parameters()):
        places[name] = Place(number, start, parameter.shape, parameter.stride())
        start += parameter.numel()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), places


def _replayed(
    recorded: Recorded, inputs: Tensor, labels: Tensor
) -> Callable[[Sequence[int]], None]:
    def compute(part: Sequence[int]) -> None:
        recorded.forward(part, [[inputs[n]] for n in range(len(part))])
        grads = _gradients(recorded.outputs[0][: len(part)], labels)
        recorded.backward(dict(enumerate(grads)))

    return compute


def _told(
    program: Program, rows: Rows, inputs: Tensor, labels: Tensor
) -> Callable[[Sequence[int]], None]:
    assert rows.x is not None and rows.g is not None
    x, g, rest = rows.x, rows.g, rows.rest

    def compute(part: Sequence[int]) -> None:
        own = [{name: matrix[rank] for name, matrix in rest.items()} for rank in part]
        cases = [Worker_s(x[rank], own[n], [inputs[n]]) for n, rank in enumerate(part)]
        joint = joint_of(program, cases)
        grads = _gradients(joint.outputs[0], labels)
        for rank, found in zip(part, joint.backward(range(len(part)), grads, False), strict=True):
            torch.cat([grad.flatten() for grad in found if grad is not None], out=g[rank])

    return compute


def _gradients(outputs: Tensor, labels: Tensor) -> list[list[Tensor]]:
    """Those of each worker's mean loss, by its output."""
    outputs = outputs.detach().requires_grad_()
    (len(outputs) * loss_of(outputs, labels[: len(outputs)])).backward()
    assert outputs.grad is not None
    return [[grad] for grad in outputs.grad.unbind(0)]


# For comparison ----------------------------------------------------------------------------------


def _one_us(case: Case) -> float:
    """A step of one worker, in torch alone."""
    return _plain_us(case, case.batch_size, channels_last=False)


def _big_batch_us(case: Case) -> float:
    """The share of one worker in a step of one network on the samples of many."""
    most = FEW if case.device == "cpu" else 256 if case.model == "resnet20" else 64
    count = min(case.workers, most)
    return _plain_us(case, count * case.batch_size, channels_last=True) / count


def _plain_us(case: Case, batch_size: int, channels_last: bool) -> float:
    device = torch.device(case.device)
    net = make(case.model).to(device)
    x, y = (each.to(device) for each in _samples(case, batch_size).tensors)
    if channels_last and x.dim() == 4:
        layout: Any = {"memory_format": torch.channels_last}
        net, x = net.to(**layout), x.contiguous(**layout)
    optimizer = make_optimizer(case.model, net)

    def step() -> None:
        optimizer.zero_grad()
        with case.autocast:
            outputs = net(x)
        loss_of(outputs, y).backward()
        optimizer.step()

    return _median_us(step, case.device)


def _median_us(step: Callable[[], None], device: str) -> float:
    """The median of several times, after two that do not count."""
    where = torch.device(device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    micros = []
    for _ in range(7):
        finish(where)
        began_s = clock()
        step()
        finish(where)
        micros.append(1e6 * (clock() - began_s))
    return statistics.median(micros[2:])


# Memory ------------------------------------------------------------------------------------------


def _forget_peaks(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.empty(1, device=device)  # a device that nobody has used has no statistics
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def own_gb(case: Case) -> float:
    """What all workers hold of their own, reckoned: nobody's batch, and nothing that passes.

    Parameters, gradients, moments of the optimizer, and buffers.
    """
    net = make(case.model)
    parameters, buffers = (
        sum(each.numel() * each.element_size() for each in tensors)
        for tensors in (net.parameters(), net.buffers())
    )
    moments = 2 if isinstance(make_optimizer(case.model, net), torch.optim.AdamW) else 1
    return case.workers * ((2 + moments) * parameters + buffers) / 1e9


def _memory(device: str) -> dict[str, float | None]:
    """The most memory that was taken: of the device in this case, of the host so far."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    there = None if device == "cpu" else torch.cuda.max_memory_reserved(device) / 1e9
    return {"device_gb": there, "host_gb": host}


def cases_of(
    models: Sequence[str],
    workers: Sequence[int],
    methods: Sequence[str],
    precisions: Sequence[str],
    device: str,
    batched: str,
) -> Iterator[Case]:
    """All combinations; the joint computation alone first."""
    for model in models:
        for precision in precisions:
            for count in workers:
                for method in (JOINT, *methods):
                    yield Case(
                        model=model,
                        workers=count,
                        method=method,
                        precision=precision,
                        device=device,
                        batched=batched,
                    )
