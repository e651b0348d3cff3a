"""Text to token ids and back, with the SentencePiece BPE vocabulary that a Gemma GGUF carries."""

from __future__ import annotations

import heapq
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SPACE = "\u2581"
USER_DEFINED, BYTE = 4, 6  # token types as GGUF numbers them


class Tokenizer:
    """The vocabulary, its merge scores and its byte tokens."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, bos: int) -> None:
        self.tokens = list(tokens)
        self.scores = list(scores)
        self.types = list(types)
        self.bos = bos
        self.ids = {token: i for i, token in enumerate(self.tokens) if self.types[i] not in (USER_DEFINED, BYTE)}
        self.user_ids = {token: i for i, token in enumerate(self.tokens) if self.types[i] == USER_DEFINED}
        self.byte_ids = {int(t[3:5], 16): i for i, t in enumerate(self.tokens) if self.types[i] == BYTE}
        longest_first = sorted(self.user_ids, key=len, reverse=True)
        self.user_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        """Token ids of text, the beginning-of-sequence id first."""
        out = [self.bos]
        for part in self.user_pattern.split(text):
            out += [self.user_ids[part]] if part in self.user_ids else self._encode_plain(part.replace(" ", SPACE))
        return out

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; the beginning-of-sequence id is left out."""
        data = bytearray()
        for i in ids:
            if self.types[i] == BYTE:
                data.append(int(self.tokens[i][3:5], 16))
            elif i != self.bos:
                data += self.tokens[i].replace(SPACE, " ").encode()
        return data.decode()

    def _encode_plain(self, text: str) -> list[int]:
        out: list[int] = []
        for piece in self._merge(text):
            known = self.ids.get(piece)
            out += [known] if known is not None else [self.byte_ids[b] for b in piece.encode()]
        return out

    def _merge(self, text: str) -> list[str]:
        """Pieces left when the best-scored pair of neighbours has been joined until no pair is a token."""
        pieces = list(text)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int) -> None:
            right = after[left]
            joined = pieces[left] + pieces[right] if right >= 0 else ""
            if joined in self.ids:
                heapq.heappush(heap, (-self.scores[self.ids[joined]], left, right, joined))

        for left in range(len(pieces) - 1):
            offer(left)
        while heap:
            _, left, right, joined = heapq.heappop(heap)
            # A stale offer: one of the two was joined to something else since.
            if after[left] != right or pieces[left] + pieces[right] != joined or not pieces[right]:
                continue
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            after[right] = -1
            if before[left] >= 0:
                offer(before[left])
            offer(left)
        return [piece for piece in pieces if piece]
