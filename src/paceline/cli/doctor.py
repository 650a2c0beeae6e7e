"""``paceline doctor``: check that this machine has what Paceline needs."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cli.screen import Screen, size
from paceline.errors import PacelineError
from paceline.lab.tasks.recipe import find_folder
from paceline.launcher.capacity import PROCESS_BYTES, memory_bytes


def examine(screen: Screen) -> bool:
    """Make and show every check; returns whether all that is needed was found."""
    checks = []
    for name, check in CHECKS.items():
        try:
            ok, detail = True, check()
        except OptionalMissing as missing:
            ok, detail = None, str(missing)
        except Exception as error:
            ok, detail = False, str(error).partition("\n")[0] or type(error).__name__
        mark = {True: "ok", None: "--", False: "NO"}[ok]
        screen.say(screen.wrap(detail, f"{mark}  {name:<14} "))
        checks.append({"name": name, "ok": ok, "detail": detail})
    healthy = all(check["ok"] is not False for check in checks)
    screen.say("" if healthy else "\nFix what is marked NO first.")
    screen.emit({"checks": checks, "ok": healthy})
    return healthy


class OptionalMissing(Exception):
    """Something is missing that a run does not need."""


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}" + (
        "" if sys.platform == "linux" else " (untested)"
    )


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise OptionalMissing("torch sees none; runs use the CPU")
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reached = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    peers = f"; {reached} of {len(pairs)} pairs have peer access" if pairs else ""
    nccl = "nccl" if torch.distributed.is_nccl_available() else "no nccl"
    return f"{names}{peers}; {nccl}"


def _gpu_memory() -> str:
    import torch

    from paceline.common.reference import refer_to
    from paceline.launcher.supervisor import run_ranks

    if not torch.cuda.is_available():
        raise OptionalMissing("no GPU")
    shares = run_ranks(refer_to(shares_memory), [{}, {}], device="cuda:0")
    if not all(shares):
        raise OptionalMissing("ranks on a GPU cannot share its memory; they use that of the host")
    mps = _mps_runs()
    return "ranks on a GPU share its memory" + ("; MPS runs" if mps else "; MPS does not run")


def _mps_runs() -> bool:
    """Whether the service runs that lets several processes use a GPU at once."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def shares_memory(ports: Any, channel: Any, argument: Any) -> bool:
    """The program of each rank: whether it shares memory of the device."""
    return ports.shared.places.segments is not None


def _room() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fits = max(2, memory_bytes() // PROCESS_BYTES)
    return f"{cores} cores, {size(memory_bytes())} of memory: up to {fits} real workers"


def _ranks(transport: str) -> Callable[[], str]:
    def check() -> str:
        from paceline.common.reference import refer_to
        from paceline.launcher.supervisor import run_ranks

        if transport == "shared_memory" and sys.platform != "linux":
            raise OptionalMissing("needs Linux; runs use --transport distributed")
        if transport == "hosts" and importlib.util.find_spec("zmq") is None:
            raise OptionalMissing('needs pyzmq: pip install "paceline[hosts]"')
        averages = run_ranks(refer_to(average), [{}, {}], transport=transport)
        if averages != [1.5, 1.5]:
            raise PacelineError(f"an all-reduce of 1 and 2 gave {averages}")
        return "two processes averaged a vector"

    return check


def average(ports: Any, channel: Any, argument: Any) -> float:
    """The program of each rank: an all-reduce."""
    import torch

    from paceline.comm.comm import Comm

    comm = Comm(ports)
    x = torch.full((1000,), comm.rank + 1.0)
    x /= comm.all_reduce(x).weight
    return float(x.mean())


def _namespaces() -> str:
    from paceline.lab.network.hosts import why_no_hosts

    reason = why_no_hosts()
    if reason is not None:
        raise OptionalMissing(f"{reason} (drills and benchmarks of many hosts need them)")
    return "several hosts can be made on this machine"


def _simulator() -> str:
    from paceline.launcher.simulate import simulate

    simulate(_nothing, workers=4)
    return "ran"


def _nothing(worker: Any) -> None:
    worker.comm.barrier()


def _threads() -> str:
    setting = os.environ.get("OMP_NUM_THREADS")
    if setting is None:
        raise OptionalMissing("OMP_NUM_THREADS is not set: workers divide the cores")
    return f"OMP_NUM_THREADS={setting}, for every worker"


def _data() -> str:
    from paceline.lab.tasks.fashion import load_images

    images = load_images()
    return f"{len(images.x_train)} train and {len(images.x_test)} test images are bundled"


def _full_data() -> str:
    try:
        return f"{Path(find_folder()).expanduser()} (--full uses it)"
    except PacelineError as error:
        raise OptionalMissing(str(error)) from None


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "torch": _torch,
    "gpu": _gpu,
    "gpu memory": _gpu_memory,
    "room": _room,
    "threads": _threads,
    "shared memory": _ranks("shared_memory"),
    "gloo": _ranks("distributed"),
    "many hosts": _ranks("hosts"),
    "namespaces": _namespaces,
    "simulator": _simulator,
    "bundled data": _data,
    "whole data": _full_data,
}
