"""The kernels compile for a GPU, with or without one here."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compile_without_gpu.py")
SHARED_MEMORY = 232_448  # bytes that a program may take on sm_90
KERNELS = {
    "attend_kernel",
    "attend_union_kernel",
    "row_kernel",
    "query_gradient_kernel",
    "sum_chunks_kernel",
    "key_gradient_kernel",
    "sum_parts_kernel",
    "round_sums_kernel",
    "score_gradient_kernel",
}


def test_every_kernel_compiles_and_one_that_only_an_interpreter_takes_does_not(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    compiled = [line.split() for line in lines if line.startswith("compiled ")]
    assert {name for _, name, *_ in compiled} == KERNELS
    products = [" ".join(product) for _, name, _, *product in compiled if name == "attend_kernel"]
    assert "wgmma" in products
    assert products[-1] == "mma"  # of single elements: ptxas 12.8 can read a descriptor from the wrong register
    (taken,) = (int(line.split()[-1]) for line in lines if line.startswith("shared memory "))
    assert taken <= SHARED_MEMORY
    assert lines[-1] == "refused reads_a_plain_global"
