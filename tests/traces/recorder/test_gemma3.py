"""The forward pass: a step at a time is the pass at once, and attention sees its window and no more."""

from __future__ import annotations

import pytest
import torch

from attnconform.traces.recorder.gemma3 import Gemma3, Geometry, attend, rotate


def small_model() -> Gemma3:
    geometry = Geometry(7, 4, 1, 16, 5, 1e6, 1e-6)
    generator = torch.Generator().manual_seed(1)
    hidden, inner = 24, 40
    shapes = {"attn_q": (64, hidden), "attn_k": (16, hidden), "attn_v": (16, hidden), "attn_output": (hidden, 64)}
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    shapes |= {"attn_q_norm": (16,), "attn_k_norm": (16,)}
    shapes |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (hidden,))
    names = {f"blk.{layer}.{name}.weight": shape for layer in range(7) for name, shape in shapes.items()}
    names |= {"token_embd.weight": (50, hidden), "output_norm.weight": (hidden,)}
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in names.items()}
    return Gemma3(weights, geometry, max_seqlen=64)


def ignore(layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
    """Observe nothing."""


def test_a_step_at_a_time_is_the_pass_at_once() -> None:
    model, tokens = small_model(), torch.arange(14)
    at_once = model.prefill(tokens, ignore)
    stepped = torch.cat([model.prefill(tokens[:9], ignore), *(model.step(int(t), ignore) for t in tokens[9:])])
    assert torch.allclose(at_once, stepped, atol=1e-4)


def test_one_layer_in_six_sees_everything() -> None:
    geometry = small_model().geometry
    assert [geometry.layer_window(layer) for layer in range(7)] == [5, 5, 5, 5, 5, None, 5]


@pytest.mark.parametrize("window", [None, 3])
def test_attention_sees_its_window_and_no_more(window: int | None) -> None:
    q, k, v = (torch.randn(h, 6, 4, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 3))
    v = v[:1]
    got = attend(q, k, v, 0, window)
    for i in range(6):
        low = 0 if window is None else max(0, i - window + 1)
        p = (q[:, i] @ k[0, low : i + 1].T / 2).softmax(-1)
        assert torch.allclose(got[:, i], p @ v[0, low : i + 1], atol=1e-6)


def test_rotation_depends_on_the_difference_of_positions() -> None:
    x, y = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    near = (rotate(x, 3, 100.0) * rotate(y, 1, 100.0)).sum()
    far = (rotate(x, 13, 100.0) * rotate(y, 11, 100.0)).sum()
    assert torch.allclose(near, far)
    assert not torch.allclose(near, (rotate(x, 13, 100.0) * rotate(y, 10, 100.0)).sum())
