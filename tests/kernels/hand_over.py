"""Controls for racecheck: warps hand others what they wrote, as PTX's memory model orders it, and nothing else.

Every thread of the writer puts its numbers into shared memory, a barrier of the writer's warps follows, and arrivals at
an mbarrier that the reader waits for. A barrier orders what its threads did before, and an arrival releases what came
before it, so that one thread's arrival is enough: no race.

    compute-sanitizer --tool racecheck python3 tests/kernels/hand_over.py group once

`warp`: the writer is one warp. `group`: it is four. `exchange`: the reader answers in the same place, as two groups
that exchange their sums do. `once`: one thread arrives; racecheck reports the numbers of all the others. `each`: every
thread arrives too, as `hand_over` of the kernels has them do; nothing is reported.
"""

import click
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnconform.kernels.sparse_attention.hopper_tiles import (
    BY_GROUP,
    BY_WARP,
    finish_writing,
    group_barrier,
    hand_over,
    make_barriers,
)

NUMBERS = gl.constexpr(256)


@gluon.jit
def tell(bar, BY_EACH: gl.constexpr):
    if BY_EACH:
        hand_over(bar)
    else:
        group_barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def read(numbers, told, answered, out_ptr, ANSWERS: gl.constexpr, BY_EACH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    mbarrier.wait(told.index(0), 0)
    found = numbers.load(layout)
    if ANSWERS:
        group_barrier()
        numbers.store(found + NUMBERS)
        tell(answered.index(0), BY_EACH)
    gl.store(out_ptr + gl.arange(0, NUMBERS, layout=layout), found)


@gluon.jit
def write(
    numbers, told, answered, out_ptr, NUM_WARPS: gl.constexpr, ANSWERS: gl.constexpr, BY_EACH: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [NUM_WARPS], [0])
    place = gl.arange(0, NUMBERS, layout=layout)
    numbers.store(place)
    tell(told.index(0), BY_EACH)
    if ANSWERS:
        mbarrier.wait(answered.index(0), 0)
        gl.store(out_ptr + NUMBERS + place, numbers.load(layout))


@gluon.jit
def hand_over_kernel(out_ptr, NUM_WARPS: gl.constexpr, ANSWERS: gl.constexpr, BY_EACH: gl.constexpr):
    ARRIVALS: gl.constexpr = BY_WARP if NUM_WARPS == 1 else BY_GROUP
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = make_barriers(1, ARRIVALS if BY_EACH else 1)
    answered = make_barriers(1, BY_GROUP if BY_EACH else 1)
    finish_writing()
    gl.warp_specialize(
        [
            (read, (numbers, told, answered, out_ptr, ANSWERS, BY_EACH)),
            (write, (numbers, told, answered, out_ptr, NUM_WARPS, ANSWERS, BY_EACH)),
        ],
        [NUM_WARPS],
        [120],
    )


@click.command()
@click.argument("way", type=click.Choice(["warp", "group", "exchange"]))
@click.argument("arrivals", type=click.Choice(["once", "each"]))
def main(way: str, arrivals: str) -> None:
    """One launch; fails where a number is not the one that was handed over."""
    out = torch.zeros(2 * NUMBERS.value, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](out, 1 if way == "warp" else 4, way == "exchange", arrivals == "each", num_warps=4)
    assert out.tolist()[: NUMBERS.value] == list(range(NUMBERS.value))
    if way == "exchange":
        assert out.tolist()[NUMBERS.value :] == list(range(NUMBERS.value, 2 * NUMBERS.value))


if __name__ == "__main__":
    main()
