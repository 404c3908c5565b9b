"""Recipe files: strict YAML, `extends`, overrides from the command line, and the resolved recipe as YAML again.

The YAML is the 1.2 core schema without its traps: `on` and `yes` are strings, `3e-4` is a number, `010` is a string,
a key may appear once, and anchors, aliases, merge keys and tags are refused.

`extends: ../base/x.yaml` (or a list, later ones winning) starts from other files, relative to the file that says so.
Sections merge field by field; any other value, lists and blends included, is replaced whole.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fp4mega.attention.policy import register_policy
from fp4mega.train.recipe import Recipe
from fp4mega.train.schema import RecipeError, field_at, is_section, show

_SCALARS = (
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|false", ["t", "f"]),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
)


MAX_DEPTH = 50
"""Sections inside sections; Python's stack ends far above, and no recipe comes near."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars above, unique string keys, and nothing that refers elsewhere."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed in a recipe; use extends",
                problem_mark=event.start_mark,
            )
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"tag {event.tag!r} is not allowed in a recipe",
                problem_mark=event.start_mark,
            )
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} deep", problem_mark=event.start_mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = None
            if not isinstance(key, str):
                problem = f"key {show(key)} must be a string"
            elif key in made:
                problem = f"key {key!r} appears twice"
            if problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            made[key] = self.construct_object(value_node, deep=True)
        return made


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly what `_Loader` would not read back as a string."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_mapping)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise RecipeError(f"{source}{place}: {problem}") from None
    except ValueError as error:  # of int(), on a number of thousands of digits
        raise RecipeError(f"{source}: {str(error).partition(';')[0]}") from None


def _merge(
    base: dict[str, Any], changes: dict[str, Any], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`base` with `changes` over it: sections field by field, every other value replaced."""
    merged = dict(base)
    for key, value in changes.items():
        inside = (*path, key)
        section = is_section(field_at(Recipe, inside)[0])
        if section and isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value, inside)
        else:
            merged[key] = value
    return merged


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Content of a recipe file over those it extends."""
    asked_by = f" (extended by {chain[-1]})" if chain else ""
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise RecipeError(f"{show(str(path))}: no path of a recipe{asked_by}: {error}") from None
    if path in chain:
        raise RecipeError(
            f"extends: a cycle: {' -> '.join(str(p) for p in [*chain[chain.index(path) :], path])}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe{asked_by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as UTF-8 text{asked_by}: {error}") from None
    content = _parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected sections such as `model:`, found {show(content)}")
    extends = content.pop("extends", [])
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(p, str) and p for p in parents):
        raise RecipeError(f"{path}: extends={show(extends)}: expected a path or a list of paths")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = _merge(merged, _read(path.parent / parent, (*chain, path)))
    return _merge(merged, content)


def _override(content: dict[str, Any], text: str) -> None:
    """Set the field that `a.b=value` names; the schema checks the result, so an unknown name is reported there."""
    name, equals, value_text = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(
            f"override {show(text)}: expected field=value, such as attention.policy=bf16"
        )
    value = _parse_yaml(value_text, f"override {show(text)}")
    place = content
    for depth, key in enumerate(keys[:-1], start=1):
        inner = place.get(key)
        if inner is None:
            inner = place[key] = {}
        if not isinstance(inner, dict):
            field = ".".join(keys[:depth])
            raise RecipeError(
                f"override {show(text)}: {field}={show(inner)} holds no named fields; set it whole"
            )
        place = inner
    place.update(_merge(place, {keys[-1]: value}, tuple(keys[:-1])))


def _expand_home(content: dict[str, Any]) -> None:
    """Replace the `~/` of paths that a run writes and reads, so that every reader of the recipe means one folder."""

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return [expanded(item) for item in value]
        if isinstance(value, dict):
            return {expanded(key): item for key, item in value.items()}
        home = isinstance(value, str) and value.startswith("~/")
        return os.path.expanduser(value) if home else value

    for section, field in (("tracking", "dir"), ("data", "train"), ("data", "valid")):
        place = content.get(section)
        if isinstance(place, dict) and field in place:
            place[field] = expanded(place[field])


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply `section.field=value` overrides in order, check it, and register its own policies.

    Raises RecipeError, one line a problem.
    """
    content = _read(Path(path), ())
    for text in overrides:
        _override(content, text)
    _expand_home(content)
    recipe = Recipe.parse(content)
    for name, policy in recipe.attention.build_policies().items():
        try:
            register_policy(policy)
        except ValueError as error:
            raise RecipeError(f"attention.policies.{name}: {error}") from None
    return recipe


def resolved_yaml(recipe: Recipe) -> str:
    """Every field with its value, in the schema's order; loading it gives the same recipe and digest."""
    return yaml.dump(recipe.as_dict(), Dumper=_Dumper, sort_keys=False, width=100)
