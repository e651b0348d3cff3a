"""What a run may not do: allocate, read a free slot, take raw indices, compile for other lengths; and what is kept."""

import math
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from attention_case import DEVICE, Case, build_plan, paged
from torch.utils._python_dispatch import TorchDispatchMode

from attnconform.kernels.sparse_attention import PlanError, plan_tier, run
from attnconform.kernels.sparse_attention.autotune import (
    AutotuneCache,
    Distribution,
    Traffic,
    decode_choices,
    tune_key,
)
from attnconform.kernels.sparse_attention.graphs import MAX_GRAPHS, GraphCache, call_or_replay
from attnconform.kernels.sparse_attention.rules import And, Causal, Window
from attnconform.kernels.sparse_attention.tier_cache import TierCache, smallest_tier
from attnconform.kernels.sparse_attention.tier_ring import Buffers, TierRing
from attnconform.kernels.sparse_attention.tuning import NO_CHOICE, Choice, Geometry
from attnconform.reference.plan_storage import StorageEvent, replay_storage

TIER = {
    "page_size": 8,
    "num_pages": 24,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 32,
    "head_dim_vo": 32,
    "sm_scale": 0.2,
    "dtype": torch.float32,
    "device": DEVICE,
    "batch_size": 2,
    "max_seqlen_kv": 64,
    "granularity": "token",
    "sharing": "shared",
}


class NoAllocation(TorchDispatchMode):
    """Every operation that makes a tensor of its own raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            raise MemoryError(f"{func} allocated {tuple(result.shape)}")
        return result


def tensors_of(case):
    out = torch.full((len(case.q), case.num_qo_heads, case.head_dim_vo), math.nan, dtype=case.dtype, device=DEVICE)
    lse = torch.full(out.shape[:2], math.nan, device=DEVICE)
    return (case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)), {"out": out, "lse": lse}


def update_of(seqlens=(64, 40), length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(n, generator=generator)[:length] for n in seqlens]
    inputs = {
        "seqlen_kv": torch.tensor(seqlens, dtype=torch.int32),
        "page_table": torch.randperm(24, generator=generator)[:16].view(2, 8).int(),
        "indptr": torch.tensor([0, length, 2 * length], dtype=torch.int32),
        "indices": torch.cat(ids).int(),
    }
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def test_the_watch_over_allocations_sees_one():
    with pytest.raises(MemoryError, match="allocated"), NoAllocation():
        torch.zeros(3)


@pytest.fixture
def interpreter_allocates_nothing(monkeypatch):
    """The interpreter copies tensors to a host, which a launch on a GPU does not do: those copies are left out."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    launched = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            return launched(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"sharing": "kv_head"}, {"sharing": "kv_head", "seqlen_q": (40, 0, 1, 5)}])
@pytest.mark.usefixtures("interpreter_allocates_nothing")
def test_a_run_allocates_nothing(changes, splits):
    case = Case(mask_rule=Causal(), num_kv_splits=splits, seed=61, **changes)
    planned = build_plan(case)
    inputs, outputs = tensors_of(case)
    run(planned, *inputs, **outputs)
    want = outputs["out"].clone()
    outputs["out"].fill_(math.nan)
    with NoAllocation():
        run(planned, *inputs, **outputs)
    assert torch.equal(outputs["out"], want)


@pytest.mark.usefixtures("interpreter_allocates_nothing")
def test_an_update_and_a_step_allocate_nothing():
    tier = plan_tier(**TIER, capacity=64, num_kv_splits=2)
    case = Case(seqlen_q=(1, 1), seqlen_kv=(96, 90), head_dim_qk=32, head_dim_vo=32, seed=62)
    q, k, v = case.q.to(DEVICE), paged(case, case.k)[:24], paged(case, case.v)[:24]
    out, lse = torch.empty_like(q), torch.empty(2, 4, device=DEVICE)
    inputs = update_of()
    for _ in range(2):  # the second one captures the graph
        tier.step(q, k, v, out=out, lse=lse, **inputs)
    with NoAllocation():
        tier.step(q, k, v, out=out, lse=lse, **inputs)
        tier.update(**inputs)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("changes", [{}, {"num_kv_splits": 2}, {"index_parts": 3}])
def test_what_lies_in_free_slots_of_a_tier_never_matters(poison, changes):
    tier = plan_tier(**TIER, capacity=64, **changes)
    generator = torch.Generator().manual_seed(63)
    q = torch.randn(2, 4, 32, generator=generator).to(DEVICE)
    k, v = (torch.randn(24, 8, 2, 32, generator=generator).to(DEVICE) for _ in range(2))
    inputs = update_of()
    tier.update(**inputs)
    want = run(tier.plan, q, k, v)
    lengths = tier.list_lengths.tolist()
    used = torch.cat([tier.plan.list_slots[i * 64 : i * 64 + n] for i, n in enumerate(lengths)])
    free = torch.ones(24 * 8, dtype=torch.bool, device=DEVICE)
    free[used] = False
    assert int(free.sum()) == 24 * 8 - 18
    for cache in (k, v):
        cache.view(24 * 8, 2, 32)[free] = poison
    for got, expected in zip(run(tier.plan, q, k, v), want, strict=True):
        assert torch.equal(got, expected)


def test_a_run_takes_a_plan_and_never_raw_indices():
    inputs, outputs = tensors_of(Case(seed=64))
    with pytest.raises(PlanError, match=r"^plan is Tensor, but run takes what plan returned"):
        run(torch.zeros(4, dtype=torch.int32), *inputs, **outputs)


class Repeats:
    def __init__(self, launch):
        self.replay = launch


def test_launches_on_the_same_tensors_are_captured_at_the_second_call_and_replayed_after_it():
    graphs, calls = GraphCache(capture=lambda launch: Repeats(lambda: calls.append("replay"))), []
    a, b = torch.zeros(1), torch.zeros(1)
    for tensors in ((a, None), (a, None), (a, None), (b, None), (a, None)):
        graphs.call(tensors, lambda: calls.append("launch"))
    assert calls == ["launch", "replay", "replay", "launch", "replay"]
    assert graphs.num_captures == 1


def test_a_captured_call_is_known_by_its_ids_alone_but_not_inside_a_graph_of_the_callers(monkeypatch):
    graphs, calls = GraphCache(capture=lambda launch: Repeats(lambda: calls.append("replay"))), []
    tensors = (torch.zeros(1), None)
    key = tuple(map(id, tensors))
    is_capturing = "attnconform.kernels.sparse_attention.graphs.is_capturing"
    monkeypatch.setattr(is_capturing, lambda: False)
    graphs.call(tensors, lambda: calls.append("launch"))
    assert not graphs.replay(key)
    graphs.call(tensors, lambda: calls.append("launch"))
    assert graphs.replay(key)
    assert calls == ["launch", "replay", "replay"]
    monkeypatch.setattr(is_capturing, lambda: True)
    assert not graphs.replay(key)
    assert len(calls) == 3


def test_a_graph_is_captured_on_a_stream_of_the_device_that_its_launches_use(monkeypatch):
    """Where another GPU is the current one, launches would run on the plan's own and leave the graph empty."""
    current, seen = [0], []

    @contextmanager
    def on(device):
        current.append(device.index)
        yield
        current.pop()

    def capture(graph, stream=None):
        seen.append(("captures", stream))
        return nullcontext()

    fakes = {
        "current_device": lambda: current[-1], "device": on, "Stream": lambda: current[-1], "graph": capture,
        "CUDAGraph": lambda: Repeats(lambda: seen.append(("replays", current[-1]))),
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = GraphCache()
    for _ in range(2):
        call_or_replay(graphs, torch.device("cuda", 1), (None,), lambda: seen.append(("launches", current[-1])))
    assert seen == [("launches", 1), ("captures", 1), ("launches", 1), ("replays", 1)]
    assert current == [0]


def test_only_so_many_graphs_are_kept():
    graphs = GraphCache(capture=lambda launch: Repeats(launch))
    for _ in range(3 * MAX_GRAPHS):
        graphs.call((torch.zeros(1),), lambda: None)
    assert len(graphs.seen) == MAX_GRAPHS


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_a_tier_is_found_again_and_one_of_other_numbers_or_code_is_another():
    cache = TierCache((16, 64))
    first = cache.tier(9, **TIER)
    assert cache.tier(16, **TIER) is first
    others = [{"layout": "HND"}, {"dtype": torch.float16}, {"page_size": 4}, {"window": 3}, {"batch_size": 1}]
    assert all(cache.tier(9, **TIER | change) is not first for change in others)
    assert cache.tier(17, **TIER).capacity == 64
    assert (cache.hits, cache.misses) == (1, 7)


def test_lists_that_outgrow_their_tier_are_planned_again_and_what_outgrows_all_is_refused():
    cache = TierCache((8, 32))
    tier = cache.update(cache.tier(5, **TIER), arguments=TIER, **update_of(length=9))
    assert tier.capacity == 32
    assert tier.list_lengths.tolist() == [9, 9]
    assert cache.num_replans == 1
    with pytest.raises(PlanError, match=r"^length is 33, but the largest tier is 32 \[FORMAT-TIER-LIMIT\]$"):
        cache.update(tier, arguments=TIER, **update_of(length=40))


@pytest.mark.parametrize(
    ("tiers", "message"), [((), r"tiers is \(\)"), ((4, 4), r"tiers\[1\] is 4"), ((0,), r"tiers\[0\] is 0")]
)
def test_tiers_ascend(tiers, message):
    with pytest.raises(PlanError, match=f"^{message}"):
        smallest_tier(3, tiers)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_storage_is_handed_out_as_the_reference_hands_it_out(count):
    rng = torch.Generator().manual_seed(count)
    events, flying, started = [StorageEvent("update")], [], 0
    for _ in range(60):
        kind = int(torch.randint(3, (), generator=rng))
        if kind == 0:
            events.append(StorageEvent("update"))
        elif kind == 1 or not flying:
            events.append(StorageEvent("launch", started))
            flying.append(started)
            started += 1
        else:
            done = flying.pop(int(torch.randint(len(flying), (), generator=rng)))
            events.append(StorageEvent("finish", done))
    buffers, got = Buffers(count), []
    for event in events:
        answer = buffers.update() if event.kind == "update" else getattr(buffers, event.kind)(event.run)
        got.append(-1 if answer is None else answer)
    assert got == replay_storage(count, events)


class Pending:
    """A run that ends when a test says so."""

    def __init__(self, device):
        self.over = False

    def is_over(self):
        return self.over

    def wait(self):
        self.over = True


def test_an_update_is_launched_on_the_device_of_its_tier(monkeypatch):
    tier, seen = plan_tier(**TIER, capacity=64), []

    @contextmanager
    def on(device):
        seen.append(device)
        yield
        seen.append("over")

    module = "attnconform.kernels.sparse_attention.tier"
    monkeypatch.setattr(f"{module}.launching_on", on)
    monkeypatch.setattr(f"{module}.Tier._launch", lambda tier, inputs: seen.append("launched"))
    tier.update(**update_of(seed=0))
    assert seen == [tier.plan.device, "launched", "over"]


def test_an_update_never_writes_what_a_run_in_flight_reads():
    ring = TierRing(2, event=Pending, **TIER, capacity=64, with_positions=True)
    plans = []
    for seed in range(3):
        tier = ring.update(**update_of(seed=seed))
        lists = tier.plan.list_positions.clone()
        ring.run(plans.append)
        assert plans[-1] is tier.plan
        if seed == 1:
            assert plans[0] is not plans[1]
            assert ring.num_waits == 0
        assert torch.equal(tier.plan.list_positions, lists)
    assert ring.num_waits == 1
    assert plans[2] is plans[0]
    with pytest.raises(PlanError, match=r"^num_buffers is 0"):
        Buffers(0)


# -- autotune ---------------------------------------------------------------------------------------------------------

GEOMETRY = Geometry(32, 8, 128, 128, 2, "kv_head", None, None, 132)


def key_of(lengths=(4224,) * 8, num_rows=64):
    return tune_key(
        GEOMETRY, dtype=torch.bfloat16, page_size=16, num_rows=num_rows, lengths=lengths, device=torch.device("cpu")
    )


def test_like_distributions_share_a_key_and_others_do_not():
    assert key_of((4224,) * 8) == key_of((4200, 4224) * 4)
    others = [key_of((900,) * 8), key_of((4224,) * 7 + (60000,)), key_of(num_rows=4)]
    assert len({key_of(), *others}) == 4
    assert Distribution.of([]) == Distribution(mean=0, p95=0, longest=0, dispersion=0)


def test_the_safe_configuration_is_served_until_something_is_measured():
    cache, fast = AutotuneCache(), Choice(num_warps=8)
    assert cache.serve(key_of()) == NO_CHOICE
    assert cache.pending == {key_of(): 1}
    cache.tune(key_of(), [Traffic(weight=1, seconds=lambda choice: 1.0 if choice == fast else 2.0)], [fast])
    assert cache.serve(key_of()) == fast
    assert cache.pending == {}


def test_the_choice_is_the_best_over_the_weighted_traffic_and_not_over_one_call():
    often, seldom = Choice(num_warps=4), Choice(num_warps=8)
    traffic = [
        Traffic(weight=9, seconds=lambda choice: {often: 1.0, seldom: 1.5}.get(choice, 2.0)),
        Traffic(weight=1, seconds=lambda choice: {often: 3.0, seldom: 1.0}.get(choice, 2.0)),
    ]
    assert AutotuneCache().tune(key_of(), traffic, [seldom, often]).choice == often
    with pytest.raises(PlanError, match="traffic is 0"):
        AutotuneCache().tune(key_of(), [], [often])


def test_a_choice_that_does_not_launch_is_left_out():
    def seconds(choice):
        if choice == Choice(tile_kv=128):
            raise PlanError("SAFE-SHAPE", "tile_kv", 128, "too large")
        return 1.0

    entry = AutotuneCache().tune(key_of(), [Traffic(weight=1, seconds=seconds)], [Choice(tile_kv=128)])
    assert entry.choice == NO_CHOICE


def test_entries_survive_a_file_and_one_of_another_machine_or_compiler_is_refused_in_one_line(tmp_path):
    cache = AutotuneCache()
    cache.tune(key_of(), [Traffic(weight=1, seconds=lambda choice: float(choice == NO_CHOICE))], decode_choices()[:1])
    path = tmp_path / "tuned.json"
    cache.save(path)
    text = path.read_text()
    assert AutotuneCache.load(path, device=torch.device("cpu")).entries == cache.entries
    for name, value in (("architecture", "cpu"), ("compiler", key_of().compiler)):
        path.write_text(text.replace(f'"{value}"', '"other 9"'))
        with pytest.raises(PlanError) as caught:
            AutotuneCache.load(path, device=torch.device("cpu"))
        assert str(caught.value) == f"entries.{name}[0] is other 9, but this is {value} [PLAN-KEY]"
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"^format is None"):
        AutotuneCache.load(path, device=torch.device("cpu"))


@pytest.mark.parametrize("choice", [Choice(tile_kv=16, num_kv_splits=3), Choice(num_warps=2, num_stages=1)])
def test_a_choice_changes_no_answer(choice):
    case = Case(sharing="kv_head", mask_rule=Causal(), tile_kv=None, seed=65)
    inputs, outputs = tensors_of(case)
    run(build_plan(case), *inputs, **outputs)
    out, lse = run(build_plan(case, choice=choice), *inputs)
    torch.testing.assert_close(out, outputs["out"], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, outputs["lse"], rtol=2e-6, atol=2e-6)


# -- compilation ------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_again_where_only_lengths_or_candidates_change():
    """In a process that compiles: every specialization that launches ask for is counted, and none is built."""
    script = Path(__file__).with_name("count_specializations.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    ones = dict.fromkeys(("decode", "prefill", "hopper", "union", "tier", "block_mask"), "1")
    assert counts == {**ones, "page_size": "2"}


def test_rules_of_other_numbers_are_data():
    case = Case(sharing="kv_head", seed=66)
    first, second = (build_plan(case, mask_rule=And((Causal(), Window(left=w)))) for w in (2, 9))
    assert first.mask_fn is second.mask_fn is None
    assert first.launches[0].shape == second.launches[0].shape
