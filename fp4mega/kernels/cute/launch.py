"""One forward call in plain tensors and numbers: what the kernel is given, and what becomes of what it wrote."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4mega.attention.call import Call, accumulator_dtype
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.score_map import LOG2E
from fp4mega.kernels.contract import Forward
from fp4mega.kernels.cute import operands, publishing, schedule
from fp4mega.kernels.cute.config import TILE_N, ForwardConfig
from fp4mega.kernels.cute.operands import Published
from fp4mega.kernels.cute.publishing import Launcher
from fp4mega.kernels.cute.support import forward_config


@dataclass(slots=True)
class ForwardCall:
    """Arguments of one launch: `tensors` and `numbers`, in the order of `AttentionForward.__call__`."""

    call: Call
    config: ForwardConfig
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    scale_log2: float
    saved: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor
    statistics: Tensor

    def numbers(self, ctas: int) -> tuple[int | float, ...]:
        """What follows the tensors, for a grid of at most `ctas` CTAs. Raises ValueError for fewer than one."""
        if ctas < 1:
            raise ValueError(f"ctas={ctas}: expected 1 or more")
        return (*self.sizes, ctas, self.scale_log2)

    def finish(self) -> Forward:
        """After the launch: outputs in the caller's layout, and the reference's saved tensors."""
        call, saved = self.call, self.saved
        problem = call.problem
        if call.policy.backward == "represented":
            shape = (2, problem.batch, problem.num_kv_heads, call.groups, problem.seqlen_q)
            dtype = accumulator_dtype(problem.dtype, call.policy)
            saved = (*saved, self.statistics.view(shape).to(dtype))
        lse = call.leave_lse(self.lse.unflatten(1, (problem.num_kv_heads, call.groups)))
        return Forward(call.leave_rows(self.out), lse, saved)


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
    launch: Launcher | None,
) -> ForwardCall:
    """Quantize, allocate and line up; q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv] on any device.

    `launch` runs the publishers; None quantizes with torch operations, to the same bytes.
    """
    call = Call(problem, policy, side)
    q, k, v = call.enter(q, k, v)
    published = _publish(policy, q, k, v, launch)
    dense = call.problem
    shape = (dense.batch, dense.seqlen_q, dense.num_heads)
    out = torch.empty((*shape, dense.head_dim_v), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((shape[0], shape[2], shape[1]), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
    left, right = dense.window
    if dense.causal != "none":
        right = 0
    config = forward_config(problem, policy)
    band = schedule.Band(left if config.left else None, right if config.right else None)
    beside = _beside(call, lse, band)
    parts = [(p.codes, p.scales, p.shared) for p in published]
    return ForwardCall(
        call=call,
        config=config,
        tensors=(*parts[0], *parts[1], *parts[2][:2], *beside, out, lse, statistics),
        sizes=(
            dense.batch,
            dense.seqlen_q,
            dense.seqlen_k,
            dense.num_heads,
            dense.num_kv_heads,
            int(dense.causal == "bottom_right"),
            left or 0,
            right or 0,
        ),
        scale_log2=dense.softmax_scale * LOG2E,
        saved=tuple(t for p in published for t in p.saved),
        out=out,
        lse=lse,
        statistics=statistics,
    )


def _publish(
    policy: AttentionPolicy, q: Tensor, k: Tensor, v: Tensor, launch: Launcher | None
) -> list[Published]:
    ops = policy.operands
    transposed = policy.direct_p is not None
    if launch is None:
        values = operands.publish_transposed_values if transposed else operands.publish_values
        rows = [operands.publish_rows(name, ops[name], x) for name, x in (("q", q), ("k", k))]
        return [*rows, values(ops["v"], v)]
    published = [
        publishing.publish_rows(name, ops[name], x, launch) for name, x in (("q", q), ("k", k))
    ]
    if transposed:
        return [*published, publishing.publish_transposed_values(ops["v"], v, launch)]
    return [*published, publishing.publish_values(ops["v"], v, launch)]


def _beside(call: Call, placeholder: Tensor, band: schedule.Band) -> tuple[Any, ...]:
    """Lengths of rows and keys, the order of row blocks, bits of hidden keys, and the sink; `placeholder` where the kernel is compiled without."""
    mask, side, dense = call.mask, call.side, call.problem
    lengths_q, lengths_k = (
        placeholder if n is None else n.to(torch.int32) for n in (mask.lengths_q, mask.lengths_k)
    )
    order = placeholder
    if mask.lengths_q is not None:
        order = schedule.packed_order(
            lengths_q,
            lengths_k,
            dense.seqlen_q,
            band,
            bottom_right=dense.causal == "bottom_right",
        )
    padding = side.key_padding_mask
    hidden = placeholder if padding is None else hidden_bits(padding, call.order(padding.device))
    sink = placeholder if side.sink is None else side.sink.to(torch.float32).contiguous()
    return (lengths_q, lengths_k, order, hidden, sink)


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device: the CTAs of a persistent grid, one each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def hidden_bits(padding: Tensor, order: Tensor | None) -> Tensor:
    """Bool [B, T], True where nobody sees the key, to int32 [B, ceil(T / 128), 4]: a bit a key, in the kernel's order of keys."""
    if order is not None:
        padding = padding[:, order]
    tiles = -(-padding.shape[1] // TILE_N)
    padded = F.pad(padding, (0, tiles * TILE_N - padding.shape[1]))
    weights = 2 ** torch.arange(8, device=padding.device, dtype=torch.uint8)
    octets = (padded.unflatten(1, (tiles, TILE_N // 8, 8)).to(torch.uint8) * weights).sum(
        dim=-1, dtype=torch.uint8
    )
    return octets.view(torch.int32)
