"""Keys of stochastic rounding: distinct where they must be, repeated where they must be."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp4mega.megatron.rounding import RoundingKeys, mix


def test_mix_is_a_good_hash_of_every_word():
    keys = {mix(seed, layer, call) for seed in range(8) for layer in range(8) for call in range(64)}
    assert len(keys) == 8 * 8 * 64
    assert all(-(2**63) <= key < 2**63 for key in keys)
    flips = [(mix(1, 2, call) ^ mix(1, 2, call ^ 1)) & (2**64 - 1) for call in range(0, 512, 2)]
    assert 30 < sum(flip.bit_count() for flip in flips) / len(flips) < 34


def test_keys_count_calls_and_start_again_with_the_step():
    keys = RoundingKeys(seed=3, layer=2, rank=(0, 1))
    keys.start_step(5)
    first = [keys.next(training=True) for _ in range(4)]
    evaluation = [keys.next(training=False) for _ in range(2)]
    fifth = keys.next(training=True)
    assert len({*first, fifth, *evaluation}) == 6
    keys.start_step(6)
    assert keys.next(training=True) not in first
    keys.start_step(5)
    assert [keys.next(training=True) for _ in range(5)] == [*first, fifth]
    for other in ({"seed": 4}, {"layer": 3}, {"rank": (0, 2)}):
        twin = RoundingKeys(**{"seed": 3, "layer": 2, "rank": (0, 1)} | other)
        twin.start_step(5)
        assert twin.next(training=True) not in first


class Recorder:
    """x -> 2 x, noting the key that each call got."""

    def __init__(self):
        self.keys, self.seen = RoundingKeys(seed=0, layer=1, rank=()), []

    def __call__(self, x):
        self.seen.append(self.keys.next(training=True))
        return x * 2


def test_recompute_repeats_the_keys_of_microbatches_in_flight():
    layer = Recorder()
    x = torch.ones(1, requires_grad=True)
    outputs = [checkpoint(layer, x, use_reentrant=True) for _ in range(3)]
    for output in outputs[:2]:
        output.sum().backward()
    outputs.append(checkpoint(layer, x, use_reentrant=True))
    for output in outputs[2:]:
        output.sum().backward()
    a, b, c = layer.seen[:3]
    d = layer.seen[5]
    assert len({a, b, c, d}) == 4
    assert layer.seen == [a, b, c, a, b, d, c, d]


def test_recompute_within_recompute():
    layer = Recorder()
    x = torch.ones(1, requires_grad=True)

    def inner(x):
        return checkpoint(layer, x, use_reentrant=True)

    checkpoint(inner, x, use_reentrant=True).backward()
    assert len(layer.seen) == 3
    assert len(set(layer.seen)) == 1


def test_recompute_that_cannot_be_matched_is_an_error():
    layer = Recorder()
    x = torch.ones(1, requires_grad=True)
    output = checkpoint(lambda x: torch.sin(layer(x)), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        output.sum().backward()
