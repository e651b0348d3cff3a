"""Backends that merge partial states: a sound merge conforms, and one that spoils empty states is named."""

import math

import pytest
import torch

from attnconform.conformance.adapters.merged_parts import MergedParts
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.judge.judge import judge_case

if torch.cuda.is_available():
    pytest.skip("Triton compiles here", allow_module_level=True)


class Sound(MergedParts):
    """The merge as it should be."""

    name = "sound"
    unit = 1.0

    def load(self) -> None:
        return None

    def merge(self, v, s):
        lse = torch.logsumexp(s * self.unit, dim=1)
        weights = torch.where(lse[:, None].isneginf(), 0.0, torch.exp(s * self.unit - lse[:, None]))
        return (weights[..., None] * v).sum(1), lse / self.unit


class InBaseTwo(Sound):
    unit = math.log(2)


class SpoilsEmptyStates(Sound):
    """What several packages do: two maxima of -inf are subtracted."""

    def merge(self, v, s):
        top = s.max(dim=1).values
        weights = torch.exp(s - top[:, None])
        return (weights[..., None] * v).sum(1) / weights.sum(1)[..., None], top + weights.sum(1).log()


def case_of(**axes: str):
    lists = {"granularity": "token", "sharing": "query_head", "phase": "chunk", "score": "alibi", "splits": "3"}
    return matrix_case("forward", 19, SMOKE_ROW | lists | axes)


@pytest.mark.parametrize("merge", [Sound, InBaseTwo])
@pytest.mark.parametrize("empty", ["none", "first"])
def test_a_sound_merge_conforms(merge, empty: str) -> None:
    assert judge_case(case_of(empty=empty), merge()).state == "PASS"


def test_a_merge_that_spoils_empty_states_is_named() -> None:
    result = judge_case(case_of(empty="first"), SpoilsEmptyStates())
    assert any("EMPTY-OUT" in finding.clauses for finding in result.findings)
