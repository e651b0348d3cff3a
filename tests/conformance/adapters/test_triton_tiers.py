"""The bundled kernels' tiers keep nothing of what they were renewed from, on any device; graphs of them on a GPU."""

import msgspec
import pytest
import torch

from attnconform.conformance.adapters.triton_tiers import TritonTiers, lists_of
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix, matrix_case
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.lifecycle import LIFECYCLE_CHECKS
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import check_values
from attnconform.reference.errors import RefusedInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLANS = (
    "PLAN-REPLAN", "PLAN-WORKSPACE", "PLAN-INPUTS", "PLAN-APART", "PLAN-COPY", "PLAN-ALLOCATE", "PLAN-REPLAY",
)  # fmt: skip
CHANGES = (
    {"granularity": "token", "sharing": "query_head", "splits": "3", "heads": "2/2"},
    {"granularity": "token", "sharing": "kv_head", "listing": "holes_and_duplicates", "score": "alibi"},
    {"granularity": "block", "sharing": "shared", "sink": "logits", "lengths": "long_and_short"},
    {"granularity": "token", "sharing": "shared", "quant": "int8_channel", "dtype": "bfloat16", "splits": "2"},
)


def decode_case(index):
    case = matrix_case("forward", (1 << 22) + index, SMOKE_ROW | CHANGES[index])
    return msgspec.structs.replace(case, clauses=tuple(sorted({*case.clauses, *PLANS})))


@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_a_tier_conforms_and_forgets_what_it_held(index):
    backend, case = TritonTiers(DEVICE), decode_case(index)
    assert undeclared(case, backend) is None
    result = judge_case(case, backend, checks=[check_values, *LIFECYCLE_CHECKS])
    assert result.state == "PASS", result.findings
    skipped = [finding.check for finding in result.findings]
    assert skipped == ([] if DEVICE == "cuda" else ["check_replay"])  # nothing can be captured on a CPU


class ForgetsToRenew(TritonTiers):
    """Renews the handle's tensors, and not the tier."""

    def replan(self, handle, problem):
        return handle if handle.indices else super().replan(handle, problem)


def test_a_tier_that_is_not_renewed_is_found():
    trial = Trial(decode_case(0), ForgetsToRenew(DEVICE))
    (check,) = (c for c in LIFECYCLE_CHECKS if c.__name__ == "check_planning_again")
    assert {finding.clauses for finding in check(trial)} == {("PLAN-REPLAN",)}


def test_what_a_tier_has_no_place_for_is_refused():
    case = next(c for c in matrix("L0") if c.structure.mask_rule is not None)
    with pytest.raises(RefusedInput, match="PLAN-CAPACITY"):
        lists_of(Trial(case, TritonTiers(DEVICE)).view)
