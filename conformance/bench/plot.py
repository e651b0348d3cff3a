"""A report as a picture and as a page: PNG for a pull request, HTML with the numbers under the picture."""

import base64
import io
import math
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from attnconform.conformance.bench.crossing import crossing
from attnconform.conformance.bench.report_text import met_text
from attnconform.conformance.bench.row import CHUNK, BenchReport, SweepPoint
from attnconform.conformance.bench.sweep import choices, rate_crossings
from attnconform.conformance.bench.timing import Quantiles

COLORS = ("#4269d0", "#efb118", "#3ca951", "#a463f2")
STYLES = tuple(zip(COLORS, "os^D", (10, 7, 5, 4), strict=True))  # lines may lie on each other
DENSE, INDEX = "#333333", "#9a9a9a"
PANELS = {  # axis -> field, label with its unit
    "length": ("seqlen_kv", "committed keys of a request (tokens)"),
    "batch": ("batch", "batch (requests)"),
    "clustering": ("run_length", "neighbouring blocks chosen together (blocks)"),
    "query length": ("seqlen_q", "query rows of a request (rows)"),
    CHUNK: ("seqlen_kv", "committed keys at the end of the chunk (tokens)"),
}


def write_plot(report: BenchReport, path: Path) -> list[Path]:
    """Writes PATH.png and PATH.html, whatever suffix PATH has. Raises ValueError where matplotlib is missing."""
    png = draw(report)
    page = template().render(
        report=report, picture=base64.b64encode(png).decode(), choices=choices(report.sweep), met=met_text
    )
    targets = [path.with_suffix(".png"), path.with_suffix(".html")]
    path.parent.mkdir(parents=True, exist_ok=True)
    targets[0].write_bytes(png)
    targets[1].write_text(page, encoding="utf-8")
    return targets


def template() -> jinja2.Template:
    source = Path(__file__).with_name("bench.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)


def need_matplotlib() -> None:
    """Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ValueError("--plot needs matplotlib: pip install 'attnconform[plot]'") from missing


def draw(report: BenchReport) -> bytes:
    """The sweep where there is one, else every row beside its peer."""
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25}):  # fmt: skip
        figure = draw_sweep(report, plt) if report.sweep else draw_rows(report, plt)
    figure.suptitle(title_of(report), fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


def title_of(report: BenchReport) -> str:
    """Which machine, and whether its times mean anything."""
    where = f"{report.environment.device}, {report.date}"
    warning = " (interpreter: times mean nothing)" if report.environment.is_interpreted else ""
    return (
        f"Sparse against dense, decode from candidates to output: {where}{warning}" if report.sweep else where + warning
    )


def draw_sweep(report: BenchReport, plt: Any) -> Any:
    """A panel for every axis, of which only the chunk of a prompt is prefill, and a table."""
    figure = plt.figure(figsize=(17, 7.8), layout="constrained")
    axes = figure.subplot_mosaic(
        [["rate", "length", "batch", "chunk"], ["clustering", "query length", "table", "table"]]
    )
    if any(p.axis == "rate and block" for p in report.sweep):
        draw_rates(axes["rate"], report.sweep)
    else:
        leave_empty(axes["rate"], "rate and block")
    for axis, (field, label) in PANELS.items():
        points = [p for p in report.sweep if p.axis == axis]
        if points:
            draw_line(axes[axis], points, axis, field, label)
        else:
            leave_empty(axes[axis], axis)
    draw_table(axes["table"], report)
    return figure


def leave_empty(ax: Any, axis: str) -> None:
    """A panel whose points were left out."""
    ax.axis("off")
    ax.text(0.5, 0.5, f"{axis}: not measured", ha="center", transform=ax.transAxes)


def draw_rates(ax: Any, found: list[SweepPoint]) -> None:
    """A line for each block size, dense, and the rates at which they cross."""
    points = [p for p in found if p.axis == "rate and block"]
    crossings = rate_crossings(found)
    for (color, marker, size), block in zip(STYLES, sorted({p.block_size for p in points}), strict=False):
        line = sorted((p for p in points if p.block_size == block), key=lambda p: p.rate)
        where = crossings[block]
        label = f"sparse, block {block}" + ("" if where is None else f", dense from {where:.0%}")
        xs, ys = [p.rate for p in line], [p.total for p in line]
        ax.plot(xs, ys, f"{marker}-", color=color, markersize=size, label=label)
        if where is not None:
            height = min(line, key=lambda p: abs(p.rate - where)).dense
            ax.plot([where], [height], "X", color=color, markersize=11, markeredgecolor="white")
    line = sorted((p for p in points if p.block_size == min(q.block_size for q in points)), key=lambda p: p.rate)
    ax.plot([p.rate for p in line], [p.dense for p in line], "--", color=DENSE, label="dense, every key")
    if any(where is not None for where in crossings.values()):
        ax.plot([], [], "X", color="grey", label="crossing point")
    else:
        ax.plot([], [], " ", label=throughout(line[-1]))
    shape = points[0]
    finish(ax, f"by rate: kv {shape.seqlen_kv}, batch {shape.batch}", "candidate rate (share of the keys)")
    ax.set_xticks([p.rate for p in line], [f"{p.rate:.3g}" for p in line], minor=False)
    ax.set_xticks([], minor=True)


def draw_line(ax: Any, points: list[SweepPoint], axis: str, field: str, label: str) -> None:
    """Total, its index part and dense along one axis, and where the two meet."""
    line = sorted(points, key=lambda p: getattr(p, field))
    xs = [getattr(p, field) for p in line]
    has_index = [p for p in line if p.index is not None]
    ax.plot(xs, [p.total for p in line], "o-", color=COLORS[0], label=f"sparse, {line[-1].stage}")
    if len(has_index) == len(line):
        ax.plot(xs, [p.index for p in line], "o:", color=INDEX, label="of it, index", markersize=4)
    ax.plot(xs, [p.dense for p in line], "s--", color=DENSE, label="dense, every key", markersize=4)
    mark_crossing(ax, xs, line, label)
    finish(ax, title_of_line(line[-1], axis, field), label)
    ax.set_xticks(xs, [f"{x // 1024}K" if field == "seqlen_kv" and x >= 1024 else str(x) for x in xs], minor=False)
    ax.set_xticks([], minor=True)


def title_of_line(point: SweepPoint, axis: str, field: str) -> str:
    """The axis, and what is the same all along it."""
    fixed = {
        "seqlen_kv": f"kv {point.seqlen_kv}", "batch": f"batch {point.batch}", "rate": f"rate {point.rate:.3g}",
        "block_size": f"block {point.block_size}",
    }  # fmt: skip
    if axis == CHUNK:
        fixed["batch"] = f"{point.seqlen_q} rows"
    phase = " (prefill)" if axis == CHUNK else ""
    return f"by {axis}{phase}: " + ", ".join(text for name, text in fixed.items() if name != field)


def mark_crossing(ax: Any, xs: list[float], line: list[SweepPoint], label: str) -> None:
    """The point at which sparse and dense meet, or which of the two is faster all along."""
    sparse, dense = [p.total for p in line], [p.dense for p in line]
    where = crossing(xs, sparse, dense)
    if where is None:
        ax.plot([], [], " ", label=throughout(line[-1]))
        return
    height = math.exp(float(np.interp(math.log(where), np.log(xs), np.log(sparse))))
    unit = label.rsplit("(", 1)[-1].rstrip(")")
    told = f"crossing at {where:,.0f} {unit}"
    ax.plot([where], [height], "X", color=COLORS[3], markersize=11, markeredgecolor="white", label=told)


def throughout(point: SweepPoint) -> str:
    """Which of the two is faster all along a line that does not cross, from one of its points."""
    return f"no crossing: {'sparse' if point.total < point.dense else 'dense'} is faster throughout"


def finish(ax: Any, title: str, label: str) -> None:
    """Axes, units, and a legend above the curves."""
    from matplotlib.ticker import LogLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.5)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(label)
    ax.set_ylabel("time of a step (µs)")
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def draw_table(ax: Any, report: BenchReport) -> None:
    """What to run at each rate, and the weighted summary."""
    ax.axis("off")
    lines = ["what is fastest, by candidate rate", ""]
    lines += [f"  {rate:7.2%}   {choice}" for rate, choice in choices(report.sweep).items()]
    for w in report.weighted:
        start = "nowhere" if w.sparse_from is None else f"from {w.sparse_from:,} tokens"
        lines += [
            "", f"weighted by lengths of {w.trace}, {w.phase}", "", f"  sparse {w.sparse:8.1f} µs",
            f"  dense  {w.dense:8.1f} µs", f"  best   {w.best:8.1f} µs   (sparse {start})",
            f"  {w.outside:.0%} of its lengths lie outside the sweep",
        ]  # fmt: skip
    ax.text(0, 1, "\n".join(lines), va="top", family="monospace", fontsize=9, transform=ax.transAxes)


def draw_rows(report: BenchReport, plt: Any) -> Any:
    """Horizontal bars of every row, the peer's beside ours; a whisker from the fastest block to the slowest."""
    from matplotlib.ticker import LogLocator

    rows = report.rows
    figure, ax = plt.subplots(figsize=(11, max(2.5, 0.42 * len(rows) + 1.2)), layout="constrained")
    places = range(len(rows))
    draw_bars(ax, [(p - 0.2, r.time) for p, r in zip(places, rows, strict=True)], COLORS[0], "ours")
    theirs = [(p + 0.2, r.peer_time) for p, r in zip(places, rows, strict=True) if r.peer_time]
    names = sorted({r.peer.name for r in rows if r.peer and r.peer_time})
    if theirs:
        draw_bars(ax, theirs, COLORS[1], ", ".join(names))
    ax.set_yticks(list(places), [f"{r.work}: {r.stage}" for r in rows])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.xaxis.set_minor_formatter("")
    ax.set_xlabel("median time (µs), from the fastest block to the slowest")
    ax.legend(frameon=False)
    return figure


def draw_bars(ax: Any, bars: list[tuple[float, Quantiles]], color: str, label: str) -> None:
    """Bars at heights, with their blocks' range."""
    times = [time for _, time in bars]
    reach = ([t.median - t.low for t in times], [t.high - t.median for t in times])
    ax.barh(
        [place for place, _ in bars], [t.median for t in times], 0.36, color=color, label=label, xerr=reach,
        error_kw={"elinewidth": 1, "ecolor": DENSE},
    )  # fmt: skip
