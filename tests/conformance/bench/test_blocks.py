"""The spread of a row comes from blocks that draw anew what differs between two processes."""

import gc
import os
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from attnconform.conformance.bench.agreement import disagreements
from attnconform.conformance.bench.blocks import BLOCKS, Block, Taken, blocks
from attnconform.conformance.bench.cores import core_of, on_core
from attnconform.conformance.bench.decode_stages import one_time
from attnconform.conformance.bench.machine import TimeUp
from attnconform.conformance.bench.timing import Quantiles, Samples, no_collection, stretches


def quantiles(*medians):
    """As of blocks with these medians."""
    middle = float(np.median(medians))
    return Quantiles(median=middle, p5=middle, p95=middle, p99=middle, events=6, blocks=list(medians))


def samples(device, sets=2):
    values = np.asarray(device, dtype=float)
    return Samples(values, np.arange(len(values)) % sets, values * 2, values * 0.5, num_sets=sets)


def test_blocks_that_only_chance_tells_apart_disagree_once_in_462():
    places = range(2 * BLOCKS)
    verdicts = [
        quantiles(*chosen).agrees_with(quantiles(*(p for p in places if p not in chosen)))
        for chosen in combinations(places, BLOCKS)
    ]
    assert verdicts.count(False) / len(verdicts) == 1 / 462


def test_runs_agree_where_their_blocks_overlap_and_nowhere_else(numbers):
    first = numbers.report(numbers.row())  # blocks from 99 to 101
    assert disagreements(first, numbers.report(numbers.row(ours=numbers.timing(101.5)))) == []
    lines = disagreements(first, numbers.report(numbers.row(ours=numbers.timing(110.0))))
    assert lines == [
        "seed64k: w: attention: 100.0 us (99.0 to 101.0), now 110.0 us (108.9 to 111.1) by the device's clock"
    ]


def test_events_that_scatter_do_not_widen_the_spread_of_equal_blocks():
    scattered = np.tile([50.0, 100.0, 150.0], 200)
    timing = Samples.join([samples(scattered) for _ in range(BLOCKS)]).timing
    assert timing.device.spread == 0.0
    assert timing.device.p95 - timing.device.p5 == 100.0
    assert not timing.device.agrees_with(quantiles(*[110.0] * 6))


def test_equal_events_in_different_blocks_widen_it():
    timing = Samples.join([samples(np.full(100, median)) for median in (48.9, 52.0, 85.0)]).timing
    assert timing.device.low == 48.9
    assert timing.device.high == 85.0
    assert timing.device.agrees_with(quantiles(84.0, 90.0))


def test_a_time_that_only_a_profiler_gives_has_a_spread_too():
    """Two runs of 4.01 and 4.04 us once disagreed, since one value has no events to scatter."""
    parts = [one_time(time, samples([20.0] * 100)) for time in (4.01, 4.02, 4.05)]
    timing = Samples.join(parts).timing
    assert (timing.device.low, timing.device.high, timing.device.events) == (4.01, 4.05, 3)
    assert timing.device.agrees_with(quantiles(4.04))


def test_a_tail_that_lies_in_one_set_of_one_block_stays_there():
    joined = Samples.join([samples([1.0, 2.0, 1.0, 2.0]), samples([3.0, 9.0, 3.0, 9.0])])
    assert joined.num_sets == 4
    assert set(joined.device[joined.sets == 3]) == {9.0}
    assert joined.timing.host.blocks == [3.0, 12.0]


def test_events_of_the_host_keep_the_sets_that_they_read():
    device = np.array([1.0, 2.0, 1.0, 2.0])
    parts = [Samples(device, np.arange(4) % 2, host, host, num_sets=2) for host in (np.full(3, 5.0), np.full(2, 9.0))]
    joined = Samples.join([part.by_host() for part in parts])
    assert joined.sets.tolist() == [0, 1, 0, 2, 3]
    assert joined.device.tolist() == [5.0, 5.0, 5.0, 9.0, 9.0]


def test_one_measurement_is_cut_into_stretches():
    assert np.bincount(stretches(1000)).tolist() == [167, 167, 166, 167, 167, 166]
    assert stretches(1).tolist() == [0]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell cores apart")
def test_a_block_stays_on_one_core_and_gives_the_others_back():
    before = os.sched_getaffinity(0)
    with on_core(3):
        assert os.sched_getaffinity(0) == {core_of(sorted(before), 3)}
    assert os.sched_getaffinity(0) == before


def test_six_blocks_run_on_six_cores_where_there_are_as_many():
    assert len({core_of(list(range(16)), number) for number in range(BLOCKS)}) == BLOCKS


def test_no_garbage_is_collected_while_the_host_is_timed():
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_work_that_has_not_begun_when_the_time_is_up_does_not_begin(machine):
    late = SimpleNamespace(is_real=True, is_warming=False, is_time_up=True, release=machine.release)
    with pytest.raises(TimeUp):
        next(blocks(late))


def test_a_work_that_is_under_way_ends_with_fewer_blocks():
    clock = SimpleNamespace(is_real=True, is_warming=False, is_time_up=False, release=lambda: None)
    numbers = []
    for block in blocks(clock):
        numbers.append(block.number)
        clock.is_time_up = block.number == 1
    assert numbers == [0, 1]


def test_warming_up_calls_every_set_once_in_one_block_and_times_one_event(machine):
    warming, calls = replace(machine, is_warming=True), []
    sets = [partial(calls.append, number) for number in range(3)]
    [block] = blocks(SimpleNamespace(is_real=True, is_warming=True, is_time_up=False, release=lambda: None))
    taken = Block(block.number, warming, block.of).measure(sets, 10.0)
    assert set(calls) == {0, 1, 2}
    assert len(calls) <= 2 * len(sets) + 1
    assert taken.timing.device.events == taken.timing.host.events == 1


def test_the_events_of_all_blocks_are_those_of_one_measurement(machine):
    assert Block(0, machine, of=BLOCKS).measure(lambda: None, 0.1).num_sets == 1
    taken = Taken()
    taken.add("a", samples([1.0]))
    taken.add("a", samples([2.0]))
    assert taken.joined()["a"].timing.device.blocks == [1.0, 2.0]
