"""Every recipe in the repository loads, can run where its name says, and pairs differ in nothing but the policy."""

import re
from pathlib import Path

import pytest

from fp4mega.attention.policy import list_policies
from fp4mega.train.loader import load_recipe, resolved_yaml
from fp4mega.train.validate import describe, layer_policies, parameter_count, validate

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
BASES = [path for path in FILES if path.parent.name == "base"]
NAMED_BY_POLICY = [path for path in FILES if path.parent.name != "base"]
RUNS = [path for path in FILES if path.parent.name == "runs"]


def stem(path):
    return path.stem


def world_size_in(path):
    gpus = re.search(r"_(\d+)gpu_", path.name)
    return int(gpus[1]) if gpus else 1


def test_the_promised_recipes_are_there():
    studies = {
        *("study_1m", "study_1m_edges", "study_1m_high"),
        *("study_30m", "study_30m_edges", "study_30m_high", "study_30m_4k"),
        "study_30m_small_batch",
        *("study_125m", "study_350m"),
    }
    assert {p.stem for p in BASES} == studies | {
        *("tiny", "125m", "350m", "1b", "llama3_8b", "llama3_70b"),
    }
    machines = ("tiny", "8b_1gpu_gb200", "8b_1gpu_h200", "8b_64gpu_gb200", "8b_128k_8gpu_gb200")
    policies = ("nvfp4_qk_fp8_pv", "bf16")
    assert {p.stem for p in RUNS} == {
        f"{machine}_{policy}" for machine in machines for policy in policies
    }
    assert {p.parent.name for p in FILES} == {"base", "runs", "ci"}


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_loads_and_can_run_where_its_name_says(path):
    recipe, world_size = load_recipe(path), world_size_in(path)
    validate(recipe, world_size, "cuda", None)
    if "gpu" not in path.name:
        validate(recipe, world_size, "cpu", 0)
    assert recipe.run_name in describe(recipe, world_size)


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_resolved_reads_back(path, tmp_path):
    recipe = load_recipe(path)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(recipe))
    assert load_recipe(tmp_path / "resolved.yaml").digest == recipe.digest


@pytest.mark.parametrize("path", NAMED_BY_POLICY, ids=stem)
def test_the_file_is_named_by_size_machine_and_policy(path):
    recipe = load_recipe(path)
    assert path.stem == f"{recipe.name}_{recipe.attention.policy}"
    assert recipe.attention.policy in list_policies()


@pytest.mark.parametrize("path", BASES, ids=stem)
def test_a_base_is_named_by_size(path):
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", [p for p in RUNS if p.stem.endswith("_bf16")], ids=stem)
def test_a_pair_differs_in_the_policy_only(path):
    plain = load_recipe(path)
    partner = path.with_name(f"{plain.name}_nvfp4_qk_fp8_pv.yaml")
    quantized = load_recipe(partner)
    assert quantized.attention.policy == "nvfp4_qk_fp8_pv"
    assert quantized.digest != plain.digest
    assert load_recipe(partner, ["attention.policy=bf16"]).digest == plain.digest


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 806_016),
        ("125m", 124_668_672),
        ("study_30m", 34_087_424),
        ("study_125m", 97_536_768),
        ("study_350m", 325_108_736),
        ("350m", 348_701_696),
        ("1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
    ],
)
def test_sizes(name, parameters):
    assert parameter_count(load_recipe(RECIPES / "base" / f"{name}.yaml").model) == parameters


def test_the_8b_model_is_llama_3():
    model = load_recipe(RECIPES / "base" / "llama3_8b.yaml").model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (32, 8, 128)
    assert (model.vocab_size, model.tie_embeddings) == (128256, False)
    assert (model.rotary_base, model.norm_epsilon) == (500000.0, 1e-5)


def test_the_64_gpu_recipe_is_the_published_study():
    recipe = load_recipe(RECIPES / "runs" / "8b_64gpu_gb200_nvfp4_qk_fp8_pv.yaml")
    train = recipe.train
    assert (train.seq_length, train.micro_batch_size, train.global_batch_size, train.steps) == (
        4096,
        4,
        1024,
        23842,
    )
    assert train.global_batch_size == 64 * train.micro_batch_size * 4
    assert round(train.steps * train.global_batch_size * train.seq_length / 1e9, 1) == 100.0


def test_the_long_context_recipe_cuts_128k_over_8():
    recipe = load_recipe(RECIPES / "runs" / "8b_128k_8gpu_gb200_nvfp4_qk_fp8_pv.yaml")
    assert (recipe.train.seq_length, recipe.parallel.context) == (2**17, 8)
    # Kernels take whole sequences, so the other exchanges would run on the reference.
    assert recipe.parallel.cp_comm_type == "a2a"
    assert recipe.train.global_batch_size * recipe.train.seq_length == 1024 * 4096


def test_the_8b_runs_have_the_8b_model():
    model = load_recipe(RECIPES / "base" / "llama3_8b.yaml").model
    assert all(load_recipe(path).model == model for path in RUNS if path.name.startswith("8b_"))


def test_every_arm_of_the_study_can_run():
    path = RECIPES / "base" / "study_30m.yaml"
    own = load_recipe(path).attention.policies
    assert len(own) == 10
    for policy in own:
        validate(load_recipe(path, [f"attention.policy={policy}"]), 1, "cuda", None)
    edges = load_recipe(
        RECIPES / "base" / "study_30m_edges.yaml", ["attention.policy=nvfp4_qk_mxfp4_pv"]
    )
    middle = ["nvfp4_qk_mxfp4_pv"] * 6
    assert layer_policies(edges) == ["bf16", *middle, "bf16"]


def test_recorded_runs_need_no_text_of_this_machine():
    for path in (RECIPES / "ci").glob("*.yaml"):
        recipe = load_recipe(path)
        assert recipe.data.kind == "mock"
        assert recipe.train.steps == 20
