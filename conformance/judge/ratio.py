"""How an error / bound reads, in every message and report."""

import sys

LARGEST_SAID = 1e6  # past this, how much larger says nothing more


def ratio_text(ratio: float) -> str:
    """Three significant digits; `inf`, and `> 1e6` for what is larger.

    The largest float stands for infinity, which JSON does not have.
    """
    if ratio >= sys.float_info.max:
        return "inf"
    if ratio > LARGEST_SAID:
        return "> 1e6"
    return f"{float(f'{ratio:.3g}'):.0f}" if ratio >= 1000 else f"{ratio:.3g}"
