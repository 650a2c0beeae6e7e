"""``paceline bench``: run the benchmarks and show tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.screen import Screen, number, size
from paceline.common.options import above, at_least, check_device, one_of
from paceline.launcher.capacity import check_real_workers, check_virtual_workers


def show_comm(
    screen: Screen, workers: int, repeats: int, sizes: list[int] | None, device: str
) -> None:
    """Time the all-reduce of shared memory and of gloo."""
    _check(workers, repeats)
    from paceline.lab.bench.comm import SIZES, bench_comm

    rows = bench_comm(workers, sizes or list(SIZES), repeats, one_device(device))
    screen.table(
        ["engine", "workers", "vector", "ms", "relative to gloo", "to a copy"],
        [
            (
                r["engine"],
                str(r["workers"]),
                size(r["bytes"]),
                _ms(r),
                f"{r['ratio_to_gloo']:.3f}",
                f"{r['ratio_to_copy']:.1f}",
            )
            for r in rows
        ],
    )
    screen.emit({"rows": rows})


def show_step(screen: Screen, workers: int, repeats: int, device: str, hidden: int) -> None:
    """Time a step with each way of training."""
    _check(workers, repeats)
    at_least("hidden", hidden, 1)
    from paceline.lab.bench.step import bench_step

    rows = bench_step(workers, repeats, one_device(device), hidden)
    screen.table(
        ["step with", "workers", "ms", "relative to no comm.", "90 % interval"],
        [
            (
                r["what"],
                str(r["workers"]),
                _ms(r),
                f"{r['ratio_to_no_comm']:.3f}",
                "{:.3f} to {:.3f}".format(*r["interval_90"]),
            )
            for r in rows
        ],
    )
    added = {row["what"]: row["ratio_to_no_comm"] - 1 for row in rows}
    share = added["allreduce"] / added["torch DDP"]
    screen.say(f"The overhead of allreduce is {share:.2f} times that of torch DDP.")
    screen.emit({"rows": rows, "allreduce_added_of_ddp": share})


def show_hosts(screen: Screen, links: list[str], repeats: int) -> None:
    """Time messages and sums between hosts that are made on this machine."""
    at_least("repeats", repeats, 1)
    from paceline.lab.bench.hosts import LINKS, bench_hosts

    for link in links:
        one_of("link", link, LINKS)
    rows = bench_hosts(links or list(LINKS), repeats)
    screen.table(
        ["link", "what", "bytes", "engine", "ms", "range", "of the line", "relative to gloo"],
        [
            (
                r["link"],
                r["what"],
                size(r["bytes"]),
                r["engine"],
                f"{r['ms']:.1f}",
                "{:.1f} to {:.1f}".format(*r["ms_range"]),
                f"{r['share_of_line']:.3f}" if "share_of_line" in r else "",
                f"{r['ratio_to_gloo']:.3f}" if "ratio_to_gloo" in r else "",
            )
            for r in rows
        ],
    )
    screen.emit({"rows": rows})


def show_sim(screen: Screen, workers: int, repeats: int, steps: int) -> None:
    """Time the simulator, with and without gradients."""
    check_virtual_workers(workers)
    at_least("repeats", repeats, 1)
    from paceline.lab.bench.sim import bench_sim

    rows = bench_sim(workers, repeats, steps)
    screen.table(
        ["gradients", "workers", "events/s", "overhead", "half of the repeats", "us", "of threads"],
        [
            (
                row["model"] or "none",
                str(row["workers"]),
                number(round(row["events_per_s"])),
                *_overhead(row),
            )
            for row in rows
        ],
    )
    screen.emit({"rows": rows})


def _overhead(row: dict[str, Any]) -> tuple[str, ...]:
    if row["overhead_share"] is None:
        return ("-",) * 4
    low, high = row["overhead_quartiles"]
    share, step_us = row["overhead_share"], row["overhead_us_per_step"]
    spread, threads = f"{low:+.1%} to {high:+.1%}", row["of_threads_share"]
    return f"{share:+.1%}", spread, f"{step_us:.0f}", f"{threads:+.1%}"


@dataclass(frozen=True, kw_only=True)
class LabChoice:
    """The options of ``bench lab``; all combinations are timed."""

    models: list[str]
    workers: list[int]
    methods: list[str]
    precisions: list[str]
    device: str
    batched: str
    file: Path | None
    minutes: float | None


def show_lab(screen: Screen, chosen: LabChoice) -> None:
    """Time the gradients of many virtual workers; each row is shown when it is known."""
    device = one_device(chosen.device)
    one_of("batched", chosen.batched, ("auto", "on"))
    for workers in chosen.workers:
        check_virtual_workers(workers)
    if chosen.minutes is not None:
        above("minutes", chosen.minutes, 0)
    from paceline.lab.bench.lab import MODELS, PRECISIONS, bench_lab, cases_of
    from paceline.strategies import make_strategy

    for model in chosen.models:
        one_of("model", model, MODELS)
    for precision in chosen.precisions:
        one_of("precision", precision, PRECISIONS)
    for method in chosen.methods:
        make_strategy(method)
    named = chosen.models, chosen.workers, chosen.methods, chosen.precisions
    cases = [*cases_of(*named, device, chosen.batched)]
    seconds = float("inf") if chosen.minutes is None else 60 * chosen.minutes
    rows = bench_lab(cases, chosen.file, seconds, lambda row: screen.say(" ".join(_lab_cells(row))))
    head = ["model", "precision", "workers", "method", "together", "alone", "big batch", "ratio"]
    screen.table([*head, "batch", "memory, own"], [_lab_cells(row) for row in rows])
    if left := len(cases) - len(rows):
        screen.say(f"{left} of {len(cases)} are left: run the same command again.")
    screen.emit({"rows": rows, "left": left})


def _lab_cells(row: dict[str, Any]) -> tuple[str, ...]:
    first = row["model"], row["precision"], str(row["workers"]), row["method"]
    if "error" in row:
        return (*first, row["error"], "", "", "", "", "")
    micros = [row[name] for name in ("batched_us", "one_by_one_us", "big_batch_us")]
    mean, own = row.get("mean"), f"{row['own_gb']:.2g}"
    memory = row["host_gb"] if row["device_gb"] is None else row["device_gb"]
    return (
        *first,
        *(f"{us:.0f} us" for us in micros),
        f"{micros[0] / micros[2]:.2f}",
        "-" if mean is None else f"{mean:.1f}",
        f"{memory:.1f} GB, {own}",
    )


def show_scale(screen: Screen, repeats: int, steps: int) -> None:
    """Time a worker's step among few workers, and among a thousand."""
    at_least("repeats", repeats, 1)
    from paceline.lab.bench.sim import SCALED, SCALES, bench_scale

    rows = bench_scale(SCALED, SCALES, repeats, steps)
    screen.table(
        ["method", "workers", "CPU us per step", f"relative to {SCALES[0]}"],
        [
            (
                row["strategy"] or "plain loop",
                str(row["workers"]),
                f"{row['cpu_us_per_step']:.0f}",
                f"{row['ratio_to_fewest']:.2f}",
            )
            for row in rows
        ],
    )
    screen.emit({"rows": rows})


def _check(workers: int, repeats: int) -> None:
    check_real_workers(workers)
    at_least("workers", workers, 2)
    at_least("repeats", repeats, 1)


def one_device(device: str) -> str:
    """The device that all ranks share, by its whole name."""
    check_device(device)
    from paceline.launcher.spec import OnDevice

    return OnDevice(device=device).device_of(0)


def _ms(row: dict[str, Any]) -> str:
    return f"{row['ms']:.3f}"
