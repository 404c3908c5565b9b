"""A checkpoint of our trainer in models that Megatron-Core builds: finetuning under another policy, or without us."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron_harness import batch, local_spec, megatron_process, tiny_config

from fp4mega.megatron import swap_core_attention
from fp4mega.train.launch import find_launch
from fp4mega.train.loop import run
from fp4mega.train.recipe import Recipe

STEPS = 12


def trained_in_bf16(folder):
    recipe = Recipe.parse(
        {
            "name": "t",
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "vocab_size": 264,
            },
            "attention": {"policy": "bf16"},
            "optimizer": {"lr": 5e-3, "min_lr": 1e-3, "warmup_steps": 1, "decay_steps": 40},
            "data": {"kind": "mock"},
            "train": {
                "seq_length": 24,
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "steps": STEPS,
                "precision": "fp32",
                "save_interval": STEPS,
            },
            "tracking": {"dir": str(folder), "wandb": {"mode": "disabled"}},
        }
    )
    assert run(recipe, find_launch({})) == 0
    return folder / "t__bf16" / "checkpoints" / f"iter_{STEPS:07}"


def test_finetuning_under_another_policy_begins_where_bf16_ended(tmp_path):
    checkpoint = trained_in_bf16(tmp_path / "runs")
    config = tiny_config()
    specs = {
        "stock": local_spec(),
        "exact": swap_core_attention(local_spec(), policy="exact"),
        "nvfp4_qk_fp8_pv": swap_core_attention(local_spec(), policy="nvfp4_qk_fp8_pv"),
    }
    rising = torch.arange(25).expand(2, -1)  # what Megatron's mock data holds
    inputs = batch() | {"input_ids": rising[:, :-1], "labels": rising[:, 1:]}
    losses = {}
    with megatron_process(str(tmp_path / "store")):
        for name, spec in specs.items():
            torch.manual_seed(1)
            model = GPTModel(
                config,
                spec,
                vocab_size=264,
                max_sequence_length=24,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )
            before = model(**inputs, attention_mask=None).mean().item()
            state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
            model.load_state_dict(state["model"], strict=True)
            losses[name] = model(**inputs, attention_mask=None).mean().item()
            assert losses[name] < before - 1
    assert losses["exact"] == pytest.approx(losses["stock"], rel=1e-5)
    assert losses["nvfp4_qk_fp8_pv"] == pytest.approx(losses["stock"], rel=0.05)
