"""Shapes of the attention benchmark, the operations they count for, and their inputs."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.attention import AttentionProblem
from fp4mega.testing.cases import Case

DEFAULT_SHAPES = (
    "4,32/32,4096,128",
    "4,32/32,4096,128:causal",
    "2,32/8,8192,128:causal",
    "1,32/8,16384,128:causal",
)
PHASES = ("forward", "backward", "both")
WEIGHT = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Operations of a phase over those of the forward: five products against two, recomputed scores counted."""


class Tensors(NamedTuple):
    """q [B,S,H,D], k and v [B,S,G,D], dout [B,S,H,D], contiguous BF16."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Shape:
    """One benchmark shape; S = T and D = Dv."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    dim: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read `B,H/G,S,D[:causal]`. Raises ValueError for anything else, and for dims that no attention has."""
        found = re.fullmatch(r"(\d+),(\d+)/(\d+),(\d+),(\d+)(:causal)?", text)
        if not found:
            raise ValueError(f"shape={text!r}: expected B,H/G,S,D or B,H/G,S,D:causal")
        batch, heads, kv_heads, seqlen, dim = (int(n) for n in found.groups()[:5])
        shape = cls(batch, heads, kv_heads, seqlen, dim, causal=bool(found[6]))
        if not (batch and seqlen):
            raise ValueError(f"shape={text!r}: batch and sequence length must be 1 or more")
        try:
            _ = shape.problem
        except ValueError as error:
            raise ValueError(f"shape={text!r}: {error}") from None
        return shape

    def __str__(self) -> str:
        end = ":causal" if self.causal else ""
        return f"{self.batch},{self.heads}/{self.kv_heads},{self.seqlen},{self.dim}{end}"

    def flops(self, phase: str) -> float:
        """4 B H S T D forward, half of it when causal; 2.5 times that backward, 3.5 times both."""
        whole = 4.0 * self.batch * self.heads * self.seqlen**2 * self.dim
        return WEIGHT[phase] * (whole / 2 if self.causal else whole)

    @property
    def case(self) -> Case:
        """The same problem as a test case, BF16, causal ones with the diagonal at the top left."""
        return Case(
            batch=self.batch,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            causal="top_left" if self.causal else "none",
            dtype=torch.bfloat16,
        )

    @property
    def problem(self) -> AttentionProblem:
        """What a backend is asked."""
        return self.case.problem

    def tensors(self, device: str, *, seed: int = 0) -> Tensors:
        """Standard normal BF16 tensors, drawn on the device."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            size = (self.batch, self.seqlen, heads, self.dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return Tensors(*(normal(h) for h in heads))
