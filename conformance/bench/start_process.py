"""One work of suite starts in a process that has compiled nothing before; prints what it found as a line of JSON.

TRITON_CACHE_DIR=EMPTY_FOLDER python -m attnconform.conformance.bench.start_process WORK DEVICE
"""

import sys
import time
from collections.abc import Callable

import msgspec

from attnconform.conformance.bench.cold_starts import ColdStart, by_kernel
from attnconform.conformance.bench.machine import Machine, open_machine
from attnconform.conformance.bench.start_works import WORKS, StartWork
from attnconform.conformance.bench.timing import wall_time


def start(name: str, work: StartWork, machine: Machine) -> ColdStart:
    """The first call and the next one, then every change, with what each had compiled."""
    machine.flush()  # the device is awake and its context made
    machine.synchronize()
    started, before = time.perf_counter(), machine.compiles.compiled
    call = work.make()
    wall_time(call, machine)
    first = time.perf_counter() - started
    kernels = by_kernel(machine.compiles.compilations[before:])
    return ColdStart(
        work=name,
        first=first,
        warm=wall_time(call, machine),
        kernels=kernels,
        changed={what: count_compiled(make, machine) for what, make in work.changed.items()},
        other_code=None if work.other_code is None else count_compiled(work.other_code, machine),
    )


def count_compiled(make: Callable[[], Callable[[], object]], machine: Machine) -> int:
    """Specializations that planning something and calling it asked for."""
    before = machine.compiles.total
    wall_time(make(), machine)
    return machine.compiles.total - before


def main(name: str, device: str) -> None:
    machine = open_machine(device)
    found = start(name, WORKS[name](machine), machine)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
