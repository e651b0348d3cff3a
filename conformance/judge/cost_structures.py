"""Figures that a backend gives, against the formulas of the chapter COST."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnconform.conformance.adapters.reference_structures import COSTS
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.offering import lacks, wrong
from attnconform.conformance.judge.trial import BackendCrash, Trial, first_line
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.cost.end_to_end import StepTimes
from attnconform.reference.cost.gather import Bandwidths

EXAMPLE = Bandwidths(direct=100e9, gather=80e9, write=1000e9, contiguous=900e9)
TIMES = StepTimes(route=12, topk=10, index=8, attention=25, reduce=5, launch=6)
SHAPE = {"num_pages": 264, "page_size": 16, "num_kv_heads": 8, "head_dim": 128}
METHOD = "cost"  # optional: a backend that gives no figures does not have it
REL_TOL = 1e-9  # float64 in another order of operations; a count is far from its neighbour


@dataclass(frozen=True)
class Question:
    """A figure to ask for."""

    clause: str
    name: str
    arguments: dict[str, Any]


def questions() -> list[Question]:
    """One or more questions a clause: the articles' own, and one where equal sizes cannot hide a mistake."""
    pages = np.array([0, 1, 2, 3, 8, 9, 40, 63])
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("COST-FLOPS", "attention_flops", {"num_keys": 4224, "head_dim_qk": 128, "num_rows": 32}),
        ("COST-FLOPS", "attention_flops", {"num_keys": 100, "head_dim_qk": 576, "head_dim_vo": 512}),
        ("COST-INTENSITY", "arithmetic_intensity", {"flops": 4e6, "num_bytes": 1e6}),
        ("COST-GRID", "num_blocks", {"length": 1_000_000, "block_size": 128}),
        ("COST-GRID", "num_blocks", {"length": 65536, "block_size": 128}),
        ("COST-TILES", "aligned_tiles", {"pages": pages, "page_size": 16, "tile_size": 64}),
        ("COST-TILES", "aligned_tiles", {"pages": pages, "page_size": 16, "tile_size": 24}),
        ("COST-TILES", "tile_efficiency", {"num_tokens": 4224, "num_tiles": 116, "tile_size": 64}),
        ("COST-UTILIZATION", "block_use", {"num_tokens": 6, "num_blocks": 2, "block_size": 64}),
        ("COST-INDEX-USE", "index_use", {"lengths": np.array([32, 32, 0, 800]), "width": 800}),
        ("COST-AMPLIFICATION", "execution_amplification", {"executed": 36, "num_edges": 26}),
        ("COST-BYTES", "kv_bytes", {"num_tokens": 4224, "head_dim_qk": 128, "num_kv_heads": 8}),
        (
            "COST-BYTES",
            "kv_bytes",
            {"num_tokens": 10, "head_dim_qk": 64, "head_dim_vo": 32, "k_bytes": 2, "v_bytes": 1},
        ),
        ("COST-INDEX-BYTES", "index_table_bytes", {"num_entries": 264, "num_lists": 8}),
        ("COST-INDEX-BYTES", "block_mask_bytes", {"num_indices": 9, "num_rows": 4}),
        ("COST-TRANSACTION", "transaction_utilization", {"useful_bytes": 64, "num_transactions": 32}),
        ("COST-TIME", "memory_time", {"num_bytes": 2**20, "bandwidth": 3e12, "share": 0.2}),
        ("COST-TIME", "roofline_time", {"flops": 2e12, "num_bytes": 1e9, "peak_flops": 1e15, "bandwidth": 1e12}),
        ("COST-GATHER", "direct_time", {"num_bytes": 1e9, "bandwidths": EXAMPLE, "num_reads": 8}),
        ("COST-GATHER", "gather_time", {"num_bytes": 1e9, "bandwidths": EXAMPLE, "num_reads": 8, "launch": 1e-4}),
        ("COST-GATHER", "gather_traffic", {"num_tokens": 2048, "bytes_per_token": 512}),
        ("COST-PARTIALS", "partial_state_bytes", {"num_splits": 4, "num_qo_heads": 32, "head_dim_vo": 128}),
        ("COST-ATOMICS", "hot_atomics", {"num_q_tiles": 64, "page_size": 16, "head_dim": 128}),
        (
            "COST-GRADIENTS",
            "gradient_partial_bytes",
            {"num_q_tiles": 64, "num_pages": 264, "page_size": 16, "head_dim": 128},
        ),
        ("COST-END-TO-END", "end_to_end_speedup", {"dense": 100, "times": TIMES}),
        ("COST-USE-BOUND", "least_block_use", {"num_tokens": 100, "block_size": 16, "seqlen_kv": 400}),
        ("COST-USE-BOUND", "least_block_use", {"num_tokens": 20, "block_size": 16, "seqlen_kv": 4000}),
        ("COST-USE-BOUND", "largest_block_use", {"num_tokens": 100, "block_size": 16, "seqlen_kv": 400}),
        ("MASK-LEAK", "leaked_mass", {"num_masked": 65536, "c": 10.0, "z": 2.5}),
        ("MASK-LEAK", "leaked_mass", {"num_masked": 3, "c": 50000.0, "z": 0.0}),
        ("COST-SCALES", "scale_bytes", {"k_granularity": "page_channel", "v_granularity": "token", **SHAPE}),
    ]
    asked += [("COST-SCALES", "num_scales", {"granularity": g, **SHAPE}) for g in ("tensor", "head", "page", "channel")]
    return [Question(*one) for one in asked]


@checks(
    "COST-FLOPS", "COST-INTENSITY", "COST-GRID", "COST-TILES", "COST-UTILIZATION", "COST-INDEX-USE",
    "COST-AMPLIFICATION", "COST-BYTES", "COST-INDEX-BYTES", "COST-TRANSACTION", "COST-TIME", "COST-SCALES",
    "COST-GATHER", "COST-PARTIALS", "COST-ATOMICS", "COST-GRADIENTS", "COST-END-TO-END", "COST-USE-BOUND", "MASK-LEAK",
)  # fmt: skip
def check_costs(trial: Trial) -> list[Finding]:
    """Every figure that the backend gives is the formula's."""
    if lacks(trial, METHOD):
        return []
    findings = []
    for question in questions():
        trial.calls += 1
        try:
            got = getattr(trial.backend, METHOD)(question.name, question.arguments)
        except NotImplementedError:
            continue  # a figure that the backend does not give
        except Exception as error:
            message = f"cost({question.name!r}) raised {type(error).__name__}: {first_line(error)}"
            raise BackendCrash(message) from error
        wanted = float(COSTS[question.name](**question.arguments))
        if not np.isclose(got, wanted, rtol=REL_TOL, atol=0):
            message = f"{question.name} is {got}, and {wanted} by its formula"
            findings.append(wrong(message, question.clause, state="FAIL_value"))
    return findings
