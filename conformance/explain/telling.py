"""The parts of a problem as lines of plain numpy, for a script that a stranger reads."""

import base64
import io

import numpy as np

from attnconform.conformance.cases.values import Values
from attnconform.reference.attention import effective_sets
from attnconform.reference.coordinates import BoolArray, FloatArray, Positions
from attnconform.reference.dropout import kept_edges
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import apply_score_rule, mask_allows, score_rule_slope
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)
from attnconform.reference.steps import Steps

WRITTEN_OUT = 12  # numbers; larger arrays are packed
# numpy has no bfloat16: the upper half of a float32, to nearest, ties to even
BFLOAT16_LINES = [
    "bits = y.astype(np.float32).view(np.uint32)",
    "y = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)",
]


class Untold(ValueError):
    """A problem with a part that has no line of numpy here."""


class Telling:
    """Expressions and statements of one problem, and the arrays that they need beside the inputs."""

    def __init__(self, problem: AttentionProblem, values: Values) -> None:
        self.problem = problem
        self.values = values
        self.extra: list[tuple[str, str]] = []  # name and text of arrays that come after the inputs
        for name in ("k", "v"):
            quant = getattr(problem, f"{name}_quant", None)
            if quant is not None:
                slots, size = np.arange(problem.cache.num_slots), problem.cache.page_size
                heads = [quant.scales_at(slots, head, page_size=size) for head in range(problem.num_kv_heads)]
                self.extra.append((f"{name.upper()}_SCALE", array_text(np.stack(heads, axis=1))))
                self.extra.append((name.upper(), f"{name.upper()}_CODES * {name.upper()}_SCALE"))

    def input_name(self, name: str) -> str:
        """What an input is called: the codes of a quantized cache are not its numbers."""
        is_coded = getattr(self.problem, f"{name}_quant", None) is not None
        return f"{name.upper()}_CODES" if is_coded else name.upper()

    def list_head(self) -> str:
        """Which list of a block a query head h reads."""
        sharing = "shared" if self.problem.candidates is None else self.problem.candidates.sharing
        return {"query_head": "h", "kv_head": f"h // {self.problem.group_size}", "shared": "0"}[sharing]

    def mask(self, rule: MaskRule | None) -> str:
        """A mask rule in n, h, i and j: request, query head, query and key position."""
        match rule:
            case None:
                return "True"
            case Causal():
                return "j <= i"
            case Window(left, right):
                sides = ((left, "i - j"), (right, "j - i"))
                return " and ".join(f"{distance} <= {side}" for side, distance in sides if side is not None) or "True"
            case HeadWindow(lefts, rights):
                of_heads = ((list(lefts), "i - j"), (list(rights), "j - i"))
                return " and ".join(f"({side}[h] is None or {distance} <= {side}[h])" for side, distance in of_heads)
            case PrefixLM(prefix_len):
                return f"j < {list(prefix_len)}[n] or j <= i"
            case Document(starts):
                rows = f"{[list(row) for row in starts]}[n]"
                return f"sum(x <= i for x in {rows}) == sum(x <= j for x in {rows})"
            case And(rules):
                return " and ".join(f"({self.mask(part)})" for part in rules)
            case Or(rules):
                return " or ".join(f"({self.mask(part)})" for part in rules)
            case CustomMask():
                return self.table(rule)

    def table(self, rule: MaskRule) -> str:
        """A rule that is registered code, as the set of what it allows here."""
        allowed = [
            (where.request, h, where.q_idx, int(j))
            for where in self.problem.rows()
            for h in range(self.problem.num_qo_heads)
            for j in np.flatnonzero(self.allows(rule, where, h))
        ]
        name = f"ALLOWED_{len(self.extra)}"
        self.extra.append((name, f"{set(allowed) or 'set()'}  # (n, h, i, j) that a registered rule allows"))
        return f"(n, h, i, j) in {name}"

    def allows(self, rule: MaskRule, where: QueryRow, qo_head: int) -> BoolArray:
        """What a rule allows one row and head, of all committed positions."""
        every = np.arange(int(self.problem.seqlen_kv[where.request]))
        return mask_allows(rule, where.request, where.q_idx, every, qo_head)

    def score(self, rule: ScoreRule) -> list[str]:
        """A score rule as statements that change s and slope."""
        match rule:
            case Alibi(slopes):
                return [f"s = s + {list(slopes)}[h] * (keys - i)"]
            case SoftCap(cap):
                return [f"slope = slope * (1 - np.tanh(s / {cap!r}) ** 2)", f"s = {cap!r} * np.tanh(s / {cap!r})"]
            case RelativeBias(tables):
                reach = len(tables[0]) // 2
                table = f"np.array({[list(row) for row in tables]}[h])"
                return [f"s = s + {table}[np.clip(keys - i, -{reach}, {reach}) + {reach}]"]
            case CustomScore():
                return self.scored(rule)

    def scored(self, rule: ScoreRule) -> list[str]:
        """A rule that is registered code, as the scores and slopes that it gives here."""
        before = self.problem.score_rules[: self.problem.score_rules.index(rule)]
        rows: list[list[tuple[list[float], list[float]]]] = [[] for _ in range(self.problem.total_q)]
        for where in self.problem.rows():
            for h in range(self.problem.num_qo_heads):
                positions, scores = self.scaled_dots(where, h)
                for earlier in before:
                    scores = apply_score_rule(earlier, scores, h, where.q_idx, positions.values)
                after = apply_score_rule(rule, scores, h, where.q_idx, positions.values)
                slope = score_rule_slope(rule, scores, h, where.q_idx, positions.values)
                rows[where.row].append((after.tolist(), slope.tolist()))
        name = f"SCORED_{len(self.extra)}"
        self.extra.append((name, f"{rows}  # [row][head] scores after a registered rule, and its slopes"))
        return [f"s, slope = np.array({name}[row][h][0]), slope * np.array({name}[row][h][1])"]

    def scaled_dots(self, where: QueryRow, qo_head: int) -> tuple[Positions, FloatArray]:
        """A row's keys and their scores before any rule."""
        steps, problem, values = Steps(), self.problem, self.values
        kv_head, positions = steps.kv_head(problem, qo_head), steps.effective(problem, where, qo_head)
        slots = steps.head_slots(problem, steps.slots(problem, where, positions), kv_head)
        keys = steps.keys(problem, positions, slots, kv_head, values.k)
        dots = keys @ steps.query(problem, where, values.q[where.row, qo_head])
        return positions, steps.scale(problem, dots)

    def ranks(self) -> list[str]:
        """What the place in a sequence adds to a score, after every rule."""
        bias = getattr(self.problem.candidates, "rank_bias", None)
        if bias is None:
            return []
        return [f"s = s + np.array([{bias.tolist()}[entries_of(n, local, h).index(j)] for j in keys])"]

    def kept(self) -> str:
        """What dropout multiplies each key's weight by."""
        dropout = getattr(self.problem, "dropout", None)
        if dropout is None:
            return "1.0"
        edges, rows = effective_sets(self.problem), []
        for where in self.problem.rows():
            heads = [(h, edges.of(where.row, h)[0]) for h in range(self.problem.num_qo_heads)]
            kept = [kept_edges(dropout, where.request, h, where.q_idx, positions) for h, positions in heads]
            rows.append([[int(x) for x in row] for row in kept])
        self.extra.append(("KEPT", f"{rows}  # [row][head] which edges dropout keeps"))
        return f"np.array(KEPT[row][h], dtype=float) * {dropout.factor!r}"

    def epilogue(self) -> list[str]:
        """What is done to a complete row y, and its slope e."""
        lines: list[str] = []
        for step in getattr(self.problem, "epilogue", ()):
            kind, which = type(step).__name__, getattr(step, "kind", None)
            if kind == "Activation" and which == "relu":
                lines += ["e = e * (y > 0)", "y = np.maximum(y, 0.0)"]
            elif kind == "Activation":
                lines += ["gate = 1 / (1 + np.exp(-y))", "e, y = e * (gate + y * gate * (1 - gate)), y * gate"]
            elif kind == "Gate":
                lines += [f"gate = 1 / (1 + np.exp(-np.array({list(step.logits)})[h]))", "e, y = e * gate, y * gate"]
            elif kind == "Cast" and step.dtype in ("float32", "float16"):
                lines += [f"y = y.astype(np.{step.dtype}).astype(np.float64)"]
            elif kind == "Cast" and step.dtype == "bfloat16":
                lines += BFLOAT16_LINES
            else:
                raise Untold(f"{step} has no statement")
        return lines


def array_text(array: FloatArray) -> str:
    """An array as an expression: written out where it is small and finite, else packed, exactly."""
    if array.size <= WRITTEN_OUT and array.size and np.isfinite(array).all():
        return f"np.array({array.tolist()})"
    narrow = array.astype(np.float32)
    exact = np.array_equal(narrow.astype(np.float64), array, equal_nan=True)
    file = io.BytesIO()
    np.save(file, narrow if exact else array)
    packed = f'unpack("{base64.b64encode(file.getvalue()).decode()}")'
    return f"{packed}.astype(np.float64)" if exact else packed


def literal(value: object) -> str:
    """A Python literal; tuples of tuples included."""
    return repr(value)
