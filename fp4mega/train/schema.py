"""What a schema made of pydantic sections says to a user: types in words, errors in one line each, a table of fields."""

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, field_validator

LARGEST_INTEGER = 2**31 - 1
LARGEST_NUMBER = 1e30


class RecipeError(ValueError):
    """What is wrong with a recipe: one line a problem, naming the field, the value and what is allowed."""


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys refused, no conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    _largest_integer: ClassVar[int] = LARGEST_INTEGER

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """Sizes and counts that torch holds in 32 bits, and numbers that FP32 holds with room for what multiplies them."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                limit = cls._largest_integer if isinstance(number, int) else LARGEST_NUMBER
                if abs(number) > limit:
                    raise ValueError(f"expected at most {limit}")
        return value


def nearest(name: object, allowed: list[str]) -> str:
    """`; nearest is 'x'` when a name is likely a slip for an allowed one, otherwise nothing."""
    near = get_close_matches(str(name), allowed, n=1)
    return f"; nearest is {near[0]!r}" if near else ""


def show(value: object) -> str:
    """A value as a recipe spells it, shortened to stay on one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def show_key(key: object) -> str:
    """A part of a dotted name; quoted when it holds characters that would break the line."""
    return str(key) if str(key).isprintable() else show(key)


def unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """The plain type of an annotation without None, and the constraints around it."""
    constraints: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            for item in extra:
                constraints += item.metadata if hasattr(item, "metadata") else [item]
            continue
        if get_origin(annotation) in (Union, UnionType):
            kept = [arg for arg in get_args(annotation) if arg is not NoneType]
            if len(kept) == 1:
                annotation = kept[0]
                continue
        return annotation, constraints


def _nullable(annotation: Any) -> bool:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def is_section(annotation: Any) -> bool:
    """True for the type of a section, optional or not."""
    plain, _ = unwrap(annotation)
    return isinstance(plain, type) and issubclass(plain, BaseModel)


def spell_type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type and its range in a user's words: `integer >= 1 or null`, `one of bf16, fp32`."""
    plain, constraints = unwrap(annotation)
    constraints = [*constraints, *(metadata or [])]
    null = " or null" if _nullable(annotation) else ""
    origin, arguments = get_origin(plain), get_args(plain)
    if origin is Literal:
        return f"one of {', '.join(str(a) for a in arguments)}{null}"
    if is_section(plain):
        return f"section{null}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {spell_type(arguments[0])}{null}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(spell_type(a) for a in arguments)}{null}"
    if origin in (Union, UnionType):
        return f"{' or '.join(spell_type(a) for a in arguments if a is not NoneType)}{null}"
    if origin is dict:
        return f"mapping from name to {spell_type(arguments[1])}{null}"
    words = {int: "integer", float: "number", bool: "true or false", str: "string"}[plain]
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    limits = [
        f"{sign} {getattr(c, key)}" for key, sign in signs for c in constraints if hasattr(c, key)
    ]
    limits += [f"like {c.pattern}" for c in constraints if getattr(c, "pattern", None)]
    limits += ["not empty" for c in constraints if getattr(c, "min_length", None)]
    return f"{words}{' ' if limits else ''}{' and '.join(limits)}{null}"


def field_at(root: type[Section], location: Sequence[int | str]) -> tuple[Any, list[Any]]:
    """Annotation and constraints of the field at a path from `root`; (None, []) when there is none."""
    annotation: Any = root
    metadata: list[Any] = []
    for key in location:
        plain, _ = unwrap(annotation)
        if is_section(plain):
            info = plain.model_fields.get(str(key))
            if info is None:
                return None, []
            annotation, metadata = info.annotation, info.metadata
        elif get_origin(plain) is tuple and isinstance(key, int):
            arguments = get_args(plain)
            annotation, metadata = arguments[0 if arguments[-1] is Ellipsis else key], []
        elif get_origin(plain) is dict:
            annotation, metadata = get_args(plain)[1], []
        else:
            return None, []
    return annotation, metadata


def explain(root: type[Section], problem: Any) -> str | None:
    """One line for one of pydantic's errors; None for those that only follow from another."""
    location, kind, value = problem["loc"], problem["type"], problem["input"]
    name = ".".join(show_key(part) for part in location)
    if kind == "default_factory_not_called":
        return None
    if kind == "extra_forbidden":
        parent = unwrap(field_at(root, location[:-1])[0])[0]
        allowed = list(parent.model_fields)
        near = nearest(location[-1], allowed)
        return f"{name}={show(value)}: unknown field{near}; allowed: {', '.join(allowed)}"
    annotation, metadata = field_at(root, location)
    section = unwrap(annotation)[0] if is_section(annotation) else None
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{name}.{message}" if section else f"{name}={show(value)}: {message}"
    expected = spell_type(annotation, metadata)
    if section:
        expected = f"a section with the fields {', '.join(section.model_fields)}"
    if kind == "missing":
        return f"{name} is missing: expected {expected}"
    near = ""
    if kind == "literal_error":
        near = nearest(value, [str(a) for a in get_args(unwrap(annotation)[0])])
    return f"{name}={show(value)}: expected {expected}{near}"


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, info in section.model_fields.items():
        name, spelled = f"{prefix}{key}", spell_type(info.annotation, info.metadata)
        if is_section(info.annotation):
            plain = unwrap(info.annotation)[0]
            yield f"| **`{name}`** | {spelled} | | {(plain.__doc__ or '').splitlines()[0]} |"
            yield from _rows(plain, f"{name}.")
            continue
        default = f"`{show(info.default)}`"
        if info.is_required() or info.default_factory:
            default = "required" if info.is_required() else "derived"
        yield f"| `{name}` | {spelled} | {default} | {info.description} |"
        item = get_args(unwrap(info.annotation)[0])[:1]
        if get_origin(unwrap(info.annotation)[0]) is tuple and is_section(item[0]):
            yield from _rows(item[0], f"{name}.<i>.")


def table_of_fields(root: type[Section]) -> str:
    """Every field of a schema as a Markdown table."""
    head = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *_rows(root, "")]) + "\n"
