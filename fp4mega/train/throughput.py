"""Floating-point operations of a training step, and the share of a device's peak that a run reaches (MFU).

Counted are the matrix products of forward and backward (twice the forward), a multiply-add as two operations; recomputed
activations do not count. Attention counts only the pairs of positions that the mask lets through.
"""

from dataclasses import dataclass

from fp4mega.train.recipe import ModelSection

# Dense peaks in TFLOP/s from the vendors' data sheets, by a part of the device's name; the first match counts.
_PEAK_TFLOPS = (
    ("GB300", {"bf16": 2500.0, "fp32": 80.0}),
    ("B300", {"bf16": 2250.0, "fp32": 75.0}),
    ("GB200", {"bf16": 2500.0, "fp32": 80.0}),
    ("B200", {"bf16": 2250.0, "fp32": 75.0}),
    ("H200", {"bf16": 989.4, "fp32": 66.9}),
    ("GH200", {"bf16": 989.4, "fp32": 66.9}),
    ("H100 PCIe", {"bf16": 756.0, "fp32": 51.2}),
    ("H100", {"bf16": 989.4, "fp32": 66.9}),
    ("A100", {"bf16": 312.0, "fp32": 19.5}),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in TFLOP/s at the recipe's precision; None for a CPU or a device not in the table."""
    for part, peaks in _PEAK_TFLOPS:
        if part in device_name:
            return peaks[precision]
    return None


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one token through forward and backward: matrix products of weights, and those of attention."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        """All FLOPs of one token."""
        return self.weights + self.attention

    @property
    def attention_share(self) -> float:
        """Part of the FLOPs that attention's products (scores and output) take, 0 to 1."""
        return self.attention / self.total


def visible_keys(seq_length: int, window: tuple[int, int] | None) -> float:
    """Mean number of keys that a causal query sees, with an optional window [left, right] (-1: no limit)."""
    if window is None or window[0] < 0 or window[0] >= seq_length:
        return (seq_length + 1) / 2
    left = window[0] + 1  # the query itself and `left` keys before it
    return (left * (left + 1) / 2 + (seq_length - left) * left) / seq_length


def flops_per_token(model: ModelSection, seq_length: int) -> StepFlops:
    """FLOPs of one trained token: 6 for each weight it meets, 12 for each head channel and visible key."""
    queries = model.num_attention_heads * model.kv_channels
    keys_values = 2 * model.num_query_groups * model.kv_channels
    projections = model.hidden_size * (queries + keys_values) + queries * model.hidden_size
    if model.num_moe_experts is None:
        mlp = 3 * model.hidden_size * model.ffn_hidden_size
    else:
        expert = 3 * model.hidden_size * (model.moe_ffn_hidden_size or model.ffn_hidden_size)
        mlp = model.moe_router_topk * expert + model.hidden_size * model.num_moe_experts
    weights = model.num_layers * (projections + mlp) + model.hidden_size * model.vocab_size
    attention = 0.0
    for layer in range(1, model.num_layers + 1):
        skip = model.window_attn_skip_freq
        window = None if skip is not None and layer % skip == 0 else model.window_size
        attention += 12.0 * queries * visible_keys(seq_length, window)
    return StepFlops(6.0 * weights, attention)
