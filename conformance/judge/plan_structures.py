"""Keys, counters, capacities, task storage and index storage of a backend's plans, against the reference's."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.offering import MAX_LISTED, ask, check_refuses, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.coordinates import IntArray
from attnconform.reference.plan_cache import CacheCounts, CallDescription, PlanCache
from attnconform.reference.plan_storage import WAIT, Planned, Sizes, StorageEvent, plan_each
from attnconform.reference.rules import Alibi, And, Causal, Document, MaskRule, Or, SoftCap, Window
from attnconform.reference.task_table import TaskTable

Relation = Literal["same", "other", "free"]
TARGET, CAPACITY = 3, 12  # entries a task, tasks a plan
NUM_CALLS = 16


@dataclass(frozen=True)
class Change:
    """Another call, and whether its keys must be those of the first."""

    what: str
    make: Callable[[CallDescription], CallDescription]
    plan: Relation
    mask: Relation
    rule: MaskRule | None = None  # of the call that is changed; None: its own


def setting(what: str, plan: Relation, mask: Relation, **fields_of_call: Any) -> Change:
    """A change of some fields to fixed values, which no drawn call has."""
    return Change(what, lambda call: replace(call, **fields_of_call), plan, mask)


def setting_rule(what: str, plan: Relation, mask: Relation, rule: MaskRule, other: MaskRule) -> Change:
    """A change of one mask rule to another."""
    return Change(what, lambda call: replace(call, mask_rule=other), plan, mask, rule)


def with_document_at(start: int) -> And:
    return And((Causal(), Document(((0, start),))))


def with_slopes(call: CallDescription, slope: float) -> Alibi:
    return Alibi((slope,) * call.num_qo_heads)


def with_feature(feature: str) -> Callable[[CallDescription], CallDescription]:
    return lambda call: replace(call, features=call.features | {feature})


CAUSAL_WINDOW = And((Causal(), Window(left=9)))
CHANGES: tuple[Change, ...] = (
    Change("the same call, written anew", deepcopy, "same", "same"),
    setting("another architecture", "other", "free", architecture="sm_100"),
    setting("another back end", "other", "other", backend="another"),
    setting("another device", "free", "other", device="cuda:7"),
    setting("another dtype", "other", "free", dtype="float32"),
    setting("another head_dim_qk", "other", "free", head_dim_qk=192),
    setting("another head_dim_vo", "other", "free", head_dim_vo=192),
    Change("another group size", lambda c: replace(c, num_kv_heads=c.num_kv_heads // 2), "other", "free"),
    setting("another page size", "other", "free", page_size=7),
    setting("another layout", "other", "free", layout="HND"),
    setting("another query block size", "other", "other", q_block_size=32),
    setting("another KV block size", "other", "other", kv_block_size=48),
    setting("a cache of codes", "other", "free", features=frozenset({"k int8 token"})),
    Change("codes of V", with_feature("v float8_e4m3 page"), "other", "free"),
    Change("raw keys to be turned", with_feature("rope raw"), "other", "free"),
    setting("another tier", "other", "free", tier=4096),
    setting("one more mask rule", "other", "other", mask_rule=And((with_document_at(5), Window(left=9)))),
    setting("a document that begins elsewhere", "same", "other", mask_rule=with_document_at(3)),
    setting("an edited tensor of the mask rule", "same", "other", mask_version=1),
    Change("the score rules in another order", lambda c: replace(c, score_rules=c.score_rules[::-1]), "other", "same"),
    Change("a score rule less", lambda c: replace(c, score_rules=c.score_rules[:1]), "other", "same"),
    Change(
        "other slopes and another cap",
        lambda c: replace(c, score_rules=(with_slopes(c, 0.125), SoftCap(8.0))),
        "same",
        "same",
    ),
    setting("an edited tensor of a score rule", "same", "same", score_version=1),
    setting("other lengths inside the tier", "same", "other", seqlens_kv=(17, 21)),
    setting("lengths in another order", "same", "other", seqlens_kv=(20, 16)),
    setting("other query lengths", "same", "other", seqlens_q=(2, 2)),
    setting("other query offsets", "same", "other", q_offset=(2, 3)),
    setting("one mask for every request", "free", "other", is_one_mask_for_requests=True),
    setting("a mask for each head", "free", "other", is_one_mask_for_heads=False),
    setting("other candidates inside the tier", "same", "free", candidates_version=1),
    setting_rule("a window of another width", "same", "other", CAUSAL_WINDOW, And((Causal(), Window(left=3)))),
    setting_rule("a limit on the right", "other", "other", CAUSAL_WINDOW, And((Causal(), Window(left=9, right=0)))),
    setting_rule("a union of the same rules", "other", "other", CAUSAL_WINDOW, Or((Causal(), Window(left=9)))),
)


def drawn_call(draw: Draw) -> CallDescription:
    """A call of two requests with a mask rule and two score rules."""
    num_qo_heads = draw.choice((8, 16, 32))
    return CallDescription(
        architecture=draw.choice(("sm_80", "sm_90", "gfx942")),
        backend="triton",
        device="cuda:0",
        dtype=draw.choice(("bfloat16", "float16")),
        head_dim_qk=draw.choice((64, 128)),
        head_dim_vo=draw.choice((64, 128)),
        num_qo_heads=num_qo_heads,
        num_kv_heads=draw.choice((2, 4)),
        page_size=draw.choice((16, 32)),
        layout="NHD",
        q_block_size=draw.choice((1, 16)),
        kv_block_size=draw.choice((16, 64)),
        tier=draw.choice((64, 256)),
        mask_rule=with_document_at(5),
        score_rules=(Alibi((0.5,) * num_qo_heads), SoftCap(30.0)),
        features=frozenset(draw.subset(("dropout", "rope"), draw.integer(0, 2))),
        seqlens_q=(1, 1),
        seqlens_kv=(16, 20),
        q_offset=(15, 19),
    )


@checks("PLAN-KEY", "PLAN-VALUES", "PLAN-MASK-KEY")
def check_keys(trial: Trial) -> list[Finding]:
    """Keys differ where code or a mask's structure does, and are the same where neither does."""
    call, findings = drawn_call(Draw(trial.case.seed)), []
    for method in ("plan_key", "mask_key"):
        if lacks(trial, method):
            continue
        for change in CHANGES:
            relation = change.plan if method == "plan_key" else change.mask
            first = call if change.rule is None else replace(call, mask_rule=change.rule)
            is_same = bool(ask(trial, method, change.make(first)) == ask(trial, method, first))
            if relation != "free" and is_same != (relation == "same"):
                message = f"{method} is {'the same' if is_same else 'another'} for {change.what}"
                findings.append(wrong(message, key_clause(method, relation)))
    return findings


def key_clause(method: str, relation: Relation) -> str:
    if method == "mask_key":
        return "PLAN-MASK-KEY"
    return "PLAN-KEY" if relation == "other" else "PLAN-VALUES"


@checks("PLAN-COUNT")
def check_counts(trial: Trial) -> list[Finding]:
    """Each call counts once in either cache, as a hit or a miss of that cache's own key."""
    if lacks(trial, "count_lookups"):
        return []
    draw = Draw(trial.case.seed)
    call, settled = drawn_call(draw), [change for change in CHANGES if "free" not in (change.plan, change.mask)]
    calls = [call, *(draw.choice(settled).make(call) for _ in range(NUM_CALLS))]
    got, cache = ask(trial, "count_lookups", calls), PlanCache()
    for one in calls:
        cache.look_up(one)
    return [
        wrong(f"{name} is {getattr(got, name)}, not {getattr(cache.counts, name)}", "PLAN-COUNT", state="FAIL_value")
        for name in (field.name for field in fields(CacheCounts))
        if getattr(got, name) != getattr(cache.counts, name)
    ]


@checks("PLAN-CAPACITY")
def check_capacities(trial: Trial) -> list[Finding]:
    """Exactly the capacity fits; one more of anything is refused, and bytes that 32 bits would wrap."""
    if lacks(trial, "check_capacity"):
        return []
    names, draw = [field.name for field in fields(Sizes)], Draw(trial.case.seed)
    capacity = Sizes(**dict(zip(names, draw.integers(len(names), 4, 4096), strict=True)))
    ask(trial, "check_capacity", capacity, capacity)
    findings = []
    for name in names:
        need = replace(capacity, **{name: getattr(capacity, name) + 1})
        what = f"{name} one above the capacity"
        findings += check_refuses(trial, "PLAN-CAPACITY", what, "check_capacity", need, capacity)
    for num_bytes in (2**31, 2**32 + 1):
        need = replace(capacity, workspace_bytes=num_bytes)
        what = f"{num_bytes} bytes of workspace"
        findings += check_refuses(trial, "PLAN-CAPACITY", what, "check_capacity", need, capacity)
    return findings


@checks("PLAN-REPLAN", "PLAN-LAYER", "PLAN-CAPACITY")
def check_replanning(trial: Trial) -> list[Finding]:
    """One plan made for list after list runs the tasks of the last list alone, from the same place."""
    if lacks(trial, "plan_each"):
        return []
    indptrs = drawn_layers(Draw(trial.case.seed))
    got: Sequence[Planned] = ask(trial, "plan_each", indptrs, TARGET, CAPACITY)
    wanted = plan_each(indptrs, target=TARGET, capacity=CAPACITY)
    if len(got) != len(wanted):
        return [wrong(f"{len(got)} plans for {len(wanted)} lists", "PLAN-LAYER")]
    findings = []
    for i, (ours, right) in enumerate(zip(got, wanted, strict=True)):
        if ours.was_refused != right.was_refused:
            done = "refused" if ours.was_refused else "accepted"
            findings.append(wrong(f"plan {i} is {done}, with room for {CAPACITY} tasks", "PLAN-CAPACITY"))
        elif entries_of(ours.tasks) != entries_of(right.tasks):
            earlier = [entries_of(plan.tasks) for plan in wanted[:i]]
            message = f"plan {i} runs {entries_of(ours.tasks)}, not {entries_of(right.tasks)}"
            findings.append(wrong(message, replan_clause(entries_of(ours.tasks), earlier, right.was_refused)))
        if ours.address != got[0].address:
            findings.append(wrong(f"the storage of plan {i} lies elsewhere than that of plan 0", "PLAN-LAYER"))
    return findings[:MAX_LISTED]


def drawn_layers(draw: Draw) -> list[IntArray]:
    """Lists of a full plan, of the same rows with their lengths moved, of fewer, of too many, and of few again."""
    lengths = [draw.integer(4, 6), draw.integer(7, 9), draw.integer(1, 3), draw.integer(4, 6)]
    moved = lengths[1:] + lengths[:1]
    layers = [lengths, moved, [draw.integer(1, 2)], [9] * 5, moved[:2], draw.integers(2, 1, 3)]
    return [np.cumsum([0, *layer]) for layer in layers]


def entries_of(tasks: TaskTable) -> dict[int, list[int]]:
    """Entries that the tasks of every row hold, by row, in the order of their splits."""
    held: dict[int, list[int]] = {}
    for task in np.lexsort((tasks.start, tasks.split, tasks.row)).tolist():
        entries = range(int(tasks.start[task]), int(tasks.end[task]))
        held.setdefault(int(tasks.row[task]), []).extend(entries)
    return held


def replan_clause(ours: dict[int, list[int]], earlier: list[dict[int, list[int]]], was_refused: bool) -> str:
    """What a launch of the wrong tasks breaks: it runs those of another layer, or some that were left standing."""
    if was_refused:
        return "PLAN-CAPACITY"
    return "PLAN-LAYER" if ours in earlier else "PLAN-REPLAN"


@checks("PLAN-STORAGE")
def check_storage(trial: Trial) -> list[Finding]:
    """No run in flight finds its indices overwritten, and none waits where storage is free."""
    if lacks(trial, "replay_storage"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for num_buffers in (1, 2, 3):
        events = drawn_events(draw)
        answers: Sequence[int] = ask(trial, "replay_storage", num_buffers, events)
        if len(answers) != len(events):
            return [wrong(f"{len(answers)} answers to {len(events)} events", "PLAN-STORAGE")]
        if message := storage_fault(num_buffers, events, answers):
            findings.append(wrong(f"{num_buffers} buffers: {message}", "PLAN-STORAGE", state="FAIL_race"))
    return findings


def drawn_events(draw: Draw) -> list[StorageEvent]:
    """Updates, launches of several runs from one update, and events of runs in any order."""
    events, in_flight, num_runs = [StorageEvent("update"), StorageEvent("launch", 0)], [0], 1
    for _ in range(24):
        kind = draw.choice(("update", "update", "launch", "launch", "finish"))
        if kind == "update":
            events.append(StorageEvent("update"))
        elif kind == "launch" and len(in_flight) < 4:
            events.append(StorageEvent("launch", num_runs))
            in_flight.append(num_runs)
            num_runs += 1
        elif in_flight:
            run = draw.choice(in_flight)
            in_flight.remove(run)
            events.append(StorageEvent("finish", run))
    return events


def storage_fault(num_buffers: int, events: Sequence[StorageEvent], answers: Sequence[int]) -> str:
    """The first answer that no sound storage gives; empty where all are sound."""
    latest, reads = WAIT, dict[int, int]()
    for at, (event, answer) in enumerate(zip(events, answers, strict=True)):
        if event.kind == "update":
            free = set(range(num_buffers)) - set(reads.values())
            if answer == WAIT and free:
                return f"event {at}, an update, waits although buffer {min(free)} is free"
            if answer != WAIT and answer not in free:
                return f"event {at}, an update, writes buffer {answer}, which a run in flight reads"
            latest = latest if answer == WAIT else answer
        elif event.kind == "launch":
            if answer != latest:
                return f"event {at}, the launch of run {event.run}, reads buffer {answer}, not {latest}"
            reads[event.run] = answer
        elif answer != reads.pop(event.run):
            return f"event {at}, the end of run {event.run}, lets another buffer go"
    return ""
