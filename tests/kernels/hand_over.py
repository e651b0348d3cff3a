"""Controls for racecheck: warps hand others what they wrote, as PTX's memory model orders it, and nothing else.

Every thread of the writer puts its number into shared memory, a barrier of the writer's warps follows, and one thread
arrives at an mbarrier that the reader waits for. Barriers order what their threads did before, and an arrival releases
what came before it: no race. `hopper_keys_kernel` and `hopper_rows_kernel` hand lse, delta and sums over in these ways.

    compute-sanitizer --tool racecheck python3 tests/kernels/hand_over.py group

`warp`: the writer is one warp, whose barrier the assembler leaves out where the warp has not parted. `group`: it is
four. `exchange`: the reader answers in the same place, as two groups that exchange their sums do.
"""

import click
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnconform.kernels.sparse_attention.hopper_tiles import finish_writing, group_barrier, make_barriers

NUMBERS = gl.constexpr(256)


@gluon.jit
def read(numbers, ends, out_ptr, ANSWERS: gl.constexpr):
    place = gl.arange(0, NUMBERS, layout=gl.BlockedLayout([2], [32], [4], [0]))
    mbarrier.wait(ends.index(0), 0)
    found = numbers.load(place.type.layout)
    if ANSWERS:
        group_barrier()
        numbers.store(found + NUMBERS)
        group_barrier()
        mbarrier.arrive(ends.index(1), count=1)
    gl.store(out_ptr + place, found)


@gluon.jit
def write(numbers, ends, out_ptr, NUM_WARPS: gl.constexpr, ANSWERS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [NUM_WARPS], [0])
    place = gl.arange(0, NUMBERS, layout=layout)
    numbers.store(place)
    group_barrier()
    mbarrier.arrive(ends.index(0), count=1)
    if ANSWERS:
        mbarrier.wait(ends.index(1), 0)
        gl.store(out_ptr + NUMBERS + place, numbers.load(layout))


@gluon.jit
def hand_over_kernel(out_ptr, NUM_WARPS: gl.constexpr, ANSWERS: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ends = make_barriers(2, 1)
    finish_writing()
    gl.warp_specialize(
        [(read, (numbers, ends, out_ptr, ANSWERS)), (write, (numbers, ends, out_ptr, NUM_WARPS, ANSWERS))],
        [NUM_WARPS],
        [120],
    )


@click.command()
@click.argument("way", type=click.Choice(["warp", "group", "exchange"]))
def main(way: str) -> None:
    """One launch; fails where a number is not the one that was handed over."""
    out = torch.zeros(2 * NUMBERS.value, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, 1 if way == "warp" else 4, way == "exchange", num_warps=4)
    assert out.tolist()[: NUMBERS.value] == list(range(NUMBERS.value))
    if way == "exchange":
        assert out.tolist()[NUMBERS.value :] == list(range(NUMBERS.value, 2 * NUMBERS.value))


if __name__ == "__main__":
    main()
