"""Which policy each layer takes: a default, and ordered globs over layer names of which the first that fits wins.

Layer i (from 0) of L has two names, `layers.<i>` and `layers.-<L - i>`: `layers.[0-1]` is the first two layers,
`layers.-[1-2]` the last two whatever their number, `layers.*` all. Matching is case-sensitive `fnmatch`.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase


def _matches(pattern: str, layer_index: int, num_layers: int) -> bool:
    names = (f"layers.{layer_index}", f"layers.-{num_layers - layer_index}")
    return any(fnmatchcase(name, pattern) for name in names)


def _check_matchers(num_layers: int, matchers: Sequence[tuple[str, str]]) -> None:
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers}: expected 1 or more")
    for position, (pattern, _) in enumerate(matchers):
        if not any(_matches(pattern, i, num_layers) for i in range(num_layers)):
            raise ValueError(
                f"layers.{position}.match={pattern!r}: matches no layer; layers are layers.0 to "
                f"layers.{num_layers - 1}, or from the end layers.-1 to layers.-{num_layers}"
            )


def resolve_layer_policies(
    default: str, matchers: Sequence[tuple[str, str]], num_layers: int
) -> list[str]:
    """Policy name of every layer, in order; `matchers` are (glob, policy name).

    Raises ValueError when a glob matches no layer, because a slip would otherwise silently change nothing.
    """
    _check_matchers(num_layers, matchers)
    return [
        next((policy for pattern, policy in matchers if _matches(pattern, i, num_layers)), default)
        for i in range(num_layers)
    ]


def resolve_layer_policy(
    layer_index: int, num_layers: int, default: str, matchers: Sequence[tuple[str, str]]
) -> str:
    """Policy name of layer `layer_index` (from 0, over the whole model). Raises ValueError as `resolve_layer_policies`."""
    if not 0 <= layer_index < num_layers:
        raise ValueError(f"layer_index={layer_index}: expected 0 to {num_layers - 1}")
    return resolve_layer_policies(default, matchers, num_layers)[layer_index]
