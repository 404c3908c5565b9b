"""The schema: values and defaults, and one clear line for every kind of bad field."""

import copy
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4mega.attention.policy import get_policy, list_policies
from fp4mega.train.recipe import Recipe, RecipeError, field_table

DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"

MINIMAL = {
    "name": "small",
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 264,
    },
    "optimizer": {"lr": 1e-3, "min_lr": 0, "warmup_steps": 1},
    "data": {"kind": "mock"},
    "train": {"seq_length": 32, "micro_batch_size": 1, "global_batch_size": 2, "steps": 4},
}
DELETE = object()


def changed(*changes):
    """MINIMAL with ("a.b", value) changes."""
    content = copy.deepcopy(MINIMAL)
    for name, value in changes:
        *sections, last = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        if value is DELETE:
            del place[last]
        else:
            place[last] = value
    return content


def errors_of(*changes):
    with pytest.raises(RecipeError) as error:
        Recipe.parse(changed(*changes))
    return str(error.value).split("\n")


def test_defaults():
    recipe = Recipe.parse(MINIMAL)
    assert recipe.model.num_query_groups == 4
    assert recipe.model.kv_channels == 16
    assert recipe.model.rotary_base == 10000.0
    assert recipe.model.norm_epsilon == 1e-5
    assert recipe.attention.policy == "nvfp4_qk_fp8_pv"
    assert recipe.attention.backend == "auto"
    assert recipe.attention.layers == ()
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.optimizer.min_lr == 0.0
    assert isinstance(recipe.optimizer.min_lr, float)
    assert recipe.data.split == "98,2,0"
    assert recipe.data.tokenizer.kind == "byte"
    assert recipe.train.seed == 1234
    assert recipe.tracking.wandb.mode == "auto"
    assert recipe.run_name == "small__nvfp4_qk_fp8_pv"
    assert recipe.decay_steps == 4


def test_given_values_win_over_derived_ones():
    recipe = Recipe.parse(
        changed(
            ("model.num_query_groups", 2),
            ("model.kv_channels", 48),
            ("model.window_size", [15, 0]),
            ("model.window_attn_skip_freq", 2),
            ("optimizer.decay_steps", 9),
            ("data", {"kind": "indexed", "train": {"a": 1, "b": 0.5}, "valid": ["c"]}),
            ("attention.layers", [{"match": "layers.0", "policy": "bf16"}]),
        )
    )
    assert (recipe.model.num_query_groups, recipe.model.kv_channels) == (2, 48)
    assert recipe.model.window_size == (15, 0)
    assert recipe.decay_steps == 9
    assert recipe.data.train == {"a": 1.0, "b": 0.5}
    assert recipe.data.valid == ("c",)
    assert recipe.data.split is None
    assert recipe.data.valid_share == 1.0
    assert recipe.attention.layers[0].policy == "bf16"


def test_share_of_validation():
    assert Recipe.parse(changed(("data.split", "90,6,4"))).data.valid_share == pytest.approx(0.06)


def test_a_recipe_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Recipe.parse(MINIMAL).train.steps = 3


@pytest.mark.parametrize(
    ("field", "near", "allowed"),
    [
        ("trian", "train", "name, model, attention, parallel, optimizer, data, train, tracking"),
        ("model.num_layer", "num_layers", "num_layers, hidden_size,"),
        ("attention.polcy", "policy", "policy, backend, layers, allow_divergent_pv, policies"),
        (
            "parallel.tensors",
            "tensor",
            "tensor, pipeline, virtual_pipeline, context, cp_comm_type, expert, sequence",
        ),
        ("optimizer.weight_deca", "weight_decay", "lr, min_lr, betas,"),
        ("data.tokeniser", "tokenizer", "kind, train, valid, split, tokenizer, prepare"),
        ("data.tokenizer.pth", "path", "kind, path"),
        ("train.step", "steps", "seq_length,"),
        ("tracking.wandb.projct", "project", "mode, project, entity, group"),
    ],
)
def test_unknown_field_names_the_nearest_and_the_allowed(field, near, allowed):
    (line,) = errors_of((field, 7))
    assert line.startswith(f"{field}=7: unknown field; nearest is {near!r}; allowed: {allowed}")


def test_unknown_field_in_a_list_and_in_a_policy_of_ones_own():
    (line,) = errors_of(
        ("attention.layers", [{"match": "layers.0", "policy": "bf16", "polici": "x"}])
    )
    assert (
        line
        == "attention.layers.0.polici=\"x\": unknown field; nearest is 'policy'; allowed: match, policy"
    )
    (line,) = errors_of(("attention.policies.mine", {"base": "bf16", "direct_p": {"slop": 1.0}}))
    assert line.startswith(
        "attention.policies.mine.direct_p.slop=1.0: unknown field; nearest is 'slope'"
    )


def test_unknown_field_with_nothing_near():
    (line,) = errors_of(("train.zzz", None))
    assert line.startswith("train.zzz=null: unknown field; allowed: seq_length")


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("train.steps", "ten", 'train.steps="ten": expected integer >= 1'),
        ("train.steps", "10", 'train.steps="10": expected integer >= 1'),
        ("train.steps", 1.0, "train.steps=1.0: expected integer >= 1"),
        ("train.steps", True, "train.steps=true: expected integer >= 1"),
        ("train.steps", None, "train.steps=null: expected integer >= 1"),
        ("train.steps", 0, "train.steps=0: expected integer >= 1"),
        ("train.seed", 2**31, "train.seed=2147483648: expected integer >= 0 and <= 2147483647"),
        ("train.resume", 1, "train.resume=1: expected true or false"),
        ("train.save_interval", 0, "train.save_interval=0: expected integer >= 1 or null"),
        ("optimizer.lr", 0, "optimizer.lr=0: expected number > 0"),
        ("optimizer.lr", "1e-3x", 'optimizer.lr="1e-3x": expected number > 0'),
        ("optimizer.lr", float("inf"), "optimizer.lr=Infinity: expected number > 0"),
        ("optimizer.eps", float("nan"), "optimizer.eps=NaN: expected number > 0"),
        ("optimizer.betas", [0.9], "optimizer.betas.1 is missing: expected number >= 0 and < 1"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas.1=1.0: expected number >= 0 and < 1"),
        (
            "optimizer.betas",
            0.9,
            "optimizer.betas=0.9: expected list of 2: number >= 0 and < 1, number >= 0 and < 1",
        ),
        (
            "optimizer.decay_style",
            "cosin",
            "optimizer.decay_style=\"cosin\": expected one of cosine, linear, constant; nearest is 'cosine'",
        ),
        (
            "train.precision",
            "fp16",
            "train.precision=\"fp16\": expected one of bf16, fp32; nearest is 'bf16'",
        ),
        (
            "parallel.cp_comm_type",
            "ring",
            'parallel.cp_comm_type="ring": expected one of all_gather, p2p, a2a',
        ),
        (
            "parallel.cp_comm_type",
            "a2a+p2p",
            'parallel.cp_comm_type="a2a+p2p": two levels of groups, heads exchanged inside a node and keys around nodes, are '
            "not written; allowed: all_gather, p2p, a2a",
        ),
        ("model.kv_channels", 258, "model.kv_channels=258: expected integer >= 1 and <= 256"),
        ("model.hidden_size", 2048, "model.kv_channels=512: expected integer >= 1 and <= 256"),
        ("model.window_size", [-2, 0], "model.window_size.0=-2: expected integer >= -1"),
        ("model.rotary_base", "10000", 'model.rotary_base="10000": expected number > 0'),
        ("name", "a/b", 'name="a/b": expected string like ^[A-Za-z0-9][A-Za-z0-9._-]*$'),
        ("name", DELETE, "name is missing: expected string like ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ("optimizer.lr", DELETE, "optimizer.lr is missing: expected number > 0"),
        (
            "train",
            DELETE,
            "train is missing: expected a section with the fields seq_length, micro_batch_size,",
        ),
        ("parallel", [1], "parallel=[1]: expected a section with the fields tensor, pipeline,"),
        ("parallel", None, "parallel=null: expected a section with the fields tensor, pipeline,"),
        (
            "attention.layers",
            {"match": "x"},
            'attention.layers={"match": "x"}: expected list of section',
        ),
        (
            "attention.layers",
            ["bf16"],
            'attention.layers.0="bf16": expected a section with the fields match, policy',
        ),
    ],
)
def test_wrong_type_range_or_missing(field, value, line):
    (found,) = errors_of((field, value))
    assert found.startswith(line)
    assert "pydantic" not in found
    if not line.endswith(","):
        assert found == line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([("model.num_query_groups", 3)], "model.num_query_groups=3: must divide num_attention_heads=4"),
        ([("model.hidden_size", 66)], "model.kv_channels is not given and hidden_size=66 is not divisible by num_attention_heads=4: set kv_channels"),
        ([("model.kv_channels", 17)], "model.kv_channels=17: the rotary embedding needs an even number"),
        ([("model.window_attn_skip_freq", 2)], "model.window_attn_skip_freq=2: needs window_size"),
        ([("model.moe_ffn_hidden_size", 2)], "model.moe_ffn_hidden_size=2: needs num_moe_experts"),
        ([("model.num_moe_experts", 2), ("model.moe_router_topk", 3)], "model.moe_router_topk=3: at most num_moe_experts=2"),
        ([("optimizer.min_lr", 1)], "optimizer.min_lr=1.0: at most lr=0.001"),
        ([("data.tokenizer", {"kind": "huggingface"})], "data.tokenizer.path=null: kind=huggingface needs the path of a tokenizer.json"),
        ([("data.tokenizer", {"kind": "byte", "path": "x"})], 'data.tokenizer.path="x": kind=byte takes none; write null'),
        ([("data.train", ["x"])], 'data.train=["x"]: kind=mock takes none; write null'),
        ([("data", {"kind": "indexed"})], "data.train=null: kind=indexed needs prefixes of .bin/.idx files"),
        ([("data", {"kind": "indexed", "train": ["x"], "valid": ["y"], "split": "1,1,0"})], 'data.split="1,1,0": give shares when valid is null, and null when valid has its own files'),
        ([("data.split", None)], "data.split=null: give shares when valid is null, and null when valid has its own files"),
        ([("data", {"kind": "indexed", "train": ["x", "y"], "prepare": {"source": "s"}})], 'data.train=["x", "y"]: `prepare` makes exactly one prefix'),
        ([("data", {"kind": "indexed", "train": ["x"], "prepare": {"source": "s", "suffixes": ["py"]}})], "data.prepare.suffixes=[\"py\"]: expected a non-empty list of suffixes that start with '.'"),
    ],
)  # fmt: skip
def test_fields_of_one_section_that_contradict_one_another(changes, line):
    assert errors_of(*changes) == [line]


@pytest.mark.parametrize("split", ["98,2", "98;2;0", "0,2,98", "a,b,c", "-1,2,3", "98,2,0,0", ""])
def test_split_is_three_shares(split):
    (line,) = errors_of(("data.split", split))
    assert (
        line
        == f'data.split="{split}": expected three shares "train,valid,test" of 0 or more, the first above 0'
    )


@pytest.mark.parametrize(
    ("blend", "part"),
    [
        ([], "data.train=[]: expected a non-empty list of prefixes or a mapping"),
        ("prefix", 'data.train="prefix": expected a non-empty list'),
        ([3], "a prefix is the path of a .bin/.idx pair"),
        ({"a": 0}, 'the weight of "a" is 0'),
        ({"a": True}, 'the weight of "a" is true'),
        ({"a": float("nan")}, 'the weight of "a" is NaN'),
        ({"a": 1e308, "b": 1e308}, 'at most 1e+30; the weight of "a" is 1e+308'),
        ({"a": 10**400}, 'the weight of "a" is 1000'),
        (["a", "a"], "a prefix appears twice"),
    ],
)
def test_bad_blends(blend, part):
    (line,) = errors_of(("data", {"kind": "indexed", "train": blend}))
    assert part in line


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("model.hidden_size", 10**20, "model.hidden_size=100000000000000000000: expected at most 2147483647"),
        ("train.steps", 2**31, "train.steps=2147483648: expected at most 2147483647"),
        ("model.window_size", [2**31, -1], "model.window_size=[2147483648, -1]: expected at most 2147483647"),
        ("optimizer.lr", 1e300, "optimizer.lr=1e+300: expected at most 1e+30"),
        ("train.max_seconds", 1e300, "train.max_seconds=1e+300: expected at most 1e+30"),
        ("model.num_layers", 10**6, "model.num_layers=1000000: expected integer >= 1 and <= 10000"),
        ("train.timeout_minutes", 1e300, "train.timeout_minutes=1e+300: expected number > 0 and <= 525600"),
    ],
)  # fmt: skip
def test_numbers_that_nothing_could_hold(field, value, line):
    assert line in errors_of((field, value))


def test_a_limit_of_bytes_may_be_larger_than_other_integers():
    prepare = {"source": "s", "max_bytes": 10**12}
    content = changed(("data", {"kind": "indexed", "train": ["x"], "prepare": prepare}))
    assert Recipe.parse(content).data.prepare.max_bytes == 10**12
    prepare["max_bytes"] = 2**63
    (line,) = errors_of(("data", {"kind": "indexed", "train": ["x"], "prepare": prepare}))
    assert line.startswith("data.prepare.max_bytes=9223372036854775808: expected at most")


def test_every_problem_has_its_line():
    lines = errors_of(
        ("train.steps", 0), ("train.stps", 1), ("optimizer.lr", "x"), ("model.num_layers", DELETE)
    )
    assert sorted(line.partition(":")[0] for line in lines) == [
        "model.num_layers is missing", 'optimizer.lr="x"', "train.steps=0", "train.stps=1",
    ]  # fmt: skip


def test_long_values_are_shortened():
    (line,) = errors_of(("train.steps", "x" * 500))
    assert len(line) < 140
    assert "...: expected integer" in line


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ([("attention.policy", "nvfp4_qk_fp8_vp")], "attention.policy"),
        (
            [("attention.layers", [{"match": "layers.0", "policy": "nvfp4_qk_fp8_vp"}])],
            "attention.layers.0.policy",
        ),
        (
            [("attention.policies.mine", {"base": "nvfp4_qk_fp8_vp"})],
            "attention.policies.mine.base",
        ),
    ],
)
def test_unknown_policy_names_the_nearest(changes, field):
    (line,) = errors_of(*changes)
    assert line.startswith(
        f"{field}=\"nvfp4_qk_fp8_vp\": unknown policy; nearest is 'nvfp4_qk_fp8_pv'; "
    )
    assert "mxfp4_qk_fp8_pv" in line


def test_policy_of_ones_own_changes_its_base():
    recipe = Recipe.parse(
        changed(
            ("attention.policy", "own_sr"),
            ("attention.policies", {
                "own": {"base": "nvfp4_qk_fp8_pv", "v": "mxfp4_even", "tile_n": 64},
                "own_sr": {"base": "own", "v": "mxfp4_even+sr"},
                "own_direct": {"base": "direct_p_accurate", "direct_p": {"slope": 1.7}},
            }),
        )
    )  # fmt: skip
    made = recipe.attention.build_policies()
    base = get_policy("nvfp4_qk_fp8_pv")
    assert (made["own"].v, made["own"].tile_n, made["own"].q, made["own"].do) == (
        "mxfp4_even",
        64,
        "nvfp4",
        base.do,
    )
    assert (made["own_sr"].v, made["own_sr"].tile_n) == ("mxfp4_even+sr", 64)
    assert (made["own_direct"].direct_p.slope, made["own_direct"].direct_p.exact_every) == (1.7, 4)
    assert not {"own", "own_sr", "own_direct"} & set(list_policies()), "checking must not register"
    assert recipe.as_dict()["attention"]["policies"]["own_sr"] == {
        "base": "own",
        "v": "mxfp4_even+sr",
    }
    assert recipe.run_name == "small__own_sr"


def test_policy_of_ones_own_without_base():
    given_fields = {"q": "bf16", "k": "bf16", "p": "bf16", "v": "bf16", "max_rule": "exact"}
    made = Recipe.parse(
        changed(("attention.policies.plain", given_fields))
    ).attention.build_policies()
    assert (made["plain"].q, made["plain"].max_rule, made["plain"].backward) == (
        "bf16",
        "exact",
        "represented",
    )


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        (
            {"v": "mxfp4_evn"},
            "attention.policies.mine: q, k, p missing; give them, or a `base` to take them from",
        ),
        (
            {"base": "bf16", "v": "mxfp4_evn"},
            "attention.policies.mine.v='mxfp4_evn': unknown format 'mxfp4_evn'; nearest is 'mxfp4_even'",
        ),
        (
            {"base": "bf16", "p": "e4m3"},
            "attention.policies.mine.p='e4m3': FP8 P has the fixed scale",
        ),
        (
            {"base": "bf16", "backward": "pper"},
            "attention.policies.mine.backward=\"pper\": expected one of paper, centered, represented; nearest is 'paper'",
        ),
        ({"base": "bf16", "tile_n": "64"}, 'attention.policies.mine.tile_n="64": expected integer'),
        (
            {"base": "bf16", "tile_n": 33},
            "attention.policies.mine.tile_n=33: expected a positive multiple of 32",
        ),
        ({"base": "bf16", "name": "x"}, 'attention.policies.mine.name="x": unknown field'),
        (
            {"base": "bf16", "direct_p": {"offset": 1.0}},
            "attention.policies.mine.direct_p.slope is missing",
        ),
        (
            {"base": "direct_p_accurate", "direct_p": {"samples": 0}},
            "attention.policies.mine.direct_p.samples=0: expected an integer of 1 or more",
        ),
        ({"base": "later"}, 'attention.policies.mine.base="later": unknown policy'),
        ("bf16", 'attention.policies.mine="bf16": expected a section with the fields q, k,'),
    ],
)
def test_bad_policies_of_ones_own_name_the_field(policy, part):
    (line,) = errors_of(("attention.policies", {"mine": policy, "later": {"base": "bf16"}}))
    assert line.startswith(part)


def test_names_that_would_break_the_line_are_quoted():
    (line,) = errors_of(("train.a\nb", 1))
    assert line.startswith('train."a\\nb"=1: unknown field')
    (line,) = errors_of(("attention.policies", {"a\nb": {"q": "bf16"}}))
    assert line.startswith('attention.policies."a\\nb": k, p, v missing')


def test_bad_name_of_ones_own_policy():
    (line,) = errors_of(("attention.policies", {"a b": {"base": "bf16"}}))
    assert line.startswith("attention.policies.a b: policy name='a b': expected a non-empty string")


def test_digest_follows_every_value_and_the_order_of_a_blend():
    recipe = Recipe.parse(MINIMAL)
    assert re.fullmatch("[0-9a-f]{64}", recipe.digest)
    assert Recipe.parse(recipe.as_dict()) == recipe
    assert Recipe.parse(recipe.as_dict()).digest == recipe.digest
    assert Recipe.parse(changed(("optimizer.min_lr", 0.0))).digest == recipe.digest
    assert Recipe.parse(changed(("train.seed", 1234))).digest == recipe.digest
    assert Recipe.parse(changed(("train.seed", 1))).digest != recipe.digest
    blends = [{"kind": "indexed", "train": blend} for blend in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    first, second = (Recipe.parse(changed(("data", data))) for data in blends)
    assert first.digest != second.digest


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = re.findall(r"^\| (?:\*\*)?`([a-z_.]+)`", field_table(), re.M)


@settings(deadline=None)
@given(field=st.sampled_from(FIELDS), value=JUNK)
def test_any_value_anywhere_gives_a_recipe_or_lines_that_name_the_section(field, value):
    try:
        Recipe.parse(
            changed(
                ("data", {"kind": "indexed", "train": ["x"], "prepare": {"source": "s"}}),
                (field, value),
            )
        )
    except RecipeError as error:
        for line in str(error).split("\n"):
            assert line.startswith(field.partition(".")[0])
            assert "\n" not in line
            assert "pydantic" not in line


def test_the_documented_table_is_the_schema():
    assert field_table() in DOCS.read_text(), (
        "run `python -m fp4mega.train.recipe` and paste its output"
    )
    assert len(FIELDS) > 70
