"""The machine code: no spills, the intended tensor-core instructions, and resources within a multiprocessor's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fp4mega.attention.policy import get_policy
from fp4mega.kernels.cute.config import Columns, ForwardConfig
from tests.kernels.cute.cubin import usage
from tests.kernels.cute.harness import compiled, program

NVFP4 = ForwardConfig(nvfp4=True, right=True)
MXFP4 = ForwardConfig(nvfp4=False, dim=64, dim_v=64)
DIRECT = ForwardConfig(nvfp4=True, direct_p=get_policy("direct_p_fast").direct_p)
FORWARD = pytest.mark.parametrize(
    "config", [NVFP4, MXFP4, DIRECT], ids=["nvfp4", "mxfp4", "direct_p"]
)
SHARED_MEMORY = 232_448
KINDS = {
    NVFP4: {"mxf4nvf4.block_scale.block16", "f8f6f4"},
    MXFP4: {"mxf4.block_scale.block32", "f8f6f4"},
    DIRECT: {"mxf4nvf4.block_scale.block16", "mxf4.block_scale.block32"},
}


@FORWARD
def test_nothing_is_spilled(config: ForwardConfig) -> None:
    """No stack at all; 512 threads of 128 registers fill the register file, and are handed out anew by role."""
    found = usage(compiled(config).__cubin__)
    assert found.stack == 0
    assert found.registers == 128
    ptx = program(config).module.text
    assert ".local" not in ptx
    handed = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    # Idle, load and multiply; two softmax groups; correction.
    assert sorted(handed) == [64, 80, 184]
    assert 128 * (64 + 80 + 2 * 184) <= 65_536


@FORWARD
def test_products_are_of_the_intended_kinds(config: ForwardConfig) -> None:
    found = set(
        re.findall(r"tcgen05\.mma\.cta_group::1\.kind::([\w.:]+)", program(config).module.text)
    )
    assert found == KINDS[config]


@FORWARD
def test_nothing_is_computed_from_a_load_that_is_not_waited_for(config: ForwardConfig) -> None:
    """Tensor-memory loads are asynchronous, and the interpreter's are not. The DSL itself puts moves before the wait, as in
    every kernel it emits; any other use would be ours."""
    pending: set[str] = set()
    loads = 0
    for line in program(config).module.text.splitlines():
        load = re.match(r"\s*tcgen05\.ld\S*\s+\{([^}]*)\}", line)
        if load:
            pending |= {name.strip() for name in load[1].split(",")}
            loads += 1
        elif "tcgen05.wait::ld" in line:
            pending = set()
        elif not line.strip().startswith(("mov", "//")):
            assert not pending & set(re.findall(r"%\w+", line)), line
    assert loads > 4
    assert not pending


@FORWARD
def test_tensor_and_shared_memory_fit(config: ForwardConfig) -> None:
    from fp4mega.kernels.cute.storage import shared_storage

    columns = Columns(config)
    assert columns.allocated in (256, 512)
    assert columns.out[1] + config.dim_v <= columns.allocated
    assert shared_storage(config).size_in_bytes() <= SHARED_MEMORY
    # What shares a retired score tile does not overlap.
    atoms = 4 * config.scale_atoms
    taken = [(columns.p, config.p_columns), (columns.total, 16), (columns.q_scale, atoms)]
    taken += [(columns.k_scale, atoms), (columns.p_scale, 8), (columns.v_scale, 4)]
    taken = sorted([*taken, (columns.one_scale, 4)])
    for (first, count), (following, _) in zip(taken, [*taken[1:], (128, 0)], strict=True):
        assert first + count <= following


@FORWARD
def test_machine_instructions(config: ForwardConfig, tmp_path: Path) -> None:
    """UTCOMMA is the four-bit MMA (.4X: a scale for every 16), UTCQMMA the eight-bit one, UTCCP a copy of scales."""
    tool = shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("needs nvdisasm (pip install nvidia-cuda-nvdisasm)")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(config).__cubin__)
    sass = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True)
    found = set(
        re.findall(r"\b(UTC\w*MMA(?:\.4X)?|UTCCP|STL|LDL|F2FP\.SATFINITE\.\w+)", sass.stdout)
    )
    assert "UTCCP" in found
    assert not {"STL", "LDL"} & found
    assert ("UTCOMMA.4X" in found) == config.nvfp4
    assert ("UTCQMMA" in found) == (config.direct_p is None)
    if config.direct_p is not None:
        assert {"UTCOMMA", "F2FP.SATFINITE.RELU"} & found
