"""Mask and score rules as data: what a query may see, and what is done to its scores.

A rule is pure: it sees the request, the query head and two logical positions, never a physical slot, and gives
the same answer for the same four. [COORD-LOGICAL]
"""

import msgspec


class Causal(msgspec.Struct, frozen=True, tag=True):
    """A query sees its own position and earlier ones. [MASK-CAUSAL]"""


class Window(msgspec.Struct, frozen=True, tag=True):
    """A query sees `left` positions before its own and `right` after it; None is unlimited. [MASK-WINDOW]"""

    left: int | None = None
    right: int | None = None


class PrefixLM(msgspec.Struct, frozen=True, tag=True):
    """Every query sees the whole prefix of its request; past the prefix the mask is causal. [MASK-PREFIX]"""

    prefix_len: tuple[int, ...]  # (batch_size,) tokens


class Document(msgspec.Struct, frozen=True, tag=True):
    """A query sees only its own document. [MASK-DOCUMENT]"""

    starts: tuple[tuple[int, ...], ...]  # per request: ascending positions where documents start, the first being 0


class And(msgspec.Struct, frozen=True, tag=True):
    """What every one of the rules allows. [MASK-COMPOSE]"""

    rules: tuple["MaskRule", ...]


class Or(msgspec.Struct, frozen=True, tag=True):
    """What at least one of the rules allows. [MASK-COMPOSE]"""

    rules: tuple["MaskRule", ...]


class Alibi(msgspec.Struct, frozen=True, tag=True):
    """Adds slope[h] * (kv_idx - q_idx) to the score. [SCORE-ALIBI, SCORE-HEAD]"""

    slopes: tuple[float, ...]  # (num_qo_heads,)


class SoftCap(msgspec.Struct, frozen=True, tag=True):
    """Replaces the score by cap * tanh(score / cap). [SCORE-SOFTCAP]"""

    cap: float


MaskRule = Causal | Window | PrefixLM | Document | And | Or
ScoreRule = Alibi | SoftCap
