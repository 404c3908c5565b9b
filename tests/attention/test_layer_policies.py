"""Layer names, order of the globs, and the error for a glob that names no layer."""

import pytest

from fp4mega.attention.layer_policies import resolve_layer_policies, resolve_layer_policy

ENDS = [("layers.[0-1]", "bf16"), ("layers.-[1-2]", "bf16")]


def test_no_matcher_leaves_the_default_everywhere():
    assert resolve_layer_policies("nvfp4_qk_fp8_pv", [], 3) == ["nvfp4_qk_fp8_pv"] * 3


@pytest.mark.parametrize("num_layers", [5, 12, 32])
def test_first_and_last_two(num_layers):
    expected = ["bf16"] * 2 + ["fp4"] * (num_layers - 4) + ["bf16"] * 2
    assert resolve_layer_policies("fp4", ENDS, num_layers) == expected


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("layers.*", range(12)),
        ("layers.1", [1]),
        ("layers.1*", [1, 10, 11]),
        ("layers.-1", [11]),
        ("layers.-1?", [0, 1, 2]),
        ("layers.[!-]", range(10)),
        ("layers.?", range(10)),
        ("layers.-12", [0]),
    ],
)
def test_what_a_glob_matches(pattern, layers):
    resolved = resolve_layer_policies("rest", [(pattern, "hit")], 12)
    assert [i for i, policy in enumerate(resolved) if policy == "hit"] == list(layers)


def test_the_first_match_wins():
    assert resolve_layer_policies("c", [("layers.0", "a"), ("layers.*", "b")], 3) == ["a", "b", "b"]
    assert resolve_layer_policies("c", [("layers.*", "b"), ("layers.0", "a")], 3) == ["b", "b", "b"]


@pytest.mark.parametrize(
    "pattern", ["layers.4", "layers.-5", "layer.0", "Layers.0", "0", "*.layers.0"]
)
def test_a_glob_that_matches_no_layer_is_an_error(pattern):
    with pytest.raises(ValueError, match="matches no layer") as error:
        resolve_layer_policies("a", [("layers.0", "b"), (pattern, "c")], 4)
    assert f"layers.1.match={pattern!r}" in str(error.value)
    assert "layers.0 to layers.3" in str(error.value)
    assert "layers.-1 to layers.-4" in str(error.value)


def test_one_layer_agrees_with_all():
    every = resolve_layer_policies("fp4", ENDS, 6)
    assert [resolve_layer_policy(i, 6, "fp4", ENDS) for i in range(6)] == every


@pytest.mark.parametrize("index", [-1, 6])
def test_index_out_of_range(index):
    with pytest.raises(ValueError, match=f"layer_index={index}: expected 0 to 5"):
        resolve_layer_policy(index, 6, "fp4", ENDS)


def test_no_layers():
    with pytest.raises(ValueError, match="num_layers=0"):
        resolve_layer_policies("fp4", [], 0)
