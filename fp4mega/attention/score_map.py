"""From scores to probabilities, one key tile at a time: `2^x` with a running maximum, or Direct-P.

Scores z are in log2 units (softmax_scale * log2(e) * q.k), -inf where masked. A map turns a tile of z and the running row
reference m into the represented P relative to the new m. Both passes use it: the forward to compute, the backward (rule
`represented`) to obtain again exactly the P that the forward multiplied.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy, DirectP
from fp4mega.attention.represent import represent_probabilities
from fp4mega.formats import E2M1, quotient, round_to

LOG2E = math.log2(math.e)
_MX_BLOCK = 32
_SWITCH = math.log2(1.5)
_LOG2_6 = math.log2(6.0)


class TileProbabilities(NamedTuple):
    """p: represented P of the tile; weight: what the normalizer sums of it; reference: the row reference m of both."""

    p: Tensor
    weight: Tensor
    reference: Tensor


def tile_probabilities(
    z: Tensor, reference: Tensor, policy: AttentionPolicy, key: Tensor | None, *, tile: int
) -> TileProbabilities:
    """z [..., rows, keys] and the running reference [..., rows]; a row that has seen no key yet has -inf."""
    if policy.direct_p is not None:
        p = direct_p_codes(z - reference[..., None], policy.direct_p)
        return TileProbabilities(p, p, reference)
    largest = z.amax(dim=-1)
    if policy.max_rule == "integer":
        largest = largest.ceil()
    reference = torch.maximum(reference, largest)
    p = torch.exp2(z - finite_reference(reference)[..., None])
    represented = represent_probabilities(
        "p", policy.operands["p"], p, policy.p_exponent, key, tile=tile
    )
    return TileProbabilities(
        represented, represented if policy.normalizer == "represented" else p, reference
    )


def finite_reference(reference: Tensor) -> Tensor:
    """The reference with 0 for a row that sees no key, so that -inf minus it stays -inf."""
    return reference.masked_fill(reference == -math.inf, 0.0)


def direct_p_codes(z: Tensor, rule: DirectP) -> Tensor:
    """Represented P = alpha * q / 6 of a tile, straight from scores relative to the row reference.

    Source: "Hardware-Aware FP4 FlashAttention-4", Direct-P; the formulas are in docs/numerics.md. alpha is 2^(u' - 127)
    with the stored byte u'; u' = 0 is the zero block. z [..., keys] in log2 units, blocks of 32 keys from key 0.
    """
    keys = z.shape[-1]
    short = -keys % _MX_BLOCK
    blocks = torch.nn.functional.pad(z, (0, short), value=-math.inf).unflatten(-1, (-1, _MX_BLOCK))
    largest = blocks.amax(dim=-1, keepdim=True)
    whole = largest.floor()
    exponent = whole + (largest - whole >= _SWITCH).to(z.dtype)
    byte = (exponent + 127).clamp(0, 254)
    if rule.floor:
        byte = torch.where(largest == -math.inf, 0.0, byte.clamp(min=rule.floor + 1))
    # A masked block has exponent -inf and byte 0; a zero byte stands for zero whatever its codes are.
    x = blocks - (byte - 127) + _LOG2_6
    line = (rule.slope * x + rule.offset).clamp(min=0.0)
    if rule.exact_every:
        pair = torch.arange(_MX_BLOCK, device=z.device) // 2
        line = torch.where(pair % rule.exact_every == 0, torch.exp2(x), line)
    codes = round_to(line, E2M1)
    alpha = torch.where(byte == 0, 0.0, torch.exp2(byte - rule.floor - 127))
    return (alpha * quotient(codes, E2M1.max)).flatten(-2)[..., :keys]


def sample_order(keys: int, samples: int, device: torch.device) -> Tensor:
    """Permutation of the keys that puts `samples` of them, strided over the whole sequence, first."""
    picked = torch.arange(min(samples, keys), device=device) * keys // max(min(samples, keys), 1)
    rest = torch.ones(keys, dtype=torch.bool, device=device)
    rest[picked] = False
    return torch.cat([picked, torch.arange(keys, device=device)[rest]])


def direct_p_reference(sampled_z: Tensor, rule: DirectP) -> Tensor:
    """Row reference m [..., rows] from the scores of the sampled keys (log2 units); 0 where all of them are masked."""
    return finite_reference(sampled_z.amax(dim=-1)) + rule.headroom
