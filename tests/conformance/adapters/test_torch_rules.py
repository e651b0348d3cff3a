"""The torch lowering of rules against the reference's values."""

from itertools import product

import numpy as np
import pytest
import torch

from attnconform.conformance.adapters.torch_rules import lower_mask, lower_score
from attnconform.reference.rule_values import apply_score_rule, mask_allows
from attnconform.reference.rules import Alibi, And, Causal, Document, MaskRule, Or, PrefixLM, ScoreRule, SoftCap, Window

REQUESTS = [2, 0]  # a call may hold some of a problem's requests, in another order
Q_OFFSET = (-3, 11)  # of the call's requests; before the first key, and past the first document
ROWS, KEYS, HEADS = 9, 21, 3
MASK_RULES: tuple[MaskRule, ...] = (
    Causal(),
    Window(left=2),
    Window(right=3),
    Window(left=0, right=4),
    Window(),
    PrefixLM((0, 5, 4)),
    Document(((0, 9), (0,), (0, 1, 14))),
    Document(((0,), (0, 300), (0, 200))),
)
SCORE_RULES: tuple[ScoreRule, ...] = (Alibi((0.5, -0.25, 1.0)), SoftCap(1.5), SoftCap(0.125), Alibi((0.0, 2.0, 3.0)))


def test_no_mask_rule_allows_everything() -> None:
    assert mask_of(None).all()


@pytest.mark.parametrize("rule", MASK_RULES)
def test_every_mask_rule_is_the_references(rule: MaskRule) -> None:
    np.testing.assert_array_equal(mask_of(rule), reference_mask(rule))


@pytest.mark.parametrize(("first", "second"), list(product(MASK_RULES, repeat=2)))
def test_every_pair_of_mask_rules_composes_as_the_reference(first: MaskRule, second: MaskRule) -> None:
    for rule in (And((first, second)), Or((first, second)), Or((And((second, first)), first))):
        np.testing.assert_array_equal(mask_of(rule), reference_mask(rule))


@pytest.mark.parametrize("rules", [(), *product(SCORE_RULES), *product(SCORE_RULES, repeat=2)])
def test_every_list_of_score_rules_is_the_references(rules: tuple[ScoreRule, ...]) -> None:
    scores = np.random.default_rng(7).normal(size=(len(REQUESTS), HEADS, ROWS, KEYS))
    want = scores.copy()
    for (b, offset), h, row in product(enumerate(Q_OFFSET), range(HEADS), range(ROWS)):
        for rule in rules:
            want[b, h, row] = apply_score_rule(rule, want[b, h, row], h, offset + row, np.arange(KEYS))
    score_mod = lower_score(rules, torch.tensor(Q_OFFSET))
    got = torch.from_numpy(scores)
    got = got if score_mod is None else score_mod(got, *grid())
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def mask_of(rule: MaskRule | None) -> np.ndarray:
    allowed = lower_mask(rule, REQUESTS, torch.tensor(Q_OFFSET))(*grid())
    return allowed.expand(len(REQUESTS), HEADS, ROWS, KEYS).numpy()


def reference_mask(rule: MaskRule) -> np.ndarray:
    q_idx = np.arange(ROWS)[:, None]
    masks = [
        mask_allows(rule, n, q_idx + offset, np.arange(KEYS)) for n, offset in zip(REQUESTS, Q_OFFSET, strict=True)
    ]
    return np.broadcast_to(np.stack(masks)[:, None], (len(REQUESTS), HEADS, ROWS, KEYS))


def grid() -> tuple[torch.Tensor, ...]:
    """b, h, q_idx and kv_idx of every element, as broadcast index tensors."""
    sizes = (len(REQUESTS), HEADS, ROWS, KEYS)
    return tuple(torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes))
