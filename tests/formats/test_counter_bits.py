"""Counter-based random bits: golden values from Python integers, reproducibility, and statistics."""

import pytest
import torch

from fp4mega.formats import counter_bits

MASK = (1 << 64) - 1


def mix(z):
    """The SplitMix64 finalizer on unbounded integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def expected(key, stream, index):
    start = mix(((mix(key & MASK)) + (stream + 1) * 0x9E3779B9) & MASK)
    word = mix((start + index * 0x9E3779B97F4A7C15) & MASK) >> 32
    return word - (1 << 32) if word >= 1 << 31 else word


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
@pytest.mark.parametrize("stream", [0, 5, 2**31 - 1])
def test_bits_are_the_hash_of_key_stream_and_index(key, stream):
    bits = counter_bits(torch.tensor(key), (3, 5), stream=stream)
    assert bits.dtype is torch.int32
    assert bits.flatten().tolist() == [expected(key, stream, i) for i in range(15)]


def test_same_key_same_bits_and_the_shape_only_reshapes():
    key = torch.tensor(42)
    bits = counter_bits(key, (6, 8), stream=3)
    assert torch.equal(bits, counter_bits(key, (6, 8), stream=3))
    assert torch.equal(bits, counter_bits(key.view(1), (48,), stream=3).view(6, 8))
    assert counter_bits(key, (), stream=3).item() == bits[0, 0].item()
    assert counter_bits(key, (0, 4), stream=3).shape == (0, 4)


def test_bits_are_uniform_and_streams_and_keys_independent():
    n = 1 << 16
    draws = [
        counter_bits(torch.tensor(k), (n,), stream=s)
        for k, s in ((0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0))
    ]
    for bits in draws:
        for position in range(32):
            ones = ((bits >> position) & 1).sum().item()
            assert abs(ones - n / 2) <= 5 * (n / 4) ** 0.5
        # Pairs of neighbours are uncorrelated.
        unit = bits.double() / 2**31
        assert abs((unit[1:] * unit[:-1]).mean().item()) <= 5 / 3 / n**0.5
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs((a.double() * b.double()).mean().item() / 2**62) <= 5 / 3 / n**0.5
            assert (a == b).sum().item() <= 3


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"key: expected an int64 tensor, got torch\.int32"):
        counter_bits(torch.tensor(1, dtype=torch.int32), (2,), stream=0)
    with pytest.raises(TypeError, match="got int"):
        counter_bits(1, (2,), stream=0)
    with pytest.raises(ValueError, match=r"key\.shape=\(2,\)"):
        counter_bits(torch.tensor([1, 2]), (2,), stream=0)
    with pytest.raises(ValueError, match="stream=-1"):
        counter_bits(torch.tensor(1), (2,), stream=-1)
