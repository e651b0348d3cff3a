"""Paths that a backend chooses, and what it writes down about them, batch after batch."""

from dataclasses import replace
from fractions import Fraction

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.offering import ask, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.fallback import BatchFacts, Decision, FallbackReport, SparsePath, choose_paths

NUM_BATCHES = 16
PATH = SparsePath(
    architectures=frozenset({"sm_80", "sm_90"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    head_dims=frozenset({(64, 64), (128, 128)}),
    block_sizes=frozenset({16, 64}),
    rules=frozenset({"Causal", "Window", "SoftCap"}),
    workspace_bytes=4096,
    leave_above=Fraction(3, 4),
    enter_below=Fraction(1, 2),
)
RATES = (0, 10, 49, 50, 51, 60, 74, 75, 76, 100)  # of 100 blocks: both thresholds, and either side of them
# blocks of so many: thresholds that whole percents do not tell from what lies beside them, and a batch without any
FINE_RATES = ((300, 400), (301, 400), (200, 400), (199, 400), (60, 70), (0, 0), (60, 100))
MISFITS: dict[str, dict[str, object]] = {
    "architecture": {"architecture": "sm_70"},
    "dtype": {"dtype": "float32"},
    "head_dim": {"head_dim": (64, 128)},  # each is supported, the two together are not
    "block_size": {"block_size": 48},
    "rule": {"rules": ("Causal", "Document")},
    "workspace": {"workspace_bytes": 4097},
}
FAULTS = ("SAFE-OWNER", "COORD-PAGE-RANGE", "SET-RANGE")


@checks(
    "FALLBACK-REASON", "FALLBACK-RECORD", "FALLBACK-COUNT", "FALLBACK-HYSTERESIS", "FALLBACK-EMPTY",
    "FALLBACK-SECURITY",
)  # fmt: skip
def check_fallbacks(trial: Trial) -> list[Finding]:
    """Every batch takes the path of its first reason, and everything that fell back is recorded and counted."""
    if lacks(trial, "choose_paths"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for batches in (lone_batches(draw), [drawn_batch(draw) for _ in range(NUM_BATCHES)]):
        got: FallbackReport = ask(trial, "choose_paths", batches, PATH)
        wanted = choose_paths(batches, PATH)
        findings += compare_decisions(batches, got, wanted) or compare_figures(got, wanted)
    return findings


def sound_batch(draw: Draw) -> BatchFacts:
    """A batch that the sparse path takes, at the very limits of what it takes."""
    return BatchFacts(
        architecture=draw.choice(("sm_80", "sm_90")),
        dtype=draw.choice(("bfloat16", "float16")),
        head_dim=draw.choice(((64, 64), (128, 128))),
        block_size=draw.choice((16, 64)),
        rules=tuple(draw.subset(("Causal", "Window", "SoftCap"), draw.integer(0, 3))),
        workspace_bytes=draw.choice((0, 4096)),
        seqlens_kv=tuple(draw.integers(draw.integer(1, 5), 0, 9000)),
        num_candidate_blocks=draw.choice(RATES),
        num_blocks=100,
        seconds=draw.integer(1, 64) / 64,
    )


def lone_batches(draw: Draw) -> list[BatchFacts]:
    """Each reason by itself at a low rate, empty rows, faults, and the rate over both thresholds and back, twice.

    The last rise comes with a batch that falls back for another reason. Batches have one to four requests.
    """
    low = replace(sound_batch(draw), num_candidate_blocks=10)
    misfits = draw.shuffled([replace(low, **changed) for changed in MISFITS.values()])  # type: ignore[arg-type]
    rates = [replace(low, num_candidate_blocks=rate) for rate in (75, 76, 75, 50, 49, 60)]
    rates += [replace(low, num_candidate_blocks=some, num_blocks=of) for some, of in FINE_RATES]
    rise = [replace(misfits[0], num_candidate_blocks=76), replace(low, num_candidate_blocks=60)]
    faults = [replace(facts, fault=draw.choice(FAULTS)) for facts in (low, misfits[0])]
    batches = [low, *misfits, replace(low, num_empty_rows=3), *faults, *rates, *rise]
    return [replace(one, seqlens_kv=tuple(draw.integers(i % 4 + 1, 0, 9000))) for i, one in enumerate(batches)]


def drawn_batch(draw: Draw) -> BatchFacts:
    """A batch with none, one or several reasons to fall back, now and then a fault, now and then empty rows."""
    batch = sound_batch(draw)
    for name in draw.subset(list(MISFITS), draw.choice((0, 0, 1, 2, 3))):
        batch = replace(batch, **MISFITS[name])  # type: ignore[arg-type]
    fault = draw.choice(FAULTS) if draw.integer(0, 5) == 0 else None
    return replace(batch, fault=fault, num_empty_rows=draw.choice((0, 0, 2)))


def compare_decisions(batches: list[BatchFacts], got: FallbackReport, wanted: FallbackReport) -> list[Finding]:
    """The first decision that is another than it should be; what follows may follow from it."""
    if len(got.decisions) != len(batches):
        return [wrong(f"{len(got.decisions)} decisions for {len(batches)} batches", "FALLBACK-REASON")]
    for i, (ours, right) in enumerate(zip(got.decisions, wanted.decisions, strict=True)):
        if ours != right:
            rates = [f"{batch.num_candidate_blocks}/{batch.num_blocks}" for batch in batches[: i + 1]]
            message = f"batch {i} runs {told(ours)}, not {told(right)}, after rates of {', '.join(rates)}"
            return [wrong(message, decision_clause(batches[i], ours, right))]
    return []


def told(decision: Decision) -> str:
    return decision.path if decision.reason is None else f"{decision.path} for {decision.reason}"


def decision_clause(batch: BatchFacts, ours: Decision, right: Decision) -> str:
    """The clause that a wrong decision breaks."""
    if "refused" in (ours.path, right.path):
        return "FALLBACK-SECURITY"
    if ours.path == right.path:
        return "FALLBACK-REASON"
    if "dense_rate" in (ours.reason, right.reason):
        return "FALLBACK-HYSTERESIS"
    return "FALLBACK-EMPTY" if batch.num_empty_rows and right.path == "sparse" else "FALLBACK-REASON"


def compare_figures(got: FallbackReport, wanted: FallbackReport) -> list[Finding]:
    """Records and counters that are others than the decisions make them."""
    findings = []
    if tuple(got.records) != wanted.records:
        pairs = zip(got.records, wanted.records, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got.records), len(wanted.records)))
        message = f"record {at} of {len(got.records)} is not that of fallback {at} of {len(wanted.records)}"
        findings.append(wrong(message, "FALLBACK-RECORD", state="FAIL_value"))
    for name in ("counts", "num_refused"):
        if getattr(got, name) != getattr(wanted, name):
            message = f"{name} is {getattr(got, name)}, not {getattr(wanted, name)}"
            findings.append(wrong(message, "FALLBACK-COUNT", state="FAIL_value"))
    if abs(got.request_share - wanted.request_share) > 1e-9:
        message = f"the share of requests is {got.request_share}, not {wanted.request_share}"
        findings.append(wrong(message, "FALLBACK-COUNT", state="FAIL_value"))
    return findings
