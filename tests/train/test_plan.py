"""A plan's figures are those of real processes: what they allocate, keep for backward, and send."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fp4mega.attention import get_policy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.megatron import adapted_to_cpu
from fp4mega.ops import attention_func
from fp4mega.train.__main__ import main
from fp4mega.train.imagined import Message
from fp4mega.train.launch import (
    find_launch,
    seed_everything,
    start_process_groups,
    stop_process_groups,
)
from fp4mega.train.loader import load_recipe
from fp4mega.train.model import build_training
from fp4mega.train.plan import attention_saves, make_plan
from fp4mega.train.plan_table import Machines
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.validate import parameter_count

RECIPES = Path(__file__).parents[2] / "recipes"

TWO_PROCESSES = {
    "data": {},
    "data_sharded": {"optimizer": {"distributed": True}, "train": {"precision": "bf16"}},
    "tensor_sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "context": {"parallel": {"context": 2}},
    "context_ring": {"parallel": {"context": 2, "cp_comm_type": "p2p"}},
    "context_heads": {"parallel": {"context": 2, "cp_comm_type": "a2a"}},
    "context_bf16": {"parallel": {"context": 2}, "attention": {"policy": "bf16"}},
    "pipeline": {"parallel": {"pipeline": 2}, "train": {"global_batch_size": 8}},
    "interleaved_tied": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2},
        "model": {"num_layers": 4, "tie_embeddings": True},
        "train": {"global_batch_size": 8},
    },
}


def changed(content, changes):
    return {
        **content,
        **{section: {**content.get(section, {}), **fields} for section, fields in changes.items()},
    }


@pytest.fixture
def plain(content):
    """The tiny recipe, on mock data."""
    content["data"] = {"kind": "mock"}
    content["attention"] = {"policy": "nvfp4_qk_fp8_pv"}
    return content


@pytest.fixture
def two_real(plain, tmp_path):
    """What two processes measured, by case and rank."""
    contents = {name: changed(plain, changes) for name, changes in TWO_PROCESSES.items()}
    path = tmp_path / "contents.json"
    path.write_text(json.dumps(contents))
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
            ),
            *(str(Path(__file__).with_name("plan_worker.py")), str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in (0, 1)]
    return contents, ranks


def test_two_processes_hold_and_send_what_the_plan_says(two_real):
    contents, ranks = two_real
    for name, content in contents.items():
        recipe = Recipe.parse(content)
        plan = make_plan(recipe, 2, "cpu")
        for rank, real in enumerate(r[name] for r in ranks):
            stage = plan.stages[rank if recipe.parallel.pipeline == 2 else 0]
            where = f"{name}, rank {rank}"
            assert stage.parameters == real["numbers"], where
            # Buffers of a distributed optimizer are padded to a multiple of 64 elements a process.
            assert stage.parameter_bytes == pytest.approx(real["parameters"], rel=2e-3), where
            assert stage.gradient_bytes == pytest.approx(real["gradients"], rel=2e-3), where
            masters = 12 if recipe.train.precision == "bf16" else 8
            assert stage.optimizer_bytes == pytest.approx(
                real["moments"] * masters / 8, rel=2e-3
            ), where
            assert sent(stage) == really_sent(real), where
            working = stage.forward_backward - stage.state_bytes
            assert working == pytest.approx(real["working"], rel=0.05), where


def sent(stage):
    """(kind, processes, payload of all) of a planned stage, to the number of messages."""
    found = Counter()
    for t in stage.traffic:
        found["send" if t.group == "pipeline" else t.kind, tuple(sorted(t.ranks))] += t.payload
    return {**found}


def really_sent(real):
    found = Counter()
    for kind, _, ranks, payload in real["messages"]:
        found[kind, tuple(ranks)] += payload
    return {**found}


@pytest.mark.parametrize("recompute", ["none", "core_attn", "full"])
@pytest.mark.parametrize("policy", ["bf16", "nvfp4_qk_fp8_pv"])
def test_held_activations_are_what_autograd_saves(plain, policy, recompute):
    plain["attention"] = {"policy": policy}
    plain = changed(plain, {"train": {"recompute": recompute, "precision": "bf16"}})
    recipe = Recipe.parse(plain)
    planned = make_plan(recipe, 1, "cpu").stages[0]
    assert planned.held == pytest.approx(saved_by_a_forward(recipe), rel=0.01)


def saved_by_a_forward(recipe):
    """Bytes that autograd saves in a real forward of one micro-batch, parameters and buffers aside."""
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with adapted_to_cpu():
        start_process_groups(find_launch({}), recipe.parallel)
        try:
            seed_everything(1, torch.device("cpu"))
            (chunk,) = build_training(recipe, torch.device("cpu")).chunks
            shape = (recipe.train.micro_batch_size, recipe.train.seq_length)
            tokens = torch.randint(recipe.model.vocab_size, shape)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = chunk(tokens, tokens, None, labels=tokens)
            own = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
        finally:
            stop_process_groups()
    assert loss.requires_grad
    return sum(size for pointer, (size, _) in saved.items() if pointer not in own)


@pytest.mark.parametrize(
    "policy", ["bf16", "nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv"]
)
def test_what_attention_saves_is_counted_to_the_byte(policy):
    problem = AttentionProblem(
        batch=2,
        seqlen_q=160,
        seqlen_k=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        head_dim_v=64,
        dtype=torch.bfloat16,
        softmax_scale=0.125,
        causal="top_left",
    )
    q, k, v = (
        torch.randn(2, 160, heads, 64, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    saved = {}

    def note(tensor):
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = attention_func(q, k, v, policy=policy, causal=True, backend="reference")
    assert out.requires_grad
    assert sum(saved.values()) == attention_saves(problem, get_policy(policy))


def test_a_ring_sends_each_byte_to_all_but_the_last():
    ranks = (0, 1, 2, 3)
    assert Message("all-gather", "g", ranks, 400).sent == 300
    assert Message("reduce-scatter", "g", ranks, 400).sent == 300
    assert Message("all-reduce", "g", ranks, 400).sent == 600
    assert Message("send", "g", ranks, 400).sent == 400


def test_links():
    machines = Machines(per_node=4, per_domain=72)
    assert machines.link((0, 3)) == machines.link((4, 7)) == "node"
    assert machines.link((3, 4)) == machines.link((0, 71)) == "domain"
    assert machines.link((71, 72)) == "network"
    with pytest.raises(RecipeError, match="--gpus-per-domain=6"):
        Machines(per_node=4, per_domain=6)


@pytest.mark.parametrize(
    ("name", "world_size", "overrides"),
    [
        ("llama3_8b", 1, ["train.global_batch_size=8"]),
        ("llama3_8b", 64, []),
        (
            "llama3_70b",
            1024,
            ["parallel.tensor=4", "parallel.sequence=true", "parallel.pipeline=4"],
        ),
    ],
)
def test_a_large_model_is_planned_in_full(name, world_size, overrides):
    recipe = load_recipe(RECIPES / "base" / f"{name}.yaml", overrides)
    plan = make_plan(recipe, world_size)
    parts = recipe.parallel.tensor
    # Tensor-parallel processes each hold all of the norms, 2 a layer and one at the end.
    norms = (2 * recipe.model.num_layers + 1) * recipe.model.hidden_size
    distinct = sum(stage.parameters for stage in plan.stages) * parts - (parts - 1) * norms
    assert distinct == parameter_count(recipe.model)
    copies = world_size // (parts * len(plan.stages))
    for stage in plan.stages:
        # BF16 weights, FP32 gradients; FP32 weights and two moments, divided over the copies of the model.
        assert stage.parameter_bytes == pytest.approx(2 * stage.parameters, rel=1e-3)
        assert stage.gradient_bytes == pytest.approx(4 * stage.parameters, rel=1e-3)
        assert stage.optimizer_bytes == pytest.approx(12 * stage.parameters / copies, rel=1e-3)
        updates = {t.kind: t for t in stage.traffic if t.group == "data"}
        if copies == 1:
            assert not updates
            continue
        share = (copies - 1) / copies
        assert updates["reduce-scatter"].sent == pytest.approx(
            share * stage.gradient_bytes, rel=1e-6
        )
        assert updates["all-gather"].sent == pytest.approx(share * stage.parameter_bytes, rel=1e-6)


def test_tensor_parallel_messages_are_those_of_sequence_parallelism():
    """A layer gathers the hidden state before attention and before the MLP, in forward, and again twice in backward."""
    overrides = ["parallel.tensor=2", "parallel.sequence=true", "model.num_layers=2"]
    recipe = load_recipe(RECIPES / "base" / "llama3_8b.yaml", overrides)
    (stage,) = make_plan(recipe, 2).stages
    micro_batches = 256
    hidden = 4 * 4096 * 4096 * 2
    gathered = [t for t in stage.traffic if (t.when, t.kind) == ("micro-batch", "all-gather")]
    scattered = [t for t in stage.traffic if (t.when, t.kind) == ("micro-batch", "reduce-scatter")]
    # Layers: 2 forward, 2 x 2 backward. The output matrix: one forward, two backward.
    assert [t.payload for t in gathered] == [(2 * 6 + 3) * hidden * micro_batches]
    # Layers: 2 forward, 2 backward. Embedding forward, output matrix backward.
    assert [t.payload for t in scattered] == [(2 * 4 + 2) * hidden * micro_batches]


def test_a_mixture_of_experts_is_refused(plain):
    plain = changed(plain, {"model": {"num_moe_experts": 4}})
    with pytest.raises(RecipeError, match="model.num_moe_experts=4"):
        make_plan(Recipe.parse(plain), 1, "cpu")


def test_the_command_prints_the_plan(capsys):
    recipe = str(RECIPES / "runs" / "8b_64gpu_gb200_nvfp4_qk_fp8_pv.yaml")
    options = ["--plan", "--world-size", "64", "--gpus-per-node", "4", "--gpus-per-domain", "64"]
    assert main([recipe, *options]) == 0
    told = capsys.readouterr().out
    assert "8,030,261,248 distinct" in told
    assert "195.0 MiB a layer" in told
    assert "61 % of what bf16 holds" in told
    row = next(line.split() for line in told.splitlines() if "all-gather" in line)
    assert row == ["0", "update", "all-gather", "data", "64", "domain", "1", "16.061", "15.810"]
    assert main([recipe, "--plan", "--world-size", "48"]) == 2
    assert "global_batch_size=1024" in capsys.readouterr().err
