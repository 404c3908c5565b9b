"""Checkpoints of a run: written whole or not at all, refused when they belong to another experiment.

`checkpoints/iter_0000100/` holds Megatron's distributed checkpoint (model, optimizer, schedule, random generators) and
`checkpoint.json` (step, recipe, fingerprints). It is written under a temporary name that no other save ever had, flushed to
the disk and renamed, then `checkpoints/latest` names it, and only then are older ones removed. A folder under a temporary
name is never loaded. The name is new each time because what a killed run left behind may still be writing into the old one.

Saving here makes training wait; `fp4mega.train.async_saves` writes in the background, between the same beginning and end.
"""

import json
import os
import queue
import random
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from fp4mega.tracking.manifest import flat_fields
from fp4mega.train.bucket_padding import sharded_optimizer_state
from fp4mega.train.model import Training
from fp4mega.train.optimizer_state import allocate_state, load_state
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.schema import show
from fp4mega.train.writer_process import noticing_dead_workers

T = TypeVar("T")

META = "checkpoint.json"
LATEST = "latest"
SCHEMA = 1
_META_FIELDS = {"step": int, "recipe": dict, "recipe_digest": str, "data_fingerprint": str}
_WORDS = {int: "an integer", dict: "a mapping", str: "a string"}
_NAME = re.compile(r"iter_(\d{7,})")

# Fields that may change when a run is resumed. Everything else decides which experiment it is.
_MAY_CHANGE = (
    "attention.backend",
    "attention.allow_divergent_pv",
    "parallel.",
    "optimizer.decay_steps",
    "data.prepare",
    "train.steps",
    "train.micro_batch_size",
    "train.log_interval",
    "train.eval_",
    "train.save_interval",
    "train.async_save",
    "train.keep_checkpoints",
    "train.recompute",
    "train.resume",
    "train.max_seconds",
    "train.timeout_minutes",
    "tracking.",
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read back; the message says which one is still good."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on the disk: where, and what `checkpoint.json` says."""

    path: Path
    step: int
    recipe: Mapping[str, Any]
    recipe_digest: str
    data_fingerprint: str


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"iter_{step:07d}"


def _read_meta(path: Path) -> Checkpoint:
    """Raises RecipeError when the description cannot be read or is none."""
    try:
        meta = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"not a JSON file: {error}"
        raise _damaged(path, str(problem)) from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        schema = meta.get("schema") if isinstance(meta, dict) else show(meta)
        raise RecipeError(f"{path / META}: schema={schema!r}: this version reads {SCHEMA}")
    missing = [name for name in _META_FIELDS if name not in meta]
    if missing:
        raise _damaged(path, f"{', '.join(missing)} missing")
    for name, kind in _META_FIELDS.items():
        if type(meta[name]) is not kind:
            raise _damaged(path, f"{name}={show(meta[name])}: expected {_WORDS[kind]}")
    if path.name != folder_name(meta["step"]):
        raise _damaged(path, f"step={meta['step']}: expected that of the folder's name")
    return Checkpoint(path, **{name: meta[name] for name in _META_FIELDS})


def _damaged(path: Path, problem: str) -> RecipeError:
    return RecipeError(
        f"{path / META}: {problem}: the file is damaged; remove {path} to resume from an older one"
    )


def _look_through(folder: Path) -> tuple[list[Checkpoint], dict[str, RecipeError]]:
    """Complete checkpoints in the folder, oldest first, and by folder name what is wrong with the others."""
    complete, damaged = [], {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(path.name):
            try:
                complete.append(_read_meta(path))
            except RecipeError as error:
                damaged[path.name] = error
    return sorted(complete, key=lambda c: c.step), damaged


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints in the folder, oldest first."""
    return _look_through(folder)[0]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint that `latest` names; the one of the highest step when what it names is not there.

    Raises RecipeError when that one cannot be read: going on from an older one, or anew, is for the user to decide.
    """
    complete, damaged = _look_through(folder)
    try:
        named = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        named = ""
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{folder / LATEST}: {error}; remove it to resume from the newest one"
        ) from None
    names = {c.path.name: c for c in complete}
    if named not in names | damaged:
        named = max(names | damaged, key=lambda name: int(name.removeprefix("iter_")), default="")
    if named in damaged:
        raise damaged[named]
    return names.get(named)


def describe_newest(folder: Path) -> str:
    """For the message of an error: which checkpoint is good."""
    try:
        good = newest_checkpoint(folder)
    except RecipeError as error:
        return str(error)
    return f"the newest good checkpoint is {good.path}" if good else "there is no checkpoint"


def check_resumable(place: Path, trained: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Fields in which the recipe differs from the one trained in `place`, and may.

    Raises RecipeError naming those that may not differ: going on would mix two experiments under one name.
    """
    before, now = (flat_fields(fields, levels=2) for fields in (trained, recipe.as_dict()))
    different = [
        name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)
    ]
    refused = [name for name in different if not name.startswith(_MAY_CHANGE)]
    # Megatron gives experts that are spread over processes an optimizer of their own, and reads a state that is not
    # sharded back into as many optimizers as wrote it.
    spread = {section.get("parallel.expert", 1) > 1 for section in (before, now)}
    if len(spread) == 2 and not recipe.optimizer.distributed:
        refused.append("parallel.expert")
    if refused:
        lines = [
            f"{name}={show(now.get(name))}: {place} was trained with {show(before.get(name))}"
            for name in refused
        ]
        raise RecipeError(
            "\n".join(lines)
            + "\nTo start anew choose another `name` or `tracking.dir`, or set train.resume=false, "
            "which replaces the checkpoints there"
        )
    return different


def check_data(checkpoint: Checkpoint, recipe: Recipe, fingerprint: str) -> None:
    """Raise RecipeError when the data changed under the run.

    Not compared when train.steps was changed: that many steps may need another pass over the data, which Megatron then
    shuffles as a whole. The tracker records such a change of the order.
    """
    same_steps = checkpoint.recipe["train"].get("steps") == recipe.train.steps
    if same_steps and checkpoint.data_fingerprint != fingerprint:
        raise RecipeError(
            f"data: its fingerprint is {fingerprint[:12]}, that of {checkpoint.path} is {checkpoint.data_fingerprint[:12]}; "
            "the token files were rewritten since. Restore them, or start anew under another `name`"
        )


def _rng_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    _, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state = {
        "python": random.getstate(),
        "numpy": (keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
        state["megatron"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def sharded_state(training: Training, *, loading: bool, with_rng: bool = True) -> dict[str, Any]:
    """Everything a checkpoint holds, as Megatron's map from this process's parts to the whole. Collective."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    # After an update each process has new weights in its own shard only; with overlap the others come with the next forward.
    for chunk in () if loading else training.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    models = {
        f"model{i}": _unwrapped(chunk).sharded_state_dict()
        for i, chunk in enumerate(training.chunks)
    }
    state: dict[str, Any] = dict(models)
    # The only layout of the distributed optimizer that can be saved and cut anew; other optimizers ignore it.
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    state["optimizer"] = sharded_optimizer_state(
        training.optimizer, models, is_loading=loading, metadata=metadata
    )
    state["scheduler"] = training.scheduler.state_dict()
    if with_rng:
        stage, stages = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        part, parts = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        state["rng"] = ShardedObject(
            "rng", _rng_state(), (stages, parts), (stage, part), replica_id=copy
        )
    return state


def _write_in_this_process() -> None:
    """Let Megatron's writer report through a queue of this process.

    Its default is a queue in a manager process of its own, made for asynchronous saving. A synchronous save fills and reads
    the queue in one process, and a manager would be killed by the SIGTERM that asks for this very save.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _flush(folder: Path) -> None:
    """Ask the disk to keep every file of the folder, and the folder itself."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _root_cause(error: BaseException) -> BaseException:
    failures = getattr(
        error, "failures", None
    )  # torch's CheckpointException: {rank: (error, traceback)}
    if failures:
        return _root_cause(next(iter(failures.values()))[0])
    cause = error.__cause__ or error.__context__
    return error if cause is None else _root_cause(cause)


def _free_space(folder: Path) -> str:
    """Room on the folder's disk: torch's writer reports a full one as a file position that it did not expect."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free there"
    except OSError as error:
        return f"the folder cannot be looked at: {error}"


def in_first_process(work: Callable[[], T]) -> T:
    """What `work` returned in the first process, in all of them; its error is an error in all of them. Collective."""
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            told[0] = work()
        except Exception as error:
            failure = error
            told[1] = f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise RuntimeError(f"rank 0: {told[1]}")
    return cast(T, told[0])


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Make the empty folder that a step's checkpoint is written into, and remove what earlier lives left. Collective."""

    def make() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary = folder / f"{folder_name(step)}.{secrets.token_hex(4)}.tmp"
        temporary.mkdir()
        return temporary

    return in_first_process(make)


def publish_checkpoint(temporary: Path, step: int, recipe: Recipe, data_fingerprint: str) -> Path:
    """Describe the checkpoint that every process has written, and give it its name, which is returned. Collective."""

    def publish() -> Path:
        meta = {
            "schema": SCHEMA,
            "step": step,
            "consumed_samples": step * recipe.train.global_batch_size,
            "policy": recipe.attention.policy,
            "recipe_digest": recipe.digest,
            "data_fingerprint": data_fingerprint,
            "recipe": recipe.as_dict(),
        }
        (temporary / META).write_text(json.dumps(meta, indent=2) + "\n")
        return _publish(temporary, step, recipe.train.keep_checkpoints)

    return in_first_process(publish)


def failed_save(
    error: BaseException, folder: Path, step: int, temporary: Path | None
) -> CheckpointError:
    """The error of a save, which says what is still good. Removes what was written."""
    if temporary is not None and torch.distributed.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    if isinstance(error, CheckpointException) and not error.failures:
        told = "a process could not write its part; rank 0 says which and why"
    else:
        cause = _root_cause(error)
        told = f"{type(cause).__name__}: {cause}"
    return CheckpointError(
        f"could not save step {step} to {folder / folder_name(step)}: {told} ({_free_space(folder)}); {describe_newest(folder)}"
    )


def save_checkpoint(
    folder: Path, step: int, training: Training, recipe: Recipe, data_fingerprint: str
) -> Path:
    """Save the state after `step` updates and return its folder. Collective.

    Raises CheckpointError when it could not be written; what was written of it is removed, and earlier ones are untouched.
    """
    from megatron.core import dist_checkpointing

    temporary = None
    try:
        temporary = begin_checkpoint(folder, step)
        _write_in_this_process()
        with noticing_dead_workers():
            dist_checkpointing.save(sharded_state(training, loading=False), str(temporary))
        torch.distributed.barrier()
        return publish_checkpoint(temporary, step, recipe, data_fingerprint)
    except (
        Exception,
        CheckpointException,
    ) as error:  # Megatron's writer wraps what went wrong in errors of several kinds
        raise failed_save(error, folder, step, temporary) from error


def _remove_leftovers(folder: Path) -> None:
    """Remove folders under temporary names, as far as nobody is writing into them: a later save tries again."""
    for leftover in folder.glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _publish(temporary: Path, step: int, keep: int) -> Path:
    """Give the complete checkpoint its name, point `latest` at it, and remove those that are no longer wanted."""
    folder = temporary.parent
    final = folder / folder_name(step)
    _flush(temporary)
    if final.exists():  # of an earlier life of the run, which went on beyond its resumption
        final.rename(folder / f"{temporary.name}.old.tmp")
    temporary.rename(final)
    pointer = folder / f"{LATEST}.new"
    pointer.write_text(final.name + "\n")
    pointer.replace(folder / LATEST)
    _flush(folder)
    complete = list_checkpoints(folder)
    kept = {c.path for c in [c for c in complete if c.step <= step][-keep:]}
    for checkpoint in complete:
        if checkpoint.path not in kept:
            shutil.rmtree(checkpoint.path)
    _remove_leftovers(folder)
    return final


def load_checkpoint(checkpoint: Checkpoint, training: Training, recipe: Recipe) -> int:
    """Put the checkpoint's state into model, optimizer, schedule and random generators; returns its step. Collective.

    Raises CheckpointError when the files are damaged or do not fit the model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    before = checkpoint.recipe.get("parallel", {})
    same_layout = all(
        before.get(name) == getattr(recipe.parallel, name) for name in ("tensor", "pipeline")
    )
    try:
        allocate_state(training.optimizer)
        with torch.no_grad():
            state = dist_checkpointing.load(
                sharded_state(training, loading=True, with_rng=same_layout),
                str(checkpoint.path),
                strict=StrictHandling.RAISE_UNEXPECTED,
            )
            for i, chunk in enumerate(training.chunks):
                _unwrapped(chunk).load_state_dict(state[f"model{i}"], strict=True)
            load_state(training.optimizer, state["optimizer"])
            training.scheduler.load_state_dict(state["scheduler"])
            if same_layout:
                _set_rng_state(state["rng"])
    except (
        Exception,
        CheckpointException,
    ) as error:  # damaged files surface as errors of many kinds
        cause = _root_cause(error)
        raise CheckpointError(
            f"{checkpoint.path}: could not be loaded: {type(cause).__name__}: {cause}; remove it to resume from an older one"
        ) from error
    return checkpoint.step
