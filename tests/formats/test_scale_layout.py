"""tcgen05 scale layout: offsets written out by hand, and the way back."""

import pytest
import torch

from fp4mega.formats import from_tcgen05, quantize, to_tcgen05

# (rows, k) of the matrix, then (row, scale) -> byte offset.
OFFSETS = [
    ((128, 4), (0, 0), 0),
    ((128, 4), (0, 3), 3),
    ((128, 4), (1, 0), 16),
    ((128, 4), (31, 2), 498),  # 31 * 16 + 2
    ((128, 4), (32, 0), 4),  # second quarter of the rows
    ((128, 4), (127, 3), 511),
    ((128, 8), (0, 4), 512),  # next atom along K
    ((128, 8), (33, 5), 512 + 16 + 4 + 1),
    ((256, 8), (128, 0), 1024),  # next 128 rows: after both atoms along K
    ((256, 8), (200, 6), 1024 + 512 + 8 * 16 + 2 * 4 + 2),  # 200 - 128 = 72 = 2 * 32 + 8
    (
        (203, 5),
        (202, 4),
        1024 + 512 + 10 * 16 + 2 * 4,
    ),  # padded to 256 x 8; 202 - 128 = 74 = 2 * 32 + 10
    ((64, 2), (63, 1), 31 * 16 + 4 + 1),  # padded to one atom
]


@pytest.mark.parametrize(("shape", "at", "offset"), OFFSETS)
def test_offset_of_one_scale(shape, at, offset):
    scale = torch.zeros(shape, dtype=torch.uint8)
    scale[at] = 200
    flat = to_tcgen05(scale)
    assert flat.numel() == -(-shape[0] // 128) * -(-shape[1] // 4) * 512
    assert flat.nonzero().tolist() == [[offset]]


@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 4), (129, 4), (203, 5), (64, 8), (512, 16), (300, 3)]
)
def test_round_trip_and_zero_padding(shape):
    scale = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    flat = to_tcgen05(scale)
    assert torch.equal(from_tcgen05(flat, *shape), scale)
    assert flat.count_nonzero() == scale.numel()
    assert flat.is_contiguous()


def test_scales_of_a_quantized_tensor_with_head_dim_64():
    # D = 64: NVFP4 has 4 scales a row, one whole atom; MXFP4 has 2, padded to 4.
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    for name, k in (("nvfp4", 4), ("mxfp4_rceil", 2)):
        scale = quantize(x, name).scale
        assert scale.shape == (200, k)
        flat = to_tcgen05(scale)
        assert flat.numel() == 1024
        assert flat[512 + 16 * 3 + 4 + 1].item() == scale[128 + 35, 1].item()
        assert torch.equal(from_tcgen05(flat, 200, k), scale)


def test_strided_and_float8_scales():
    scale = torch.arange(200, dtype=torch.uint8).view(4, 50).t()
    assert torch.equal(to_tcgen05(scale), to_tcgen05(scale.contiguous()))
    assert torch.equal(
        to_tcgen05(scale.contiguous().view(torch.float8_e4m3fn)).view(torch.uint8),
        to_tcgen05(scale),
    )


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"\(4,\) torch\.uint8"):
        to_tcgen05(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"torch\.float32"):
        to_tcgen05(torch.zeros(4, 4))
    with pytest.raises(
        ValueError, match=r"flat\.shape=\(512,\): 129 rows x 4 scales take \[1024\]"
    ):
        from_tcgen05(torch.zeros(512, dtype=torch.uint8), 129, 4)
