"""Honest arithmetic never exceeds the worst case, whatever a kernel is free to choose. [BOUND-OUT] [BOUND-GRAD]"""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES
from attnconform.conformance.bounds.emulate import Schedule, emulate_backward, emulate_forward

EMULATED = ("fp32", "bf16", "fp16", "bf16-hopper", "fp16-hopper", "tf32", "tf32x3", "float64")
# Each schedule with the declaration that goes with it: splits, order, biased exp, fused exponent, reused P.
SCHEDULES = (
    ({}, Schedule(tile=64, exp_bias=3.0)),
    ({"num_splits": 4, "heads_low": True}, Schedule(tile=64, splits=4, exp_bias=-3.0, exp2=True)),
    ({"l_from_p": True, "ds_from_p": True, "ds_scaled": True}, Schedule(tile=64, exp2=True)),
)


def shuffled(keys, seed):
    return tuple(int(x) for x in np.random.default_rng(seed).permutation(keys))


def emulate(case, numerics, schedule, rule=None):
    forward = emulate_forward(case.block, numerics, schedule, rule)
    backward = emulate_backward(case.block, case.do, numerics, schedule, forward, rule, case.dlse)
    names = {"out": forward.out, "lse": forward.lse, "dsink": case.sum_heads(backward.dsink)}
    return {**names, **{name: getattr(backward, name) for name in ("dq", "dk", "dv")}}


def report(ratios, what):
    print(what, " ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items() if ratio))


@pytest.mark.parametrize("schedule_idx", range(3))
@pytest.mark.parametrize("name", EMULATED)
def test_no_honest_kernel_exceeds_either_bound(make_case, family, name, schedule_idx):
    declared, schedule = SCHEDULES[schedule_idx]
    keys = (64, 100, 41)[schedule_idx]
    if schedule_idx:
        schedule = replace(schedule, key_order=shuffled(keys, schedule_idx))
    numerics = msgspec.structs.replace(NUMERICS_CLASSES[name], **declared)
    case = make_case(family, schedule_idx, keys=keys).with_block(num_heads=2)

    ratios = case.ratios(numerics, emulate(case, numerics, schedule))

    report(ratios, f"{name} {family}:")
    assert max(ratios.values()) <= 1


def alibi(case):
    distance = np.abs(np.arange(len(case.block.k)) - np.arange(len(case.block.q))[:, None])
    bias = (-np.float32(0.3) * distance.astype(np.float32)).astype(np.float64)
    return case.with_block(scores=case.block.scores + bias, added=np.abs(bias)), lambda x: x + bias


def soft_cap(case):
    tanh = np.tanh(case.block.scores / 2)
    capped = case.with_block(scores=2 * tanh, slope=1 - tanh**2, cap=2.0)
    return capped, lambda x: 2 * np.tanh(x / 2).astype(np.float32).astype(np.float64)


def sinks(case):
    sink = np.linspace(-3, 5, len(case.block.q)).astype(np.float32).astype(np.float64)
    sink[2] = -np.inf
    return case.with_block(sink=sink), None


def dropout(case):
    keep = (np.abs(case.block.scores) < 1) / np.float64(np.float32(0.7))
    return case.with_block(dropout=keep), None


def lse_gradient(case):
    return replace(case, dlse=np.linspace(-4, 4, len(case.block.q))), None


RULES = (alibi, soft_cap, sinks, dropout, lse_gradient)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16-hopper", "tf32"])
def test_score_rules_sinks_dropout_and_dlse_stay_within_bounds(make_case, name, rule):
    numerics = msgspec.structs.replace(NUMERICS_CLASSES[name], num_splits=2)
    for family in ("normal", "q_times_4", "q_zero"):
        case, map_score = rule(make_case(family, 3, keys=50))
        schedule = Schedule(tile=64, splits=2, exp2=True, key_order=shuffled(50, 3))
        ratios = case.ratios(numerics, emulate(case, numerics, schedule, map_score))
        report(ratios, f"{name} {rule.__name__} {family}:")
        assert max(ratios.values()) <= 1


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("bf16", {"kv_bits": 5}),
        ("fp16", {"prescale": "q", "prescale_bits": 5}),
        ("bf16", {"p_storage": "float8_e4m3", "p_scale": 256.0}),
        ("bf16", {"d_storage": "float8_e5m2"}),
    ],
)
def test_a_declared_rounding_is_covered_and_an_undeclared_one_is_caught(make_case, name, declared):
    plain = NUMERICS_CLASSES[name]
    rounded = msgspec.structs.replace(plain, **declared)
    case = make_case("normal", 4, keys=40)

    got = emulate(case, rounded, Schedule(tile=16))

    assert max(case.ratios(rounded, got).values()) <= 1
    assert max(case.ratios(plain, got).values()) > 1


def test_a_fast_exp_is_rejected_until_it_is_declared(make_case):
    # A CPU kernel of torch 2.13 has an exp that errs by 900 U.
    numerics = NUMERICS_CLASSES["bf16-hopper"]
    case = make_case("normal", 6)

    got = emulate(case, numerics, Schedule(tile=64, exp_bias=900.0))

    assert case.ratios(numerics, got)["lse_worst"] > 1
    declared = msgspec.structs.replace(numerics, eps=1024.0, exp_zero_exact=False)
    assert max(case.ratios(declared, got).values()) <= 1


def test_emulation_refuses_an_unfused_class(make_case):
    with pytest.raises(ValueError, match="norm_p is True"):
        emulate_forward(make_case("normal").block, NUMERICS_CLASSES["bf16-unfused"], Schedule())
