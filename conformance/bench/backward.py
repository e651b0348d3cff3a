"""Suite backward: gradients of long prompts and of chosen blocks; its parts, its two modes, and their repeat spread."""

from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.figures import Figures, plan_figures
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex_backward import flex_backward
from attnconform.conformance.bench.peers.peer import time_peer
from attnconform.conformance.bench.peers.sdpa_backward import sdpa_backward
from attnconform.conformance.bench.prefill import OurPrefill
from attnconform.conformance.bench.prefill_work import PrefillWork, make_inputs, works
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Call, measure

MODES = ("kv_centric", "atomic")
PEERS = {"flex": flex_backward, "sdpa": sdpa_backward}
NAMED = ("window 4096", "causal")  # beginnings of the prompts whose backward is timed


def chosen_works(machine: Machine) -> list[PrefillWork]:
    """One window without further rules, and one causal batch."""
    plain = [w for w in works(machine) if not (w.documents or w.alibi or w.soft_cap)]
    return [w for w in plain if w.name.removeprefix("tiny ").startswith(NAMED)]


def backward_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Both modes of every prompt."""
    for work in chosen_works(machine):
        yield from work_rows(work, machine, options)
        machine.release()


def work_rows(work: PrefillWork, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Gradients by either mode, the transposition that one of them needs, and the peer's gradients."""
    from attnconform.kernels.sparse_attention import backward, transpose_plan

    forward = OurPrefill(work, make_inputs(work, machine))
    forward.run()
    dout = torch.randn_like(forward.out)
    transposed = transpose_plan(forward.plan)
    gradients: dict[str, Any] = {}

    def call_of(mode: str) -> Call:
        def call() -> None:
            saved = (*forward.inputs, forward.out, forward.lse, dout)
            gradients[mode] = backward(
                forward.plan, *saved, mode=mode, transposed=transposed if mode == "kv_centric" else None
            )

        return call

    calls = {f"backward {mode}": call_of(mode) for mode in MODES}
    calls["transpose"] = lambda: transpose_plan(forward.plan)
    samples = {stage: measure(call, machine, seconds=options.seconds) for stage, call in calls.items()}
    spreads = {mode: repeat_spread(call_of(mode), gradients, mode) for mode in MODES}
    agreement = max(relative_error(a, b.float()) for a, b in zip(*(gradients[m][:3] for m in MODES), strict=True))
    peers, build = {}, PEERS.get(options.peer or "")
    if build is not None:
        peers = time_peer(
            options.peer or "", lambda: build(work, forward.inputs, dout, machine), machine,
            (gradients["kv_centric"].dq, None), seconds=options.seconds,
        )  # fmt: skip
    figures = backward_figures(work, forward, machine)
    for stage, taken in samples.items():
        mode = stage.removeprefix("backward ")
        yield BenchRow(
            suite="backward",
            phase="prefill",
            work=work.name,
            stage=stage,
            ours=taken.timing,
            figures=replaced(figures if mode in MODES else Figures(), recompiles=taken.recompiles),
            peer=peers.get("backward", peers.get("")) if mode == "kv_centric" else None,
            error=agreement if mode in MODES else None,
            path=path_of(forward.plan) + (f", repeats differ by {spreads[mode]:.1e}" if mode in spreads else ""),
            kernels=look_inside([calls[stage]], machine).kernels,
        )


def repeat_spread(call: Call, gradients: dict[str, Any], mode: str) -> float:
    """How far apart two runs of one mode are, the worst of its gradients; 0 where it repeats bit for bit."""
    call()
    first = [x.clone() for x in gradients[mode][:3]]
    call()
    return max(relative_error(a, b.float()) for a, b in zip(first, gradients[mode][:3], strict=True))


def backward_figures(work: PrefillWork, forward: OurPrefill, machine: Machine) -> Figures:
    """Five products where the forward has two; everything it reads, twice, and the gradients."""
    figures = plan_figures(
        forward.plan,
        processors=machine.processors,
        lengths=work.row_lengths.numpy(),
        edges=work.edges * work.num_qo_heads,
        bytes_ideal=2 * work.bytes,
    )
    return replaced(figures, flops_useful=figures.flops_useful * 5 // 2, flops_executed=figures.flops_executed * 5 // 2)
