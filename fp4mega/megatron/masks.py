"""Megatron's ways of saying which keys a query sees, as arguments of `attention_func`.

| attn_mask_type       | without attention_mask | with attention_mask (bool, True = masked out)             |
| -------------------- | ---------------------- | --------------------------------------------------------- |
| no_mask              | every key; past the    | ignored: static decoding hands over the prompt's mask     |
|                      | prompt, see below      |                                                           |
| padding              | every key              | [b, 1, 1, t] masks keys, [b or 1, 1, s, t] masks pairs    |
| causal               | top-left causal        | both hold: a materialised causal mask changes nothing,    |
|                      |                        | one that also cuts at document boundaries is honoured     |
| padding_causal       | top-left causal        | both hold                                                 |
| causal_bottom_right  | bottom-right causal    | both hold                                                 |
| arbitrary            | refused                | the mask alone                                            |

Past the first tokens of a prompt, static inference says no_mask to causal layers too. It is right for one query, which sees the
whole cache; several are the last of the keys, and bottom-right causal hides their future.

A window of the configuration narrows all of these. Packed sequences (`thd`) take causal or nothing from the mask
type and the rest from their cumulative lengths. Under context parallelism masks are not taken.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

_CAUSAL = {
    AttnMaskType.no_mask: "none",
    AttnMaskType.padding: "none",
    AttnMaskType.arbitrary: "none",
    AttnMaskType.causal: "top_left",
    AttnMaskType.padding_causal: "top_left",
    AttnMaskType.causal_bottom_right: "bottom_right",
}

Window = tuple[int | None, int | None]


def window_from_config(window_size: tuple[int, int] | None) -> Window | None:
    """Megatron's (left, right) with -1 for "no limit" as (left, right) with None for it."""
    if window_size is None:
        return None
    left, right = (None if side == -1 else side for side in window_size)
    return (left, right)


def is_causal(mask_type: AttnMaskType) -> bool:
    """Whether a mask type hides the future."""
    return _CAUSAL[mask_type] != "none"


def mask_arguments(
    mask_type: AttnMaskType,
    attention_mask: Tensor | tuple[Tensor, Tensor] | None,
    window: Window | None,
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    causal_layer: bool = False,
) -> dict[str, Any]:
    """`causal`, `window`, `key_padding_mask` and `attention_mask` of `attention_func` for unpacked [S, B, H, D] input.

    `causal_layer` says of a self-attention that its own mask type is causal, whatever that of the call.

    A pair of masks (padding of the queries, padding of the keys), as for cross attention, is read as its second
    half: a padded query's output means nothing and its gradient is zero where the loss ignores it.
    """
    causal = _CAUSAL[mask_type]
    if causal_layer and mask_type == AttnMaskType.no_mask and 1 < seqlen_q < seqlen_k:
        causal = "bottom_right"
    if window is not None and causal == "none" and seqlen_q != seqlen_k:
        # The window's diagonal is the last key's. With one query that is what bottom-right causal says already.
        if seqlen_q != 1:
            raise NotImplementedError(
                f"window_size={window} with attn_mask_type={mask_type.name} and {seqlen_q} queries on {seqlen_k} "
                "keys: the window's diagonal is not defined; allowed: as many queries as keys, or one query"
            )
        causal = "bottom_right"
    arguments: dict[str, Any] = {"causal": causal, "window": window}
    if mask_type == AttnMaskType.arbitrary and attention_mask is None:
        raise ValueError("attn_mask_type=arbitrary needs an attention_mask, got None")
    if attention_mask is not None and mask_type != AttnMaskType.no_mask:
        mask = attention_mask[1] if isinstance(attention_mask, tuple) else attention_mask
        arguments |= _mask_tensor(mask, batch, seqlen_q, seqlen_k)
    return arguments


def _mask_tensor(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask.dtype={mask.dtype}: expected torch.bool, True where masked out"
        )
    rows_allowed = (1, seqlen_q)
    if (
        mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[2] not in rows_allowed
        or mask.shape[3] != seqlen_k
    ):
        raise ValueError(
            f"attention_mask.shape={tuple(mask.shape)}: expected [{batch} or 1, heads or 1, {seqlen_q} or 1, {seqlen_k}]"
        )
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return {"key_padding_mask": mask[:, 0, 0].expand(batch, seqlen_k)}
    return {"attention_mask": mask.expand(-1, -1, seqlen_q, -1)}


def context_parallel_arguments(
    mask_type: AttnMaskType,
    attention_mask: Tensor | tuple[Tensor, Tensor] | None,
    packed: PackedSeqParams | None,
    window: Window | None,
    group: torch.distributed.ProcessGroup,
) -> dict[str, Any]:
    """`causal`, `window` and the cumulative lengths of `context_parallel_attention`; all are about whole sequences.

    group: the layer's context-parallel group, which cuts each packed sequence into chunks.
    """
    given = attention_mask is not None and mask_type != AttnMaskType.no_mask
    if mask_type == AttnMaskType.arbitrary or given:
        raise NotImplementedError(
            f"attn_mask_type={mask_type.name} with attention_mask={'a tensor' if given else 'None'} under context parallelism: "
            "ranks exchange keys, not masks; allowed: causal or no mask, with attention_mask=None"
        )
    arguments: dict[str, Any] = {"causal": is_causal(mask_type), "window": window}
    return arguments if packed is None else arguments | _packed_over_ranks(packed, group)


def _packed_over_ranks(
    packed: PackedSeqParams, group: torch.distributed.ProcessGroup
) -> dict[str, Tensor | None]:
    """`cu_seqlens` and `cu_seqlens_padded`: Megatron's are those of all ranks together."""
    if packed.qkv_format != "thd":
        raise NotImplementedError(
            f"packed_seq_params.qkv_format={packed.qkv_format!r}: allowed: thd"
        )
    ranks = group.size()
    if packed.cp_group not in (None, group) or packed.local_cp_size not in (None, ranks):
        raise NotImplementedError(
            f"packed_seq_params.local_cp_size={packed.local_cp_size} with a context-parallel group of the micro-batch's own: "
            f"allowed: the group of the layer, of {ranks} ranks, or None"
        )
    # Later Megatrons can cut a sequence otherwise.
    mode = getattr(packed, "cp_partition_mode", None) or "zigzag"
    if mode != "zigzag":
        raise NotImplementedError(f"packed_seq_params.cp_partition_mode={mode!r}: allowed: zigzag")
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        q, kv = (
            getattr(packed, name.replace("cu_seqlens", f"cu_seqlens_{x}")) for x in ("q", "kv")
        )
        if q is None and kv is None and name == "cu_seqlens":
            raise ValueError(
                "packed_seq_params.cu_seqlens_q=None: expected int32 [number of sequences + 1]"
            )
        if q is not kv and (q is None or kv is None or not torch.equal(q, kv)):
            raise NotImplementedError(
                f"packed_seq_params.{name.replace('cu_seqlens', 'cu_seqlens_kv')} differs from that of q: under context "
                "parallelism a rank holds the same chunks of queries and keys"
            )
    padded = packed.cu_seqlens_q_padded
    return {
        "cu_seqlens": packed.cu_seqlens_q.to(torch.int32),
        "cu_seqlens_padded": None if padded is None else padded.to(torch.int32),
    }


def packed_arguments(
    packed: PackedSeqParams,
    mask_type: AttnMaskType,
    attention_mask: Tensor | tuple[Tensor, Tensor] | None,
    window: Window | None,
) -> dict[str, Any]:
    """`causal`, `window` and the cumulative lengths of `attention_func` for packed [t, H, D] input without padding."""
    if packed.qkv_format != "thd":
        raise NotImplementedError(
            f"packed_seq_params.qkv_format={packed.qkv_format!r}: allowed: thd"
        )
    if packed.cp_group is not None or (packed.local_cp_size or 1) > 1:
        raise NotImplementedError(
            f"packed_seq_params.local_cp_size={packed.local_cp_size} with a context-parallel group of its own: packed "
            "sequences are not cut over ranks; allowed: None"
        )
    if mask_type == AttnMaskType.arbitrary or attention_mask is not None:
        raise NotImplementedError(
            f"packed_seq_params with attn_mask_type={mask_type.name} and attention_mask="
            f"{'None' if attention_mask is None else 'a tensor'}: packed sequences take causal or no mask, and "
            "attention_mask=None"
        )
    for name in ("q", "kv"):
        if getattr(packed, f"cu_seqlens_{name}") is None:
            raise ValueError(
                f"packed_seq_params.cu_seqlens_{name}=None: expected int32 [number of sequences + 1]"
            )
    return {
        "causal": _CAUSAL[mask_type],
        "window": window,
        "cu_seqlens_q": packed.cu_seqlens_q.to(torch.int32),
        "cu_seqlens_k": packed.cu_seqlens_kv.to(torch.int32),
        "max_seqlen_q": None if packed.max_seqlen_q is None else int(packed.max_seqlen_q),
        "max_seqlen_k": None if packed.max_seqlen_kv is None else int(packed.max_seqlen_kv),
    }
