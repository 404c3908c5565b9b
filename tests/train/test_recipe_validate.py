"""Sections against one another, the number of processes and the device; parameter counts; the summary."""

import copy
import warnings

import pytest

from fp4mega.attention.policy import DIVERGENT_PV_REASON
from fp4mega.train.recipe import ModelSection, Recipe, RecipeError
from fp4mega.train.validate import (
    data_parallel_size,
    describe,
    layer_policies,
    parameter_count,
    validate,
)

CONTENT = {
    "name": "small",
    "model": {
        "num_layers": 8,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "vocab_size": 264,
    },
    "attention": {},
    "parallel": {},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 1},
    "data": {"kind": "indexed", "train": ["x"]},
    "train": {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 32, "steps": 4},
}


def recipe_with(**sections):
    content = copy.deepcopy(CONTENT)
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    return Recipe.parse(content)


def problems(world_size=1, device_type="cpu", device_count=None, **sections):
    with pytest.raises(RecipeError) as error:
        validate(recipe_with(**sections), world_size, device_type, device_count)
    return str(error.value).split("\n")


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (2, {"parallel": {"context": 2}}),
        (4, {"parallel": {"context": 4, "cp_comm_type": "a2a"}}),
        (8, {"parallel": {"context": 8, "cp_comm_type": "p2p"}}),  # any number of heads
        (1, {}),
        (16, {}),
        (4, {"parallel": {"tensor": 4, "sequence": True}}),
        (8, {"parallel": {"tensor": 8, "sequence": True}}),  # 4 kv heads are replicated over 8
        (8, {"parallel": {"tensor": 2, "pipeline": 2}}),
        (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 4}}),
        (4, {"model": {"num_moe_experts": 4}, "parallel": {"expert": 4}}),
        (1, {"model": {"window_size": [7, 0], "softmax_type": "learnable"}}),
    ],
)
def test_what_can_run(world_size, sections):
    validate(recipe_with(**sections), world_size, "cpu")
    validate(recipe_with(**sections), world_size, "cuda", world_size)


@pytest.mark.parametrize(
    ("world_size", "sections", "line"),
    [
        (3, {"parallel": {"tensor": 2}}, "world_size=3: must be a multiple of parallel.tensor * pipeline * context = 2 * 1 * 1 = 2"),
        (1, {"parallel": {"tensor": 2}}, "world_size=1: must be a multiple of parallel.tensor * pipeline * context = 2 * 1 * 1 = 2"),
        (2, {"model": {"num_attention_heads": 9, "num_query_groups": 1, "kv_channels": 8}, "parallel": {"tensor": 2}}, "model.num_attention_heads=9: must be divisible by parallel.tensor=2"),
        (2, {"model": {"ffn_hidden_size": 97}, "parallel": {"tensor": 2}}, "model.ffn_hidden_size=97: must be divisible by parallel.tensor=2"),
        (2, {"model": {"vocab_size": 263}, "parallel": {"tensor": 2}}, "model.vocab_size=263: must be divisible by parallel.tensor=2"),
        (3, {"model": {"num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 8}, "parallel": {"tensor": 3}, "train": {"global_batch_size": 2}}, "model.num_query_groups=2: must be a multiple or a divisor of parallel.tensor=3"),
        (3, {"parallel": {"pipeline": 3}}, "model.num_layers=8: must be divisible by parallel.pipeline * virtual_pipeline = 3"),
        (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 3}}, "model.num_layers=8: must be divisible by parallel.pipeline * virtual_pipeline = 6"),
        (1, {"parallel": {"virtual_pipeline": 2}}, "parallel.virtual_pipeline=2: needs parallel.pipeline > 1; otherwise null"),
        (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "train": {"global_batch_size": 6}}, "train.global_batch_size=6: its 3 micro-batches must be a multiple of parallel.pipeline=2 for the interleaved schedule"),
        (1, {"parallel": {"sequence": True}}, "parallel.sequence=true: needs parallel.tensor > 1; allowed with tensor=1: false"),
        (2, {"parallel": {"tensor": 2, "sequence": True}, "train": {"seq_length": 33}}, "train.seq_length=33: with parallel.sequence it must be divisible by parallel.tensor=2"),
        (2, {"parallel": {"context": 2}, "train": {"seq_length": 34}}, 'attention.policy="nvfp4_qk_fp8_pv" with parallel.context=2: sequence length 34: every one of 2 context-parallel ranks holds two chunks of it, so it must be a multiple of 4'),
        (8, {"parallel": {"context": 2, "tensor": 4, "sequence": True}, "train": {"seq_length": 36}}, "train.seq_length=36 / parallel.context=2: with parallel.sequence it must be divisible by parallel.tensor=4"),
        (8, {"parallel": {"context": 4, "tensor": 2, "cp_comm_type": "a2a"}}, "attention.policy=\"nvfp4_qk_fp8_pv\" with parallel.context=4 and parallel.tensor=2: cp_comm_type='a2a' with 2 kv heads on 4 context-parallel ranks: every rank takes as many whole heads, so their number must be a multiple of 4; allowed: all_gather, p2p"),
        (2, {"parallel": {"context": 2, "cp_comm_type": "p2p"}, "attention": {"backend": "triton"}}, "attention.policy=\"nvfp4_qk_fp8_pv\" with parallel.context=2: backend='triton' with cp_comm_type='p2p': its kernels take whole sequences of unquantized keys, not the bytes of parts; allowed: reference, auto (which is the reference here), or cp_comm_type='a2a'"),
        (2, {"parallel": {"context": 2}, "tracking": {"probe_interval": 3}}, "tracking.probe_interval=3: probes look at whole rows of P, of which a process has no keys under parallel.context=2; allowed: null"),
        (2, {"parallel": {"expert": 2}}, "parallel.expert=2: needs model.num_moe_experts; allowed without: 1"),
        (2, {"model": {"num_moe_experts": 3}, "parallel": {"expert": 2}}, "model.num_moe_experts=3: must be divisible by parallel.expert=2"),
        (2, {"model": {"num_moe_experts": 4}, "parallel": {"expert": 4}}, "world_size=2: must be a multiple of parallel.tensor * pipeline * expert = 1 * 1 * 4"),
        (2, {"model": {"num_moe_experts": 4}, "parallel": {"tensor": 2}}, "parallel.sequence=false: a mixture of experts with parallel.tensor=2 trains only with sequence parallelism; allowed: true"),
        (3, {}, "train.global_batch_size=32: must be a multiple of micro_batch_size * data-parallel size = 2 * 3 = 6"),
        (32, {}, "train.global_batch_size=32: must be a multiple of micro_batch_size * data-parallel size = 2 * 32 = 64"),
        (1, {"optimizer": {"warmup_steps": 4}}, "optimizer.warmup_steps=4: must be below decay_steps=4"),
        (1, {"optimizer": {"warmup_steps": 3, "decay_steps": 2}}, "optimizer.warmup_steps=3: must be below decay_steps=2"),
        (1, {"train": {"eval_interval": 2}, "data": {"split": "100,0,0"}}, 'train.eval_interval=2: data.split="100,0,0" keeps nothing for validation; give it a second share, name data.valid, or set eval_interval=null'),
        (1, {"model": {"vocab_size": 256}}, "model.vocab_size=256: the byte tokenizer needs 257 or more"),
        (0, {}, "world_size=0: expected 1 or more"),
    ],
)  # fmt: skip
def test_what_cannot(world_size, sections, line):
    assert problems(world_size, **sections) == [line]


def test_more_gpus_than_there_are():
    (line,) = problems(4, "cuda", 2)
    assert line == (
        "world_size=4: only 2 GPUs are there, and each process needs its own; start at most 2 processes"
    )
    validate(recipe_with(), 4, "cpu", 0)
    validate(recipe_with(), 4, "cuda", None)


def test_unknown_device():
    assert problems(1, "tpu") == ['device_type="tpu": allowed: cpu, cuda']


def test_all_problems_at_once():
    found = problems(
        3,
        "cuda",
        1,
        parallel={"tensor": 2, "context": 2},
        optimizer={"warmup_steps": 9},
        tracking={"probe_interval": 3},
    )
    assert [line.partition("=")[0] for line in found] == [
        "world_size", "tracking.probe_interval", "optimizer.warmup_steps", "world_size",
    ]  # fmt: skip


FOUR_BIT = ["nvfp4_qk_mxfp4_pv", "nvfp4_qk_fp8_p_mxfp4_v", "nvfp4_qk_mxfp4_p_fp8_v-paper"]


@pytest.mark.parametrize("policy", FOUR_BIT)
def test_four_bit_pv_needs_its_flag_beyond_one_process(policy):
    (line,) = problems(2, attention={"policy": policy})
    assert line == f'attention.policy="{policy}" with world_size=2: {DIVERGENT_PV_REASON}'
    assert "attention.allow_divergent_pv=true" in line
    assert "diverged" in line
    validate(recipe_with(attention={"policy": policy}), 1, "cpu")
    validate(recipe_with(attention={"policy": policy, "allow_divergent_pv": True}), 2, "cpu")


def test_four_bit_pv_in_one_layer_or_in_a_policy_of_ones_own():
    rule = {"match": "layers.-1", "policy": FOUR_BIT[0]}
    (line,) = problems(2, attention={"layers": [{"match": "layers.0", "policy": "bf16"}, rule]})
    assert line.startswith(f'attention.layers.1.policy="{FOUR_BIT[0]}" with world_size=2: ')
    own = {"policies": {"mine": {"base": "nvfp4_qk_fp8_pv", "v": "nvfp4"}}, "policy": "mine"}
    (line,) = problems(2, attention=own)
    assert line.startswith('attention.policy="mine" with world_size=2: ')


@pytest.mark.parametrize("policy", ["direct_p_fast", "direct_p_accurate", "direct_p_guarded"])
def test_direct_p_does_not_train_unless_allowed(policy):
    (line,) = problems(1, attention={"policy": policy})
    assert line.startswith(f'attention.policy="{policy}": Direct-P serves inference')
    assert "attention.allow_divergent_pv=true" in line
    validate(recipe_with(attention={"policy": policy, "allow_divergent_pv": True}), 1, "cpu")


def test_a_rule_that_matches_no_layer():
    (line,) = problems(attention={"layers": [{"match": "layers.8", "policy": "bf16"}]})
    assert line.startswith(
        "attention.layers.0.match='layers.8': matches no layer; layers are layers.0 to layers.7"
    )


def test_unknown_backend():
    (line,) = problems(attention={"backend": "referense"})
    assert line.startswith(
        "attention.backend='referense' is unknown; nearest is 'reference'; allowed: auto, "
    )


def test_a_backend_that_cannot_says_why(monkeypatch):
    import fp4mega.train.validate as module

    class Unable:
        name = "one"

        def explain(self, problem, policy, device):
            self.problem = problem
            return f"cannot do {policy.name} on {device.type}"

    unable = Unable()
    monkeypatch.setattr(module, "list_backends", lambda: ["one"])
    monkeypatch.setattr(module, "get_backend", lambda name: unable)
    (line,) = problems(
        2,
        parallel={"tensor": 2},
        model={"window_size": [7, -1], "softmax_type": "learnable"},
        train={"precision": "fp32"},
    )
    assert line == (
        'attention.policy="nvfp4_qk_fp8_pv" with attention.backend="auto": no backend can run layer 0: '
        "one: cannot do nvfp4_qk_fp8_pv on cpu"
    )
    assert (
        str(unable.problem) == "B2 S32 T32 H4/2 D8/8 float32 causal=top_left window=(7, None) sink"
    )


def test_layer_policies():
    rules = [{"match": "layers.0", "policy": "bf16"}, {"match": "layers.-[1-2]", "policy": "exact"}]
    names = layer_policies(recipe_with(attention={"layers": rules}))
    assert names == ["bf16", *["nvfp4_qk_fp8_pv"] * 5, "exact", "exact"]


def test_data_parallel_size():
    recipe = recipe_with(parallel={"tensor": 2, "pipeline": 2})
    assert data_parallel_size(recipe, 12) == 3
    with pytest.raises(RecipeError, match="world_size=6: must be a multiple"):
        data_parallel_size(recipe, 6)


def test_description():
    rules = [{"match": "layers.[0-1]", "policy": "bf16"}, {"match": "layers.-1", "policy": "exact"}]
    recipe = recipe_with(attention={"layers": rules}, parallel={"tensor": 2})
    rows = dict(line.split(maxsplit=1) for line in describe(recipe, 8).splitlines())
    assert rows["run"] == f"small__nvfp4_qk_fp8_pv (recipe {recipe.digest[:12]})"
    assert rows["parameters"] == f"{parameter_count(recipe.model):,}"
    assert rows["processes"] == "8 = tensor 2 x pipeline 1 x context 1 x data 4"
    cut = recipe_with(parallel={"context": 2, "cp_comm_type": "a2a"})
    assert "= tensor 1 x pipeline 1 x context 2 (a2a) x data 1\n" in describe(cut, 2)
    assert rows["batch"] == "32 x 32 = 1,024 tokens an update (micro-batch 2, 4 accumulated)"
    assert rows["updates"] == "4 = 4,096 tokens"
    assert rows["attention"] == "layers 0-1 bf16; layers 2-6 nvfp4_qk_fp8_pv; layer 7 exact"


MODEL = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 160,
}


def test_parameter_counts_of_known_models():
    llama3_8b = ModelSection(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, vocab_size=128256,
    )  # fmt: skip
    assert parameter_count(llama3_8b) == 8_030_261_248
    llama32_1b = ModelSection(
        num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32,
        num_query_groups=8, vocab_size=128256, tie_embeddings=True,
    )  # fmt: skip
    assert parameter_count(llama32_1b) == 1_235_814_400
    plain, sink = ModelSection(**MODEL), ModelSection(**MODEL, softmax_type="learnable")
    assert parameter_count(sink) - parameter_count(plain) == 3 * 4


@pytest.fixture(scope="module")
def build_megatron():
    """A function that builds Megatron's own GPTModel for a ModelSection, in a group of one process."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=True, force_reset_rng=True
    )

    def build(model):
        shared = (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "qk_layernorm", "num_moe_experts", "moe_ffn_hidden_size",
        )  # fmt: skip
        config = TransformerConfig(
            **{name: getattr(model, name) for name in shared},
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec(
            num_experts=model.num_moe_experts,
            qk_layernorm=model.qk_layernorm,
            normalization="RMSNorm",
        )
        return GPTModel(
            config, spec, vocab_size=model.vocab_size, max_sequence_length=32, position_embedding_type="rope",
            share_embeddings_and_output_weights=model.tie_embeddings,
        )  # fmt: skip

    yield build
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"qk_layernorm": True},
        {"tie_embeddings": True, "kv_channels": 24},
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 40},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_parameter_count_is_that_of_megatron_s_model(build_megatron, extra):
    model = ModelSection(**MODEL, **extra)
    built = build_megatron(model)
    assert parameter_count(model) == sum(parameter.numel() for parameter in built.parameters())


def test_bf16_optimizer_state_needs_bf16_training_and_a_distributed_optimizer():
    bf16 = {"state_dtype": "bf16", "distributed": True}
    assert problems(optimizer=bf16, train={"precision": "fp32"}) == [
        "optimizer.state_dtype=bf16: train.precision=fp32; allowed with bf16 only"
    ]
    with pytest.raises(RecipeError, match="set distributed=true"):
        recipe_with(optimizer={"state_dtype": "bf16"})


def test_bf16_optimizer_state_needs_transformer_engine(monkeypatch):
    from fp4mega.train import model

    recipe = recipe_with(optimizer={"state_dtype": "bf16", "distributed": True})
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="needs Transformer Engine, which is not installed"):
        model.check_installed(recipe)
    monkeypatch.setattr(model, "find_spec", lambda name: object())
    model.check_installed(recipe)
