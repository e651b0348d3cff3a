"""For operators whose causal mask cannot be turned off, moved or told an offset: where each row has to stand."""

from attnconform.conformance.views import ProblemView


def causal_places(problem: ProblemView, request: int) -> list[int]:
    """Of each row the last key that it may see. Where nothing is masked that is the last of all.

    A row past the last key sees what a row at the last key sees.
    """
    last = int(problem.spec.seqlen_kv[request]) - 1
    rows = problem.q_rows(request)
    first = last if problem.spec.mask_rule is None else int(problem.spec.q_offset[request])
    step = 0 if problem.spec.mask_rule is None else 1
    return [min(first + step * row, last) for row in range(rows.stop - rows.start)]


def rows_of_calls(places: list[int], *, together: bool = True) -> list[slice]:
    """All rows in one call where they stand side by side, else a call for each."""
    if together and places == list(range(places[0], places[0] + len(places))):
        return [slice(0, len(places))]
    return [slice(row, row + 1) for row in range(len(places))]
