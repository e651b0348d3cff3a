"""One forward call, and one backward call where the case has one, of the cases of L1 that the bundled kernels declare.

For a tool that watches every access and is too slow for the whole judge:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/kernels/run_once.py --shard 1/8

Exit 1 where a call raised. What a case's answer is worth is not asked here.
"""

import time
from collections import Counter

import click
import torch

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import undeclared
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.selection import select_cases

OPERATIONS = ("forward", "backward")


def call_once(case: Case, backend: Backend) -> str:
    """What became of a case's calls: called, undeclared, or raised with the message."""
    if case.operation not in OPERATIONS or undeclared(case, backend):
        return "undeclared"
    trial = Trial(case, backend)
    try:
        observed = trial.run(trial.values)
        if case.operation == "backward":
            trial.run_backward(trial.values, observed)
    except BackendCrash as crash:
        return f"raised: {crash}"
    if backend.device.startswith("cuda"):
        torch.cuda.synchronize()
    return "called"


@click.command()
@click.option("--backend", default="triton")
@click.option("--device", default="cuda")
@click.option("--select", default="", help="as of attnconform run")
@click.option("--shard", default="1/1")
@click.option("--seconds", default=600.0, help="no case is begun after them")
def main(backend: str, device: str, select: str, shard: str, seconds: float) -> None:
    """Calls, and says how many cases were called."""
    end = time.monotonic() + seconds
    loaded = load_backend(backend, device)
    counts: Counter[str] = Counter()
    cases = select_cases("L1", select, shard)
    for case in cases:
        if time.monotonic() > end:
            break
        fate = call_once(case, loaded)
        counts[fate.partition(":")[0]] += 1
        if fate.startswith("raised"):
            print(case.id, fate, flush=True)
    print(f"{counts.total()} of {len(cases)} cases of {len(matrix('L1'))}: {dict(counts)}")
    raise SystemExit(int(counts["raised"] > 0))


if __name__ == "__main__":
    main()
