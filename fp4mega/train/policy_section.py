"""A policy that a recipe defines by itself: the fields of AttentionPolicy, all given or over those of a `base`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from pydantic import create_model

from fp4mega.attention.policy import (
    AttentionPolicy,
    DirectP,
    get_policy,
    list_policies,
)
from fp4mega.train.schema import Section, nearest, show, show_key


def _optional_fields(name: str, source: type, **extra: Any) -> type[Section]:
    """A section with the fields of dataclass `source`, none of them required; unset ones come from elsewhere."""
    hints = get_type_hints(source)
    made = {f.name: (hints[f.name], None) for f in fields(source) if f.init and f.name != "name"}
    return create_model(
        name, __base__=Section, __doc__=f"Fields of {source.__name__}.", **{**made, **extra}
    )


DirectPSection = _optional_fields("DirectPSection", DirectP)
PolicySection = _optional_fields(
    "PolicySection", AttentionPolicy, base=(str, None), direct_p=(DirectPSection | None, None)
)


def build_policy(
    name: str, given: dict[str, Any], earlier: Mapping[str, AttentionPolicy]
) -> AttentionPolicy:
    """The policy `name` of the fields given. Raises ValueError naming the field under the section `attention`."""
    where = f"policies.{show_key(name)}"
    base: dict[str, Any] = {}
    if "base" in given:
        known = [*list_policies(), *earlier]
        if given["base"] not in known:
            raise ValueError(
                f"{where}.base={show(given['base'])}: unknown policy{nearest(given['base'], known)}; "
                f"allowed: built-in policies and those above this one: {', '.join(known)}"
            )
        base = (earlier.get(given["base"]) or get_policy(given["base"])).as_dict()
    values = {**base, **{key: value for key, value in given.items() if key != "base"}, "name": name}
    required = [f.name for f in fields(AttentionPolicy) if f.init and f.default is MISSING]
    missing = [field for field in required if field not in values]
    if missing:
        raise ValueError(
            f"{where}: {', '.join(missing)} missing; give them, or a `base` to take them from"
        )
    if values.get("direct_p") is not None:
        inherited = base.get("direct_p") or {}
        values["direct_p"] = {**inherited, **values["direct_p"]}
        for field in ("slope", "offset"):
            if field not in values["direct_p"]:
                raise ValueError(f"{where}.direct_p.{field} is missing")
        try:
            values["direct_p"] = DirectP(**values["direct_p"])
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from None
    try:
        return AttentionPolicy(**values)
    except ValueError as error:
        # A policy calls its field "policy 'x': v"; in the recipe the same field is "policies.x.v".
        field = str(error).removeprefix(f"policy {name!r}: ")
        raise ValueError(f"{where}{'.' if field != str(error) else ': '}{field}") from None
