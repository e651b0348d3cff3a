"""A tiny model of random weights says the same with every backend's attention, and something else with a wrong one."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnconform.conformance.adapters.registry import load_backend
from attnconform.reference.rules import And, Causal, Window
from attnconform.traces.recorder.gemma3 import Geometry

GEOMETRY = Geometry(num_layers=6, num_qo_heads=2, num_kv_heads=1, head_dim=32, window=11, rope_base=1e6, eps=1e-6)
HIDDEN, VOCABULARY = 48, 96
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]


def load_script():
    path = Path(__file__).with_name("greedy.py")
    spec = importlib.util.spec_from_file_location("greedy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["greedy"] = module
    spec.loader.exec_module(module)
    return module


greedy = load_script()


@pytest.fixture(scope="module")
def weights():
    """Weights under which the continuation depends on what is attended."""
    torch.manual_seed(7)
    q_width, kv_width = (heads * GEOMETRY.head_dim for heads in (GEOMETRY.num_qo_heads, GEOMETRY.num_kv_heads))
    shapes = {
        "attn_q": (q_width, HIDDEN), "attn_k": (kv_width, HIDDEN), "attn_v": (kv_width, HIDDEN),
        "attn_output": (HIDDEN, q_width), "ffn_gate": (2 * HIDDEN, HIDDEN), "ffn_up": (2 * HIDDEN, HIDDEN),
        "ffn_down": (HIDDEN, 2 * HIDDEN),
    }  # fmt: skip
    norms = {
        "attn_norm": HIDDEN, "post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN, "ffn_norm": HIDDEN,
        "attn_q_norm": GEOMETRY.head_dim, "attn_k_norm": GEOMETRY.head_dim,
    }  # fmt: skip
    made = {"token_embd.weight": torch.randn(VOCABULARY, HIDDEN) / 16, "output_norm.weight": torch.ones(HIDDEN)}
    for layer in range(GEOMETRY.num_layers):
        for name, shape in shapes.items():
            made[f"blk.{layer}.{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
        for name, size in norms.items():
            made[f"blk.{layer}.{name}.weight"] = torch.ones(size)
    return made


@pytest.mark.parametrize("name", ["triton", "flex-eager", "sdpa"])
def test_64_greedy_tokens_are_the_same_over_a_shuffled_page_table(weights, name):
    found = greedy.regress(weights, GEOMETRY, PROMPT, load_backend(name, "cpu"))
    assert found.same_tokens == found.steps == 64
    assert found.worst <= greedy.LOGIT_BOUND


def test_the_continuation_is_no_loop_and_its_pages_are_out_of_order(weights):
    backend = load_backend("sdpa", "cpu")
    model = greedy.PagedGemma3(weights, GEOMETRY, backend, max_seqlen=len(PROMPT) + 64)
    said = greedy.continue_greedily(model, PROMPT, 64)
    assert len(set(said.tokens)) > 12
    assert (model.page_table[1:] < model.page_table[:-1]).any()
    assert model.num_pages > len(model.page_table)


class Wrong:
    """A backend that is asked another problem than the model's."""

    def __init__(self, change):
        self.backend, self.change, self.device = load_backend("sdpa", "cpu"), change, "cpu"

    def forward(self, view, tensors):
        return self.backend.forward(replace(view, spec=self.change(view.spec)), tensors)


def shorter_window(spec):
    if not isinstance(spec.mask_rule, And):
        return spec
    return replace(spec, mask_rule=And((Causal(), Window(left=spec.mask_rule.rules[1].left - 1))))


def no_window(spec):
    return replace(spec, mask_rule=Causal())


def top_left(spec):
    return replace(spec, q_offset=spec.q_offset * 0)


def two_pages_swapped(spec):
    table = spec.cache.page_table.copy()
    table[0, :2] = table[0, :2][::-1]
    return (
        replace(spec, cache=replace(spec.cache, page_table=table)) if table.shape[1] > 1 and table[0, 1] >= 0 else spec
    )


def last_key_missing(spec):
    return replace(spec, seqlen_kv=spec.seqlen_kv - 1) if spec.total_q == 1 else spec


@pytest.mark.parametrize("change", [shorter_window, no_window, top_left, two_pages_swapped, last_key_missing])
def test_another_problem_than_the_models_is_seen(weights, change):
    found = greedy.regress(weights, GEOMETRY, PROMPT, Wrong(change))
    assert not found.is_same
    assert found.worst > 4 * greedy.LOGIT_BOUND


def test_a_model_that_is_not_there_and_a_backend_that_is_none_are_said_in_one_line(tmp_path, capsys):
    assert greedy.main(["--model", str(tmp_path / "none.gguf"), "--backend", "tritn", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "greedy: backend is 'tritn'" in said
    assert said.count("\n") == 1
