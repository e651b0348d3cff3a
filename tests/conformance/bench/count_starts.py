"""Prints what suite starts would find on a GPU, but for seconds: a line of JSON for every work.

Runs without a GPU and compiles nothing: Triton is given a device that is not there, asked for each launch's key, and
stopped before it compiles.
"""

import sys

import msgspec
import torch
from launches_without_gpu import watch_launches
from triton.runtime import jit

from attnconform.conformance.bench.compiles import Compilation, CompileLog
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.start_process import start
from attnconform.conformance.bench.start_works import WORKS
from attnconform.kernels.sparse_attention import run_checks


def watch(log, known):
    """Every launch of this process asks for its specialization and does no more; the log hears of those not known."""

    def hear(*, key, fn, **_):
        if (fn.name, key) not in known:
            known.add((fn.name, key))
            log.compilations.append(Compilation(fn.name.rpartition(".")[2], 0.0))
        return True

    watch_launches(hear)
    # what a hook is told beside the key cannot tell of a kernel that takes a rule's function
    jit.serialize_specialization_data = lambda *_: ""
    run_checks.IS_INTERPRETED = True  # or a run on the CPU would be refused


if __name__ == "__main__":
    log, known = CompileLog(), set()
    watch(log, known)
    machine = Machine("cpu", log)
    for name in sys.argv[1:] or WORKS:
        known.clear()  # as in a process of its own
        # the tile of dK and dV follows how full the lists are: one draw in fifty of works as small as these changes it
        torch.manual_seed(0)
        print(msgspec.json.encode(start(name, WORKS[name](machine), machine)).decode(), flush=True)
