"""A control for racecheck: one group of warps hands another what it wrote, as PTX's memory model orders it.

Every thread of the first group writes its number to shared memory, the group's barrier follows, and one thread arrives
at an mbarrier that the second group waits for. Barriers of a group order what its threads did before, and an arrival
releases what came before it: no race. What racecheck says of it, it says of `hopper_keys_kernel` and
`hopper_rows_kernel`, which hand lse, delta and sums over in the same way; only the arriving thread's own number goes
unreported.

    compute-sanitizer --tool racecheck python3 tests/kernels/hand_over.py
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnconform.kernels.sparse_attention.hopper_tiles import finish_writing, group_barrier, make_barriers

THREADS = gl.constexpr(128)


@gluon.jit
def read(numbers, handed_over, out_ptr):
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    mbarrier.wait(handed_over.index(0), 0)
    gl.store(out_ptr + thread, numbers.load(thread.type.layout))


@gluon.jit
def write(numbers, handed_over, out_ptr):
    thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    numbers.store(thread)
    group_barrier()
    mbarrier.arrive(handed_over.index(0), count=1)


@gluon.jit
def hand_over_kernel(out_ptr):
    numbers = gl.allocate_shared_memory(gl.int32, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handed_over = make_barriers(1, 1)
    finish_writing()
    arguments = (numbers, handed_over, out_ptr)
    gl.warp_specialize([(read, arguments), (write, arguments)], [4], [120])


if __name__ == "__main__":
    out = torch.zeros(THREADS.value, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, num_warps=4)
    assert out.tolist() == list(range(THREADS.value))
