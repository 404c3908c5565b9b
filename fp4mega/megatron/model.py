"""What a trainer does with the attention layers of a whole model: list them, count steps, arm and collect probes.

A model may be one module or, under virtual pipelining, a sequence of chunks; each rank sees its own layers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from fp4mega.megatron.core_attention import Fp4CoreAttention

Model = nn.Module | Sequence[nn.Module]


def attention_layers(model: Model) -> Iterator[Fp4CoreAttention]:
    """Every `Fp4CoreAttention` of the model, in the order of its modules."""
    for chunk in (model,) if isinstance(model, nn.Module) else model:
        for module in chunk.modules():
            if isinstance(module, Fp4CoreAttention):
                yield module


def policies_by_layer(model: Model) -> dict[int, str]:
    """Name of the policy of each layer on this rank, by 1-based layer number: what a run's manifest records.

    Raises ValueError for layers of one number with different policies, such as an encoder's and a decoder's.
    """
    policies: dict[int, str] = {}
    for layer in attention_layers(model):
        number, name = layer.layer_number, layer.policy.name
        if policies.setdefault(number, name) != name:
            raise ValueError(
                f"layer_number={number}: one attention layer has policy {policies[number]!r}, another {name!r}; "
                "ask each part of the model, such as encoder and decoder, on its own"
            )
    return policies


def set_rounding_step(model: Model, step: int) -> None:
    """Tell stochastic rounding which training step begins, so that a resumed run repeats its random bits.

    Call it before every step, with the number that a resumed run gives the same step. Policies that round to
    nearest need no call.
    """
    for layer in attention_layers(model):
        if layer.rounding is not None:
            layer.rounding.start_step(step)


def arm_probes(
    model: Model, record: Callable[[int, dict[str, Tensor]], None] | None = None
) -> None:
    """Measure the next training forward of every layer.

    `record(layer_number, tensors)` is given what a layer was measured on, of the first batch entry: q [1, S, H, D], k [1, T, G, D],
    v [1, T, G, Dv] and, out of backward, dout [1, S, H, Dv]; the layer number counts from 1. Raises ValueError for two layers of
    one number, whose figures could not be told apart.
    """
    layers = list(attention_layers(model))
    numbers = Counter(layer.layer_number for layer in layers)
    for number, count in numbers.items():
        if count > 1:
            raise ValueError(
                f"layer_number={number}: {count} attention layers have it, and figures are kept by number; "
                "arm each part of the model, such as encoder and decoder, on its own"
            )
    for layer in layers:
        layer.request_probe(None if record is None else partial(record, layer.layer_number))


def collect_probes(model: Model) -> dict[int, dict[str, float]]:
    """Take the figures of every layer measured since `arm_probes`, by 1-based layer number."""
    collected = {}
    for layer in attention_layers(model):
        if layer.last_probe is not None:
            collected[layer.layer_number] = layer.last_probe
            layer.last_probe = None
    return collected
