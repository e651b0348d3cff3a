"""A single file that reproduces a failure: the case and the right numbers inside, the adapter by name."""

import json
from pathlib import Path

from attnconform.conformance.cases.structure import Case, encode_case

TEMPLATE = '''"""Reproduces {case_id} on {backend}. Needs attnconform and the adapter; what is expected stands below."""

import json

import numpy as np

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.structure import decode_case
from attnconform.conformance.judge.trial import Trial

CASE = r"""{case_json}"""
WANT = json.loads(r"""{want_json}""")


def parse(rows):
    return np.array([float.fromhex(x) for x in rows["data"]]).reshape(rows["shape"])


trial = Trial(decode_case(CASE.encode(), "CASE"), load_backend({backend!r}, {device!r}))
seen = trial.base
for name in ("out", "lse"):
    got, want = getattr(seen, name), parse(WANT[name])
    if got is None:
        continue
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
    at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    place = tuple(map(int, at))
    print(f"{{name}}{{place}}: error {{error[at]:.3g}}, got {{got[at]:.9g}}, want {{want[at]:.9g}}")
'''


def write_reproducer(path: Path, case: Case, want: dict[str, dict[str, object]], *, backend: str, device: str) -> None:
    """Writes the script. `want` holds out and lse as shape and hexadecimal floats."""
    text = TEMPLATE.format(
        case_id=case.id,
        backend=backend,
        device=device,
        case_json=encode_case(case).decode(),
        want_json=json.dumps(want),
    )
    path.write_text(text, encoding="utf-8")
