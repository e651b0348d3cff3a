"""The tokenizer joins by score and loses nothing."""

from __future__ import annotations

import pytest

from attnconform.traces.recorder.tokenizer import Tokenizer


def small_tokenizer() -> Tokenizer:
    tokens = ["<bos>", "\n\n", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "ab", "\u2581", "\u2581ab", "\n", "ba"]
    types = [3, 4, *[6] * 256, *[1] * 7]
    scores = [0.0] * 258 + [-9.0, -9.0, -1.0, -9.0, -2.0, -9.0, -3.0]
    return Tokenizer(tokens, scores, types, bos=0)


def test_the_best_scored_pair_is_joined_first() -> None:
    tokenizer = small_tokenizer()
    assert [tokenizer.tokens[i] for i in tokenizer.encode("bab ab")] == ["<bos>", "b", "ab", "\u2581ab"]


@pytest.mark.parametrize("text", ["ab ab\n\nba", "\n\n\n", "é→a", "", "   b"])
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
