"""A deviation and a variant under several seeds: the same structures with other numbers."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from attnconform.conformance.cases.structure import Case, named
from attnconform.conformance.deviations.deviation import Deviation, Variant
from attnconform.conformance.deviations.judging import (
    Screen,
    is_enough,
    is_killed,
    judge_until_killed,
    sample_of,
    score_deviation,
    score_variant,
    variant_score,
)
from attnconform.conformance.deviations.records import DeviationScore, VariantScore
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import replace_seed
from attnconform.conformance.judge.verdict import CaseResult

OTHER_SEED_CASES = 20  # a variant sees at least so many under each other seed, where there are


def reseed(case: Case, times: int) -> Case:
    """The case with another seed, and the id that belongs to it; itself for 0."""
    if not times:
        return case
    return named(replace_seed(case, case.seed + (times << 40)), case.id.split(".")[2])


def score_under_seeds(entry: Deviation | Variant, cases: Sequence[Case], seeds: int) -> DeviationScore | VariantScore:
    """The score under the cases' own seed, and what becomes of the entry under each of the others."""
    with np.errstate(all="ignore"):  # mistakes overflow and divide by 0 on purpose
        if isinstance(entry, Deviation):
            first = score_deviation(entry, cases)
            escaped = [times for times in range(1, seeds) if not is_killed_again(entry, first, cases, times)]
            return replace(first, escaped_seeds=tuple(escaped))
        score = score_variant(entry, cases)
        for times in range(1, seeds):
            score = with_another_sample(entry, score, cases, times)
        return score


def is_killed_again(deviation: Deviation, first: DeviationScore, cases: Sequence[Case], times: int) -> bool:
    """Whether a check of its clause kills it with other numbers: on a case that did before, else on any."""
    killers = {kill.case_id for kill in first.kills if kill.is_related}
    results: list[CaseResult] = []
    judge_until_killed(deviation, iter([reseed(case, times) for case in cases if case.id in killers]), results)
    if is_killed(results, deviation.clause):
        return True
    for group in Screen(deviation, [reseed(case, times) for case in cases]).groups():
        judge_until_killed(deviation, group, results)
        if is_enough(results, deviation.clause):
            break
    return is_killed(results, deviation.clause)


def with_another_sample(variant: Variant, first: VariantScore, cases: Sequence[Case], times: int) -> VariantScore:
    """A variant's score with what another sample of the matrix, under another seed, adds to it."""
    sample = [reseed(case, times) for case in sample_of(cases, f"{variant.id} {times}", OTHER_SEED_CASES)]
    judged = variant_score(variant, [judge_case(case, variant.build()) for case in sample])
    return replace(
        first,
        judged=first.judged + judged.judged,
        unsupported=first.unsupported + judged.unsupported,
        quality=first.quality + judged.quality,
        rejections=(*first.rejections, *judged.rejections),
    )
