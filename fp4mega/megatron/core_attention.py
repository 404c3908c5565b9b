"""`Fp4CoreAttention`: quantized attention in the place of Megatron's `core_attention`.

No numerics here. The module turns Megatron's layout and masks into those of `fp4mega.ops.attention_func`, looks up
the policy of its layer, and holds the softmax sink.

Dims: S query length, T key length, B batch, H query heads and G kv heads of this tensor-parallel rank, D head dim of
q and k, Dv of v, t tokens of packed sequences. Megatron hands over [S, B, H, D] (packed: [t, H, D]) and takes back
[S, B, H * Dv] (packed: [t, H * Dv]).
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

from fp4mega.attention.layer_policies import resolve_layer_policy
from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.megatron.masks import (
    context_parallel_arguments,
    is_causal,
    mask_arguments,
    packed_arguments,
    window_from_config,
)
from fp4mega.megatron.padding import put_back, rows_that_count
from fp4mega.megatron.probing import probe_forward, watch_backward
from fp4mega.megatron.rounding import RoundingKeys
from fp4mega.megatron.support import (
    check_backend,
    check_config,
    check_context_parallel,
    check_head_dims,
    check_policy,
    explain_latent_training,
)
from fp4mega.ops import attention_func
from fp4mega.parallel import backend_of, context_parallel_attention

DEFAULT_POLICY = "nvfp4_qk_fp8_pv"
DEFAULT_EXCHANGE = "all_gather"

LayerMatchers = Sequence[tuple[str, str | AttentionPolicy]]


class Fp4CoreAttention(MegatronModule):
    """Drop-in `core_attention`, to be named in a layer spec as a class, `ModuleSpec(..., params=...)` or partial.

    The first ten arguments are Megatron's own. `layer_number` is 1-based and counts over all pipeline stages, layers of multi-token
    prediction after those of the decoder. `cp_comm_type`
    is `all_gather` (also for None), `p2p` or `a2a`, as `fp4mega.parallel` describes them.

    Args:
        policy: name of the policy, or the policy itself, for layers that no matcher names.
        backend: name of a kernel backend, or `auto` for the fastest that can run.
        layers: ordered (glob, policy) pairs on `layers.<index>` and `layers.-<distance from the end>`, indices
            0-based; the first match wins.
        allow_divergent_pv: lets a job of several processes use 4-bit P or V.
        rounding_seed: seed of stochastic rounding, for policies that round so.

    Raises:
        NotImplementedError: the configuration asks for something that this module does not do.
        ValueError: an unknown policy or setting, or 4-bit P or V where it is not allowed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        policy: str | AttentionPolicy = DEFAULT_POLICY,
        backend: str = "auto",
        layers: LayerMatchers | None = None,
        allow_divergent_pv: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        check_config(
            config,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            pg_collection=pg_collection,
        )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.tp_group = pg_collection.tp
        self.cp_group = getattr(pg_collection, "cp", None)
        self.cp_size = config.context_parallel_size
        self.exchange: Any = cp_comm_type or DEFAULT_EXCHANGE
        self.num_heads = divide(config.num_attention_heads, self.tp_group.size())
        head_dim = config.kv_channels if k_channels is None else k_channels
        head_dim_v = config.kv_channels if v_channels is None else v_channels
        # apply_query_key_layer_scaling divides the scores by the layer number and multiplies them back inside the
        # softmax, to fit 16-bit score matrices. There is no score matrix here, and the two cancel.
        self.softmax_scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = window_from_config(config.window_size if windowed else None)

        self.policy = layer_policy(self._decoder_layer(), config.num_layers, policy, layers or ())
        check_policy(self.policy, allow_divergent_pv=allow_divergent_pv)
        # Multi-latent attention builds its core twice, the first time without channels, and keeps the second.
        if k_channels is not None or not config.multi_latent_attention:
            check_head_dims(head_dim, head_dim_v)
            num_kv_heads = (
                self.num_heads
                if config.multi_latent_attention
                else divide(config.num_query_groups, self.tp_group.size())
            )
            if self.cp_size > 1:
                check_context_parallel(
                    self.exchange,
                    self.policy,
                    backend,
                    ranks=self.cp_size,
                    num_heads=self.num_heads,
                    num_kv_heads=num_kv_heads,
                )
            by_heads = self.cp_size if self.exchange == "a2a" else 1
            check_backend(
                backend_of(self.exchange, backend) if self.cp_size > 1 else backend,
                self.policy,
                config,
                num_heads=self.num_heads // by_heads,
                num_kv_heads=num_kv_heads // by_heads,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
            )
        self.backend = backend
        self._wrong_in_training = explain_latent_training(config, self.tp_group.size())
        self.rounding = self._rounding_keys(rounding_seed)
        self._make_sink()

        self.last_probe: dict[str, float] | None = None
        self._probe_armed = self._watch_armed = False
        self._record: Callable[[dict[str, Tensor]], None] | None = None

    def _decoder_layer(self) -> int:
        """The layer (1-based) whose policy this one takes: itself, but of multi-token prediction, numbered past the decoder, the last."""
        decoder, predicting = self.config.num_layers, self.config.mtp_num_layers or 0
        return decoder if decoder < self.layer_number <= decoder + predicting else self.layer_number

    def _rounding_keys(self, seed: int) -> RoundingKeys | None:
        if not self.policy.stochastic_operands:
            return None
        dp_rank = (
            parallel_state.get_data_parallel_rank()
            if parallel_state.model_parallel_is_initialized()
            else 0
        )
        return RoundingKeys(
            seed=seed, layer=self.layer_number, rank=(self.tp_group.rank(), dp_rank)
        )

    def _make_sink(self) -> None:
        """The sink logit per head, as `softmax_offset`: the name, shape and dtype of Megatron's own core.

        It starts as there with one tensor-parallel rank; with several each has its heads' part of that, where Megatron gives all the
        same numbers and leaves the generator in another state.
        """
        config = self.config
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            zeros = torch.zeros(self.num_heads, device=device, dtype=config.params_dtype)
            self.register_buffer("softmax_offset", zeros, persistent=False)
        else:
            offset = torch.nn.Parameter(
                torch.empty(self.num_heads, device=device, dtype=config.params_dtype)
            )
            # Heads are split over tensor-parallel ranks; unmarked, gradient norms would count one rank's share only.
            set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
            if config.perform_initialization:
                whole = offset.new_empty(config.num_attention_heads)
                config.init_method(whole)
                with torch.no_grad():
                    offset.copy_(whole.chunk(self.tp_group.size())[self.tp_group.rank()])
            self.softmax_offset = offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of query [S, B, H, D], key [T, B, G, D], value [T, B, G, Dv] -> [S, B, H * Dv].

        With `packed_seq_params` the inputs are [t, H, D], [t, G, D], [t, G, Dv] and the result is [t, H * Dv].
        Padding between them has output 0 and gradient 0.
        `attn_mask_type` overrides that of the layer; `fp4mega.megatron.masks` says what each type does with
        `attention_mask`. Inputs may have any strides.
        """
        if self.training and self._wrong_in_training is not None:
            raise NotImplementedError(self._wrong_in_training)
        if attention_bias is not None:
            raise NotImplementedError(
                f"attention_bias of shape {tuple(attention_bias.shape)}: Fp4CoreAttention adds nothing to the scores; "
                "allowed: None"
            )
        if value is None:
            raise NotImplementedError(
                "value=None: decoding with cached MLA latents absorbs the value projection; set cache_mla_latents=False"
            )
        packed = packed_seq_params is not None
        dims = 3 if packed else 4
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != dims:
                layout = "[t, heads, channels]" if packed else "[s, b, heads, channels]"
                raise ValueError(f"{name}.shape={tuple(x.shape)}: expected {layout}")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if self.cp_size > 1:
            group = self.cp_group or parallel_state.get_context_parallel_group()
            arguments = context_parallel_arguments(
                mask_type, attention_mask, packed_seq_params, self.window, group
            )
            return self._over_ranks(query, key, value, group, arguments)
        rows = None
        if packed_seq_params is not None:
            arguments = packed_arguments(packed_seq_params, mask_type, attention_mask, self.window)
            rows = rows_that_count(packed_seq_params, "q", query.shape[0])
            keys = rows_that_count(packed_seq_params, "kv", key.shape[0])
            q = (query if rows is None else query[rows]).unsqueeze(0)
            k, v = ((x if keys is None else x[keys]).unsqueeze(0) for x in (key, value))
        else:
            arguments = mask_arguments(
                mask_type,
                attention_mask,
                self.window,
                batch=query.shape[1],
                seqlen_q=query.shape[0],
                seqlen_k=key.shape[0],
                causal_layer=self.attention_type == "self" and is_causal(self.attn_mask_type),
            )
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        arguments |= {
            "softmax_scale": self.softmax_scale,
            "sink": self.softmax_offset,
            "rounding_key": self._rounding_key(query.device),
        }
        if self._probe_armed and self.training:
            self._probe_armed = False
            self.last_probe = probe_forward(q, k, v, policy=self.policy, **arguments)
        out_BSHD = attention_func(q, k, v, policy=self.policy, backend=self.backend, **arguments)
        # Under recomputation the first forward has no gradient; the one that has is watched.
        if self._watch_armed and self.last_probe is not None and out_BSHD.requires_grad:
            self._watch_armed = False
            watch_backward(
                out_BSHD, q, k, v,
                into=self.last_probe, record=self._record, policy=self.policy, **arguments,
            )  # fmt: skip
        if packed:
            out = out_BSHD[0].flatten(-2)
            return out if rows is None else put_back(out, rows, query.shape[0])
        return out_BSHD.transpose(0, 1).flatten(-2)

    def _over_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: torch.distributed.ProcessGroup,
        arguments: dict[str, Any],
    ) -> Tensor:
        """As `forward`, each rank of the context-parallel group with its two chunks of every sequence."""
        packed = query.ndim == 3
        q, k, v = (x.unsqueeze(0) if packed else x.transpose(0, 1) for x in (query, key, value))
        out_BSHD, _ = context_parallel_attention(
            q,
            k,
            v,
            group=group,
            exchange=self.exchange,
            policy=self.policy,
            softmax_scale=self.softmax_scale,
            sink=self.softmax_offset,
            backend=self.backend,
            **arguments,
        )
        return out_BSHD[0].flatten(-2) if packed else out_BSHD.transpose(0, 1).flatten(-2)

    def _rounding_key(self, device: torch.device) -> Tensor | None:
        if self.rounding is None:
            return None
        return torch.full(
            (), self.rounding.next(training=self.training), dtype=torch.int64, device=device
        )

    def request_probe(self, record: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        """Measure the next training forward and its backward into `last_probe`, and give `record` the q, k, v and dout that were measured.

        Raises NotImplementedError under context parallelism.
        """
        if self.cp_size > 1:
            raise NotImplementedError(
                f"probe with context_parallel_size={self.cp_size}: it looks at whole rows of P, of which a rank has no keys; "
                "allowed: 1"
            )
        self._probe_armed = self._watch_armed = True
        self._record = record

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The learnable sink, sharded over tensor-parallel ranks along heads; nothing otherwise."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # Transformer Engine's core keeps its FP8 recipe under this name. The formats of this one are the policy's.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Layer, policy and backend, for `print(model)`."""
        return f"layer={self.layer_number}, policy={self.policy.name}, backend={self.backend}"

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled; without one, Megatron's default group is taken.
        return {**self.__dict__, "tp_group": None, "cp_group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fp4CoreAttention":
        for group in (self.tp_group, self.cp_group):
            memo[id(group)] = group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return clone


def layer_matchers(layers: LayerMatchers) -> list[tuple[str, AttentionPolicy]]:
    """(glob, policy) pairs with every policy looked up. Raises TypeError for what is no such pair, ValueError for an unknown policy."""
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(
            f"layers={layers!r}: expected a list of (glob, policy) pairs such as ('layers.0', 'bf16')"
        )
    pairs = []
    for i, pair in enumerate(layers):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                f"layers.{i}={pair!r}: expected a pair (glob, policy) such as ('layers.0', 'bf16')"
            )
        pairs.append((pair[0], get_policy(pair[1])))
    return pairs


def layer_policy(
    layer_number: int,
    num_layers: int,
    default: str | AttentionPolicy,
    layers: LayerMatchers,
) -> AttentionPolicy:
    """The policy of a layer (1-based). Raises ValueError for an unknown policy, also one that no layer takes."""
    names = [(glob, policy.name) for glob, policy in layer_matchers(layers)]
    return get_policy(
        resolve_layer_policy(layer_number - 1, num_layers, get_policy(default).name, names)
    )
