"""The dozen tiny cases of `attnconform smoke`, in sizes that the backend declares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from attnconform.conformance.adapters.conventions import CONVENTIONS
from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.domain import declared_axes
from attnconform.conformance.cases.matrix import SMOKE_ROW
from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, named
from attnconform.conformance.judge.diagnosis import rule_clauses
from attnconform.reference.rules import Alibi, Causal, MaskRule, ScoreRule, SoftCap, Window

EVERYWHERE = ("lse base", "sm_scale")  # axes that every case depends on
HEAD_MAP = "KV head of query head h"
SEED = 0x5A0CE


@dataclass(frozen=True)
class Sizes:
    """What the cases take from a declaration: the usual value where it is declared, else the first that is."""

    dtype: str = SMOKE_ROW["dtype"]
    head_dim: str = SMOKE_ROW["head_dim"]
    page_size: str = SMOKE_ROW["page_size"]
    layout: str = SMOKE_ROW["layout"]
    sharing: str = SMOKE_ROW["sharing"]
    heads: str = "2/2"  # of the cases that no head map decides
    grouped: str = "4/2"
    one_group: str = "4/1"

    @property
    def alibi(self) -> Alibi:
        """Slopes of the plain heads, from a half down."""
        return Alibi(tuple(2.0 ** -(1 + h % 8) for h in range(pair(self.heads)[0])))

    @property
    def axes(self) -> dict[str, str]:
        """As axis values of every case; heads are its own."""
        return {axis: getattr(self, axis) for axis in ("dtype", "head_dim", "page_size", "layout", "sharing")}


def sizes_of(capabilities: Capabilities) -> Sizes:
    """The sizes that a backend's cases have; the usual ones where it declares no value of some axis.

    Heads are alike in number, grouped, or of one group; where a backend has none such, the usual ones, so that the case
    says what is not declared.
    """
    axes, usual = declared_axes("forward", capabilities), Sizes()
    if not axes:
        return usual
    taken = {axis: value if value in axes[axis] else axes[axis][0] for axis, value in usual.axes.items()}
    kinds: dict[str, Callable[[int, int], bool]] = {
        "heads": lambda qo, kv: qo == kv,
        "grouped": lambda qo, kv: qo > kv > 1,
        "one_group": lambda qo, kv: qo > kv == 1,
    }
    for name, fits in kinds.items():
        fitting = [heads for heads in axes["heads"] if fits(*pair(heads))]
        instead = axes["heads"] if name == "heads" else [getattr(usual, name)]
        taken[name] = getattr(usual, name) if getattr(usual, name) in fitting else [*fitting, *instead][0]
    return Sizes(**taken)


def pair(value: str) -> tuple[int, int]:
    """The two numbers of heads or of a head dim."""
    first, second = map(int, value.split("/"))
    return first, second


@dataclass(frozen=True)
class TinyCase:
    """A case that tells the values of some axes apart."""

    case: Case
    axes: tuple[str, ...]  # that its answer depends on


def tiny_structure(
    *,
    sizes: Sizes,
    q: tuple[int, ...] = (1,),
    kv: tuple[int, ...] = (9,),
    heads: str = "",  # the plain ones
    lists: Sequence[tuple[int, ...]] | None = None,
    mask: MaskRule | None = None,
    score: tuple[ScoreRule, ...] = (),
) -> Structure:
    """A structure of one or two requests, its pages out of order; every head of a row has the row's list."""
    page_size, (num_qo_heads, num_kv_heads) = int(sizes.page_size), pair(heads or sizes.heads)
    head_dim_qk, head_dim_vo = pair(sizes.head_dim)
    needed = [-(-tokens // page_size) for tokens in kv]
    ends = np.cumsum(needed)
    pages = tuple(tuple(range(int(end), int(end) - n, -1)) for end, n in zip(ends, needed, strict=True))
    copies = {"shared": 1, "kv_head": num_kv_heads, "query_head": num_qo_heads}[sizes.sharing]
    candidates = None
    if lists is not None:
        every = tuple(entries for entries in lists for _ in range(copies))
        candidates = CandidateStructure(lists=every, sharing=sizes.sharing)  # type: ignore[arg-type]  # of the axis
    return Structure(
        dtype=sizes.dtype,  # type: ignore[arg-type]  # of the axis
        seqlens_q=q,
        seqlens_kv=kv,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        num_pages=int(ends[-1]) + 1,
        page_table=pages,
        layout=sizes.layout,  # type: ignore[arg-type]  # of the axis
        candidates=candidates,
        mask_rule=mask,
        score_rules=score,
        sm_scale=head_dim_qk**-0.5,
    )


def tiny_cases(sizes: Sizes) -> tuple[TinyCase, ...]:
    """A dozen cases, one idea each, in the order in which a reader would try them."""
    alibi, cap = sizes.alibi, SoftCap(1.5)
    structure, tiny = partial(tiny_structure, sizes=sizes), partial(tiny_case, sizes)
    token, holes, twice = {"granularity": "token"}, {"listing": "holes"}, {"listing": "duplicates"}
    prefill, chunk = {"phase": "prefill"}, {"phase": "chunk"}
    return (
        tiny("plain", structure(), {}),
        tiny("two-requests", structure(q=(1, 3), kv=(5, 19)), {"phase": "mixed"}),
        tiny("grouped", structure(heads=sizes.grouped), {}),
        tiny("one-group", structure(heads=sizes.one_group, q=(3,)), chunk),
        tiny("causal-square", structure(q=(5,), kv=(5,), mask=Causal()), prefill | {"mask": "causal"}),
        tiny("causal-chunk", structure(q=(3,), mask=Causal()), chunk | {"mask": "causal"}, "causal alignment"),
        tiny("window", structure(q=(6,), kv=(6,), mask=Window(2, 1)), prefill | {"mask": "window"}, "window"),
        tiny("listed", structure(lists=[(1, 4, 7)]), token),
        tiny("listed-twice", structure(lists=[(1, 4, 4, 7)]), token | twice, "duplicates"),
        tiny("hole-inside", structure(lists=[(1, -1, 4, 7)]), token | holes, "holes"),
        tiny("no-key", structure(q=(2,), lists=[(-1, -1), (2, 5)]), token | holes, "lse of an empty row"),
        tiny("alibi", structure(q=(4,), kv=(4,), score=(alibi,)), prefill | {"score": "alibi"}, "ALiBi"),
        tiny(
            "alibi-capped", structure(q=(4,), kv=(4,), score=(alibi, cap)), prefill | {"score": "alibi_softcap"},
            "ALiBi", "soft cap",
        ),
        tiny(
            "capped-alibi", structure(q=(4,), kv=(4,), score=(cap, alibi)), prefill | {"score": "alibi_softcap"},
            "ALiBi", "soft cap",
        ),
    )  # fmt: skip


def tiny_case(sizes: Sizes, name: str, structure: Structure, axes: dict[str, str], *told: str) -> TinyCase:
    """A tiny case, and the axes that it tells apart: the head map too where its heads are grouped."""
    heads = f"{structure.num_qo_heads}/{structure.num_kv_heads}"
    if structure.num_qo_heads > structure.num_kv_heads > 1:
        told = (*told, HEAD_MAP)
    row = SMOKE_ROW | sizes.axes | {"heads": heads} | axes
    of_axes = (CONVENTIONS[axis].clause for axis in told)
    clauses = tuple(sorted({"SET-IDENTITY", "SCORE-SCALE", *rule_clauses(structure.mask_rule), *of_axes}))
    case = Case(
        id="",
        level="L0",
        operation="forward",
        structure=structure,
        values="normal",
        seed=SEED,
        clauses=clauses,
        axes=row,
    )
    return TinyCase(named(case, name), (*EVERYWHERE, *told))
