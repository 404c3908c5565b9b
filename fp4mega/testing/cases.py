"""Named attention cases: shapes, masks, memory layouts and inputs chosen because some attention kernel got them wrong.

    @pytest.mark.parametrize("case", SHAPE_CASES, ids=str)
    def test_something(case):
        inputs = case.make()
        out = attention_func(inputs.q, inputs.k, inputs.v, **case.arguments(inputs.side))

Dims as everywhere: B batch, S query length, T key length, H query heads, G kv heads, D and Dv head dims.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.policy import get_policy
from fp4mega.attention.problem import AttentionProblem, Causal, SideInputs


class Inputs(NamedTuple):
    """q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv], dout [B,S,H,Dv], dlse [B,H,S] and the tensors beside them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    side: SideInputs


QKV = tuple[Tensor, Tensor, Tensor]


def _outlier_channels(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """One channel in 16 is 20 times as large, the same one in q and k: what trained projections look like."""
    q, k, v = q.clone(), k.clone(), v.clone()
    q[..., ::16] *= 4
    k[..., ::16] *= 20
    v[..., 3::16] *= 20
    return q, k, v


def _large_mean(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """A mean per channel ten times the spread, which the softmax cancels in k but a quantizer does not."""
    channel = torch.linspace(-10, 10, k.shape[-1], dtype=k.dtype)
    return q, k + channel, v + 10


def _zero_blocks(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Whole quantization blocks of zeros: along D in q and k, along keys in v; the last kv head is zero throughout."""
    q, k, v = q.clone(), k.clone(), v.clone()
    q[:, ::2, :, :16] = 0
    k[:, 1::2, :, :16] = 0
    v[:, :32] = 0
    k[:, :, -1] = 0
    v[:, :, -1] = 0
    return q, k, v


def _rising_logits(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """Every key outscores the one before, so that each key tile raises the running maximum."""
    direction = torch.ones(q.shape[-1], dtype=q.dtype) / math.sqrt(q.shape[-1])
    ramp = torch.linspace(0, 24, max(k.shape[1], 1), dtype=k.dtype)[: k.shape[1], None, None]
    root = q.shape[-1] ** 0.25
    return 0.5 * q + root * direction, 0.5 * k + ramp * root * direction, v


def _sink_key(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """The first key outscores all others by about 15 and carries a small v, as an attention sink does."""
    direction = torch.ones(q.shape[-1], dtype=q.dtype) / math.sqrt(q.shape[-1])
    root = q.shape[-1] ** 0.25
    k, v = k.clone(), v.clone()
    k[:, :1] += 5 * root * direction
    v[:, :1] *= 0.01
    return q + 3 * root * direction, k, v


def _denormals(q: Tensor, k: Tensor, v: Tensor) -> QKV:
    """k and half of v below the smallest normal float32."""
    v = v.clone()
    v[:, ::2] *= 1e-40
    return q, k * 1e-40, v


VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], QKV]] = {
    "randn": lambda q, k, v: (q, k, v),
    "outlier_channels": _outlier_channels,
    "large_mean": _large_mean,
    "zero_blocks": _zero_blocks,
    "zeros": lambda q, k, v: (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)),
    "rising_logits": _rising_logits,
    "sink_key": _sink_key,
    "tiny": lambda q, k, v: (q * 1e-20, k * 1e-20, v * 1e-20),
    "huge_v": lambda q, k, v: (q, k, v * 1e20),
    "huge_q_tiny_k": lambda q, k, v: (q * 1e20, k * 1e-20, v),
    "denormals": _denormals,
}
"""Name -> change of standard normal q, k, v. All but the last four also fit float16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention case; `str(case)` is its test id. `replace` gives the same case with other fields.

    `lengths_q`, `lengths_k` make it packed (batch 1, seqlen_q and seqlen_k their sums). `mask`: `padding` masks the
    tail of each batch entry but the first, `padding_all` masks every key of the last entry, `arbitrary` is a random
    [B, 1, S, T] mask whose first row is fully masked. `layout`: `fused_qkv` makes q, k, v strided views of one
    buffer, `head_major` views of [B, H, S, D], `expanded` gives every batch entry the same memory (stride 0).
    `gradient`: `expanded` gives dout stride 0 everywhere, as `out.sum().backward()` does.
    """

    policy: str = "exact"
    batch: int = 2
    seqlen_q: int = 32
    seqlen_k: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    causal: Causal = "none"
    window: tuple[int | None, int | None] = (None, None)
    mask: Literal["none", "padding", "padding_all", "arbitrary"] = "none"
    sink: bool = False
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    values: str = "randn"
    layout: Literal["contiguous", "fused_qkv", "head_major", "expanded"] = "contiguous"
    gradient: Literal["dense", "expanded"] = "dense"
    seed: int = 0

    def replace(self, **changes: Any) -> "Case":
        """A copy with other fields."""
        return replace(self, **changes)

    @property
    def dim_v(self) -> int:
        """Head dim of v; that of q and k unless given."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, S and T as the tensors have them: 1 and the token counts when packed."""
        if self.lengths_q is None or self.lengths_k is None:
            return self.batch, self.seqlen_q, self.seqlen_k
        return 1, sum(self.lengths_q), sum(self.lengths_k)

    def __str__(self) -> str:
        batch, seqlen_q, seqlen_k = self.shape
        dims = (
            f"{self.head_dim}" if self.dim_v == self.head_dim else f"{self.head_dim}_{self.dim_v}"
        )
        parts = [
            self.policy,
            f"B{batch}-S{seqlen_q}-T{seqlen_k}-H{self.num_heads}-G{self.num_kv_heads}-D{dims}",
        ]
        if self.causal != "none":
            parts.append("causal" if self.causal == "top_left" else "causal_bottom_right")
        if self.window != (None, None):
            parts.append("window" + "_".join("inf" if w is None else str(w) for w in self.window))
        if self.lengths_q is not None:
            parts.append("packed" + "_".join(map(str, self.lengths_q)))
        if self.mask != "none":
            parts.append(self.mask)
        if self.sink:
            parts.append("sink")
        if self.dtype != torch.float32:
            parts.append(str(self.dtype).removeprefix("torch."))
        for value, usual in ((self.values, "randn"), (self.layout, "contiguous")):
            if value != usual:
                parts.append(value)
        if self.gradient != "dense":
            parts.append(f"dout_{self.gradient}")
        return "-".join(parts)

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(D)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def problem(self) -> AttentionProblem:
        """The static description that `attention_func` would derive from the same call."""
        batch, seqlen_q, seqlen_k = self.shape
        return AttentionProblem(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.dim_v,
            dtype=self.dtype,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window=self.window,
            key_padding_mask=self.mask in ("padding", "padding_all"),
            attention_mask=self.mask == "arbitrary",
            sink=self.sink,
            num_sequences=len(self.lengths_q or ()),
            max_seqlen_q=max(self.lengths_q or (0,)),
            max_seqlen_k=max(self.lengths_k or (0,)),
        )

    def arguments(self, side: SideInputs) -> dict[str, Any]:
        """Keyword arguments of `attention_func` for this case."""
        chosen: dict[str, Any] = {
            "policy": self.policy,
            "causal": self.causal,
            "window": self.window,
            "key_padding_mask": side.key_padding_mask,
            "attention_mask": side.attention_mask,
            "cu_seqlens_q": side.cu_seqlens_q,
            "cu_seqlens_k": side.cu_seqlens_k,
            "sink": side.sink,
            "rounding_key": side.rounding_key,
        }
        if self.lengths_q is not None:
            chosen["max_seqlen_q"] = self.problem.max_seqlen_q
            chosen["max_seqlen_k"] = self.problem.max_seqlen_k
        return chosen

    def make(self, *, device: str | torch.device = "cpu", requires_grad: bool = False) -> Inputs:
        """The tensors, the same values on every device. With `requires_grad`, q, k, v and sink are leaves."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, seqlen_q, seqlen_k = self.shape
        values = VALUES[self.values](
            normal(batch, seqlen_q, self.num_heads, self.head_dim),
            normal(batch, seqlen_k, self.num_kv_heads, self.head_dim),
            normal(batch, seqlen_k, self.num_kv_heads, self.dim_v),
        )
        q, k, v = self._lay_out(*(t.to(self.dtype).to(device) for t in values))
        if self.gradient == "expanded":
            shape = (batch, seqlen_q, self.num_heads, self.dim_v)
            dout = normal(1).to(self.dtype).to(device).expand(shape)
        else:
            dout = normal(batch, seqlen_q, self.num_heads, self.dim_v).to(self.dtype).to(device)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal(batch, self.num_heads, seqlen_q).to(wide).to(device)
        sink = normal(self.num_heads).to(wide).to(device) if self.sink else None
        if requires_grad:
            for leaf in (q, k, v, sink):
                if leaf is not None:
                    leaf.requires_grad_()
        return Inputs(q, k, v, dout, dlse, self._side(sink, generator, torch.device(device)))

    def _lay_out(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        if self.layout == "fused_qkv":
            if q.shape[1] != k.shape[1] or k.shape[-1] != v.shape[-1]:
                raise ValueError(f"{self}: fused_qkv needs S = T and D = Dv")
            fused = torch.cat((q, k, v), dim=2)
            q, k, v = fused.split((q.shape[2], k.shape[2], v.shape[2]), dim=2)
        elif self.layout == "head_major":
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        elif self.layout == "expanded":
            q, k, v = (t[:1].expand_as(t) for t in (q, k, v))
        return q.detach(), k.detach(), v.detach()

    def _side(
        self, sink: Tensor | None, generator: torch.Generator, device: torch.device
    ) -> SideInputs:
        batch, seqlen_q, seqlen_k = self.shape
        padding = arbitrary = None
        if self.mask in ("padding", "padding_all"):
            kept = torch.tensor([seqlen_k - b * seqlen_k // (2 * batch) for b in range(batch)])
            if self.mask == "padding_all":
                kept[-1] = 0
            padding = torch.arange(seqlen_k) >= kept[:, None]
        elif self.mask == "arbitrary":
            arbitrary = torch.rand(batch, 1, seqlen_q, seqlen_k, generator=generator) < 0.3
            arbitrary[:, :, :1] = True

        def cumulative(lengths: tuple[int, ...] | None) -> Tensor | None:
            if lengths is None:
                return None
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

        stochastic = get_policy(self.policy).stochastic_operands
        return SideInputs(
            sink=sink,
            key_padding_mask=None if padding is None else padding.to(device),
            attention_mask=None if arbitrary is None else arbitrary.to(device),
            cu_seqlens_q=cumulative(self.lengths_q),
            cu_seqlens_k=cumulative(self.lengths_k),
            rounding_key=torch.tensor(self.seed, device=device) if stochastic else None,
        )


SHAPE_CASES = (
    Case(seqlen_q=113, seqlen_k=203, num_heads=6, head_dim=64, causal="top_left"),
    Case(seqlen_q=113, seqlen_k=203, num_heads=6, head_dim=64, causal="bottom_right"),
    Case(batch=1, seqlen_q=203, seqlen_k=113, causal="bottom_right", head_dim=16),
    Case(batch=1, seqlen_q=76, seqlen_k=1, causal="top_left", head_dim=40),
    Case(seqlen_q=1, seqlen_k=150, num_heads=8, num_kv_heads=1, head_dim=72),
    Case(seqlen_q=1, seqlen_k=1, head_dim=80),
    Case(batch=1, seqlen_q=65, seqlen_k=129, head_dim=96, head_dim_v=80),
    Case(batch=1, seqlen_q=70, seqlen_k=140, num_heads=8, num_kv_heads=1, head_dim=128),
    Case(batch=1, num_kv_heads=4, head_dim=192, head_dim_v=128, causal="top_left"),
    Case(batch=1, num_heads=2, head_dim=256, causal="top_left"),
)
"""Lengths off the tile, S != T both ways, S = 1, GQA to 8:1, head dims 16 to 256, Dv != D."""

MASK_CASES = (
    Case(seqlen_q=150, seqlen_k=150, causal="top_left", window=(40, 0)),
    Case(seqlen_q=100, seqlen_k=170, causal="bottom_right", window=(64, None)),
    Case(seqlen_q=100, seqlen_k=140, window=(20, 30)),
    Case(seqlen_q=140, seqlen_k=140, mask="padding", causal="top_left"),
    Case(seqlen_q=40, seqlen_k=140, mask="padding_all"),
    Case(seqlen_q=70, seqlen_k=140, mask="arbitrary"),
    Case(seqlen_q=140, seqlen_k=140, causal="top_left", sink=True),
    Case(seqlen_q=40, seqlen_k=140, mask="padding_all", sink=True),
)
"""Windows, padding, arbitrary masks, fully masked rows and batch entries, a softmax sink."""

PACKED_CASES = (
    Case(lengths_q=(5, 64, 31), lengths_k=(5, 64, 31), causal="top_left"),
    Case(lengths_q=(0, 70, 0, 1, 30, 0), lengths_k=(0, 70, 0, 1, 30, 0), causal="top_left"),
    Case(lengths_q=(7, 0, 33), lengths_k=(40, 9, 0), causal="bottom_right"),
    Case(lengths_q=(1, 1), lengths_k=(130, 3)),
    Case(lengths_q=(50, 60), lengths_k=(50, 60), causal="top_left", window=(16, 0), sink=True),
)
"""Sequences laid end to end: zero-length ones at every place, queries without keys and keys without queries."""

LAYOUT_CASES = (
    Case(seqlen_q=70, seqlen_k=70, causal="top_left", layout="fused_qkv"),
    Case(seqlen_q=70, seqlen_k=40, layout="head_major"),
    Case(seqlen_q=40, seqlen_k=70, layout="expanded"),
    Case(seqlen_q=70, seqlen_k=70, causal="top_left", gradient="expanded"),
)
"""Strided views of one buffer, head-major memory, stride 0 in inputs and in the gradient."""

VALUE_CASES = tuple(
    Case(seqlen_q=70, seqlen_k=140, head_dim=64, causal="bottom_right", values=name)
    for name in VALUES
    if name != "randn"
)
"""Every kind of adversarial input on one shape that spans two key tiles of 128."""
