"""The fields of a recipe, each with its type, range, default and one line of documentation.

A recipe is frozen, knows no Megatron, and is the only source of a run's configuration. `Recipe.parse` turns plain
data into one and reports what is wrong as `RecipeError`, one line a problem, each naming the dotted field, the value
and what is allowed. Checks here concern one section; what sections mean together for a number of processes and a
device is `fp4mega.train.validate`.

`python -m fp4mega.train.recipe` prints the table of fields that docs/recipes.md contains.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from fp4mega.attention.policy import (
    AttentionPolicy,
    list_policies,
)
from fp4mega.attention.problem import MAX_HEAD_DIM
from fp4mega.parallel import TWO_LEVELS_REASON, ExchangeName
from fp4mega.train.policy_section import PolicySection, build_policy
from fp4mega.train.schema import (
    LARGEST_NUMBER,
    RecipeError,
    Section,
    explain,
    nearest,
    show,
    table_of_fields,
)

__all__ = ["BYTE_VOCAB_SIZE", "Recipe", "RecipeError", "field_table"]

BYTE_VOCAB_SIZE = 257
"""Tokens of the byte tokenizer: 256 bytes and the end of a document."""


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _blend(value: Any) -> Any:
    """A list of prefixes, or a mapping from prefix to weight, checked here so that there is one error, not one a type."""
    allowed = "expected a non-empty list of prefixes or a mapping {prefix: weight > 0}"
    if value is None:
        return None
    if not isinstance(value, list | tuple | dict) or not value:
        raise ValueError(allowed)
    if any(not isinstance(prefix, str) or not prefix for prefix in value):
        raise ValueError(f"{allowed}; a prefix is the path of a .bin/.idx pair without its suffix")
    if isinstance(value, dict):
        for prefix, weight in value.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight <= LARGEST_NUMBER:
                raise ValueError(
                    f"{allowed} and at most {LARGEST_NUMBER:g}; the weight of {show(prefix)} is {show(weight)}"
                )
        return {prefix: float(weight) for prefix, weight in value.items()}
    if len(set(value)) != len(value):
        raise ValueError("a prefix appears twice; write {prefix: weight} to weigh it more")
    return tuple(value)


def _one_level(value: Any) -> Any:
    """Megatron's other exchange is refused with the reason, not as an unknown word."""
    if value == "a2a+p2p":
        raise ValueError(TWO_LEVELS_REASON)
    return value


PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Blend = Annotated[tuple[str, ...] | dict[str, float] | None, BeforeValidator(_blend)]


class ModelSection(Section):
    """A Llama-style decoder: RMSNorm, SwiGLU, rotary embedding, grouped-query attention, no biases."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)] = Field(description="Decoder layers")
    hidden_size: PositiveInt = Field(description="Width of the residual stream")
    ffn_hidden_size: PositiveInt = Field(
        description="Width inside the SwiGLU block (of each of its two halves)"
    )
    num_attention_heads: PositiveInt = Field(description="Query heads")
    num_query_groups: PositiveInt = Field(
        default_factory=lambda data: data["num_attention_heads"],
        description="Key/value heads; divides num_attention_heads, which is the default",
    )
    kv_channels: Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)] = Field(
        default_factory=lambda data: data["hidden_size"] // data["num_attention_heads"],
        validate_default=True,
        description="Dimension of a head; default hidden_size / num_attention_heads",
    )
    vocab_size: PositiveInt = Field(
        description="Rows of the embedding, at least the tokenizer's size; not padded"
    )
    rotary_base: Positive = Field(
        default=10000.0, description="Base of the rotary embedding's frequencies"
    )
    norm_epsilon: Positive = Field(default=1e-5, description="Epsilon of every RMSNorm")
    init_method_std: Positive = Field(
        default=0.02, description="Standard deviation of the initial weights"
    )
    tie_embeddings: bool = Field(
        default=False, description="One matrix for the embedding and the output layer"
    )
    qk_layernorm: bool = Field(
        default=False, description="RMSNorm of each query and key head before the rotary embedding"
    )
    window_size: (
        Annotated[
            tuple[Annotated[int, Field(ge=-1)], Annotated[int, Field(ge=-1)]],
            BeforeValidator(_list_to_tuple),
        ]
        | None
    ) = Field(
        default=None,
        description="Sliding window [left, right] in tokens, -1 for no limit; null: none",
    )
    window_attn_skip_freq: PositiveInt | None = Field(
        default=None, description="Every n-th layer attends without the window; null: none does"
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = Field(
        default="vanilla",
        description="Softmax sink: none, a logit of 0 (off-by-one), or one learnt logit a head",
    )
    num_moe_experts: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Experts of a layer's mixture; null: dense layers"
    )
    moe_router_topk: PositiveInt = Field(default=2, description="Experts that a token visits")
    moe_ffn_hidden_size: PositiveInt | None = Field(
        default=None, description="Width inside an expert; null: ffn_hidden_size"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (
            "kv_channels" not in self.model_fields_set
            and self.hidden_size % self.num_attention_heads
        ):
            raise ValueError(
                f"kv_channels is not given and hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={self.num_attention_heads}: set kv_channels"
            )
        if self.kv_channels % 2:
            raise ValueError(
                f"kv_channels={self.kv_channels}: the rotary embedding needs an even number"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups={self.num_query_groups}: must divide num_attention_heads={self.num_attention_heads}"
            )
        if self.window_attn_skip_freq is not None and self.window_size is None:
            raise ValueError(
                f"window_attn_skip_freq={self.window_attn_skip_freq}: needs window_size"
            )
        if self.num_moe_experts is None and self.moe_ffn_hidden_size is not None:
            raise ValueError(
                f"moe_ffn_hidden_size={self.moe_ffn_hidden_size}: needs num_moe_experts"
            )
        if self.num_moe_experts is not None and self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk={self.moe_router_topk}: at most num_moe_experts={self.num_moe_experts}"
            )
        return self


class LayerRule(Section):
    """Layers whose name fits a glob take another policy."""

    match: Annotated[str, Field(min_length=1)] = Field(
        description="Glob on `layers.<i>` (from 0) and `layers.-<n>` (n-th from the end): `layers.[0-1]`, `layers.-1`"
    )
    policy: str = Field(description="Policy of the layers that match")


class AttentionSection(Section):
    """Which numbers attention computes with, and which backend computes them."""

    policy: str = Field(
        default="nvfp4_qk_fp8_pv",
        description="Policy of every layer that no rule in `layers` matches",
    )
    backend: str = Field(
        default="auto",
        description="`auto`: the fastest backend that can; otherwise its name, or an error",
    )
    layers: Annotated[tuple[LayerRule, ...], BeforeValidator(_list_to_tuple)] = Field(
        default=(),
        description="Rules {match, policy}, tried in order; the first that matches a layer gives its policy",
    )
    allow_divergent_pv: bool = Field(
        default=False,
        description="Allow training with 4-bit P or V on several processes, and training with Direct-P",
    )
    policies: dict[str, PolicySection] = Field(  # type: ignore[valid-type]
        default={},
        description="Policies of your own by name: fields of AttentionPolicy, or `base` and the fields that change",
    )

    @field_serializer("policies")
    def _only_given_fields(self, policies: dict[str, Section]) -> dict[str, Any]:
        return {name: section.model_dump(exclude_unset=True) for name, section in policies.items()}

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        own = self.build_policies()
        known = list(dict.fromkeys([*list_policies(), *own]))
        used = {
            "policy": self.policy,
            **{f"layers.{i}.policy": rule.policy for i, rule in enumerate(self.layers)},
        }
        for field, name in used.items():
            if name not in known:
                raise ValueError(
                    f"{field}={show(name)}: unknown policy{nearest(name, known)}; known: {', '.join(known)}"
                )
        return self

    def build_policies(self) -> dict[str, AttentionPolicy]:
        """The policies of `policies` by name, not registered. Raises ValueError naming the field under this section."""
        made: dict[str, AttentionPolicy] = {}
        for name, section in self.policies.items():
            given = section.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
            made[name] = build_policy(name, given, made)
        return made


class ParallelSection(Section):
    """How the model is cut; the rest of the processes are data parallel."""

    tensor: PositiveInt = Field(default=1, description="Tensor-parallel processes")
    pipeline: PositiveInt = Field(default=1, description="Pipeline stages")
    virtual_pipeline: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Model chunks a pipeline stage (interleaved schedule); null: one"
    )
    context: PositiveInt = Field(
        default=1, description="Context-parallel processes (sequence split)"
    )
    cp_comm_type: Annotated[ExchangeName, BeforeValidator(_one_level)] = Field(
        default="all_gather",
        description="How context-parallel processes meet each other's keys: `all_gather` and `p2p` (a ring) send K and V quantized, `a2a` whole heads (docs/context_parallel.md)",
    )
    expert: PositiveInt = Field(default=1, description="Expert-parallel processes")
    sequence: bool = Field(
        default=False,
        description="Megatron's sequence parallelism outside attention; needs tensor > 1",
    )


class OptimizerSection(Section):
    """AdamW and its schedule: linear warm-up, then decay from lr to min_lr."""

    lr: Positive = Field(description="Peak learning rate")
    min_lr: Annotated[float, Field(ge=0)] = Field(
        description="Learning rate at the end of the decay"
    )
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(_list_to_tuple),
    ] = Field(default=(0.9, 0.95), description="AdamW's two decay rates")
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=0.1, description="Decoupled weight decay of matrices"
    )
    clip_grad: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Largest global gradient norm; 0: no clipping"
    )
    warmup_steps: Count = Field(description="Updates of linear warm-up")
    decay_steps: PositiveInt | None = Field(
        default=None, description="Updates until min_lr, warm-up included; null: train.steps"
    )
    decay_style: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Shape of the decay"
    )
    distributed: bool = Field(
        default=False, description="Shard the optimizer's state over data-parallel processes"
    )
    state_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: gradients and AdamW's moments in BF16, FP32 weights as BF16 plus 16 bits: 10 bytes a parameter instead of 18. Needs distributed, train.precision=bf16 and Transformer Engine",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr}: at most lr={self.lr}")
        if self.state_dtype == "bf16" and not self.distributed:
            raise ValueError(
                "state_dtype=bf16: Megatron's precision-aware optimizer is a distributed one; set distributed=true"
            )
        return self


class TokenizerSection(Section):
    """How text became the tokens of the data."""

    kind: Literal["byte", "huggingface"] = Field(
        default="byte", description="One token a byte, or a Hugging Face tokenizer"
    )
    path: str | None = Field(
        default=None, description="`tokenizer.json` or the folder that holds it; huggingface only"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "huggingface" and not self.path:
            raise ValueError(
                f"path={show(self.path)}: kind=huggingface needs the path of a tokenizer.json"
            )
        if self.kind == "byte" and self.path is not None:
            raise ValueError(f"path={show(self.path)}: kind=byte takes none; write null")
        return self


class PrepareSection(Section):
    """How to make the data when its files do not exist yet."""

    _largest_integer: ClassVar[int] = 2**63 - 1

    source: Annotated[str, Field(min_length=1)] = Field(
        description="A folder of text files, or `python_stdlib`: sources and docs of the running Python"
    )
    suffixes: Annotated[tuple[str, ...], BeforeValidator(_list_to_tuple)] = Field(
        default=(".py", ".txt", ".md", ".rst"),
        description="File names that count as text end in one of these",
    )
    max_bytes: PositiveInt | None = Field(
        default=None, description="Stop after this many bytes of text; null: take all"
    )

    @field_validator("suffixes")
    @classmethod
    def _check_suffixes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not suffix.startswith(".") for suffix in value):
            raise ValueError("expected a non-empty list of suffixes that start with '.'")
        return value


def _default_split(data: dict[str, Any]) -> str | None:
    return "98,2,0" if data["valid"] is None else None


class DataSection(Section):
    """Where tokens come from. Relative paths start at the folder the run is started in."""

    kind: Literal["indexed", "mock"] = Field(
        description="Megatron .bin/.idx files, or its trivially learnable mock data"
    )
    train: Blend = Field(
        default=None,
        description="Prefixes of .bin/.idx pairs, or {prefix: weight} for a blend; null for mock",
    )
    valid: Blend = Field(
        default=None, description="The same for validation; null: taken from `train` by `split`"
    )
    split: str | None = Field(
        default_factory=_default_split,
        description='Shares "train,valid,test" of `train` when `valid` is null; default "98,2,0"',
    )
    tokenizer: TokenizerSection = Field(
        default=TokenizerSection(), description="Tokenizer of the data"
    )
    prepare: PrepareSection | None = Field(
        default=None,
        description="Makes the one prefix of `train` when its files are missing; null: they must exist",
    )

    @field_validator("split")
    @classmethod
    def _check_split(cls, value: str | None) -> str | None:
        if value is not None:
            number = r"\d+(?:\.\d+)?"
            if (
                not re.fullmatch(rf"{number},{number},{number}", value)
                or float(value.split(",")[0]) <= 0
            ):
                raise ValueError(
                    'expected three shares "train,valid,test" of 0 or more, the first above 0'
                )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "mock":
            for name in ("train", "valid", "prepare"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={show(getattr(self, name))}: kind=mock takes none; write null"
                    )
        elif self.train is None:
            raise ValueError("train=null: kind=indexed needs prefixes of .bin/.idx files")
        if (self.valid is None) == (self.split is None):
            raise ValueError(
                f"split={show(self.split)}: give shares when valid is null, and null when valid has its own files"
            )
        if self.prepare is not None and (self.train is None or len(self.train) != 1):
            raise ValueError(f"train={show(self.train)}: `prepare` makes exactly one prefix")
        return self

    @property
    def valid_share(self) -> float:
        """Share of `train` that `split` keeps for validation; 1 when `valid` has its own files."""
        if self.split is None:
            return 1.0
        shares = [float(share) for share in self.split.split(",")]
        return shares[1] / sum(shares)


class TrainSection(Section):
    """Length, batch and bookkeeping of the run."""

    seq_length: Annotated[int, Field(ge=2)] = Field(description="Tokens a sample")
    micro_batch_size: PositiveInt = Field(description="Samples a process computes at once")
    global_batch_size: PositiveInt = Field(description="Samples an update, over all processes")
    steps: PositiveInt = Field(description="Updates")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=1234, description="Seed of initialization, data order and stochastic rounding"
    )
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Type of weights and activations"
    )
    log_interval: PositiveInt = Field(default=1, description="Updates between two lines of the log")
    eval_interval: PositiveInt | None = Field(
        default=None, description="Updates between two evaluations; null: none"
    )
    eval_batches: PositiveInt = Field(
        default=10, description="Global batches an evaluation averages"
    )
    save_interval: PositiveInt | None = Field(
        default=None, description="Updates between two checkpoints; null: none, not even at the end"
    )
    async_save: bool = Field(
        default=False,
        description="Write checkpoints in processes of their own while training goes on; one counts when all have written",
    )
    keep_checkpoints: PositiveInt = Field(default=2, description="Newest checkpoints that are kept")
    recompute: Literal["none", "core_attn", "full"] = Field(
        default="none", description="Activations computed again in backward"
    )
    resume: bool = Field(
        default=True,
        description="Start from the newest good checkpoint in the run's folder, if any; `false` begins anew, once for a launch and its restarts",
    )
    max_seconds: Positive | None = Field(
        default=None,
        description="End the run, with a checkpoint and exit code 0, after the step that passes this time since its start; null: never",
    )
    timeout_minutes: Annotated[float, Field(gt=0, le=525_600)] = Field(
        default=10.0,
        description="A process that waits this long for another, at the start or in a collective, ends the run",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_seconds is not None and self.save_interval is None:
            raise ValueError(
                f"max_seconds={self.max_seconds}: needs save_interval, or what was trained would be lost"
            )
        return self


class WandbSection(Section):
    """The Weights & Biases sink; the same events are always in events.jsonl too."""

    mode: Literal["auto", "offline", "online", "disabled"] = Field(
        default="auto", description="auto: online when an API key is set up, otherwise offline"
    )
    project: Annotated[str, Field(min_length=1)] = Field(default="fp4mega", description="Project")
    entity: str | None = Field(default=None, description="User or team; null: the key's own")
    group: str | None = Field(default=None, description="Group of runs; null: none")


class TrackingSection(Section):
    """What is recorded, and where."""

    dir: Annotated[str, Field(min_length=1)] = Field(
        default="runs", description="Folder that holds a folder for each run"
    )
    wandb: WandbSection = Field(default=WandbSection(), description="Weights & Biases")
    probe_interval: PositiveInt | None = Field(
        default=None,
        description="Updates between two per-layer probes of attention's numbers; null: none",
    )
    probe_tensors: bool = Field(
        default=False,
        description="Keep q, k, v and dout of what is probed, as probes/<step>_<layer>.pt in the run's folder: input of `fp4mega.bench bias`",
    )


class Recipe(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="Size and machine, without the policy: letters, digits, '.', '_', '-'"
    )
    model: ModelSection = Field(description="The model")
    attention: AttentionSection = Field(
        default=AttentionSection(), description="The numbers of attention"
    )
    parallel: ParallelSection = Field(default=ParallelSection(), description="How the model is cut")
    optimizer: OptimizerSection = Field(description="AdamW and its schedule")
    data: DataSection = Field(description="Tokens")
    train: TrainSection = Field(description="Length, batch, bookkeeping")
    tracking: TrackingSection = Field(default=TrackingSection(), description="What is recorded")

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> "Recipe":
        """A recipe from plain data, such as a parsed file or a manifest. Raises RecipeError, one line a problem."""
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            lines = [
                line
                for problem in error.errors(include_url=False)
                if (line := explain(cls, problem))
            ]
            raise RecipeError("\n".join(dict.fromkeys(lines))) from None

    def as_dict(self) -> dict[str, Any]:
        """Every field, defaults included, as JSON-like data; `Recipe.parse` of it gives this recipe again."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) of every resolved field; equal recipes and only those have equal digests.

        Keys keep the schema's order rather than being sorted, because the order of a blend decides its sampling.
        """
        text = json.dumps(self.as_dict(), separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def run_name(self) -> str:
        """Name of the run's folder under tracking.dir."""
        return f"{self.name}__{self.attention.policy}"

    @property
    def decay_steps(self) -> int:
        """Updates until the learning rate reaches min_lr."""
        return self.optimizer.decay_steps or self.train.steps


def field_table() -> str:
    """Every field of the schema as a Markdown table, the one in docs/recipes.md."""
    return table_of_fields(Recipe)


if __name__ == "__main__":
    sys.stdout.write(field_table())
