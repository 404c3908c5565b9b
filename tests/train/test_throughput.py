import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fp4mega.train.loader import load_recipe
from fp4mega.train.recipe import Recipe
from fp4mega.train.throughput import flops_per_token, peak_tflops, visible_keys


@pytest.mark.parametrize(
    ("seq_length", "percent"), [(2048, 3.5), (4096, 6.7), (8192, 12.5), (32768, 36.4)]
)
def test_attention_share_of_llama3_8b(seq_length, percent):
    model = load_recipe("recipes/runs/8b_1gpu_h200_bf16.yaml").model
    assert 100 * flops_per_token(model, seq_length).attention_share == pytest.approx(
        percent, abs=0.1
    )


def test_weights_agree_with_torchs_counter(content):
    """The products of one dense layer and the output, counted by torch on meta tensors, forward and backward."""
    model = Recipe.parse(content).model
    tokens, hidden, kv = 10, model.hidden_size, model.num_query_groups * model.kv_channels
    shapes = [
        (hidden, hidden + 2 * kv),
        (hidden, hidden),
        (hidden, 2 * model.ffn_hidden_size),
        (model.ffn_hidden_size, hidden),
    ] * model.num_layers + [(hidden, model.vocab_size)]
    with FlopCounterMode(display=False) as counter:
        for rows, columns in shapes:
            x = torch.zeros(tokens, rows, device="meta", requires_grad=True)
            (x @ torch.zeros(rows, columns, device="meta", requires_grad=True)).sum().backward()
    assert flops_per_token(model, 32).weights == counter.get_total_flops() / tokens


def test_experts_count_those_a_token_visits(content):
    dense = flops_per_token(Recipe.parse(content).model, 32).weights
    content["model"] |= {"num_moe_experts": 8, "moe_router_topk": 2}
    experts = flops_per_token(Recipe.parse(content).model, 32).weights
    layers, hidden, width = 2, 64, 128
    assert experts - dense == 6 * layers * (3 * hidden * width + hidden * 8)


@pytest.mark.parametrize("window", [None, (-1, 0), (0, 0), (3, 0), (31, 0), (100, 0)])
def test_visible_keys_equal_the_mask(window):
    i, j = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    mask = j <= i
    if window is not None and window[0] >= 0:
        mask &= j >= i - window[0]
    assert visible_keys(32, window) == pytest.approx(mask.sum().item() / 32)


def test_windowed_layers_cost_less_and_skipped_ones_do_not(content):
    content["model"] |= {"window_size": [7, 0], "window_attn_skip_freq": 2}
    attention = flops_per_token(Recipe.parse(content).model, 32).attention
    assert attention == pytest.approx(12 * 64 * (visible_keys(32, (7, 0)) + visible_keys(32, None)))


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("cpu", "bf16", None),
    ],
)
def test_peak_by_device_name(name, precision, peak):
    assert peak_tflops(name, precision) == peak
