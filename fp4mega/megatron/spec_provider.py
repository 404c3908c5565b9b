"""A Megatron spec provider whose core attention is ours and whose everything else is another provider's."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec

from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.megatron.core_attention import Fp4CoreAttention, layer_matchers

try:
    import transformer_engine  # noqa: F401  (an extension: absent on a machine without a GPU)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False
else:
    HAVE_TRANSFORMER_ENGINE = True


class AttentionOptions(TypedDict, total=False):
    """Keywords of `Fp4CoreAttention` that Megatron does not pass itself; its docstring says what each does."""

    policy: str | AttentionPolicy
    backend: str
    layers: Sequence[tuple[str, str | AttentionPolicy]]
    allow_divergent_pv: bool
    rounding_seed: int


def core_attention_spec(**attention: Unpack[AttentionOptions]) -> ModuleSpec:
    """A spec of `Fp4CoreAttention` with these options. Raises ValueError for an unknown policy, TypeError for an
    unknown option or for `layers` that are no (glob, policy) pairs."""
    unknown = sorted(set(attention) - set(AttentionOptions.__annotations__))
    if unknown:
        allowed = ", ".join(AttentionOptions.__annotations__)
        raise TypeError(f"attention options {', '.join(unknown)}: allowed: {allowed}")
    if "policy" in attention:
        get_policy(attention["policy"])
    layer_matchers(attention.get("layers") or ())
    return ModuleSpec(module=Fp4CoreAttention, params=dict(attention))


class Fp4SpecProvider:
    """A `BackendSpecProvider`, for Megatron's spec builders that take one (mixture of experts, multi-token prediction).

    Without `fallback` the rest comes from Transformer Engine where it is installed, and from Megatron-Core itself where
    it is not.
    """

    def __init__(
        self, fallback: BackendSpecProvider | None = None, **attention: Unpack[AttentionOptions]
    ) -> None:
        if fallback is None:
            fallback = TESpecProvider() if HAVE_TRANSFORMER_ENGINE else LocalSpecProvider()
        self.fallback = fallback
        self._core_attention = core_attention_spec(**attention)

    def core_attention(self) -> ModuleSpec:
        """The spec of our core attention."""
        return self._core_attention

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found here. `fallback` itself is missing while an instance is being unpickled.
        if name.startswith("__") or name == "fallback":
            raise AttributeError(name)
        return getattr(self.fallback, name)
