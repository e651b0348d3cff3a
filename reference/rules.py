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


class HeadWindow(msgspec.Struct, frozen=True, tag=True):
    """A window of each query head's own; None is unlimited. [MASK-HEAD-WINDOW]"""

    left: tuple[int | None, ...]  # (num_qo_heads,)
    right: tuple[int | None, ...]  # (num_qo_heads,)


class CustomMask(msgspec.Struct, frozen=True, tag=True):
    """A mask rule that running code registered under a name; a file never brings code. [RULE-NAME, RULE-PURE]"""

    name: str


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


class RelativeBias(msgspec.Struct, frozen=True, tag=True):
    """Adds an entry of a table by signed distance: tables[h][clip(kv_idx - q_idx, -D, D) + D]. [SCORE-RELATIVE]"""

    tables: tuple[tuple[float, ...], ...]  # (num_qo_heads, 2 D + 1)


class CustomScore(msgspec.Struct, frozen=True, tag=True):
    """A score rule that running code registered under a name; a file never brings code. [RULE-NAME, RULE-PURE]"""

    name: str


MaskRule = Causal | Window | HeadWindow | PrefixLM | Document | CustomMask | And | Or
ScoreRule = Alibi | RelativeBias | SoftCap | CustomScore
