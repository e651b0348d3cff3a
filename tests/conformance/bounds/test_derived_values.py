"""Spelt out one by one, the worst case's terms still give the numbers of the derivation. [BOUND-OUT]

The probable bounds have been tightened since, where errors that keys or rows share cancel: none may be above its first.
"""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES

DERIVED = json.loads((Path(__file__).parent / "derived_values.json").read_text())


@pytest.mark.parametrize("family_idx", range(8))
@pytest.mark.parametrize("name", sorted(DERIVED["values"]))
def test_worst_cases_equal_their_derivation_and_probable_bounds_stay_below_it(make_case, name, family_idx):
    family = list(DERIVED["values"][name])[family_idx]
    # The script merged eight splits for every second family.
    numerics = msgspec.structs.replace(NUMERICS_CLASSES[name], num_splits=1 + 7 * (family_idx % 2))
    case = make_case(family, rows=8, keys=48, head_dim=16)

    got = case.bounds(numerics)

    visible = case.block.mask.any(1)
    lse_rounding = 2.0**-24 * 2.0 ** np.floor(np.log2(np.abs(case.exact()["lse"][visible])))
    for column, want in zip(DERIVED["columns"], DERIVED["values"][name][family], strict=True):
        bound = got[column] if column.startswith(("dk", "dv")) else got[column][visible]
        # It left out the rounding of lse on its way to memory.
        bound = bound - lse_rounding if column.startswith("lse") else bound
        got_mean = np.log2(bound).mean()
        assert got_mean <= want + 1e-9, column
        assert column.endswith("prob") or got_mean == pytest.approx(want, abs=1e-9), column
