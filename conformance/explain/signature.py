"""Which of the usual kinds of fault a failure looks like, and where kernels that had it were wrong.

The four kinds are the ones that an engineer tells apart first: only at block edges; small and everywhere; forward right
and gradients wrong; one request right and a batch wrong.
"""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.structure import Case
from attnconform.conformance.explain.answer import Make
from attnconform.conformance.explain.location import TILES, attended_edges, position_of, wrong_edges
from attnconform.conformance.explain.shrink import only_request, with_structure
from attnconform.conformance.judge import judge
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import compare_forward
from attnconform.conformance.judge.verdict import CaseResult

SMALL = 0.1  # of the largest number of an output: an error below it is small
WIDESPREAD = 0.5  # of the elements
FORWARD_CHECKS = ("check_written", "check_path", "check_values")


@dataclass(frozen=True)
class Signature:
    """A kind of fault, and where to look for it."""

    name: str
    look: str

    def __str__(self) -> str:
        return f"{self.name}: look at {self.look}"


GRADIENT_ALONE = Signature(
    "forward right, gradients wrong",
    "the transposed lists of the backward, captured tensors that have gradients, and how dK and dV are written back",
)
BATCH_ALONE = Signature(
    "each request right alone, the batch wrong",
    "what is broadcast over the batch, and the map from logical positions to pages and slots",
)
EDGES_ALONE = Signature(
    "wrong at block edges alone",
    "partial blocks, the query's global offset, the padding of the tail, and blocks taken for full that are not",
)
SMALL_EVERYWHERE = Signature(
    "small and everywhere",
    "the order of score rules, where the scale is applied, the precision of accumulators, and the soft cap",
)


def signature_of(case: Case, make: Make, result: CaseResult) -> Signature | None:
    """The kind that a failed case looks like; None where it looks like none of them."""
    if case.operation == "backward" and not any(f.check in FORWARD_CHECKS for f in result.findings):
        return GRADIENT_ALONE
    if case.operation == "forward" and is_right_alone(case, make, result):
        return BATCH_ALONE
    trial = Trial(case, make())
    if is_wrong_at_edges(trial):
        return EDGES_ALONE
    return SMALL_EVERYWHERE if is_small_everywhere(trial) else None


def is_right_alone(case: Case, make: Make, result: CaseResult) -> bool:
    """Whether every request of a batch passes, by itself, the checks that the batch fails."""
    requests = range(len(case.structure.seqlens_q))
    failed = {f.check for f in result.findings}
    checks = [check for check in judge.CHECKS_OF[case.operation] if check.__name__ in failed]
    if len(requests) < 2 or not checks:
        return False
    alone = (with_structure(case, only_request(case.structure, n)) for n in requests)
    return all(judge.judge_case(one, make(), checks=checks).is_conforming for one in alone)


def is_wrong_at_edges(trial: Trial) -> bool:
    """Whether every wrong edge lies in a block that its row attends in part, while whole blocks are right."""
    wrong = wrong_edges(trial, repeated=False)
    if not wrong or len(wrong) < len(wrong_edges(trial)):
        return False
    lists = trial.problem.candidates
    sizes = [trial.problem.cache.page_size, *TILES]
    if lists is not None and lists.granularity == "block":
        sizes.insert(0, lists.block_size)
    return any(are_at_edges(trial, wrong, size) for size in dict.fromkeys(sizes) if size > 1)


def are_at_edges(trial: Trial, wrong: list[tuple[int, int, int]], size: int) -> bool:
    """The same for blocks of one size."""
    attended: dict[tuple[int, int, int], int] = {}
    for row, head, slot in attended_edges(trial):
        block = (row, head, position_of(trial, row, slot) // size)
        attended[block] = attended.get(block, 0) + 1
    whole = {block for block, count in attended.items() if count == size}
    positions = [position_of(trial, row, slot) for row, _, slot in wrong]
    if min(positions) < 0:  # not even a token of the request
        return False
    blocks = [(row, head, j // size) for (row, head, _), j in zip(wrong, positions, strict=True)]
    in_rows = {block[:2] for block in blocks}
    return any(block[:2] in in_rows for block in whole) and not any(block in whole for block in blocks)


def is_small_everywhere(trial: Trial) -> bool:
    """Whether most elements of an output are wrong by a little, over the right edges."""
    if wrong_edges(trial):
        return False
    for compared in compare_forward(trial, trial.values, trial.base, trial.oracle):
        finite = np.isfinite(compared.want) & np.isfinite(compared.got)
        if not finite.any() or not (compared.worst_ratio > 1):
            continue
        error = np.abs(compared.got - compared.want)[finite]
        wrong = (compared.ratio(compared.worst) > 1)[finite]
        if wrong.mean() >= WIDESPREAD and error.max() <= SMALL * max(float(np.abs(compared.want[finite]).max()), 1e-30):
            return True
    return False
