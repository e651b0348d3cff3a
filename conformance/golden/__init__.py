"""Frozen, language-neutral vectors: how they are made, and how they are checked."""

import json
from pathlib import Path

import msgspec
from rich.console import Console

from attnconform.conformance.golden.vector import Vector, encode_vector
from attnconform.conformance.golden.verify import fault_of, read_manifest
from attnconform.conformance.golden.write import all_vectors


def verify_command(console: Console) -> int:
    """Recomputes every vector; 1 where one does not hold."""
    paths = read_manifest()
    faults = [fault for path in paths if (fault := fault_of(path)) is not None]
    for fault in faults:
        console.print(fault, style="red", highlight=False)
    console.print(f"{len(paths) - len(faults)} of {len(paths)} vectors hold", highlight=False)
    return int(bool(faults))


def write_command(console: Console, folder: Path) -> int:
    """Writes every vector, the manifest that repeats their paths, and the schema of a file."""
    schema = json.dumps(msgspec.json.schema(Vector), indent=1)
    (folder / "schema.json").write_text(schema + "\n", encoding="utf-8")
    (folder / "vectors").mkdir(parents=True, exist_ok=True)
    paths = []
    for vector in all_vectors():
        (folder / vector.path).write_bytes(encode_vector(vector))
        paths.append(vector.path)
    manifest = json.dumps({"format": 1, "vectors": sorted(paths)}, indent=1)
    (folder / "manifest.json").write_text(manifest + "\n", encoding="utf-8")
    console.print(f"wrote {len(paths)} vectors to {folder}", highlight=False)
    return 0
