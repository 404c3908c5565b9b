"""What `store_transposed` assumes of the compiler: which thread holds which words of a tile. Compiled for the GPUs that are not refused, on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
LANES = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
"""Bits of the lane in `movmatrix`: of 8 rows of words, lane 4 r + c has words 2 c and 2 c + 1 of row r."""
KERNELS = {
    "mxfp4_qk_fp8_pv-128@90": 2,
    "nvfp4_qk_fp8_pv-128@90": 1,
    "nvfp4_qk_mxfp4_pv-128@90": 1,
    "nvfp4_qk_fp8_pv-256@90": 1,
    "nvfp4_qk_fp8_pv-64@89": 1,
    "nvfp4_qk_fp8_pv-64@120": 1,
}
"""Kernels of dQ of policies and head dims: E4M3 and BF16 scores, P in E4M3 and rounded in blocks, four warps and eight. And those GPUs that
`explain` does not refuse, beside an H200."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict]]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiled", *KERNELS],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", KERNELS)
def test_words_lie_as_movmatrix_reads_them(layouts: dict[str, list[list[dict]]], name: str) -> None:
    assert len(layouts[name]) == KERNELS[name]
    for kernel in layouts[name]:
        assert len(kernel) == 4, "P and dS, in key tiles with a mask and in those without"
        for words in kernel:
            assert words["name"] == "linear", words
            assert words["register"][0] == [0, 1], words
            assert words["lane"] == LANES, words
