"""Where the wrong elements lie, in the words of a kernel: page, tile, warp, head group, split."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.judge.membership import LEAST_WEIGHT, probe
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import Comparison
from attnconform.reference.coordinates import IntArray

TILES = (16, 64)  # keys or rows of a kernel's usual tiles
WARP = 32
MAX_VALUES = 8  # that are listed of one trait
Edge = tuple[int, int, int]  # row, query head, slot


@dataclass(frozen=True)
class Trait:
    """One coordinate of every element, and which of the elements are wrong."""

    name: str
    values: IntArray  # (num_elements,)
    hides: tuple[str, ...] = ()  # traits that follow from this one, and are told only where they have fewer values


def shared_traits(traits: Sequence[Trait], wrong: IntArray) -> str:
    """One line: every trait that the wrong elements share and not all elements have; "everywhere" where there is none.

    `wrong` indexes the elements.
    """
    parts, most = list[str](), dict[str, int]()  # trait -> with so many values or more it says nothing new
    for trait in traits:
        bad, every = np.unique(trait.values[wrong]), np.unique(trait.values)
        if len(bad) >= min(most.get(trait.name, len(every)), len(every)):
            continue
        text = told_values(bad, every)
        if text:
            parts.append(f"{trait.name} {text}")
            most |= dict.fromkeys(trait.hides, len(bad))
    return "; ".join(parts) or "everywhere"


def told_values(bad: IntArray, every: IntArray) -> str:
    """Some values out of all, in the fewest words; empty where they are too many to tell."""
    if len(bad) == 1:
        return str(int(bad[0]))
    if len(every) - len(bad) == 1:
        return f"not {int(np.setdiff1d(every, bad)[0])}"
    if 2 * len(bad) <= len(every) and len(bad) <= MAX_VALUES:
        return f"in {{{', '.join(str(int(v)) for v in bad)}}}"
    return ""


def position_traits(trial: Trial, positions: IntArray, pages: IntArray) -> list[Trait]:
    """Traits of keys: their page, and their position in the page, a listed block, a tile and a warp."""
    lists, sizes = trial.problem.candidates, {"page_size": trial.problem.cache.page_size}
    if lists is not None and lists.granularity == "block":
        sizes["block_size"] = lists.block_size
    units = [*sizes.items(), *(("tile", tile) for tile in TILES), ("warp", WARP)]
    mods = {f"position mod {unit} {size}": size for unit, size in units}
    return [
        Trait("position", positions, tuple(mods)),
        Trait("page", pages),
        *(Trait(name, positions % mod) for name, mod in mods.items()),
    ]


def head_traits(trial: Trial, heads: IntArray) -> list[Trait]:
    """Traits of query heads: the head, its KV head, its place in the group."""
    group = trial.problem.group_size
    return [
        Trait("query head", heads, (f"head mod group_size {group}",)),
        Trait("KV head", heads // group),
        Trait(f"head mod group_size {group}", heads % group),
    ]


def row_traits(trial: Trial, rows: IntArray) -> list[Trait]:
    """Traits of query rows: the row, its request, its place in a tile of rows."""
    where = list(trial.problem.rows())
    request, local = (np.array([getattr(w, name) for w in where], dtype=np.int64) for name in ("request", "local"))
    tile = f"row mod tile {TILES[0]}"
    return [
        Trait("row", rows, ("request", tile)),
        Trait("request", request[rows]),
        Trait(tile, local[rows] % TILES[0]),
    ]


def locate(trial: Trial, comparison: Comparison) -> str:
    """What the elements of an output that are past their bound have in common."""
    ratio = comparison.ratio(comparison.worst)
    if not ratio.ndim:  # one number, such as the gradient of a cap
        return "everywhere"
    # where 0 is right and given, as in slots that nobody attends, there is nothing to be wrong
    told = np.flatnonzero((comparison.want != 0) | (ratio > 1))
    wrong = np.flatnonzero(ratio.flat[told] > 1)
    at = np.unravel_index(told, ratio.shape)
    if comparison.name in ("dk", "dv"):
        size = trial.problem.cache.page_size
        traits = [
            Trait("slot", at[0], (f"slot mod page_size {size}",)),
            Trait("page", at[0] // size),
            Trait(f"slot mod page_size {size}", at[0] % size),
            Trait("KV head", at[1]),
        ]
    elif comparison.name == "dsink" or comparison.name.startswith("dscore"):
        traits = head_traits(trial, at[0]) + [Trait("table entry", entry) for entry in at[1:]]
    else:
        traits = [*row_traits(trial, at[0]), *head_traits(trial, at[1])]
    if ratio.ndim == 3:
        traits.append(Trait("column mod 16", at[2] % 16))
    return shared_traits(traits, wrong)


def where_edges_are_wrong(trial: Trial, wrong: Sequence[Edge] | None = None) -> str:
    """What wrong edges have in common, of all edges that could be wrong; those of the membership probe by default."""
    found = wrong_edges(trial) if wrong is None else list(wrong)
    every = sorted({*attended_edges(trial), *found})
    if not found:
        return ""
    index = {edge: i for i, edge in enumerate(every)}
    rows, heads, slots = (np.array(column, dtype=np.int64) for column in zip(*every, strict=True))
    positions = np.array([position_of(trial, row, slot) for row, slot in zip(rows, slots, strict=True)])
    traits = [*row_traits(trial, rows), *head_traits(trial, heads)]
    traits += position_traits(trial, positions, slots // trial.problem.cache.page_size)
    splits = trial.case.structure.hints.num_kv_splits or 1
    if splits > 1:
        traits.append(Trait(f"KV split (of {splits})", split_of(trial, every, splits)))
    return shared_traits(traits, np.array([index[edge] for edge in found], dtype=np.int64))


def attended_edges(trial: Trial) -> list[Edge]:
    """Every edge that the reference has."""
    problem = trial.problem
    return [
        (row, h, int(slot))
        for row in range(problem.total_q)
        for h in range(problem.num_qo_heads)
        for slot in trial.edges.of(row, h)[1]
    ]


def wrong_edges(trial: Trial, *, repeated: bool = True) -> list[Edge]:
    """Edges that the membership probe finds missing, extra or, where they are asked for, repeated."""
    weights = probe(trial)
    wanted = weights.edges > 0
    counted = np.divide(
        weights.observed * weights.edges, weights.expected, out=np.zeros_like(weights.observed), where=wanted
    )
    heaviest = weights.expected.max(axis=2, keepdims=True, initial=0.0)
    wrong = wanted & weights.resolvable & ~(np.abs(counted - weights.edges) < 0.5)
    if not repeated:
        wrong &= counted < weights.edges
    wrong |= ~wanted & (weights.observed > LEAST_WEIGHT * heaviest)
    return [(int(row), int(head), int(slot)) for row, head, slot in np.argwhere(wrong)]


def position_of(trial: Trial, row: int, slot: int) -> int:
    """The position of a slot in a row's request; -1 where the request has no token there."""
    request = int(np.searchsorted(trial.problem.qo_indptr, row, side="right")) - 1
    found = np.flatnonzero(trial.view.slots(request).cpu().numpy() == slot)
    return int(found[0]) if len(found) else -1


def split_of(trial: Trial, edges: Sequence[Edge], splits: int) -> IntArray:
    """Which equal piece of its row's keys each edge lies in; -1 for an edge that the row does not have."""
    pieces = []
    for row, head, slot in edges:
        slots = trial.edges.of(row, head)[1]
        at = np.flatnonzero(slots == slot)
        pieces.append(int(at[0]) * splits // len(slots) if len(at) else -1)
    return np.array(pieces, dtype=np.int64)
