"""What plans and masks are keyed on, and what they share."""

from dataclasses import replace

import pytest

from attnconform.reference.plan_cache import CallDescription, PlanCache, mask_key, plan_key, rule_code
from attnconform.reference.rules import Alibi, And, Causal, Document, Or, PrefixLM, SoftCap, Window

CALL = CallDescription(
    architecture="sm_90",
    backend="triton",
    device="cuda:0",
    dtype="bfloat16",
    head_dim_qk=128,
    head_dim_vo=128,
    num_qo_heads=8,
    num_kv_heads=2,
    page_size=16,
    layout="NHD",
    q_block_size=1,
    kv_block_size=16,
    tier=256,
    mask_rule=And((Causal(), Document(((0, 40),)))),
    score_rules=(Alibi((0.5,) * 8), SoftCap(30.0)),
    seqlens_q=(1,),
    seqlens_kv=(80,),
    q_offset=(79,),
)


def keys_differ(**changed: object) -> tuple[bool, bool]:
    other = replace(CALL, **changed)  # type: ignore[arg-type]
    return plan_key(other) != plan_key(CALL), mask_key(other) != mask_key(CALL)


@pytest.mark.parametrize(
    ("changed", "plan", "mask"),
    [
        ({"dtype": "float16"}, True, False),
        ({"architecture": "sm_100"}, True, False),
        ({"num_kv_heads": 4}, True, False),
        ({"num_qo_heads": 16, "num_kv_heads": 4}, False, False),  # the same group size
        ({"tier": 512}, True, False),
        ({"features": frozenset({"k float8_e4m3 head"})}, True, False),
        ({"device": "cuda:1"}, False, True),
        ({"kv_block_size": 64}, True, True),
        ({"mask_rule": Causal()}, True, True),
        ({"mask_rule": And((Causal(), Document(((0, 41),))))}, False, True),
        ({"mask_version": 1}, False, True),
        ({"score_version": 1}, False, False),
        ({"score_rules": (Alibi((0.25,) * 8), SoftCap(20.0))}, False, False),
        ({"score_rules": (SoftCap(30.0), Alibi((0.5,) * 8))}, True, False),
        ({"seqlens_kv": (90,)}, False, True),
        ({"q_offset": (80,)}, False, True),
        ({"is_one_mask_for_heads": False}, False, True),
        ({"candidates_version": 3}, False, False),
    ],
)
def test_each_key_holds_what_its_own_cache_needs(changed: dict[str, object], plan: bool, mask: bool) -> None:
    assert keys_differ(**changed) == (plan, mask)


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (Window(left=3), Window(left=4), True),
        (Window(left=3), Window(left=3, right=0), False),
        (PrefixLM((3,)), PrefixLM((3, 4)), True),
        (Causal(), None, False),
        (And((Causal(), Window(left=3))), Or((Causal(), Window(left=3))), False),
        (And((Causal(), Window(left=3))), And((Window(left=3), Causal())), False),
    ],
)
def test_code_of_rules_is_their_kinds_and_nesting(a: object, b: object, is_same: bool) -> None:
    assert (rule_code(a) == rule_code(b)) == is_same


def test_hits_are_counted_by_the_key_of_each_cache() -> None:
    cache = PlanCache()
    for call in (CALL, CALL, replace(CALL, dtype="float16"), replace(CALL, mask_version=1), CALL):
        cache.look_up(call)
    assert vars(cache.counts) == {"plan_hits": 3, "plan_misses": 2, "mask_hits": 3, "mask_misses": 2}


def test_keys_can_be_looked_up() -> None:
    assert hash(plan_key(CALL)) == hash(plan_key(replace(CALL)))
    assert hash(mask_key(CALL)) == hash(mask_key(replace(CALL)))
