"""Mistakes about which listed keys count: causality, windows, documents, tails, and when a mask takes effect. [MASK]"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import document_of, mask_allows
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM, Window
from attnconform.reference.states import PartialState, softmax_state
from attnconform.reference.steps import Steps

TILE = 16  # keys of a kernel's tile
LANES = 32  # keys of a kernel's last, zero-filled tile
ADDED_BIAS, SENTINEL = -1e4, -5e4


def exp_in_float32_range(exponents: FloatArray) -> FloatArray:
    """exp, exact where float32 holds it, and 0 or infinite where it does not.

    Nothing else of float32 is imitated, so that a mistake shows on no case but those that overflow or vanish.
    """
    with np.errstate(over="ignore"):
        exact = np.exp(exponents)
    return np.where(exponents < -104.0, 0.0, np.where(exponents > 88.8, np.inf, exact))


class ReadsRules(Steps):
    """The reference with one hook: what a single mask rule allows."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        self.qo_head = qo_head
        return Positions(listed.values[self.allows(problem.mask_rule, where, listed.values)])

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        """As `mask_allows`, with the parts of a composition asked one by one."""
        match rule:
            case And(rules):
                return np.asarray(np.logical_and.reduce([self.allows(part, where, kv_idx) for part in rules]))
            case Or(rules):
                return np.asarray(np.logical_or.reduce([self.allows(part, where, kv_idx) for part in rules]))
        return mask_allows(rule, where.request, where.q_idx, kv_idx, self.qo_head)


@deviates("MASK-CAUSAL", fault_class="M", report="BR-40 microsoft/onnxruntime#28904: future keys allowed")
class SeesOneKeyOfTheFuture(ReadsRules):
    """Causality keeps j <= i + 1."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return kv_idx <= where.q_idx + 1 if isinstance(rule, Causal) else super().allows(rule, where, kv_idx)


@deviates("MASK-CAUSAL", fault_class="M", report="article 2, 1.1: kv_idx < q_idx")
class DoesNotSeeItself(ReadsRules):
    """Causality keeps j < i."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return kv_idx < where.q_idx if isinstance(rule, Causal) else super().allows(rule, where, kv_idx)


@deviates("MASK-CAUSAL", fault_class="M", report="BR-22 flashinfer-ai/flashinfer#3716: a tile checked by its start")
class ComparesTilesForCausality(ReadsRules):
    """A tile of keys that starts at or before the query is seen whole."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, Causal):
            return kv_idx // TILE * TILE <= where.q_idx
        return super().allows(rule, where, kv_idx)


class MovesWindows(ReadsRules):
    """The reference with one hook: the bounds of a window rule."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        moved = self.move(rule) if isinstance(rule, Window) else rule
        return super().allows(moved, where, kv_idx)

    def move(self, rule: Window) -> Window:
        """The window that is applied."""
        raise NotImplementedError


@deviates("MASK-WINDOW", fault_class="M", report="BR-43 flashinfer-ai/flashinfer#5189")
class WindowLosesItsOldestKey(MovesWindows):
    """window_left counts the query's own position."""

    def move(self, rule: Window) -> Window:
        return Window(None if rule.left is None else rule.left - 1, rule.right)


@deviates("MASK-WINDOW", fault_class="M", report="BR-43 flashinfer-ai/flashinfer#5189")
class WindowKeepsOneKeyMore(MovesWindows):
    """The window's left edge is one position too far."""

    def move(self, rule: Window) -> Window:
        return Window(None if rule.left is None else rule.left + 1, rule.right)


@deviates("MASK-WINDOW", fault_class="M", report="BR-31 flashinfer-ai/flashinfer#4972: a window that is not causal")
class IgnoresTheRightEdgeOfAWindow(MovesWindows):
    """window_right is not applied."""

    def move(self, rule: Window) -> Window:
        return Window(rule.left, None)


@deviates("MASK-WINDOW", fault_class="M", report="BR-43 flashinfer-ai/flashinfer#5189: 0 as a word for unlimited")
class ReadsAWindowOfZeroAsUnlimited(MovesWindows):
    """A bound of 0, the diagonal, is taken for no bound."""

    def move(self, rule: Window) -> Window:
        return Window(rule.left or None, rule.right or None)


@deviates("MASK-WINDOW", fault_class="A", report="BR-115 EricLBuehler/mistral.rs#2094: decode without the window")
class ForgetsTheWindowRuleInDecode(ReadsRules):
    """The last row of a request, which is all of decode, sees past its window."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        self.decodes = where.row + 1 == problem.qo_indptr[where.request + 1]
        return super().effective(problem, where, qo_head)

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(Window() if isinstance(rule, Window) and self.decodes else rule, where, kv_idx)


class MovesQueries(Steps):
    """The reference with one hook: the position at which masks see a query row."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        at = self.q_idx(problem, where)
        return Positions(listed.values[mask_allows(problem.mask_rule, where.request, at, listed.values, qo_head)])

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        """Logical position of a row, as the mistake has it."""
        raise NotImplementedError


@deviates("MASK-OFFSET", fault_class="M", report="cudnn-frontend#493: top-left where bottom-right is meant")
class AlignsQueriesTopLeft(MovesQueries):
    """A request's first query row sits at position 0."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return where.local


@deviates("MASK-OFFSET", fault_class="M", report="BR-40 microsoft/onnxruntime#28904")
class AlignsQueriesToTheLongestRequest(MovesQueries):
    """One query offset, that of the longest request, serves the whole batch."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return int(problem.q_offset.max()) + where.local


@deviates("MASK-OFFSET", fault_class="M", report="BR-41 Dao-AILab/flash-attention#2528")
class DividesRowsByTheGroupSize(MovesQueries):
    """Row indices are divided by the group size, as if heads were packed into rows."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return int(problem.q_offset[where.request]) + where.local // problem.group_size


@deviates("MASK-OFFSET", fault_class="M", report="BR-44 vllm-project/vllm#51848: per-request data for per-token rows")
class CountsRowsOverTheBatch(MovesQueries):
    """The row's index in the whole batch is added to the request's offset."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return int(problem.q_offset[where.request]) + where.row


@deviates("MASK-PREFIX", fault_class="M", report="article 2, 1.1: the edge of a prefix")
class PrefixIsOneShorter(ReadsRules):
    """The last position of the prefix is causal."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, PrefixLM):
            rule = PrefixLM(tuple(n - 1 for n in rule.prefix_len))
        return super().allows(rule, where, kv_idx)


@deviates("MASK-PREFIX", fault_class="M", report="article 2, 1.1: the edge of a prefix")
class PrefixIsOneLonger(ReadsRules):
    """The first position after the prefix is seen by every row."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, PrefixLM):
            rule = PrefixLM(tuple(n + 1 for n in rule.prefix_len))
        return super().allows(rule, where, kv_idx)


@deviates("MASK-PREFIX", fault_class="M", report="article 2, 1.1: prefix AND causal")
class SeesOnlyThePrefix(ReadsRules):
    """What lies past the prefix is never seen."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, PrefixLM):
            return np.asarray(kv_idx < rule.prefix_len[where.request])
        return super().allows(rule, where, kv_idx)


@deviates("MASK-PREFIX", fault_class="T", report="BR-64 invergent-ai/surogate#110: request b uses another's mask")
class UsesThePrefixOfTheFirstRequest(ReadsRules):
    """Every request has the prefix of request 0."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, PrefixLM):
            where = replace(where, request=0)
        return super().allows(rule, where, kv_idx)


@deviates("MASK-DOCUMENT", fault_class="M", report="article 2, 1.1: document ids by searchsorted, wrong side")
class GivesAFirstTokenToTheDocumentBefore(ReadsRules):
    """A document's first token belongs to the document before it."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, Document):
            starts = tuple(tuple(s + 1 if s else s for s in row) for row in rule.starts)
            rule = Document(starts)
        return super().allows(rule, where, kv_idx)


@deviates("MASK-DOCUMENT", fault_class="M", report="article 2, 1.1: >= for ==")
class SeesEarlierDocuments(ReadsRules):
    """A query sees its own document and all before it."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, Document):
            starts = rule.starts[where.request]
            return document_of(starts, kv_idx) <= document_of(starts, where.q_idx)
        return super().allows(rule, where, kv_idx)


@deviates("MASK-DOCUMENT", fault_class="A", report="BR-113 huggingface/diffusers#12605: a mask dropped without a word")
class IgnoresDocuments(ReadsRules):
    """Document boundaries are not applied."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(None if isinstance(rule, Document) else rule, where, kv_idx)


@deviates("MASK-COMPOSE", fault_class="M", report="article 2, 1.1: and_masks for or_masks")
class ReadsAndAsOr(ReadsRules):
    """What one rule of an And allows is seen."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(Or(rule.rules) if isinstance(rule, And) else rule, where, kv_idx)


@deviates("MASK-COMPOSE", fault_class="M", report="article 2, 1.1: and_masks for or_masks, the other way")
class ReadsOrAsAnd(ReadsRules):
    """Only what every rule of an Or allows is seen."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(And(rule.rules) if isinstance(rule, Or) else rule, where, kv_idx)


@deviates("MASK-COMPOSE", fault_class="A", report="no report: of several flags the last one wins")
class AppliesTheLastRuleOnly(ReadsRules):
    """Of several rules, the last one decides."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        return super().allows(rule.rules[-1] if isinstance(rule, And | Or) else rule, where, kv_idx)


@deviates("MASK-COMPOSE", fault_class="M", report="article 2, 1.1: brackets lost between and and or")
class DistributesAndOverOr(ReadsRules):
    """An And inside an Or is applied to the whole composition."""

    def allows(self, rule: MaskRule | None, where: QueryRow, kv_idx: IntArray) -> BoolArray:
        if isinstance(rule, Or):
            conjunctions = [part for part in rule.rules if isinstance(part, And)]
            everything = super().allows(rule, where, kv_idx)
            return np.asarray(
                np.logical_and.reduce([everything, *(self.allows(part, where, kv_idx) for part in conjunctions)])
            )
        return super().allows(rule, where, kv_idx)


class KeepsMaskedKeys(Steps):
    """The reference with masked keys still in the row, and one hook that has to deal with them."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        listed = self.candidates(problem, where, qo_head)
        if not len(listed):
            return super().attend(problem, where, qo_head, q, k, v)
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx, listed.values, qo_head)
        if problem.empty_row == "refuse" and not allowed.any():
            return super().attend(problem, where, qo_head, q, k, v)
        scores, values = self.load(problem, where, qo_head, listed, q, k, v)
        with np.errstate(all="ignore"):
            state = self.masked_state(scores, allowed, values)
            return self.finish(problem, qo_head, state)

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        """State of the row, from the scores of all listed keys."""
        raise NotImplementedError


@deviates("MASK-NO-BIAS", fault_class="Z", report="BR-103 ohdearquant/lattice#361")
class AddsAFiniteBias(KeepsMaskedKeys):
    """-1e4 is added to a masked score."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        return softmax_state(scores + np.where(allowed, 0.0, ADDED_BIAS), v)


@deviates("MASK-NO-BIAS", fault_class="Z", report="flashinfer-ai/flashinfer#4451: scores below the sentinel of -5e4")
class PutsASentinelInPlaceOfAMaskedScore(KeepsMaskedKeys):
    """A masked score becomes -5e4, which a real score can be below."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        return softmax_state(np.where(allowed, scores, SENTINEL), v)


@deviates("MASK-NO-BIAS", fault_class="E", report="flashinfer: a running maximum that starts at -5e4")
class NeverLetsTheMaximumSinkBelowASentinel(Steps):
    """The running maximum starts at -5e4, so that a row below it underflows to nothing."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        m = max(float(scores.max()), SENTINEL)
        p = exp_in_float32_range(scores - m)
        return PartialState(m, float(p.sum()), p @ v)


@deviates("MASK-BEFORE-MAX", fault_class="Z", report="article 1, 3.2: zeroing after softmax")
class MasksAfterTheSum(KeepsMaskedKeys):
    """Masked weights are set to 0 in the numerator, and stay in the denominator."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        m = float(scores.max())
        p = np.exp(scores - m)
        return PartialState(m, float(p.sum()), np.where(allowed, p, 0.0)[allowed] @ v[allowed])


@deviates("MASK-BEFORE-MAX", fault_class="Z", report="article 1, 3.2: mask before the maximum and before exp")
class TakesTheMaximumBeforeMasking(KeepsMaskedKeys):
    """The maximum runs over masked keys too, so that one high masked key makes the others underflow in float32."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        m = float(scores.max())
        p = exp_in_float32_range(scores[allowed] - m)
        return PartialState(m, float(p.sum()), p @ v[allowed])


@deviates("MASK-BEFORE-MAX", fault_class="Z", report="BR-104 pytorch/pytorch#109517")
class StartsFromAMaskedTile(KeepsMaskedKeys):
    """A first tile that is masked whole leaves exp(-inf - -inf) behind."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        right = softmax_state(scores[allowed], v[allowed])
        masked = np.where(allowed, scores, -np.inf)[:TILE]
        p = np.exp(masked - masked.max())  # NaN where all are masked, and NaN stays NaN through every rescale
        return replace(right, l=right.l + 0 * float(p.sum()), o=right.o + 0 * p.sum())


@deviates("MASK-INTERFERE", fault_class="P", report="BR-14 Dao-AILab/flash-attention#1745")
class MultipliesMaskedValuesByZero(KeepsMaskedKeys):
    """A masked key's value takes part with a weight of 0, and 0 times NaN is NaN."""

    def masked_state(self, scores: FloatArray, allowed: BoolArray, v: FloatArray) -> PartialState:
        right = softmax_state(scores[allowed], v[allowed])
        return replace(right, o=right.o + np.zeros(int((~allowed).sum())) @ v[~allowed])


class ReadsTheWholeRequest(Steps):
    """The reference with one hook: a row's state, given every committed key of the request."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        every = Positions(np.arange(int(problem.seqlen_kv[where.request])))
        selected = np.isin(every.values, self.effective(problem, where, qo_head).values)
        if not selected.any():
            return super().attend(problem, where, qo_head, q, k, v)
        scores, values = self.load(problem, where, qo_head, every, q, k, v)
        with np.errstate(all="ignore"):
            return self.finish(problem, qo_head, self.selected_state(scores, selected, values))

    def selected_state(self, scores: FloatArray, selected: BoolArray, v: FloatArray) -> PartialState:
        """State of the row."""
        raise NotImplementedError


@deviates("MASK-INTERFERE", fault_class="B", report="BR-65 Dao-AILab/flash-attention#2897: dense work, masked later")
class ComputesDenselyAndWeighsByZero(ReadsTheWholeRequest):
    """Every key of the request is loaded, and those that are not selected have a weight of 0."""

    def selected_state(self, scores: FloatArray, selected: BoolArray, v: FloatArray) -> PartialState:
        right = softmax_state(scores[selected], v[selected])
        return replace(right, o=right.o + np.zeros(len(v)) @ v)


@deviates("MASK-INTERFERE", fault_class="P", report="BR-19 flashinfer-ai/flashinfer#1046: what lies elsewhere decides")
class TakesTheMaximumOverTheWholeRequest(ReadsTheWholeRequest):
    """The maximum runs over keys that the row does not select."""

    def selected_state(self, scores: FloatArray, selected: BoolArray, v: FloatArray) -> PartialState:
        m = float(scores.max())
        p = exp_in_float32_range(scores[selected] - m)
        return PartialState(m, float(p.sum()), p @ v[selected])


@deviates("MASK-INTERFERE", fault_class="P", report="BR-16 Dao-AILab/flash-attention#1974: a page shared with others")
class RoundsValuesByTheLargestOfTheRequest(ReadsTheWholeRequest):
    """Values are rounded on a grid that the largest value of the request sets."""

    def selected_state(self, scores: FloatArray, selected: BoolArray, v: FloatArray) -> PartialState:
        step = float(np.abs(v).max()) * 2.0**-24
        grid = np.rint(v[selected] / step) * step if step > 0 else v[selected]
        return softmax_state(scores[selected], grid)


@deviates("MASK-INTERFERE", fault_class="P", report="BR-13 flashinfer-ai/flashinfer#941; BR-17 vllm-project/vllm#936")
class MultipliesTheTailByZero(Steps):
    """The unowned slots of the last page take part with a weight of 0."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        out, lse = super().attend(problem, where, qo_head, q, k, v)
        tail = v[tail_slots(problem, where.request), self.kv_head(problem, qo_head)]
        return out + np.zeros(len(tail)) @ tail, lse


def tail_slots(problem: AttentionProblem, request: int) -> IntArray:
    """Slots of a request's last page that lie past its committed length."""
    page_size, seqlen_kv = problem.cache.page_size, int(problem.seqlen_kv[request])
    past = np.arange(seqlen_kv, -(-seqlen_kv // page_size) * page_size, dtype=np.int64)
    return problem.cache.slots(request, Positions(past)).values


@deviates("MASK-TAIL", fault_class="P", report="BR-23 pytorch/pytorch#159247")
class AttendsTheWholeLastPage(Steps):
    """The last page is attended to its end, past the committed length."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        page_size, seqlen_kv = problem.cache.page_size, int(problem.seqlen_kv[where.request])
        if not (kept.values // page_size == (seqlen_kv - 1) // page_size).any():
            return kept
        return Positions(np.append(kept.values, np.arange(seqlen_kv, -(-seqlen_kv // page_size) * page_size)))


@deviates("MASK-TAIL", fault_class="P", report="BR-22 flashinfer-ai/flashinfer#3716: lanes up to the end of a tile")
class CountsZeroFilledLanes(Steps):
    """The lanes that fill the last tile have a score of 0 and a value of 0, and are counted."""

    lanes: ClassVar[int] = LANES

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        spare = -len(scores) % self.lanes
        return super().state(np.append(scores, np.zeros(spare)), np.vstack([v, np.zeros((spare, v.shape[1]))]))


@deviates("MASK-TAIL", fault_class="M", report="BR-74 microsoft/SeerAttention#33: lengths rounded down to pages")
class DropsTheRaggedLastPage(Steps):
    """Only pages that are full are read."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        page_size = problem.cache.page_size
        return Positions(kept.values[kept.values < int(problem.seqlen_kv[where.request]) // page_size * page_size])


@deviates("MASK-TAIL", fault_class="M", report="no report: a length used as the index of the last key")
class DropsTheLastCommittedToken(Steps):
    """The committed length is used as the index of the last key to leave out."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        return Positions(kept.values[kept.values < int(problem.seqlen_kv[where.request]) - 1])
