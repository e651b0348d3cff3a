"""No constant may grow: a class or a bound that loosens makes kernels pass that failed. [BOUND-OUT]

The frozen file holds freeze() of the classes; only a change that tightens rewrites it.
"""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES, Numerics

FROZEN_FILE = Path(__file__).parent / "frozen_constants.json"
FROZEN = json.loads(FROZEN_FILE.read_text())
DERIVED_PROPERTIES = (
    "u",
    "u_out",
    "eta_out",
    "u_p",
    "eta_p",
    "u_ds",
    "eta_ds",
    "exp_error",
    "tanh_error",
    "largest_out",
)


def describe(numerics):
    derived = {name: getattr(numerics, name) for name in DERIVED_PROPERTIES}
    return {**msgspec.to_builtins(numerics), **derived}


def measure(case, numerics):
    """Sum and largest element of every bound."""
    return {name: [float(x.sum()), float(x.max())] for name, x in case.bounds(numerics).items() if "sink" not in name}


def freeze(make_case):
    classes = {name: describe(numerics) for name, numerics in NUMERICS_CLASSES.items()}
    case = make_case("normal", 5, rows=6, keys=24, head_dim=16)
    bounds = {name: measure(case, numerics) for name, numerics in NUMERICS_CLASSES.items()}
    return {"classes": classes, "bounds": bounds}


def test_every_class_is_frozen():
    assert set(FROZEN["classes"]) == set(FROZEN["bounds"]) == set(NUMERICS_CLASSES)


@pytest.mark.parametrize("name", sorted(NUMERICS_CLASSES))
def test_no_declared_constant_has_changed(name):
    assert describe(NUMERICS_CLASSES[name]) == FROZEN["classes"][name]


@pytest.mark.parametrize("name", sorted(NUMERICS_CLASSES))
def test_no_bound_has_grown(make_case, name):
    case = make_case("normal", 5, rows=6, keys=24, head_dim=16)
    for bound, got in measure(case, NUMERICS_CLASSES[name]).items():
        assert np.all(got <= np.array(FROZEN["bounds"][name][bound]) * (1 + 1e-9)), bound


def test_freezing_notices_a_constant_that_grows_by_a_millionth(make_case):
    case = make_case("normal", 5, rows=6, keys=24, head_dim=16)
    grown = msgspec.structs.replace(NUMERICS_CLASSES["fp32"], eps=4.00001)
    frozen = FROZEN["bounds"]["fp32"]
    assert any(np.any(got > np.array(frozen[bound]) * (1 + 1e-9)) for bound, got in measure(case, grown).items())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"out_dtype": "int8"}, "out_dtype is 'int8'"),
        ({"p_storage": "half"}, "p_storage is 'half'"),
        ({"p_scale": 3.0}, "p_scale is 3.0, not a power of two"),
        ({"num_splits": 0}, "num_splits is 0, less than 1"),
        ({"eps": -1.0}, "eps is -1.0, less than 0"),
        ({"prescale": "q"}, "prescale is 'q', but prescale_bits is 0"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Numerics(**{"out_dtype": "float32", **change})
