"""cuDNN's block-scaled GEMM (CuTe DSL, sm100) in NVFP4, MXFP4 and MXFP8 against exact products of the represented values."""

import importlib.util
import re

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

if importlib.util.find_spec("cudnn") is None:
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

import cuda.bindings.driver as cuda  # noqa: E402
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from fp4mega.testing import ptx  # noqa: E402
from tests.testing.ptx.operands import block_scaled  # noqa: E402
from tests.testing.ptx.packages import cudnn_block_scaled_gemm  # noqa: E402

FORMATS = {
    "nvfp4": (Float4E2M1FN, "e2m1", Float8E4M3FN, "e4m3", 16),
    "mxfp4": (Float4E2M1FN, "e2m1", Float8E8M0FNU, "e8m0", 32),
    "mxfp8": (Float8E4M3FN, "e4m3", Float8E8M0FNU, "e8m0", 32),
}


def compiled(name, m, n, k, tile, cluster):
    element, _, scale, _, vector = FORMATS[name]
    gemm = cudnn_block_scaled_gemm()(vector, tile, cluster)
    clusters = 148 // (cluster[0] * cluster[1])

    @cute.jit
    def host(
        a: cute.Tensor,
        b: cute.Tensor,
        sfa: cute.Tensor,
        sfb: cute.Tensor,
        c: cute.Tensor,
        amax: cute.Tensor,
        stream: cuda.CUstream,
    ):
        gemm(a, b, sfa, sfb, c, amax, clusters, stream)

    def fake(kind, shape, order):
        return make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=16)

    scales = [-(-rows // 128) * 128 * (-(-k // vector // 4) * 4) for rows in (m, n)]
    arguments = [fake(element, (rows, k, 1), (1, 0, 2)) for rows in (m, n)]
    arguments += [fake(scale, (count,), (0,)) for count in scales]
    arguments += [
        fake(Float32, (m, n, 1), (1, 0, 2)),
        fake(Float32, (1, 1, 1), (0, 1, 2)),
        make_fake_stream(),
    ]
    return ptx.load(ptx.compile_for("sm_100a", host, *arguments))


def check(name, m, n, k, tile, cluster, policies, change=None):
    _, element, _, scale, vector = FORMATS[name]
    program = compiled(name, m, n, k, tile, cluster)
    if change:
        program = change(program)
    rng = np.random.default_rng(1)
    a, sfa, a_values = block_scaled(rng, m, k, element, scale, vector)
    b, sfb, b_values = block_scaled(rng, n, k, element, scale, vector)
    expected = a_values @ b_values.T
    reports = []
    for policy in policies:
        c, amax = ptx.aligned((m, n), np.float32), ptx.aligned((1,), np.float32)
        c[:] = np.nan
        report = ptx.launch(program, a, b, sfa, sfb, c, amax, None, policy=policy)
        # All four epilogue warps of this kernel deallocate the same columns.
        report.check(allow=("tensor-dealloc",))
        error = np.abs(c - expected).max() / np.abs(expected).max()
        print(f"{name} {policy}: off by {error:.2e} of the largest value")
        assert error < 1e-6
        assert amax[0] == np.abs(c).max()
        reports.append(report)
    return reports


@pytest.mark.parametrize("name", FORMATS)
def test_one_cta_ragged(name):
    check(name, 200, 136, 512, (128, 128), (1, 1), ["lazy", "random-1"])


def test_multicast_over_a_cluster():
    report = check("nvfp4", 256, 256, 512, (128, 128), (2, 2), ["eager", "random-2"])[0]
    assert report.launches[0].cluster == (2, 2, 1)


def handshake_of_four_warps(program):
    """This kernel's deallocation handshake counts 32 arrivals, and four warps of the peer arrive with 32 lanes each."""
    init = _init_of_32(program)
    return program.mutate(init, init.rpartition(",")[0] + ", 128;")


def _init_of_32(program):
    """The one mbarrier.init whose count register holds 32."""
    text = program.module.text
    for match in re.finditer(r"\tmbarrier\.init\S+ \t\[\S+\], (%r\d+);", text):
        if re.search(rf"mov\.b32 \t{match.group(1)}, 32;", text):
            return match.group(0)
    raise AssertionError("no mbarrier with a count of 32")


def test_two_cta_handshake_of_the_original_hangs():
    """As shipped, the barrier's phase can run ahead of a warp that waits for it: found as a deadlock."""
    with pytest.raises(ptx.DeadlockError, match="parity 0"):
        check("nvfp4", 384, 256, 512, (256, 128), (2, 1), ["eager"])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_two_cta(name):
    """cta_group::2 products, copies and scale copies, with that handshake's count put right."""
    check(name, 384, 256, 512, (256, 128), (2, 1), ["lazy", "random-1"], handshake_of_four_warps)


@pytest.mark.ptx_matrix
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tile", "cluster"),
    [
        ((128, 128), (1, 1)),
        ((128, 256), (1, 1)),
        ((128, 128), (2, 1)),
        ((128, 128), (1, 2)),
        ((128, 256), (2, 2)),
    ],
)
def test_matrix(name, tile, cluster):
    if name == "nvfp4" and tile == (128, 256):
        # This configuration asks for 233,472 bytes; no GPU would launch it.
        with pytest.raises(ptx.ProtocolError, match="233472 bytes of shared memory"):
            check(name, 512, 512, 1024, tile, cluster, ["eager"])
        return
    check(name, 512, 512, 1024, tile, cluster, ["eager", "lazy", "random-1"])


@pytest.mark.ptx_matrix
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tile", "cluster"),
    [((256, 128), (2, 1)), ((256, 256), (2, 1)), ((256, 128), (2, 2)), ((256, 128), (4, 1))],
)
def test_two_cta_matrix(name, tile, cluster):
    check(
        name, 1024, 512, 1024, tile, cluster, ["eager", "lazy", "random-1"], handshake_of_four_warps
    )
