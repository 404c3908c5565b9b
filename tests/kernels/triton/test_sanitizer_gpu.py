"""compute-sanitizer over small calls of every Triton kernel: memcheck, racecheck and initcheck.

It comes with the CUDA toolkit, and as the package nvidia-cuda-sanitizer-api (13.5 and later; earlier ones lack a launcher). Each tool first has to report a planted fault, because
a tool that does not see a kernel reports nothing either.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.kernels.triton.sanitizer_report import findings, table

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.kernels.triton.sanitized_calls"


def sanitizer() -> str | None:
    """Path of compute-sanitizer: on PATH, in a CUDA toolkit, or in NVIDIA's package; None when there is none."""
    toolkits = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    spec = find_spec("nvidia")
    packages = [] if spec is None else [*(spec.submodule_search_locations or ())]
    folders = [f"{t}/bin" for t in toolkits] + [f"{p}/cu13/bin" for p in packages]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *folders]))


TOOL = sanitizer()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        TOOL is None, reason="compute-sanitizer is not on PATH, in CUDA_HOME nor installed by pip"
    ),
    pytest.mark.timeout(1800),
]
OPTIONS = {
    "memcheck": ["--padding", "256", "--report-api-errors", "no"],
    "racecheck": [],
    "initcheck": [],
}


def check(tool: str, *arguments: str) -> str:
    """What the tool and the program under it print."""
    assert TOOL is not None
    command = [
        TOOL, "--tool", tool, "--target-processes", "application-only", "--show-backtrace", "device", "--print-limit", "300",
        *OPTIONS[tool], sys.executable, "-m", PROGRAM, *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if "ERROR SUMMARY" not in done.stdout and "RACECHECK SUMMARY" not in done.stdout:
        pytest.fail(f"{tool} did not finish ({done.returncode}):\n{done.stdout[-6000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def kernels() -> set[str]:
    """All kernels, each of which the program launches; compiles them as well, so that the tools need not wait for that."""
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    from tests.kernels.triton.sanitized_calls import kernels

    return kernels()


@pytest.mark.parametrize("tool", OPTIONS)
def test_the_tool_sees_a_planted_fault(tool: str) -> None:
    if tool == "racecheck" and not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this torch compiles no CUDA source, in which a race could be planted")
    text = check(tool, "--plant", tool)
    planted = "planted_race" if tool == "racecheck" else "_read_kernel"
    assert any(f.kernel == planted for f in findings(text)), text[-4000:]


@pytest.mark.parametrize("tool", OPTIONS)
def test_the_kernels_are_clean(tool: str, kernels: set[str]) -> None:
    text = check(tool)
    found = findings(text)
    print(f"{tool}: {sum(found.values())} reports\n{table(found)}")
    launched = next(line for line in text.splitlines() if line.startswith("launched:"))
    assert kernels <= set(launched.split()[1:])
    ours = {f: n for f, n in found.items() if f.kernel in kernels}
    assert not ours, f"{tool}:\n{table(found)}\n{text[-3000:]}"
