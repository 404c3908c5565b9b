"""The backend: prepares operands, launches kernels, saves the reference's bytes. Triton is imported on first use only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4mega.attention import Saved
from fp4mega.attention import backward as reference_backward
from fp4mega.attention.call import accumulator_dtype
from fp4mega.attention.mask import Packing, unpack_problem
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.kernels.contract import Forward, Gradients, TensorSpec
from fp4mega.kernels.triton import support

if TYPE_CHECKING:
    from fp4mega.kernels.triton.forward import Operand, Shape


class TritonBackend:
    """Attention in Triton kernels: BF16 or FP8 scores that are exact for 4-bit Q and K, FP8 or MXFP4 P and V, FP8 gradients."""

    name = "triton"
    has_backward = True

    def explain(
        self, problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
    ) -> str | None:
        """None when the kernels compute exactly this policy and problem on this device."""
        return support.explain(problem, policy, device)

    def saved_spec(
        self, problem: AttentionProblem, policy: AttentionPolicy
    ) -> tuple[TensorSpec, ...]:
        """Bytes of Q, K, V, statistics, and the largest represented magnitude of each head of Q and of K."""
        return support.saved_spec(problem, policy)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Forward:
        """Attention, its log-sum-exp, and the bytes that `backward` reads."""
        with _on(q.device):
            if policy.direct_p is not None:
                return _direct_p(_Call(problem, side, policy), q, k, v)
            return _forward(_Call(problem, side, policy), q, k, v)

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        forward: Forward,
        inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Gradients:
        """Gradients under `policy.backward`, the same bits every time. Direct-P is for inference: its gradients are the reference's."""
        if policy.direct_p is not None:
            kept = Saved(forward.out, forward.lse, forward.saved[:-2])
            return Gradients(*reference_backward(dout, dlse, kept, inputs, side, problem, policy))
        with _on(dout.device):
            return _backward(_Call(problem, side, policy), dout, dlse, forward, inputs)


TALLEST = 128
"""Rows of the largest tile."""
OFFSETS = 2**31
"""Elements within a tile are counted in 32 bits by the kernels."""


def _within_offsets(x: Tensor, stride: int, steps: int) -> Tensor:
    """x [B, rows, heads, dim], copied where so many steps of this stride of it lead beyond what the kernels count."""
    return x if stride * steps < OFFSETS else x.contiguous()


def _as_stored(x: Tensor) -> Tensor:
    """A saved tensor as the kernels stored it: hooks of autograd may give it back with other strides, or in the middle of a buffer."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _on(device: torch.device) -> torch.cuda.device:
    """Triton launches on the current device: make it that of the tensors."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


@dataclass(slots=True)
class _Call:
    """One problem under one policy; packed sequences become a padded batch with lengths."""

    outer: AttentionProblem
    side: SideInputs
    policy: AttentionPolicy
    problem: AttentionProblem = None  # type: ignore[assignment]
    pack_q: Packing | None = None
    pack_k: Packing | None = None
    shape: "Shape" = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        from fp4mega.kernels.triton.forward import Shape

        self.problem, mask, self.pack_q, self.pack_k = unpack_problem(self.outer, self.side)
        problem = self.problem
        left, right = problem.window
        if problem.causal != "none":
            right = 0
        padding = self.side.key_padding_mask
        self.shape = Shape(
            batch=problem.batch,
            rows=problem.seqlen_q,
            keys=problem.seqlen_k,
            heads=problem.num_heads,
            kv_heads=problem.num_kv_heads,
            dim=problem.head_dim,
            dim_v=problem.head_dim_v,
            left=left,
            right=right,
            bottom_right=problem.causal == "bottom_right",
            hidden=None if padding is None else padding.contiguous().view(torch.uint8),
            length_q=None if mask.lengths_q is None else mask.lengths_q.to(torch.int32),
            length_k=None if mask.lengths_k is None else mask.lengths_k.to(torch.int32),
        )

    @property
    def four_bit(self) -> bool:
        return self.policy.operands["q"].quantized

    @property
    def nvfp4(self) -> bool:
        return self.policy.operands["q"].format == "nvfp4"

    @property
    def p_format(self) -> str:
        """`e4m3`, `mxfp4` or `bf16`."""
        return self.policy.operands["p"].format.removesuffix("_rceil")

    @property
    def fp8_pv(self) -> bool:
        return self.policy.operands["p"].format == self.policy.operands["v"].format == "e4m3"

    @property
    def four_bit_v(self) -> bool:
        """The V that backward reads is MXFP4."""
        return self.policy.operands[self.policy.backward_v].format == "mxfp4_rceil"

    @property
    def sink(self) -> Tensor | None:
        """[H], contiguous."""
        return None if self.side.sink is None else self.side.sink.contiguous()

    @property
    def represented(self) -> bool:
        return self.policy.backward == "represented"

    def enter_rows(self, x: Tensor) -> Tensor:
        x = x if self.pack_q is None else self.pack_q.pad(x)
        return _within_offsets(x, x.stride(3), x.shape[3])

    def enter_keys(self, x: Tensor) -> Tensor:
        x = x if self.pack_k is None else self.pack_k.pad(x)
        return _within_offsets(x, x.stride(3), x.shape[3])

    def leave_rows(self, x: Tensor) -> Tensor:
        return x if self.pack_q is None else self.pack_q.unpad(x, self.outer.seqlen_q)

    def leave_keys(self, x: Tensor) -> Tensor:
        return x if self.pack_k is None else self.pack_k.unpad(x, self.outer.seqlen_k)

    def enter_row_values(self, x: Tensor, fill: float) -> Tensor:
        """[B, H, S] of the caller to the padded batch's, contiguous."""
        if self.pack_q is None:
            return x.contiguous()
        padded = self.pack_q.pad(x.transpose(1, 2))
        return padded.masked_fill(~self.pack_q.valid[..., None], fill).transpose(1, 2).contiguous()

    def leave_row_values(self, x: Tensor, fill: float) -> Tensor:
        if self.pack_q is None:
            return x
        unpadded = self.pack_q.unpad(x.transpose(1, 2), self.outer.seqlen_q, fill)
        return unpadded.transpose(1, 2).contiguous()

    def bf16(self, x: Tensor, *, is_key: bool = False) -> "Operand":
        """The caller's tensor as a BF16 operand, copied only if its dtype, last stride or hidden keys ask for it."""
        from fp4mega.kernels.triton.forward import strided_operand

        x = x.to(torch.bfloat16)
        if is_key and self.side.key_padding_mask is not None:
            x = x.masked_fill(self.side.key_padding_mask[..., None, None], 0)
        x = x if x.stride(-1) == 1 else x.contiguous()
        return strided_operand(_within_offsets(x, x.stride(1), TALLEST + 1))

    def tiles(self) -> dict[str, Any]:
        """Keyword arguments that every attention kernel takes."""
        from fp4mega.kernels.triton.publish_input import padded_dim

        return {
            "softmax_scale": self.problem.softmax_scale,
            "wide": padded_dim(self.shape.dim),
            "wide_v": padded_dim(self.shape.dim_v),
            "p_exponent": self.policy.p_exponent if self.four_bit else 0,
            "p_format": self.p_format,
        }

    def publish_v(self, v: Tensor, maxima: Tensor) -> "tuple[list[Tensor], Operand]":
        """The bytes of V that backward reads, and V as the forward multiplies it: E4M3 with P in E4M3, otherwise BF16."""
        from fp4mega.kernels.triton.forward import padded_operand
        from fp4mega.kernels.triton.publish_fp8 import publish_v
        from fp4mega.kernels.triton.publish_values import publish_values

        if self.fp8_pv:
            saved, across = publish_v(v, self.shape.hidden, maxima)
            return saved, padded_operand(across, saved[1])
        forward, saved_format = (
            self.policy.operands[name].format.removesuffix("_rceil")
            for name in ("v", self.policy.backward_v)
        )
        saved, values, divisor = publish_values(
            v, self.shape.hidden, forward=forward, saved=saved_format
        )
        return saved, padded_operand(values, divisor)


def _forward(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    from fp4mega.kernels.triton import forward as kernels
    from fp4mega.kernels.triton.publish_fp4 import publish_fp4
    from fp4mega.kernels.triton.publish_input import cleared

    shape, policy, dtype = call.shape, call.policy, q.dtype
    q, k, v = call.enter_rows(q), call.enter_keys(k), call.enter_keys(v)
    out = q.new_empty((shape.batch, shape.rows, shape.heads, shape.dim_v), dtype=dtype)
    lse = q.new_empty((shape.batch, shape.heads, shape.rows), dtype=torch.float32)
    statistics = None
    if call.represented:
        groups = shape.heads // shape.kv_heads
        statistics = lse.new_empty((2, shape.batch, shape.kv_heads, groups, shape.rows))
    arguments: dict[str, Any] = {
        **call.tiles(),
        "sink": call.sink,
        "integer_max": policy.max_rule == "integer",
        "represented": policy.normalizer == "represented",
        "tile_n": policy.tile_n,
    }
    results = (out, lse, statistics)
    saved: list[Tensor] = []
    if not call.four_bit:
        operands = (call.bf16(q), call.bf16(k, is_key=True), call.bf16(v, is_key=True))
        kernels.attention_forward(*operands, shape, results, **arguments)
        largest: list[Tensor] = []
    else:
        inexact, *maxima = cleared((shape.batch, shape.kv_heads), q, k, v)
        nvfp4 = call.nvfp4
        q_saved, q_largest, q_operand, q_scale = publish_fp4(
            q, None, nvfp4=nvfp4, inexact=inexact, maxima=maxima[0]
        )
        k_saved, k_largest, k_operand, k_scale = publish_fp4(
            k, shape.hidden, nvfp4=nvfp4, inexact=inexact, maxima=maxima[1]
        )
        v_saved, v_factor = call.publish_v(v, maxima[2])
        scores = (
            kernels.padded_operand(q_operand, q_scale),
            kernels.padded_operand(k_operand, k_scale),
        )
        gate = kernels.GATE_NONE if nvfp4 else kernels.GATE_EXACT
        kernels.attention_forward(
            *scores, v_factor, shape, results, gate=gate, inexact=inexact, **arguments
        )
        saved, largest = [*q_saved, *k_saved, *v_saved], [q_largest, k_largest]
        if not nvfp4:
            in_bf16 = _scores_in_bf16(call, saved, largest, inexact)
            kernels.attention_forward(
                *in_bf16, v_factor, shape, results,
                gate=kernels.GATE_INEXACT, inexact=inexact, **arguments,
            )  # fmt: skip
    if statistics is not None:
        saved.append(statistics)
    return Forward(call.leave_rows(out), call.leave_row_values(lse, -torch.inf), (*saved, *largest))


def _direct_p(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """The forward of a Direct-P policy; keys in the policy's order, sampled ones first."""
    from fp4mega.kernels.triton.direct_p import direct_p_forward, swapped_keys
    from fp4mega.kernels.triton.forward import padded_operand
    from fp4mega.kernels.triton.publish_fp4 import publish_fp4
    from fp4mega.kernels.triton.publish_input import cleared
    from fp4mega.kernels.triton.publish_values import publish_values

    shape, rule, dtype = call.shape, call.policy.direct_p, q.dtype
    assert rule is not None
    q, k, v = call.enter_rows(q), call.enter_keys(k), call.enter_keys(v)
    if rule.reference == "sampled":
        order = _sampled_first(shape.keys, rule.samples, q.device)
        k, v = k[:, order], v[:, order]
        shape = shape._replace(hidden=None if shape.hidden is None else shape.hidden[:, order])
    inexact, *maxima = cleared((shape.batch, shape.kv_heads), q, k)
    q_saved, q_largest, q_operand, q_scale = publish_fp4(
        q, None, nvfp4=True, inexact=inexact, maxima=maxima[0]
    )
    swapped = swapped_keys(rule)
    k_saved, k_largest, k_operand, k_scale = publish_fp4(
        k, shape.hidden, nvfp4=True, inexact=inexact, maxima=maxima[1], swapped=swapped
    )
    # Sums that stand far below their worth need V near 1: float32 ends where a small V begins.
    v_saved, v_operand, v_scale = publish_values(
        v, shape.hidden, forward="amplitude", saved="amplitude",
        power_a_head=rule.floor > 0, swapped=swapped,
    )  # fmt: skip
    out = q.new_empty((shape.batch, shape.rows, shape.heads, shape.dim_v), dtype=dtype)
    lse = q.new_empty((shape.batch, shape.heads, shape.rows), dtype=torch.float32)
    groups = shape.heads // shape.kv_heads
    statistics = lse.new_empty((2, shape.batch, shape.kv_heads, groups, shape.rows))
    sizes = call.tiles()
    direct_p_forward(
        padded_operand(q_operand, q_scale),
        padded_operand(k_operand, k_scale),
        padded_operand(v_operand, v_scale),
        shape,
        (out, lse, statistics),
        rule,
        sink=call.sink,
        **{name: sizes[name] for name in ("softmax_scale", "wide", "wide_v")},
    )
    statistics = statistics.to(accumulator_dtype(dtype, call.policy))
    saved = (*q_saved, *k_saved, *v_saved, statistics, q_largest, k_largest)
    return Forward(call.leave_rows(out), call.leave_row_values(lse, -torch.inf), saved)


def _sampled_first(keys: int, samples: int, device: torch.device) -> Tensor:
    """The permutation of `fp4mega.attention.score_map.sample_order`, without waiting for the device: a graph can capture it."""
    samples = min(samples, keys)
    rest = torch.ones(keys, dtype=torch.uint8, device=device)
    rest.index_fill_(0, torch.arange(samples, device=device) * keys // samples, 0)
    return rest.argsort(stable=True)


def _scores_in_bf16(
    call: _Call, saved: list[Tensor], largest: list[Tensor], inexact: Tensor
) -> "tuple[Operand, Operand]":
    """Q and K of the heads whose MXFP4 values E4M3 does not hold, in BF16, which holds all of them."""
    from fp4mega.kernels.triton.forward import padded_operand
    from fp4mega.kernels.triton.publish_fp4 import expand_fp4

    operands = []
    for first, amax in ((0, largest[0]), (2, largest[1])):
        data, _, _ = expand_fp4(
            saved[first : first + 2], amax, call.shape.dim,
            nvfp4=False, scores="bf16", gradient=False, inexact=inexact, gated=True,
        )  # fmt: skip
        assert data is not None
        operands.append(padded_operand(data, None))
    return operands[0], operands[1]


def _backward(
    call: _Call,
    dout: Tensor,
    dlse: Tensor | None,
    forward: Forward,
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    from fp4mega.kernels.triton import factors as parts
    from fp4mega.kernels.triton.backward import attention_backward
    from fp4mega.kernels.triton.center import center
    from fp4mega.kernels.triton.forward import (
        GATE_EXACT,
        GATE_INEXACT,
        GATE_NONE,
        padded_operand,
        strided_operand,
    )
    from fp4mega.kernels.triton.publish_fp4 import expand_fp4
    from fp4mega.kernels.triton.publish_fp8 import Rows, publish_dout, row_terms
    from fp4mega.kernels.triton.publish_input import cleared
    from fp4mega.kernels.triton.publish_values import expand_values

    shape, policy, dtype = call.shape, call.policy, call.outer.dtype
    dout, out = call.enter_rows(dout), call.enter_rows(forward.out).contiguous()
    lse = call.enter_row_values(forward.lse, -torch.inf)
    dlse = None if dlse is None else call.enter_row_values(dlse, 0.0)
    saved = [_as_stored(t) for t in forward.saved]
    largest = [saved.pop() for _ in range(2)][::-1] if call.four_bit else []
    statistics = saved.pop() if call.represented else None
    gradients = (
        dout.new_empty((shape.batch, shape.rows, shape.heads, shape.dim), dtype=dtype),
        dout.new_empty((shape.batch, shape.keys, shape.kv_heads, shape.dim), dtype=dtype),
        dout.new_empty((shape.batch, shape.keys, shape.kv_heads, shape.dim_v), dtype=dtype),
    )
    arguments: dict[str, Any] = {**call.tiles(), "represented": call.represented}
    p_exponent = arguments["p_exponent"]
    widths = {name: arguments[name] for name in ("softmax_scale", "wide", "wide_v", "p_exponent")}
    if not call.four_bit:
        q, k, v = inputs
        assert q is not None and k is not None and v is not None  # noqa: PT018 - one invariant
        q, k, v = call.enter_rows(q), call.enter_keys(k), call.enter_keys(v)
        terms = parts.RowTerms(*row_terms(dout, Rows(out, dlse, lse, statistics, p_exponent)))
        nothing = parts.Across(None, None)
        factors = parts.Factors(
            call.bf16(v, is_key=True), call.bf16(dout), nothing, nothing, nothing, terms
        )
        scores = (call.bf16(q), call.bf16(k, is_key=True))
        if policy.backward == "centered":
            center(*scores, factors, dlse, shape, **widths)
        attention_backward([(*scores, GATE_NONE)], factors, shape, gradients, **arguments)
    else:
        nvfp4 = call.nvfp4
        count = 3 if nvfp4 else 2
        q_saved, k_saved, v_saved = saved[:count], saved[count : 2 * count], saved[2 * count :]
        inexact, maxima = cleared((shape.batch, shape.kv_heads), dout)
        do, do_across, do_power, of_rows = publish_dout(
            dout, maxima, Rows(out, dlse, lse, statistics, p_exponent)
        )
        terms = parts.RowTerms(*of_rows)
        expanded = [
            expand_fp4(
                bytes_,
                amax,
                shape.dim,
                nvfp4=nvfp4,
                scores="bf16" if nvfp4 else "e4m3",
                gradient=True,
                inexact=inexact,
            )  # fmt: skip
            for bytes_, amax in ((q_saved, largest[0]), (k_saved, largest[1]))
        ]
        operands, across = [], []
        for (data, transposed, power), bytes_ in zip(expanded, (q_saved, k_saved), strict=True):
            assert data is not None
            divisor = bytes_[2].view(shape.batch, -1) if nvfp4 else power
            operands.append(padded_operand(data, divisor))
            across.append(parts.Across(transposed, power))
        if call.four_bit_v:
            # E4M3 does not hold MXFP4 values: dP in BF16, which holds them and those of E5M2.
            v_factor, do = (
                padded_operand(*expand_values(v_saved, shape.keys)),
                do.to(torch.bfloat16),
            )
        else:
            v_codes = strided_operand(v_saved[0].view(torch.float8_e4m3fn))
            v_factor = v_codes._replace(scale=v_saved[1])
        factors = parts.Factors(
            v_factor,
            padded_operand(do, do_power),
            across[0],
            across[1],
            parts.Across(do_across, do_power),
            terms,
        )
        scored: list[tuple[Operand, Operand, int]] = [
            (operands[0], operands[1], GATE_NONE if nvfp4 else GATE_EXACT)
        ]
        if not nvfp4:
            scored.append((*_scores_in_bf16(call, saved, largest, inexact), GATE_INEXACT))
        if policy.backward == "centered":
            for q_scores, k_scores, gate in scored:
                center(
                    q_scores, k_scores, factors, dlse, shape, **widths, gate=gate, inexact=inexact
                )
        attention_backward(scored, factors, shape, gradients, **arguments, inexact=inexact)
    dq, dk, dv = gradients
    dsink = (
        None
        if call.side.sink is None
        else _sink_gradient(call, terms.r * 2.0**p_exponent, lse, statistics)
    )
    return Gradients(call.leave_rows(dq), call.leave_keys(dk), call.leave_keys(dv), dsink)


def _sink_gradient(call: _Call, r: Tensor, lse: Tensor, statistics: Tensor | None) -> Tensor:
    """dsink [H] = -sum over rows of the sink's probability times r."""
    shape = call.shape
    assert call.side.sink is not None
    sink = call.side.sink.to(torch.float32)[None, :, None]
    r = r[..., : shape.rows]
    if statistics is None:
        mass = torch.exp(sink - lse.masked_fill(lse == -torch.inf, torch.inf))
    else:
        top, total = statistics.flatten(2, 3)
        mass = torch.exp2(sink * 1.4426950408889634 - top.masked_fill(top == -torch.inf, 0.0))
        mass = (mass / total).masked_fill(total == 0, 0.0)
    return -(mass * r).sum(dim=(0, 2))
