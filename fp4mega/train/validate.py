"""What a recipe means as a whole, for a number of processes and a device, checked before any process group exists."""

from collections.abc import Iterator

import torch

from fp4mega.attention.layer_policies import resolve_layer_policies
from fp4mega.attention.policy import DIVERGENT_PV_REASON, AttentionPolicy, get_policy
from fp4mega.kernels.registry import AUTO, get_backend, list_backends
from fp4mega.parallel import explain_exchange
from fp4mega.train.recipe import BYTE_VOCAB_SIZE, ModelSection, Recipe
from fp4mega.train.schema import RecipeError, show

DEVICE_TYPES = ("cpu", "cuda")


def validate(
    recipe: Recipe, world_size: int, device_type: str, device_count: int | None = None
) -> None:
    """Check that the recipe can run in `world_size` processes, one device each.

    `device_type` is `cpu` or `cuda`. `device_count` is the number of GPUs on all machines together (processes of a
    CPU run need none); None when unknown, as in a dry run for another machine.
    Raises RecipeError with every problem found, one a line, naming field, value and what is allowed.
    """
    if device_type not in DEVICE_TYPES:
        raise RecipeError(f"device_type={show(device_type)}: allowed: {', '.join(DEVICE_TYPES)}")
    if world_size < 1:
        raise RecipeError(f"world_size={world_size}: expected 1 or more")
    problems = [
        *_parallel_problems(recipe, world_size),
        *_batch_problems(recipe, world_size),
        *_schedule_problems(recipe),
        *_attention_problems(recipe, world_size),
    ]
    if device_type == "cuda" and device_count is not None and world_size > device_count:
        problems.append(
            f"world_size={world_size}: only {device_count} GPUs are there, and each process needs its own; "
            f"start at most {device_count} processes"
        )
    # Backends are asked about one process's share of the heads, which exists only when all of the above fits.
    problems = problems or list(_backend_problems(recipe, device_type))
    if problems:
        raise RecipeError("\n".join(problems))


def _model_parallel_size(recipe: Recipe) -> int:
    return recipe.parallel.tensor * recipe.parallel.pipeline * recipe.parallel.context


def data_parallel_size(recipe: Recipe, world_size: int) -> int:
    """Copies of the model. Raises RecipeError when the processes cannot be divided evenly."""
    size, rest = divmod(world_size, _model_parallel_size(recipe))
    if rest or not size:
        raise RecipeError("\n".join(_parallel_problems(recipe, world_size)))
    return size


def _parallel_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    model, parallel, tensor = recipe.model, recipe.parallel, recipe.parallel.tensor
    size = _model_parallel_size(recipe)
    if world_size % size:
        yield (
            f"world_size={world_size}: must be a multiple of parallel.tensor * pipeline * context = "
            f"{tensor} * {parallel.pipeline} * {parallel.context} = {size}"
        )
    for field in ("num_attention_heads", "ffn_hidden_size", "vocab_size"):
        if getattr(model, field) % tensor:
            yield f"model.{field}={getattr(model, field)}: must be divisible by parallel.tensor={tensor}"
    if model.num_query_groups % tensor and tensor % model.num_query_groups:
        yield (
            f"model.num_query_groups={model.num_query_groups}: must be a multiple or a divisor of "
            f"parallel.tensor={tensor}"
        )
    stages = parallel.pipeline * (parallel.virtual_pipeline or 1)
    if model.num_layers % stages:
        yield (
            f"model.num_layers={model.num_layers}: must be divisible by parallel.pipeline * virtual_pipeline = {stages}"
        )
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: needs parallel.pipeline > 1; otherwise null"
        )
    if parallel.sequence and tensor == 1:
        yield "parallel.sequence=true: needs parallel.tensor > 1; allowed with tensor=1: false"
    if parallel.sequence and recipe.train.seq_length // parallel.context % tensor:
        share = f" / parallel.context={parallel.context}" if parallel.context > 1 else ""
        yield (
            f"train.seq_length={recipe.train.seq_length}{share}: with parallel.sequence it must be divisible by "
            f"parallel.tensor={tensor}"
        )
    if parallel.context > 1 and recipe.tracking.probe_interval is not None:
        yield (
            f"tracking.probe_interval={recipe.tracking.probe_interval}: probes look at whole rows of P, of which a "
            f"process has no keys under parallel.context={parallel.context}; allowed: null"
        )
    yield from _expert_problems(recipe, world_size)


def _expert_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    parallel, experts = recipe.parallel, recipe.model.num_moe_experts
    if experts is None:
        if parallel.expert > 1:
            yield f"parallel.expert={parallel.expert}: needs model.num_moe_experts; allowed without: 1"
        return
    if experts % parallel.expert:
        yield f"model.num_moe_experts={experts}: must be divisible by parallel.expert={parallel.expert}"
    if world_size % (parallel.tensor * parallel.pipeline * parallel.expert):
        yield (
            f"world_size={world_size}: must be a multiple of parallel.tensor * pipeline * expert = "
            f"{parallel.tensor} * {parallel.pipeline} * {parallel.expert}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.sequence=false: a mixture of experts with parallel.tensor={parallel.tensor} "
            "trains only with sequence parallelism; allowed: true"
        )


def _batch_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    train, parallel = recipe.train, recipe.parallel
    if world_size % _model_parallel_size(recipe):
        return
    copies = data_parallel_size(recipe, world_size)
    at_once = train.micro_batch_size * copies
    if train.global_batch_size % at_once:
        yield (
            f"train.global_batch_size={train.global_batch_size}: must be a multiple of micro_batch_size * "
            f"data-parallel size = {train.micro_batch_size} * {copies} = {at_once}"
        )
    elif parallel.virtual_pipeline and train.global_batch_size // at_once % parallel.pipeline:
        yield (
            f"train.global_batch_size={train.global_batch_size}: its {train.global_batch_size // at_once} micro-batches "
            f"must be a multiple of parallel.pipeline={parallel.pipeline} for the interleaved schedule"
        )


def _schedule_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.optimizer.warmup_steps >= recipe.decay_steps:
        yield (
            f"optimizer.warmup_steps={recipe.optimizer.warmup_steps}: must be below decay_steps={recipe.decay_steps}"
        )
    if recipe.train.eval_interval is not None and recipe.data.valid_share <= 0:
        yield (
            f"train.eval_interval={recipe.train.eval_interval}: data.split={show(recipe.data.split)} keeps nothing for "
            "validation; give it a second share, name data.valid, or set eval_interval=null"
        )
    if recipe.optimizer.state_dtype == "bf16" and recipe.train.precision != "bf16":
        yield f"optimizer.state_dtype=bf16: train.precision={recipe.train.precision}; allowed with bf16 only"
    tokenizer, vocab_size = recipe.data.tokenizer.kind, recipe.model.vocab_size
    if tokenizer == "byte" and recipe.data.kind == "indexed" and vocab_size < BYTE_VOCAB_SIZE:
        yield f"model.vocab_size={vocab_size}: the byte tokenizer needs {BYTE_VOCAB_SIZE} or more"


def layer_policies(recipe: Recipe) -> list[str]:
    """Policy name of every layer. Raises RecipeError when a rule matches no layer."""
    attention = recipe.attention
    matchers = [(rule.match, rule.policy) for rule in attention.layers]
    try:
        return resolve_layer_policies(attention.policy, matchers, recipe.model.num_layers)
    except ValueError as error:
        raise RecipeError(f"attention.{error}") from None


def _attention_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    attention = recipe.attention
    try:
        if attention.backend != AUTO:
            get_backend(attention.backend)
        names = layer_policies(recipe)
    except RecipeError as error:
        yield str(error)
        return
    except ValueError as error:
        yield f"attention.{error}"
        return
    for name in dict.fromkeys(names):
        policy = _policy(recipe, name)
        yield from _divergence_problems(
            policy, _place(recipe, name), attention.allow_divergent_pv, world_size
        )
        yield from _exchange_problems(recipe, policy, _place(recipe, name))


def _policy(recipe: Recipe, name: str) -> AttentionPolicy:
    return recipe.attention.build_policies().get(name) or get_policy(name)


def _place(recipe: Recipe, name: str) -> str:
    """The first field of the recipe that asks for this policy, with its value."""
    attention = recipe.attention
    rule = next((i for i, rule in enumerate(attention.layers) if rule.policy == name), None)
    field = "policy" if name == attention.policy or rule is None else f"layers.{rule}.policy"
    return f"attention.{field}={show(name)}"


def _divergence_problems(
    policy: AttentionPolicy, place: str, allowed: bool, world_size: int
) -> Iterator[str]:
    if allowed:
        return
    if policy.direct_p is not None:
        yield (
            f"{place}: Direct-P serves inference; training through its map from scores to codes is untried, and "
            f"{DIVERGENT_PV_REASON}"
        )
    elif policy.four_bit_pv and world_size > 1:
        yield f"{place} with world_size={world_size}: {DIVERGENT_PV_REASON}"


def _exchange_problems(recipe: Recipe, policy: AttentionPolicy, place: str) -> Iterator[str]:
    """Why context-parallel processes cannot exchange what this policy needs."""
    model, parallel = recipe.model, recipe.parallel
    if parallel.context == 1:
        return
    reason = explain_exchange(
        parallel.cp_comm_type,
        policy,
        ranks=parallel.context,
        backend=recipe.attention.backend,
        num_heads=model.num_attention_heads // parallel.tensor,
        num_kv_heads=max(1, model.num_query_groups // parallel.tensor),
        seqlen=recipe.train.seq_length,
    )
    if reason is not None:
        cut = f" and parallel.tensor={parallel.tensor}" if parallel.tensor > 1 else ""
        yield f"{place} with parallel.context={parallel.context}{cut}: {reason}"


def _backend_problems(recipe: Recipe, device_type: str) -> Iterator[str]:
    """Why none of the backends can run a policy; nothing for a GPU that this machine lacks, which cannot be asked."""
    # What attention is asked needs `layer_policies` above for the policies that it is asked with.
    from fp4mega.train.backends import asked_backend, attention_problem

    if device_type == "cuda" and not torch.cuda.is_available():
        return
    asked, device = asked_backend(recipe), torch.device(device_type)
    backends = [get_backend(name) for name in (list_backends() if asked == AUTO else [asked])]
    for layer, name in enumerate(layer_policies(recipe)):
        problem = attention_problem(recipe, layer)
        reasons = {b.name: b.explain(problem, _policy(recipe, name), device) for b in backends}
        if all(reasons.values()):
            listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
            yield (
                f"{_place(recipe, name)} with attention.backend={show(asked)}: no backend can run layer {layer}: {listed}"
            )
            return


def parameter_count(model: ModelSection) -> int:
    """Trainable parameters of the decoder that the recipe describes, over all processes.

    Per layer: two RMSNorms, the fused QKV and output projections, and SwiGLU's three matrices (times the experts,
    with their router); besides them the embedding, the final norm and an untied output matrix. No biases.
    """
    hidden, head = model.hidden_size, model.kv_channels
    query, key_value = model.num_attention_heads * head, model.num_query_groups * head
    attention = hidden * (query + 2 * key_value) + query * hidden
    attention += 2 * head if model.qk_layernorm else 0
    attention += model.num_attention_heads if model.softmax_type == "learnable" else 0
    if model.num_moe_experts is None:
        feed_forward = 3 * hidden * model.ffn_hidden_size
    else:
        width = model.moe_ffn_hidden_size or model.ffn_hidden_size
        feed_forward = model.num_moe_experts * (3 * hidden * width + hidden)
    matrices = 1 if model.tie_embeddings else 2
    layer = attention + feed_forward + 2 * hidden
    return matrices * model.vocab_size * hidden + model.num_layers * layer + hidden


def _runs(names: list[str]) -> Iterator[tuple[int, int, str]]:
    """(first, last, name) of each run of equal neighbours."""
    start = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[start]:
            yield start, i - 1, names[start]
            start = i


def describe(recipe: Recipe, world_size: int) -> str:
    """A summary to read before starting: size, batch, tokens, parallel layout, policy of every layer.

    Raises RecipeError where `validate` would for the number of processes.
    """
    train, parallel, model = recipe.train, recipe.parallel, recipe.model
    copies = data_parallel_size(recipe, world_size)
    tokens = train.global_batch_size * train.seq_length
    accumulation = train.global_batch_size / (train.micro_batch_size * copies)
    policies = [
        f"{f'layers {first}-{last}' if last > first else f'layer {first}'} {name}"
        for first, last, name in _runs(layer_policies(recipe))
    ]
    rows = {
        "run": f"{recipe.run_name} (recipe {recipe.digest[:12]})",
        "parameters": f"{parameter_count(model):,}",
        "model": (
            f"{model.num_layers} layers, hidden {model.hidden_size}, heads {model.num_attention_heads}/"
            f"{model.num_query_groups} of {model.kv_channels}, ffn {model.ffn_hidden_size}, vocab {model.vocab_size}"
        ),
        "processes": (
            f"{world_size} = tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context}"
            f"{f' ({parallel.cp_comm_type})' if parallel.context > 1 else ''} x data {copies}"
        ),
        "batch": (
            f"{train.global_batch_size} x {train.seq_length} = {tokens:,} tokens an update "
            f"(micro-batch {train.micro_batch_size}, {accumulation:g} accumulated)"
        ),
        "updates": f"{train.steps:,} = {train.steps * tokens:,} tokens",
        "learning rate": (
            f"{recipe.optimizer.lr:g} to {recipe.optimizer.min_lr:g}, {recipe.optimizer.decay_style}, "
            f"warm-up {recipe.optimizer.warmup_steps}, decay until {recipe.decay_steps}"
        ),
        "attention": "; ".join(policies),
        "backend": recipe.attention.backend,
    }
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items())
