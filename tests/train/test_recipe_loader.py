"""Files: strict YAML, extends, overrides, policies registered on loading, and the resolved recipe read back."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4mega.attention import policy as policy_module
from fp4mega.attention.policy import get_policy, list_policies
from fp4mega.train.loader import load_recipe, resolved_yaml
from fp4mega.train.recipe import Recipe, RecipeError

BASE = """\
name: small
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 4, vocab_size: 264}
optimizer: {lr: 1e-3, min_lr: 0, warmup_steps: 1}
data: {kind: indexed, train: {a: 1, b: 2}}
train: {seq_length: 32, micro_batch_size: 1, global_batch_size: 2, steps: 4}
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """Policies that a test registers are gone after it."""
    monkeypatch.setattr(policy_module, "_registry", dict(policy_module._registry))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "small.yaml").write_text(BASE)
    return tmp_path


def write(folder, text, name="run.yaml"):
    (folder / name).write_text(text)
    return folder / name


def error_of(path, *overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    return str(error.value)


def test_extends_merges_sections_and_replaces_everything_else(folder):
    path = write(
        folder,
        "extends: base/small.yaml\nname: other\ndata: {train: {c: 3}}\ntrain: {steps: 9}\noptimizer: {betas: [0.8, 0.9]}\n",
    )
    recipe = load_recipe(path)
    assert (recipe.name, recipe.train.steps, recipe.train.seq_length) == ("other", 9, 32)
    assert recipe.data.train == {"c": 3.0}
    assert recipe.data.kind == "indexed"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.optimizer.lr == 1e-3


def test_later_parents_win_and_a_diamond_is_no_cycle(folder):
    write(folder, "extends: base/small.yaml\ntrain: {steps: 5, seed: 5}\n", "left.yaml")
    write(
        folder,
        "extends: base/small.yaml\nattention: {policy: bf16}\ntrain: {steps: 6}\n",
        "right.yaml",
    )
    recipe = load_recipe(write(folder, "extends: [left.yaml, right.yaml]\n"))
    assert recipe.attention.policy == "bf16"
    assert recipe.train.seed == 5
    # right.yaml holds its base's value too, so the base's defaults come with it.
    assert recipe.train.steps == 6


def test_a_null_section_can_be_replaced_and_removed(folder):
    path = write(
        folder, "extends: base/small.yaml\ndata: {train: [a], prepare: {source: x}}\n", "first.yaml"
    )
    assert load_recipe(path).data.prepare.source == "x"
    removed = write(folder, "extends: first.yaml\ndata: {prepare: null}\n")
    assert load_recipe(removed).data.prepare is None
    assert load_recipe(removed, ["data.prepare.source=y"]).data.prepare.source == "y"


def test_cycle(folder):
    write(folder, "extends: b.yaml\n", "a.yaml")
    write(folder, "extends: a.yaml\n", "b.yaml")
    message = error_of(folder / "a.yaml")
    assert message == f"extends: a cycle: {folder}/a.yaml -> {folder}/b.yaml -> {folder}/a.yaml"
    assert "a cycle" in error_of(write(folder, "extends: run.yaml\n"))


def test_missing_files(folder):
    assert error_of(folder / "none.yaml") == f"{folder}/none.yaml: no such recipe"
    path = write(folder, "extends: base/none.yaml\n")
    assert error_of(path) == f"{folder}/base/none.yaml: no such recipe (extended by {path})"
    assert "cannot be read as UTF-8 text" in error_of(folder / "base")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b.yaml", "no path of a recipe.*: embedded null byte"),
        ("x" * 300, "x.* cannot be read|x.*: no path"),
    ],
)
def test_names_that_no_file_can_have(folder, name, message):
    assert re.search(message, error_of(folder / name))
    assert re.search(message, error_of(write(folder, f"extends: {json.dumps(name)}\n")))


@pytest.mark.parametrize("depth", [60, 1500, 30_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ("{a: ", "}")])
def test_nesting_has_a_limit(folder, depth, left, right):
    nested = depth * left + depth * right
    place = "line 1, column "
    assert error_of(write(folder, f"name: {nested}\n")).endswith("nested more than 50 deep")
    assert place in error_of(write(folder, f"name: {nested}\n"))
    told = error_of(folder / "base" / "small.yaml", f"train.steps={nested}")
    assert told.endswith("nested more than 50 deep")


def test_a_number_of_thousands_of_digits(folder):
    path = folder / "base" / "small.yaml"
    assert "run.yaml: Exceeds the limit" in error_of(
        write(folder, f"name: {'9' * 5000}\n", "run.yaml")
    )
    assert "Exceeds the limit" in error_of(path, f"train.steps={'9' * 5000}")
    for field in ("train.steps", "optimizer.lr", "data.split", "model.window_size"):
        assert error_of(path, f"{field}={'9' * 4000}").startswith(f"{field}=9999")


def test_home_is_expanded_in_the_paths_that_a_run_uses(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = folder / "base" / "small.yaml"
    recipe = load_recipe(
        path, ["tracking.dir=~/runs", "data.train=[~/a, b~/c]", "data.kind=indexed"]
    )
    assert (recipe.tracking.dir, recipe.data.train) == ("/home/me/runs", ("/home/me/a", "b~/c"))
    blend = ["data.train={~/a: 1.0, /b: 2.0}", "data.valid=[~/v]", "data.kind=indexed"]
    recipe = load_recipe(path, blend)
    assert recipe.data.train == {"/home/me/a": 1.0, "/b": 2.0}
    assert recipe.data.valid == ("/home/me/v",)


def test_not_text(folder):
    (folder / "run.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "run.yaml: cannot be read as UTF-8 text" in error_of(folder / "run.yaml")


@pytest.mark.parametrize("extends", ["3", "[3]", "{a: b}", "['']"])
def test_bad_extends(folder, extends):
    assert "expected a path or a list of paths" in error_of(write(folder, f"extends: {extends}\n"))


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", "line 3, column 3", "key 'steps' appears twice"),
        ("name: a\nname: b\n", "line 2, column 1", "key 'name' appears twice"),
        ("train: &t {steps: 1}\n", "line 1, column 8", "anchors and aliases are not allowed"),
        ("name: !!python/name:os.system x\n", "line 1, column 7", "is not allowed in a recipe"),
        ("name: !env HOME\n", "line 1, column 7", "tag '!env' is not allowed"),
        ("1: x\n", "line 1, column 1", "key 1 must be a string"),
        ("? [a]\n: x\n", "line 1, column 3", 'key ["a"] must be a string'),
        ("train: {steps: 1\n", "line 2, column 1", "expected ',' or '}'"),
        ("train:\n\tsteps: 1\n", "line 2, column 1", "cannot start any token"),
        ("name: a\n---\nname: b\n", "line 2, column 1", "but found another document"),
    ],
)
def test_strict_yaml(folder, text, place, part):
    path = write(folder, text)
    message = error_of(path)
    assert message.startswith(f"{path}, {place}: ")
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "just words\n"])
def test_a_recipe_is_a_mapping(folder, text):
    assert "expected sections such as `model:`" in error_of(write(folder, text))


@pytest.mark.parametrize(
    ("spelled", "value"),
    [("3e-4", 3e-4), ("1E-3", 1e-3), (".5", 0.5), ("1.", 1.0), ("2", 2.0), ("+1.5e+0", 1.5)],
)
def test_numbers(folder, spelled, value):
    recipe = load_recipe(folder / "base" / "small.yaml", [f"optimizer.lr={spelled}"])
    assert recipe.optimizer.lr == value


@pytest.mark.parametrize("spelled", ["010", "1_0", "0x10", "1:30", "'10'", "ten"])
def test_what_only_looks_like_an_integer_is_refused(folder, spelled):
    message = error_of(folder / "base" / "small.yaml", f"train.steps={spelled}")
    assert message == f'train.steps="{spelled.strip(chr(39))}": expected integer >= 1'


@pytest.mark.parametrize("word", ["on", "yes", "off", "True"])
def test_only_true_and_false_are_booleans(folder, word):
    assert error_of(folder / "base" / "small.yaml", f"train.resume={word}") == (
        f'train.resume="{word}": expected true or false'
    )


def test_overrides(folder):
    recipe = load_recipe(
        folder / "base" / "small.yaml",
        [
            "attention.policy=bf16",
            "train.steps=10",
            "train.steps=11",
            "train={micro_batch_size: 2}",
            "attention.layers=[{match: 'layers.0', policy: exact}]",
            "data.train=[x=y]",
            "tracking.wandb.mode=offline",
            "train.save_interval=",
        ],
    )
    assert recipe.attention.policy == "bf16"
    assert (recipe.train.steps, recipe.train.micro_batch_size, recipe.train.seq_length) == (
        11,
        2,
        32,
    )
    assert recipe.attention.layers[0].policy == "exact"
    assert recipe.data.train == ("x=y",)
    assert recipe.tracking.wandb.mode == "offline"
    assert recipe.train.save_interval is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "attention.polcy=bf16",
            "attention.polcy=\"bf16\": unknown field; nearest is 'policy'; allowed: policy, backend,",
        ),
        (
            "atention.policy=bf16",
            'atention={"policy": "bf16"}: unknown field; nearest is \'attention\'; allowed: name,',
        ),
        ("--dry-run", 'override "--dry-run": expected field=value, such as attention.policy=bf16'),
        ("=3", 'override "=3": expected field=value'),
        ("train..steps=3", 'override "train..steps=3": expected field=value'),
        (
            "train.steps.now=3",
            'override "train.steps.now=3": train.steps=4 holds no named fields; set it whole',
        ),
        ("optimizer.betas.x=3", 'optimizer.betas={"x": 3}: expected list of 2'),
        ("train.steps=[1", 'override "train.steps=[1", line 1'),
        ("train.steps=&a 1", 'override "train.steps=&a 1", line 1'),
        ("extends=x.yaml", 'extends="x.yaml": unknown field'),
        ("train={<<: {steps: 2}}", 'train.<<={"steps": 2}: unknown field'),
    ],
)
def test_bad_overrides(folder, override, message):
    assert error_of(folder / "base" / "small.yaml", override).startswith(message)


def test_policies_of_ones_own_are_registered(folder):
    path = write(
        folder,
        "extends: base/small.yaml\nattention:\n  policy: loader_test_policy\n"
        "  policies:\n    loader_test_policy: {base: nvfp4_qk_fp8_pv, v: mxfp4_even+sr}\n",
    )
    assert load_recipe(path).attention.policy == "loader_test_policy"
    assert "loader_test_policy" in list_policies()
    assert get_policy("loader_test_policy").v == "mxfp4_even+sr"
    load_recipe(path)  # the same numbers again are fine
    message = error_of(path, "attention.policies.loader_test_policy.v=mxfp4_even")
    assert message.startswith(
        "attention.policies.loader_test_policy: policy 'loader_test_policy' is already registered with other numbers (v)"
    )


def test_a_built_in_name_cannot_be_taken(folder):
    path = write(
        folder, "extends: base/small.yaml\nattention: {policies: {bf16: {base: bf16, q: nvfp4}}}\n"
    )
    assert error_of(path).startswith(
        "attention.policies.bf16: policy 'bf16' is already registered with other numbers (q); changed numbers"
    )
    assert get_policy("bf16").q == "bf16"


def test_resolved_yaml_holds_every_field_and_reads_back(folder):
    recipe = load_recipe(folder / "base" / "small.yaml", ["name='1e5'", "tracking.wandb.group=010"])
    text = resolved_yaml(recipe)
    assert "kv_channels: 16" in text
    assert "split: 98,2,0" in text
    assert load_recipe(write(folder, text)) == recipe


WORDS = st.text(min_size=1, max_size=12).filter(
    lambda s: s.isprintable() or "\n" in s
) | st.sampled_from(
    [
        "null",
        "true",
        "1e5",
        "~",
        "010",
        "- a",
        "a: b",
        "#x",
        "<<",
        "'",
        '"',
        " x ",
        "&a",
        "\u2028",
        "0x1",
        ".inf",
        "\x85",
    ]
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    blend=st.dictionaries(
        WORDS, st.floats(min_value=1e-300, max_value=1e30), min_size=1, max_size=3
    ),
    group=st.none() | WORDS,
    lr=st.floats(min_value=1e-12, max_value=10),
    seed=st.integers(0, 2**31 - 1),
    policies=st.dictionaries(
        st.sampled_from(["p1", "p2"]),
        st.fixed_dictionaries({"base": st.just("bf16"), "tile_n": st.just(64)}),
    ),
)
def test_loading_the_resolved_recipe_gives_the_same_digest(
    folder, blend, group, lr, seed, policies
):
    base = load_recipe(folder / "base" / "small.yaml").as_dict()
    base["data"] |= {"train": blend}
    base["tracking"]["wandb"]["group"] = group
    base["optimizer"] |= {"lr": lr, "min_lr": 0.0}
    base["train"]["seed"] = seed
    base["attention"]["policies"] = policies
    recipe = Recipe.parse(base)
    again = load_recipe(write(folder, resolved_yaml(recipe)))
    assert again == recipe
    assert again.digest == recipe.digest
    assert list(again.data.train) == list(blend)


def test_the_package_s_names_resolve_to_what_the_modules_hold():
    import fp4mega.train as package

    found = {name: getattr(package, name) for name in package.__all__}
    assert found == {
        "Recipe": Recipe,
        "RecipeError": RecipeError,
        "load_recipe": load_recipe,
        "resolved_yaml": resolved_yaml,
    }
