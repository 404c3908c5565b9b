"""Checks of a call's arguments. Those of shape, dtype and device read no data; the other two say so by name."""

from typing import Any

import torch
from torch import Tensor

from fp4mega.attention.problem import DTYPES, AttentionProblem, SideInputs, check_window

Window = tuple[int | None, int | None]


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv] fit together. Raises TypeError or ValueError naming the argument."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}={type(x).__name__}: expected a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(
                f"{name}.shape={tuple(x.shape)}: expected 4 dims, [batch, length, heads, head dim]"
            )
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name}.dtype={x.dtype}: allowed: {', '.join(str(d) for d in DTYPES)}"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name}.dtype={x.dtype}: expected q's dtype, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected q's batch, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's head dim, {q.shape[3]}")
    for dim, what in ((1, "length"), (2, "heads")):
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"v.shape={tuple(v.shape)}: expected k's {what}, {k.shape[dim]}")


def check_side_inputs(side: SideInputs, q: Tensor, k: Tensor) -> None:
    """Shape, dtype and device of the tensors beside q, k, v. Raises TypeError or ValueError naming the argument."""
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k = k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    _check(side.sink, "sink", q, ((num_heads,),), {wide, q.dtype})
    _check(side.key_padding_mask, "key_padding_mask", q, ((batch, seqlen_k),), {torch.bool})
    broadcast = tuple((b, h, seqlen_q, seqlen_k) for b in (batch, 1) for h in (num_heads, 1))
    _check(side.attention_mask, "attention_mask", q, broadcast, {torch.bool})
    _check(side.rounding_key, "rounding_key", q, ((),), {torch.int64})
    if (side.cu_seqlens_q is None) != (side.cu_seqlens_k is None):
        missing = "cu_seqlens_q" if side.cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(
            f"{missing}=None: packed sequences need both cu_seqlens_q and cu_seqlens_k"
        )
    if side.cu_seqlens_q is None or side.cu_seqlens_k is None:
        return
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu_seqlens = getattr(side, name)
        _check(cu_seqlens, name, q, None, {torch.int32})
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"{name}.shape={tuple(cu_seqlens.shape)}: expected [N + 1] for N packed sequences, N at least 1"
            )
    if side.cu_seqlens_k.shape != side.cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k.shape={tuple(side.cu_seqlens_k.shape)}: expected as many sequences as "
            f"cu_seqlens_q has, {tuple(side.cu_seqlens_q.shape)}"
        )
    if batch != 1:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: packed sequences have a batch of 1, not {batch}"
        )


def read_window(window: Any) -> Window:
    """The two sides; None is no limit on either. Raises TypeError or ValueError naming the argument.

    The range is checked here too, because an operator's schema comes before the problem and has 64 bits.
    """
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window={window!r}: expected None or a pair (left, right)")
    for side in window:
        if isinstance(side, bool) or not (side is None or isinstance(side, int)):
            raise TypeError(f"window={window!r}: each side is an integer or None (no limit)")
    check_window((window[0], window[1]))
    return window[0], window[1]


def read_softmax_scale(softmax_scale: Any, head_dim: int) -> float:
    """The number given, or 1 / sqrt(head_dim) for None. Raises TypeError or ValueError naming the argument."""
    if softmax_scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise TypeError(f"softmax_scale={softmax_scale!r}: expected a number or None")
    try:
        return float(softmax_scale)
    except OverflowError:
        raise ValueError(
            "softmax_scale: expected a finite positive number, not one beyond float64"
        ) from None


def _check(
    x: Any,
    name: str,
    q: Tensor,
    shapes: tuple[tuple[int, ...], ...] | None,
    dtypes: set[torch.dtype],
) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}={type(x).__name__}: expected a torch.Tensor or None")
    if x.dtype not in dtypes:
        allowed = ", ".join(sorted(str(d) for d in dtypes))
        raise ValueError(f"{name}.dtype={x.dtype}: allowed: {allowed}")
    if shapes is not None and tuple(x.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name}.shape={tuple(x.shape)}: expected {allowed}")
    if x.device != q.device:
        raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")


def check_finite_values(**tensors: Tensor) -> None:
    """Reads the data. Raises ValueError naming every tensor that holds a NaN or an infinity, and how many."""
    found = []
    for name, x in tensors.items():
        nans, infinities = int(x.isnan().sum()), int(x.isinf().sum())
        if nans or infinities:
            found.append(f"{name} holds {nans} NaN and {infinities} Inf of {x.numel()} values")
    if found:
        raise ValueError(f"check_finite: {'; '.join(found)}")


def check_cu_seqlens_values(
    side: SideInputs, problem: AttentionProblem, *, synchronize: bool
) -> None:
    """Reads the data. Cumulative lengths start at 0, never decrease, end at the token count, and fit max_seqlen.

    Only where reading costs nothing, on the CPU, unless `synchronize`. Raises ValueError naming the argument.
    """
    for name, cu_seqlens, total, longest in (
        ("q", side.cu_seqlens_q, problem.seqlen_q, problem.max_seqlen_q),
        ("k", side.cu_seqlens_k, problem.seqlen_k, problem.max_seqlen_k),
    ):
        if cu_seqlens is None or (cu_seqlens.device.type != "cpu" and not synchronize):
            continue
        values = cu_seqlens.tolist()
        lengths = [end - start for start, end in zip(values[:-1], values[1:], strict=True)]
        if values[0] != 0 or values[-1] != total or min(lengths) < 0:
            raise ValueError(
                f"cu_seqlens_{name}={_short(values)}: expected to start at 0, never to decrease, and to end at "
                f"the {total} rows of {name}"
            )
        if max(lengths) > longest:
            raise ValueError(
                f"max_seqlen_{name}={longest}: cu_seqlens_{name} holds a sequence of {max(lengths)} rows"
            )


def _short(values: list[int]) -> str:
    if len(values) <= 10:
        return str(values)
    return f"[{', '.join(map(str, values[:5]))}, ..., {', '.join(map(str, values[-4:]))}]"
