"""Who imports whom, where files lie, and how long functions are."""

import ast
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conformance", "fixtures", "kernels", "reference", "traces")
PACKAGE = "attnconform"
STANDARD = frozenset(sys.stdlib_module_names)

# folder -> what its modules import beside the standard library; a name stands for itself and all within it
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "reference": ("numpy", "mpmath", "ml_dtypes", "msgspec", "array_api_compat", "attnconform.reference"),
    "kernels": ("torch", "triton", "numpy", "attnconform.kernels"),
    "traces": ("numpy", "pyarrow", "msgspec", "attnconform.reference", "attnconform.traces"),
}
ELSEWHERE = {"traces": ROOT / "traces" / "recorder"}  # a script with dependencies of its own
LONGEST, MEDIAN = 60, 20  # lines of a function in reference/


def modules(folder: str) -> list[Path]:
    """Python files of a folder, but for those of a script beside it."""
    apart = ELSEWHERE.get(folder)
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if apart is None or not p.is_relative_to(apart)]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from attnconform import conformance` names a folder as much as `import attnconform.conformance`
            yield from (
                (node.lineno, f"{module}.{alias.name}" if module == PACKAGE else module) for alias in node.names
            )


def is_allowed(name: str, allowed: tuple[str, ...]) -> bool:
    return name.split(".")[0] in STANDARD or any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_its_arrow_allows(folder: str) -> None:
    files = modules(folder)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        if not is_allowed(name, MAY_IMPORT[folder])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("torch", "reference"), ("attnconform.conformance.views", "reference"), ("attnconform.reference", "kernels"),
     ("attnconform", "kernels"), ("attnconform.kernels", "traces"), ("torchvision", "kernels"), (".rules", "kernels")],
)  # fmt: skip
def test_an_import_against_an_arrow_would_be_noticed(name: str, folder: str) -> None:
    assert not is_allowed(name, MAY_IMPORT[folder])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_is_absolute(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    wrong = [f"{p.relative_to(ROOT)}:{line}" for p in files for line, name in imports(p) if name.startswith(".")]
    assert not wrong


def test_our_folders_are_never_imported_by_their_bare_names() -> None:
    files = [p for folder in (*FOLDERS, "tests") for p in sorted((ROOT / folder).rglob("*.py"))]
    wrong = [
        f"{p.relative_to(ROOT)}:{line} {name}"
        for p in files
        for line, name in imports(p)
        if name.split(".")[0] in FOLDERS
    ]
    assert not wrong


def test_nothing_is_called_utils_or_common() -> None:
    drawers = {"utils", "common", "util", "helpers", "misc"}
    assert not [p for folder in (*FOLDERS, "tests") for p in (ROOT / folder).rglob("*.py") if p.stem in drawers]
    assert not [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_dir() and p.name in drawers]


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_link_of_the_import_root_is_relative_and_leads_to_its_folder() -> None:
    root = ROOT / "src" / PACKAGE
    links = {path.name: os.readlink(path) for path in root.iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in FOLDERS}
    assert all((root / folder).resolve() == ROOT / folder for folder in FOLDERS)
    assert all((root / folder).is_dir() for folder in FOLDERS)
    assert {p.name for p in root.iterdir() if not p.is_symlink()} - {"__pycache__"} == {"__init__.py", "py.typed"}


def test_our_modules_are_loaded_under_our_import_root_alone() -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(ROOT) and name.split(".")[0] in FOLDERS:
            raise AssertionError(f"{name} is loaded from {file}")


FIND_BARE = """
import importlib.util
from pathlib import Path
import sys
import attnconform.reference.attention
root = Path(sys.argv[1])
for name in sys.argv[2:]:
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
    for place in places:
        assert not Path(place).resolve().is_relative_to(root), f"{name} is importable from {place}"
"""


def test_no_folder_of_ours_is_importable_by_its_bare_name() -> None:
    path = os.pathsep.join([str(ROOT / "src"), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)])
    run = subprocess.run(
        [sys.executable, "-P", "-c", FIND_BARE, str(ROOT), *FOLDERS],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr


def function_lengths(folder: str) -> list[tuple[int, str]]:
    """Length of every function, from its `def` to its last line, docstring not counted."""
    return [
        (length_of(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
        for path in modules(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def length_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_functions_of_the_reference_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for folder in FOLDERS:
            if found := function_lengths(folder):
                median, longest = statistics.median(length for length, _ in found), max(found)
                over = sum(length > LONGEST for length, _ in found)
                print(
                    f"\n{folder}: {len(found)} functions, median {median:g}, {over} over {LONGEST}, longest {longest}",
                    end="",
                )
    lengths = function_lengths("reference")
    assert statistics.median(length for length, _ in lengths) < MEDIAN
    assert not [where for length, where in lengths if length > LONGEST]


def jit_functions() -> list[tuple[Path, ast.FunctionDef]]:
    """Functions that Triton or Gluon compiles."""
    return [
        (path, node)
        for folder in ("conformance", "kernels")
        for path in modules(folder)
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list)
    ]


def test_compiled_functions_have_no_annotation_but_constexpr() -> None:
    """Triton compiles the annotations of what a kernel calls; its interpreter does not, and would hide it."""
    functions = jit_functions()
    assert len(functions) > 100
    for path, node in functions:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        annotations = {ast.unparse(a.annotation) for a in arguments if a.annotation}
        assert annotations <= {"tl.constexpr", "gl.constexpr"}, f"{path}: {node.name}"
        assert node.returns is None or ast.unparse(node.returns) == "None", f"{path}: {node.name}"
