"""A backward taken apart: its work made, and every launch timed by itself on the same buffers."""

from dataclasses import dataclass
from typing import Any

from attnconform.conformance.bench.backward_subjects import Subject
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.timing import Samples, measure

PART_SECONDS = 0.1
ROWS, TRANSPOSE = "lse and delta", "plan and transpose"


@dataclass(eq=False)
class OurBackward:
    """One mode of one subject, its work planned before."""

    subject: Subject
    hints: Any

    def __post_init__(self) -> None:
        self.work = self.make_work()
        self.gradients: Any = None

    def make_work(self) -> Any:
        """Tasks, transposed lists and cold pages."""
        from attnconform.kernels.sparse_attention import plan_backward

        return plan_backward(self.subject.plan, self.hints)

    def run(self) -> None:
        from attnconform.kernels.sparse_attention import backward

        self.gradients = backward(self.subject.plan, *self.subject.saved, work=self.work)

    @property
    def workspace_bytes(self) -> int:
        return sum(self.work.workspace_bytes.values())

    @property
    def path(self) -> str:
        """What was compiled in, and how far two runs may be apart."""
        shapes = ", ".join("{}x{} warps {} stages {}".format(*launch.shape) for launch in self.work.launches)
        keys = "{}x{} warps {} stages {}".format(*self.work.keys.shape) if self.work.keys else "none"
        spread = self.work.order_spread
        order = f"order moves dk, dv by {spread:.1e} of their terms at most" if spread else "repeats bit for bit"
        return f"sparse_attention.backward {self.hints.mode} [dq {shapes}; dk, dv {keys}], {order}"


def time_parts(ours: OurBackward, machine: Machine, seconds: float) -> dict[str, float]:
    """Microseconds of every part by the device's clock, in the order they run; the work's own by the host's."""
    from attnconform.kernels.sparse_attention.backward import backward_stages, prepare_rows
    from attnconform.kernels.sparse_attention.backward_plan import allocate_buffers
    from attnconform.kernels.sparse_attention.backward_query import RowInputs

    subject, buffers = ours.subject, allocate_buffers(ours.subject.plan, ours.work)
    q, k, v, out, lse, dout = subject.saved
    ours.run()
    inputs = RowInputs(q, k, v, dout, buffers.lse_log2, buffers.delta)

    def rows() -> None:
        prepare_rows(buffers, out, lse, dout, None)

    short = min(PART_SECONDS, seconds)
    parts = {TRANSPOSE: measure(ours.make_work, machine, seconds=short).timing.host.median}
    parts[ROWS] = measure(rows, machine, seconds=short).timing.median
    for stage in backward_stages(subject.plan, ours.work, inputs, tuple(ours.gradients[:3]), buffers):
        taken = measure(stage.launch, machine, seconds=short).timing.median
        parts[stage.name] = parts.get(stage.name, 0.0) + taken
    return parts


def time_whole(ours: OurBackward, machine: Machine, seconds: float) -> Samples:
    """A call as training makes it: everything but the planning."""
    return measure(ours.run, machine, seconds=seconds)


def sum_of(parts: dict[str, float], *names: str) -> float:
    """Those parts that a mode has."""
    return sum(parts.get(name, 0.0) for name in names)
