"""Tolerance policies as other projects publish them, to be measured on the same mistakes as the judge.

Each is the rule of a project's own tests or benchmark harness, retold from its source: it sees an output, the exact
one and what a plain low-precision implementation gives, and accepts or rejects. None of them looks at lse.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.structure import CandidateStructure, Case, Dtype, Operation, Structure, named
from attnconform.conformance.cases.values import NUMPY_DTYPES, round_to
from attnconform.conformance.deviations.variants import Unfused
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.rules import Alibi, And, Causal, Document, Or, PrefixLM, SoftCap, Window

# torch.testing.assert_close: (rtol, atol) of each dtype
TORCH_DEFAULTS: dict[Dtype, tuple[float, float]] = {
    "float32": (1.3e-6, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
}
FIRST_SEED = 0x90_11_C1
LONG = Structure(
    dtype="bfloat16",
    seqlens_q=(1, 2),
    seqlens_kv=(2042, 1000),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=64,
    head_dim_vo=64,
    page_size=16,
    num_pages=195,
    page_table=tuple(tuple((7 * p + 5) % 193 for p in pages) for pages in (range(128), range(128, 191))),
    sm_scale=0.125,
)
FLASH_NOISE = 0.3  # added and taken away again: what is lost is the noise of the format
FLA_RATIO, FLA_ABSOLUTE = 0.005, 1e-6
FLA_CI_RATIO, FLA_CI_ABSOLUTE = 0.01, 0.3


@dataclass(frozen=True)
class Sample:
    """One output before a policy; three arrays of one shape."""

    observed: FloatArray
    oracle: FloatArray
    baseline: FloatArray  # a textbook implementation with every matrix stored in the dtype
    dtype: Dtype


@dataclass(frozen=True)
class Policy:
    """A published way to decide whether an output is right."""

    name: str
    source: str
    accepts: Callable[[Sample], bool]


def accepts_allclose(sample: Sample) -> bool:
    """Every element within 1e-2 absolute plus 1e-2 relative."""
    return bool(np.allclose(sample.observed, sample.oracle, rtol=1e-2, atol=1e-2))


def accepts_torch_defaults(sample: Sample) -> bool:
    """Every element within the dtype's default tolerances."""
    rtol, atol = TORCH_DEFAULTS[sample.dtype]
    return bool(np.allclose(sample.observed, sample.oracle, rtol=rtol, atol=atol))


def accepts_twice_the_baseline(sample: Sample) -> bool:
    """The largest error is at most twice the baseline's, and twice the noise of adding 0.3 and taking it away."""
    stored = round_to(sample.oracle, sample.dtype)
    noisy = round_to(round_to(stored + FLASH_NOISE, sample.dtype) - FLASH_NOISE, sample.dtype)
    allowed = 2 * largest(sample.baseline - sample.oracle) + 2 * largest(noisy - stored)
    return largest(sample.observed - sample.oracle) <= allowed


def accepts_rms_ratio(sample: Sample) -> bool:
    """The root mean square of the error is below 0.5 % of the oracle's."""
    return largest(sample.observed - sample.oracle) <= FLA_ABSOLUTE or rms_ratio(sample) < FLA_RATIO


def accepts_rms_ratio_in_ci(sample: Sample) -> bool:
    """Under the CI switch a ratio below 1 % or a largest error up to 0.3 only warns."""
    if rms_ratio(sample) < FLA_CI_RATIO or largest(sample.observed - sample.oracle) <= FLA_CI_ABSOLUTE:
        return True
    return accepts_rms_ratio(sample)


def accepts_absolute_or_relative(sample: Sample) -> bool:
    """An element is wrong only where its absolute and its relative error both exceed 1e-2."""
    if not np.isfinite(sample.observed).all():
        return False
    error = np.abs(sample.observed - sample.oracle)
    return not bool(((error > 1e-2) & (error / (np.abs(sample.oracle) + 1e-8) > 1e-2)).any())


def largest(error: FloatArray) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(np.abs(error).max(initial=0.0))


def rms_ratio(sample: Sample) -> float:
    """Root mean square of the error over that of the oracle."""
    error, scale = (
        float(np.sqrt(np.mean(x**2))) if x.size else 0.0 for x in (sample.observed - sample.oracle, sample.oracle)
    )
    return error / (scale + 1e-8)


POLICIES: tuple[Policy, ...] = (
    Policy("allclose 1e-2", "BackendBench, KernelBench for 16-bit dtypes", accepts_allclose),
    Policy("torch.testing defaults", "torch.testing.assert_close", accepts_torch_defaults),
    Policy("2x baseline", "Dao-AILab/flash-attention tests", accepts_twice_the_baseline),
    Policy("RMS ratio 0.005", "flash-linear-attention assert_close", accepts_rms_ratio),
    Policy("RMS ratio 0.005, CI switch", "flash-linear-attention with FLA_CI_ENV=1", accepts_rms_ratio_in_ci),
    Policy("abs and rel > 1e-2", "flashinfer-bench default evaluator", accepts_absolute_or_relative),
)


def rejecting(case: Case, call: Call) -> frozenset[str]:
    """Names of the policies that reject what a backend gave on a case."""
    samples = list(samples_of(case, call))
    return frozenset(p.name for p in POLICIES if not all(p.accepts(sample) for sample in samples))


def samples_of(case: Case, call: Call) -> Iterator[Sample]:
    """out, and dq, dk and dv of a backward case, each with its oracle and the baseline."""
    oracle, baseline, dtype = *targets(case, call.takes_dlse), case.structure.dtype
    for name, observed in call.outputs().items():
        yield Sample(observed, oracle[name], baseline[name], dtype)


Targets = dict[str, FloatArray]  # by output


def targets(case: Case, takes_dlse: bool) -> tuple[Targets, Targets]:
    """The oracle of every output, and the baseline's, which is a textbook implementation in the case's dtype."""
    key = (case.id, takes_dlse)
    if key not in TARGETS:
        trial, dtype = trial_of(case, StepsBackend()), case.structure.dtype
        rough = outputs_of(trial, Unfused(NUMPY_DTYPES[dtype]), takes_dlse)
        TARGETS[key] = outputs_of(trial, Steps(), takes_dlse), {n: round_to(x, dtype) for n, x in rough.items()}
    return TARGETS[key]


def outputs_of(trial: Trial, steps: Steps, takes_dlse: bool) -> Targets:
    """Outputs of a case as some steps compute them; dk and dv over the whole pool."""
    problem, values = trial.problem, trial.values
    result = steps.forward(problem, values.q, values.k, values.v)
    if trial.case.operation != "backward":
        return {"out": result.out}
    dlse = values.dlse if takes_dlse else None
    gradients = steps.backward(problem, values.q, values.k, values.v, result, values.dout, dlse)
    dk, dv = gradients.in_pool(problem.cache.num_slots)
    return {"out": result.out, "dq": gradients.dq, "dk": dk, "dv": dv}


@cache
def long_cases() -> tuple[Case, ...]:
    """Long contexts with standard normal numbers, as the policies' own tests and benchmarks draw them."""
    draw = Draw(FIRST_SEED)
    lists, blocks = token_lists(draw), block_lists(draw)
    changes: dict[str, dict[str, object]] = {
        "dense": {},
        "dense-float32": {"dtype": "float32", "mask_rule": Causal(), "layout": "HND"},
        "causal-window": {"mask_rule": And((Causal(), Window(left=1023))), "interleaved": True},
        "prefix": {"mask_rule": PrefixLM((1000, 300))},
        "documents": {"mask_rule": And((Document(((0, 900), (0, 400))), Causal()))},
        "or": {"mask_rule": Or((Window(left=511, right=0), Document(((0, 900), (0, 400)))))},
        "token-lists": {"candidates": lists, "mask_rule": Causal()},
        "block-lists": {"candidates": blocks, "head_dim_vo": 32},
        "alibi-softcap": {"score_rules": (Alibi((0.5, 0.25, 0.125, 0.0625)), SoftCap(30.0)), "dtype": "float16"},
        "sink": {"sink_logits": (0.0, 1.0, -1.0, 2.0), "candidates": lists, "score_rules": (SoftCap(50.0),)},
        "alibi": {"score_rules": (Alibi((0.5, 0.25, 0.125, 0.0625)),), "dtype": "float16"},
    }
    forward = [long_case("forward", name, change) for name, change in changes.items()]
    backward = [long_case("backward", name, changes[name]) for name in ("causal-window", "token-lists", "sink")]
    return (*forward, *backward)


def long_case(operation: Operation, name: str, change: dict[str, object]) -> Case:
    """One long case: two requests, one row and two."""
    structure = msgspec.structs.replace(LONG, **change)
    case = Case(
        id="", level="L3", operation=operation, structure=structure, values="normal", seed=FIRST_SEED, clauses=()
    )
    return named(case, f"long-{name}")


def token_lists(draw: Draw) -> CandidateStructure:
    """Half of the tokens for every row and head, with holes, duplicates, a window and sink positions."""
    lists = []
    for n, rows in enumerate(LONG.seqlens_q):
        for _ in range(rows * LONG.num_qo_heads):
            chosen = draw.shuffled(draw.subset(range(LONG.seqlens_kv[n]), LONG.seqlens_kv[n] // 2))
            lists.append((-1, *chosen, *chosen[:2], -1))
    return CandidateStructure(lists=tuple(lists), window=128, num_sink_tokens=4)


def block_lists(draw: Draw) -> CandidateStructure:
    """Half of the blocks of 64 for every row and KV head."""
    counts = [-(-t // 64) for t in LONG.seqlens_kv]
    lists = tuple(
        tuple(draw.shuffled(draw.subset(range(counts[n]), counts[n] // 2)))
        for n, rows in enumerate(LONG.seqlens_q)
        for _ in range(rows * LONG.num_kv_heads)
    )
    return CandidateStructure(lists=lists, granularity="block", block_size=64, sharing="kv_head")
