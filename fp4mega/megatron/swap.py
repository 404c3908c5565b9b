"""Put our core attention into a spec that someone else built."""

import copy
import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, Unpack

from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from fp4mega.megatron.core_attention import Fp4CoreAttention
from fp4mega.megatron.spec_provider import AttentionOptions, core_attention_spec

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec")


def swap_core_attention(spec: Spec, **attention: Unpack[AttentionOptions]) -> Spec:
    """A copy of `spec` in which every self-attention has `Fp4CoreAttention` as its core; the log says how many.

    `spec` is anything made of Megatron's spec dataclasses: the `ModuleSpec` of a layer or of a hybrid stack,
    `TransformerBlockSubmodules`, multi-token prediction; local or Transformer Engine, dense or mixture of experts,
    ordinary or multi-latent attention. It is left as it was. Cross attention keeps its core, and so does an attention
    variant whose core is built of further modules (an indexer that selects keys).

    Raises TypeError when `spec` is not such a dataclass, ValueError when it holds no core attention to replace, or
    one with parameters that would be lost.
    """
    if not is_dataclass(spec) or isinstance(spec, type):
        raise TypeError(
            f"spec={spec!r}: expected a ModuleSpec or a dataclass of submodules; call a function that returns one first"
        )
    ours = core_attention_spec(**attention)
    # Classes, functions, process groups and the like are named by a spec, not part of it.
    swapped = copy.deepcopy(spec, {id(leaf): leaf for leaf in _leaves(spec)})
    replaced, kept = 0, []
    for node in dataclasses_within(swapped):
        if not hasattr(node, "core_attention") or isinstance(node, CrossAttentionSubmodules):
            continue
        core = node.core_attention
        if core is None or core is IdentityOp:
            continue
        if _submodules(core) is not None:
            kept.append(_name(core))
            continue
        if _parameters(core) and not _is_ours(core):
            raise ValueError(
                f"core_attention={_name(core)} carries parameters {_parameters(core)}, which Fp4CoreAttention would "
                "not receive; remove them from the spec if they may be dropped"
            )
        node.core_attention = ours
        replaced += 1
    if not replaced:
        found = f"; kept, with modules of their own: {', '.join(kept)}" if kept else ""
        raise ValueError(f"spec {_name(spec)} holds no self-attention with a core attention{found}")
    logger.info(
        "replaced the core attention of %d self-attention submodules by Fp4CoreAttention (%s)%s",
        replaced,
        ", ".join(f"{name}={value}" for name, value in ours.params.items()) or "defaults",
        f"; kept: {', '.join(kept)}" if kept else "",
    )
    return swapped


def dataclasses_within(root: Any) -> Iterator[Any]:
    """Every dataclass instance reachable from `root` through fields, containers and partials, each once."""
    return (node for node in _reachable(root) if _is_dataclass(node))


def _leaves(root: Any) -> Iterator[Any]:
    """Everything reachable from `root` that holds nothing of a spec."""
    return (node for node in _reachable(root) if _parts(node) is None)


def _reachable(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(_parts(node) or ())


def _parts(node: Any) -> list[Any] | None:
    """What a part of a spec holds, None of what is no such part."""
    if _is_dataclass(node):
        return [getattr(node, field.name) for field in fields(node)]
    if isinstance(node, partial):
        return [*node.args, *node.keywords.values()]
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple) else None


def _is_dataclass(node: Any) -> bool:
    return is_dataclass(node) and not isinstance(node, type)


def _parameters(core: Any) -> dict[str, Any]:
    if isinstance(core, ModuleSpec):
        return core.params
    return dict(core.keywords) if isinstance(core, partial) else {}


def _submodules(core: Any) -> Any:
    if isinstance(core, ModuleSpec):
        return core.submodules
    return core.keywords.get("submodules") if isinstance(core, partial) else None


def _is_ours(core: Any) -> bool:
    return Fp4CoreAttention in (getattr(core, "module", None), getattr(core, "func", None))


def _name(part: Any) -> str:
    target = getattr(part, "module", None) or getattr(part, "func", None) or part
    return getattr(target, "__name__", type(target).__name__)
