"""One call: the caller's tensors in the dense layout that the tile loops work in, encoded, and back again."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4mega.attention.mask import Mask, Packing, unpack_problem
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, Placement, SideInputs
from fp4mega.attention.represent import decode_operand, encode_operand, operand_spec, represent
from fp4mega.attention.score_map import sample_order

SAVED_OPERANDS = ("q", "k", "v")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of lse and dsink: FP64 for FP64 inputs, otherwise FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulator_dtype(dtype: torch.dtype, policy: AttentionPolicy) -> torch.dtype:
    """FP64 for FP64 inputs, otherwise FP32.

    FP64 too where Direct-P holds its sums far below their worth: FP32's range would end where a small V begins.
    """
    wide = policy.direct_p is not None and policy.direct_p.floor > 0
    return torch.float64 if wide else statistics_dtype(dtype)


@dataclass(slots=True)
class Call:
    """One problem under one policy: moves tensors between the caller's layout and the dense, possibly permuted one."""

    outer: AttentionProblem
    policy: AttentionPolicy
    side: SideInputs
    problem: AttentionProblem = None  # type: ignore[assignment]
    mask: Mask = None  # type: ignore[assignment]
    pack_q: Packing | None = None
    pack_k: Packing | None = None
    rows: Placement | None = None
    keys: Placement | None = None
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        self.problem, self.mask, self.pack_q, self.pack_k = unpack_problem(self.outer, self.side)
        if self.rows is not None or self.keys is not None:
            self.mask = replace(self.mask, rows=self.rows, keys=self.keys)

    @property
    def dtype(self) -> torch.dtype:
        return accumulator_dtype(self.problem.dtype, self.policy)

    @property
    def groups(self) -> int:
        return self.problem.num_heads // self.problem.num_kv_heads

    @property
    def tiles(self) -> list[tuple[int, int, int]]:
        """Tile index, first key and end of every key tile."""
        step = self.policy.tile_n
        keys = self.problem.seqlen_k
        return [(t, start, min(start + step, keys)) for t, start in enumerate(range(0, keys, step))]

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dense, keys in the policy's order."""
        return self.enter_rows(q), self._enter_keys(k), self._enter_keys(v)

    def enter_rows(self, x: Tensor) -> Tensor:
        return x if self.pack_q is None else self.pack_q.pad(x)

    def leave_rows(self, x: Tensor) -> Tensor:
        return x if self.pack_q is None else self.pack_q.unpad(x, self.outer.seqlen_q)

    def _enter_keys(self, x: Tensor) -> Tensor:
        """With hidden keys zeroed: what nobody may see must not reach a scale."""
        x = x if self.pack_k is None else self.pack_k.pad(x)
        hidden = self.mask.hidden_keys()
        if hidden is not None:
            x = x.masked_fill(hidden[..., None, None], 0)
        order = self.order(x.device)
        return x if order is None else x[:, order]

    def leave_keys(self, x: Tensor) -> Tensor:
        order = self.order(x.device)
        if order is not None:
            x = torch.empty_like(x).index_copy_(1, order, x)
        hidden = self.mask.hidden_keys()
        if hidden is not None:
            x = x.masked_fill(hidden[..., None, None], 0)
        return x if self.pack_k is None else self.pack_k.unpad(x, self.outer.seqlen_k)

    def order(self, device: torch.device) -> Tensor | None:
        """Key permutation of a sampled Direct-P reference; None keeps the order."""
        rule = self.policy.direct_p
        if rule is None or rule.reference != "sampled":
            return None
        if self.permutation is None:
            self.permutation = sample_order(self.problem.seqlen_k, rule.samples, device)
        return self.permutation

    def first_row(self, first_key: int) -> int:
        """First row of the first query tile that can see `first_key` or a later key; all rows for permuted keys."""
        if self.permutation is not None:
            return 0
        return self.mask.first_row(first_key) // self.policy.tile_m * self.policy.tile_m

    def enter_lse(self, x: Tensor, fill: float) -> Tensor:
        """[B, H, S] (packed: [1, H, total]) to [B, G, R, S] in log2 units' dtype; rows of no sequence get `fill`."""
        if self.pack_q is not None:
            padded = self.pack_q.pad(x.transpose(1, 2)).masked_fill(
                ~self.pack_q.valid[..., None], fill
            )
            x = padded.transpose(1, 2)
        return x.to(self.dtype).unflatten(1, (self.problem.num_kv_heads, self.groups))

    def leave_lse(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2).to(statistics_dtype(self.problem.dtype))
        if self.pack_q is None:
            return x
        return (
            self.pack_q.unpad(x.transpose(1, 2), self.outer.seqlen_q, -math.inf)
            .transpose(1, 2)
            .contiguous()
        )

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[dict[str, tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]:
        """The bytes that backward needs, and the values that the forward multiplies."""
        bytes_: dict[str, tuple[Tensor, ...]] = {}
        represented = []
        for name, x in zip(SAVED_OPERANDS, (q, k, v), strict=True):
            operand = self.policy.operands[name]
            wanted = self.policy.backward_v if name == "v" else name
            bytes_[name] = ()
            if operand.quantized:
                encoded = encode_operand(name, operand, x, self.side.rounding_key)
                represented.append(encoded.dequantize(self.dtype))
                if wanted == name:
                    bytes_[name] = encoded.tensors()
            else:
                represented.append(represent(name, operand, x, self.dtype))
            if wanted != name and self.policy.operands[wanted].quantized:
                bytes_[name] = encode_operand(
                    wanted, self.policy.operands[wanted], x, self.side.rounding_key
                ).tensors()
        return bytes_, (represented[0], represented[1], represented[2])

    def restore(
        self, saved: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Represented q, k and the backward's v: from bytes, or from the caller's own tensors where those were kept."""
        remaining = list(saved)
        q_dense, k_dense = (
            (self.problem.batch, self.problem.seqlen_q),
            (self.problem.batch, self.problem.seqlen_k),
        )
        shapes = (
            (*q_dense, self.problem.num_heads, self.problem.head_dim),
            (*k_dense, self.problem.num_kv_heads, self.problem.head_dim),
            (*k_dense, self.problem.num_kv_heads, self.problem.head_dim_v),
        )
        values = []
        for i, name in enumerate(SAVED_OPERANDS):
            operand = self.policy.operands[self.policy.backward_v if name == "v" else name]
            if operand.quantized:
                count = len(operand_spec(name, operand, shapes[i]))
                taken, remaining = remaining[:count], remaining[count:]
                values.append(decode_operand(name, operand, taken, shapes[i], self.dtype))
                continue
            x = inputs[i]
            assert x is not None, (
                f"{name} is unquantized under {self.policy.name}, so the caller must hand it back"
            )
            x = self.enter_rows(x) if name == "q" else self._enter_keys(x)
            values.append(represent(name, operand, x, self.dtype))
        return values[0], values[1], values[2]
