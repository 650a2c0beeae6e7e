"""Give every reader 100,000 inputs that are garbage or almost valid; print time and memory.

    python benchmarks/fuzz_readers.py [--inputs N] [NAME...]

Each reader runs in a process of its own, to measure its own peak memory.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def fuzz(name: str, inputs: int) -> None:
    from support import fuzzing

    target, began_s = fuzzing.TARGETS[name], time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for seed in range(inputs):
            target.read(target.make(Random(seed)))
    finally:
        shutil.rmtree(fuzzing.FOLDER, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took_s = time.monotonic() - began_s
    print(f"{name:<14}{inputs:>9,} inputs{took_s:>8.0f} s{(peak - before) / 1024:>8.0f} MiB more")


def main() -> None:
    from support.fuzzing import TARGETS

    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    options = parser.parse_args()
    if len(options.names) == 1:
        fuzz(options.names[0], options.inputs)
        return
    for name in options.names or TARGETS:
        command = [sys.executable, __file__, "--inputs", str(options.inputs), name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
