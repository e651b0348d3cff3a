"""What the hardware profiler runs: every named work once, warm, each after a kernel that says which it is.

`python -m attnconform.conformance.bench.probe seed64k:0 prefill:2 diagnose:healthy`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnconform.conformance.bench.machine import Machine

MARK = "mark_kernel"


def launch_mark(number: int) -> None:
    """A launch of `number` programs that does nothing."""
    import triton

    @triton.jit
    def mark_kernel() -> None:
        pass

    mark_kernel[(number,)]()


def find_work(name: str) -> Callable[[], object]:
    """The call that a name stands for, with its inputs made."""
    from attnconform.conformance.bench.machine import open_machine

    suite, _, which = name.partition(":")
    if suite not in FINDERS:
        raise ValueError(f"work is {name!r}, but must start with one of {', '.join(FINDERS)} and a colon")
    return FINDERS[suite](which, open_machine("cuda"))


def decode_work(which: str, machine: Machine) -> Callable[[], object]:
    from attnconform.conformance.bench.bundled import PlanRun
    from attnconform.conformance.bench.decode import shapes
    from attnconform.conformance.bench.decode_work import make_work

    return PlanRun.sparse(make_work(shapes(machine)[int(which)], machine))


def prefill_work(which: str, machine: Machine) -> Callable[[], object]:
    from attnconform.conformance.bench.prefill import our_prefill
    from attnconform.conformance.bench.prefill_work import make_inputs, works

    work = works(machine)[int(which)]
    return our_prefill(work, *make_inputs(work, machine)).run


def nsa_work(which: str, machine: Machine) -> Callable[[], object]:
    from attnconform.conformance.bench.nsa import OurNsa
    from attnconform.conformance.bench.nsa_work import make_nsa, shapes

    return OurNsa(make_nsa(shapes(machine)[int(which)], machine.device)).run


def subject_work(which: str, machine: Machine) -> Callable[[], object]:
    from attnconform.conformance.bench.seeded.batch import make_batches
    from attnconform.conformance.bench.seeded.subjects import SUBJECTS

    batches = make_batches(machine, count=1)
    subject = SUBJECTS[which](batches, machine)
    subject.index(batches[0])
    return lambda: subject.attend(batches[0])


FINDERS = {
    "seed64k": decode_work,
    "prefill": prefill_work,
    "nsa": nsa_work,
    "diagnose": subject_work,
}


def main(names: list[str]) -> None:
    """Runs each work outside the profiled range, then inside it."""
    for number, name in enumerate(names, start=1):
        call = find_work(name)
        call()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        launch_mark(number)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
