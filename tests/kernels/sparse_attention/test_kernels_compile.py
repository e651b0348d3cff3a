"""The kernels compile for a GPU, with or without one here."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compile_without_gpu.py")
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
    *compiled, by_elements, refused = done.stdout.splitlines()
    assert {line.split()[1] for line in compiled} == KERNELS
    assert "compiled attend_kernel with wgmma" in compiled
    assert by_elements == "compiled attend_kernel with mma"  # ptxas 12.8 can read a descriptor from the wrong register
    assert refused == "refused reads_a_plain_global"
