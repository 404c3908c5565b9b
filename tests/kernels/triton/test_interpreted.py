"""The Triton kernels through Triton's interpreter, on any machine: each module of `interpreted/` in a process of its own.

TRITON_INTERPRET must be set before Triton is imported, and makes kernels unusable on a GPU: so not in this process.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent / "interpreted"
MODULES = sorted(path.name for path in FOLDER.glob("test_*.py"))

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="Triton has packages for Linux on x86_64 only",
)


@pytest.mark.parametrize("module", MODULES)
def test_interpreted(module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / module)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{module}:\n{done.stdout[-12000:]}"
    print(done.stdout[-300:])


def test_there_are_modules() -> None:
    assert {"test_arithmetic.py", "test_publishers.py", "test_shapes.py"} <= set(MODULES)
