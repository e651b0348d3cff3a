"""`attnconform bench --diagnose`: four runs of one batch, four groups of figures, and what the decision tree says."""

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import PlanRun
from attnconform.conformance.bench.counters import Counters
from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.evidence import Compute, Evidence, FixedCost, Memory, Scheduling, Times
from attnconform.conformance.bench.figures import Figures, Work, longest_over_fair, work_of
from attnconform.conformance.bench.honesty import ERROR_BOUND, output_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.seeded.subjects import Subject
from attnconform.conformance.bench.selector import Selector
from attnconform.conformance.bench.slices import slice_events
from attnconform.conformance.bench.timing import Ceilings, Samples, measure
from attnconform.conformance.bench.tree import Finding, diagnose

HOST_STEPS = 200  # of the end-to-end run, so that a P99 has two above it


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and what it says."""

    subject: str
    error: float  # of the answer: a diagnosis of a wrong answer is worth nothing
    evidence: Evidence
    findings: list[Finding]

    @property
    def conclusion(self) -> str:
        return self.findings[0].conclusion if self.findings else "no conclusion from these times"


def diagnose_subject(
    name: str,
    make: Callable[[list[DecodeWork], Machine], Subject],
    batches: list[DecodeWork],
    machine: Machine,
    ceilings: Ceilings,
    counters: Counters,
) -> Diagnosis:
    """Runs a subject on batches that share a cache; the first is the one that all four runs see."""
    subject = make(batches, machine)
    error = output_error(lambda: subject.answer(batches[0]), batches[0])
    if not error <= ERROR_BOUND:
        raise ValueError(
            f"{subject.name} is wrong by {error:.1e}, more than {ERROR_BOUND:.0e}: there is nothing to diagnose"
        )
    evidence = gather_evidence(subject, batches, machine, ceilings, counters.of(name))
    findings = diagnose(evidence) if machine.is_real else []  # an interpreter's times accuse everyone
    return Diagnosis(subject=subject.name, error=error, evidence=evidence, findings=findings)


def gather_evidence(
    subject: Subject, batches: list[DecodeWork], machine: Machine, ceilings: Ceilings, counted: Figures | None
) -> Evidence:
    """Dense, index only, fixed candidates, end to end."""
    work = batches[0]
    dense = measure(PlanRun.dense(work), machine, seconds=0.2).timing
    index = measure(lambda: subject.index(work), machine, seconds=0.2).timing
    subject.index(work)
    attention = measure(lambda: subject.attend(work), machine, seconds=0.3).timing
    dealt = work_of(subject.plan)
    inside = look_inside([lambda: subject.attend(work)], machine)
    selector, end_to_end = selector_times(subject, work, machine)
    steps, fixed = run_steps(subject, batches, machine)
    times = Times(
        dense=dense.median,
        index=index.median,
        attention=attention.median,
        merge=inside.time_of("merge_kernel"),
        selector=selector,
        end_to_end=end_to_end,
        host_median=steps.timing.host.median,
        host_p99=steps.timing.host.p99,
    )
    return Evidence(
        subject=subject.name,
        times=times,
        memory=memory_of(work, ceilings, counted),
        compute=compute_of(work, dealt, ceilings, counted),
        scheduling=scheduling_of(work, dealt, machine, counted),
        fixed=fixed,
        slices=slice_events(steps.by_host(), [b.facts for b in batches]),
        kernels=inside.kernels,
    )


def selector_times(subject: Subject, work: DecodeWork, machine: Machine) -> tuple[float, float]:
    """Route and top-k of the longest row's count for every list; and these with index and attention after them.

    A selector gives lists of one length, and this batch is ragged: its own lists are what is indexed then.
    """
    selector = Selector.of(work, int(work.list_lengths.max()) // work.shape.block_size)

    def select() -> torch.Tensor:
        return selector.topk(selector.route(work.q))

    def step() -> None:
        select()
        subject.index(work)
        subject.attend(work)

    alone, whole = (measure(call, machine, seconds=0.2).timing.median for call in (select, step))
    return alone, whole


def run_steps(subject: Subject, batches: list[DecodeWork], machine: Machine) -> tuple[Samples, FixedCost]:
    """Whole steps over all batches in turn, and what the host did in them."""
    calls = [partial(subject.step, batch) for batch in batches]
    for call in calls:
        call()
    before, allocated = subject.fixed, device_allocations(machine)
    steps = measure(calls, machine, seconds=0.3, host_events=HOST_STEPS)
    after = subject.fixed
    fixed = replaced(
        after,
        waits=look_inside(calls[:1], machine).waits,
        device_allocations=device_allocations(machine) - allocated,
        replans=after.replans - before.replans,
        graph_exits=after.graph_exits - before.graph_exits,
    )
    return steps, fixed


def device_allocations(machine: Machine) -> int:
    """Allocations by the driver so far."""
    if not machine.is_real:
        return 0
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def memory_of(work: DecodeWork, ceilings: Ceilings, counted: Figures | None) -> Memory:
    """Bytes that must move, and those that did."""
    return Memory(
        bytes_ideal=work.bytes,
        bytes_output=work.q.nbytes + 4 * work.shape.batch * work.shape.num_qo_heads,
        bytes_dram=counted.bytes_dram if counted else None,
        bytes_written_dram=counted.bytes_written_dram if counted else None,
        copy_bytes_per_second=ceilings.copy_bytes_per_second,
        l2_hit_rate=counted.l2_hit_rate if counted else None,
    )


def compute_of(work: DecodeWork, dealt: Work, ceilings: Ceilings, counted: Figures | None) -> Compute:
    """FLOPs that are wanted, and how full tiles are."""
    computed = int(dealt.computed_keys.sum())
    return Compute(
        flops=4 * work.edges * work.shape.head_dim,
        matmul_flops_per_second=ceilings.matmul_flops_per_second,
        tensor_core_share=counted.tensor_core_share if counted else None,
        tile_efficiency=int(dealt.keys.sum()) / computed if computed else 1.0,
    )


def scheduling_of(work: DecodeWork, dealt: Work, machine: Machine, counted: Figures | None) -> Scheduling:
    """How evenly the task table deals out keys, and how busy processors were."""
    return Scheduling(
        processors_busy=counted.processors_busy if counted else None,
        longest_over_fair=longest_over_fair(dealt.keys, machine.processors),
        row_mean=float(work.list_lengths.mean()),
        row_max=int(work.list_lengths.max()),
    )
