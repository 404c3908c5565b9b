"""The run of a recipe: checks, data, model, resuming, the loop of updates, and how it ends."""

import math
import signal
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from fp4mega.megatron import adapted_to_cpu, arm_probes, set_rounding_step
from fp4mega.tracking import Tracker, WandbSettings, build_manifest, read_run
from fp4mega.train.async_saves import AsyncSaves
from fp4mega.train.backends import layer_backends
from fp4mega.train.checkpoint import (
    check_data,
    describe_newest,
    in_first_process,
    load_checkpoint,
    save_checkpoint,
)
from fp4mega.train.console import RunConsole
from fp4mega.train.data.datasets import (
    Batches,
    build_datasets,
    check_files,
    data_fingerprint,
    prepare_missing,
)
from fp4mega.train.launch import (
    Launch,
    choose_threads,
    seed_everything,
    start_process_groups,
    stop_process_groups,
)
from fp4mega.train.launch_record import note_launch
from fp4mega.train.lost_ranks import describe_lost_ranks
from fp4mega.train.model import build_training, check_installed, initial_fingerprint
from fp4mega.train.only_writer import only_writer
from fp4mega.train.probes import gather_probes, recorder
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.run_dir import Start, find_start
from fp4mega.train.signals import TIME_LIMIT, StopRequest
from fp4mega.train.step import StepResult, evaluate, train_step
from fp4mega.train.throughput import flops_per_token, peak_tflops
from fp4mega.train.validate import parameter_count, validate

# An NFS server frees the locks of a machine that is gone after 90 s.
LOST_LOCK_SECONDS = 100.0


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


def run(recipe: Recipe, launch: Launch) -> int:
    """Train the recipe in this process and return the exit code: 0, or 128 + the signal that asked to stop.

    0 too when `train.max_seconds` ended it: the next call goes on.

    Raises RecipeError before any process group for what is wrong with the recipe, the data or the run's
    folder, TrainingError when the loss or a gradient is not finite, CheckpointError when a checkpoint cannot be
    written or read. Events up to that point and the last good checkpoint stay.
    """
    with ExitStack() as held:
        try:
            validate(recipe, launch.world_size, launch.device.type)
            check_installed(recipe)
            layers = layer_backends(recipe, launch.device)
            start = find_start(recipe)
            if start.finished:
                return _already_finished(recipe, launch, start)
            if launch.is_first:
                held.enter_context(only_writer(start.folder, _patience(recipe, launch)))
                start = find_start(recipe)  # whoever held the folder may have got further
                prepare_missing(recipe.data)
                check_files(recipe)
                if start.checkpoint is None:
                    note_launch(start.folder)
        except (ValueError, OSError) as error:
            raise RecipeError(str(error)) from error
        held.enter_context(adapted_to_cpu() if launch.device.type == "cpu" else nullcontext())
        start_process_groups(launch, recipe.parallel, timeout_minutes=recipe.train.timeout_minutes)
        code = None
        try:
            # What the first process saw holding the folder; it has prepared the data before.
            start = in_first_process(lambda: start)
            if start.finished:
                code = _already_finished(recipe, launch, start)
            else:
                code = _Run(recipe, launch, start, layers).train()
            return code
        finally:
            # After an error the other processes may be waiting in a collective; torchrun ends them.
            if code is not None or launch.world_size == 1:
                stop_process_groups()


def _already_finished(recipe: Recipe, launch: Launch, start: Start) -> int:
    console = RunConsole(recipe.run_name, recipe.train.steps, 0, enabled=launch.is_first)
    console.say(
        f"{start.folder}: already finished {recipe.train.steps} steps; raise train.steps to go on"
    )
    return 0


def _patience(recipe: Recipe, launch: Launch) -> float:
    """Seconds that a run's folder may still be held: under torchrun the life before may not have ended everywhere."""
    if not launch.under_torchrun:
        return 0.0
    # Meanwhile the other processes wait for this one, for train.timeout_minutes.
    return min(LOST_LOCK_SECONDS, 30 * recipe.train.timeout_minutes)


class _Run:
    """One life of a run, from its first collective to its last."""

    def __init__(
        self, recipe: Recipe, launch: Launch, start: Start, layers: list[dict[str, Any]]
    ) -> None:
        from megatron.core import parallel_state

        self.recipe, self.launch, self.start, self.layers = recipe, launch, start, layers
        self.device = launch.device
        self.threads = choose_threads(launch)
        seed_everything(recipe.train.seed, launch.device)
        checked = check_files(recipe)
        datasets = build_datasets(recipe, checked, start.folder / "sample_index")
        place = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        self.batches = Batches(datasets[0], recipe, *place)
        self.valid = None if datasets[1] is None else Batches(datasets[1], recipe, *place)
        self.data_fingerprint = data_fingerprint(datasets[0], checked, recipe)
        if start.checkpoint is not None:
            check_data(start.checkpoint, recipe, self.data_fingerprint)
        self.training = build_training(recipe, launch.device)
        self.init_fingerprint = (
            initial_fingerprint(self.training.chunks) if start.checkpoint is None else None
        )
        if start.checkpoint is not None:
            load_checkpoint(start.checkpoint, self.training, recipe)
        self.flops = flops_per_token(recipe.model, recipe.train.seq_length)
        self.peak = peak_tflops(launch.device_name, recipe.train.precision)
        self.saves = AsyncSaves(start.checkpoints, recipe, self.data_fingerprint)
        self.tracker: Tracker | None = None

    def train(self) -> int:
        """Make the remaining updates and return the exit code."""
        steps = self.recipe.train.steps
        with RunConsole(
            self.recipe.run_name, steps, self.start.step, enabled=self.launch.is_first
        ) as self.console:
            self._greet()
            limit = self.recipe.train.max_seconds
            with self._open_tracker(), StopRequest(limit) as request, self.saves:
                stop = self._loop_or_name_lost_ranks(request)
                reason = (
                    "train.max_seconds"
                    if stop == TIME_LIMIT
                    else signal.Signals(stop).name
                    if stop
                    else ""
                )
                if stop and self.tracker is not None:
                    self.tracker.close("terminated", reason=reason)
            ending = f"stopped by {reason} after a whole step" if stop else "finished"
            self.console.say(f"{ending}: {self.start.folder}")
        return 128 + stop if stop not in (0, TIME_LIMIT) else 0

    def _greet(self) -> None:
        recipe, start = self.recipe, self.start
        policies = ", ".join(
            dict.fromkeys(f"{layer['policy']} on {layer['backend']}" for layer in self.layers)
        )
        threads = f", {self.threads} threads" if self.device.type == "cpu" else ""
        self.console.say(
            f"{recipe.run_name}: {parameter_count(recipe.model):,} parameters, attention {policies}; "
            f"{self.launch.world_size} x {self.launch.device_name}{threads}; recipe {recipe.digest[:12]}; "
            f"{100 * self.flops.attention_share:.1f} % of the FLOPs in attention's products"
        )
        if start.checkpoint is not None:
            changed = f"; changed since: {', '.join(start.changed)}" if start.changed else ""
            self.console.say(f"resumed from {start.checkpoint.path}{changed}")

    def _open_tracker(self) -> Any:
        if not self.launch.is_first:
            return nullcontext()
        recipe, wandb = self.recipe, self.recipe.tracking.wandb
        manifest = build_manifest(
            run_name=recipe.run_name,
            recipe=recipe.as_dict(),
            recipe_digest=recipe.digest,
            policy=recipe.attention.policy,
            layers=self.layers,
            seed=recipe.train.seed,
            device=self.launch.device_name,
            world_size=self.launch.world_size,
            fingerprints={"init": self.init_fingerprint, "data": self.data_fingerprint},
        )
        self.tracker = Tracker(
            self.start.folder,
            manifest=manifest,
            wandb=WandbSettings(
                mode=wandb.mode, project=wandb.project, entity=wandb.entity, group=wandb.group
            ),
            resume_step=None if self.start.checkpoint is None else self.start.step,
        )
        return self.tracker

    def _loop_or_name_lost_ranks(self, request: StopRequest) -> int:
        try:
            return self._loop(request)
        except RuntimeError as error:
            lost = describe_lost_ranks(error, self.launch, give_up=lambda: bool(request.signal))
            if lost is None:
                raise
            raise TrainingError(f"{lost}; {describe_newest(self.start.checkpoints)}") from error

    def _loop(self, request: StopRequest) -> int:
        """Update until the recipe's steps are made; returns the signal that stopped it early, or 0."""
        train, tracking = self.recipe.train, self.recipe.tracking
        spent, logged = 0.0, self.start.step
        if self._was_stopped_before_evaluating():
            self._evaluate(self.start.step)
        for step in range(self.start.step + 1, train.steps + 1):
            probing = _due(step, tracking.probe_interval)
            if probing:
                arm_probes(self.training.chunks, self._probe_recorder(step))
            set_rounding_step(self.training.chunks, step)
            began = time.perf_counter()
            request.check_time()
            result = train_step(
                self.training, self.recipe, self.batches, step - 1, self.device, request
            )
            spent += time.perf_counter() - began
            stop = result.stop if step < train.steps else 0
            finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
            last = step == train.steps or bool(stop)
            saving = train.save_interval is not None and (_due(step, train.save_interval) or last)
            self._finish_save(wait=saving or not finite)
            if _due(step, train.log_interval) or last or not finite:
                self._log_step(step, result, spent / (step - logged))
                spent, logged = 0.0, step
            if not finite:
                raise TrainingError(self._nonfinite(step, result))
            if probing:
                for layer, values in gather_probes(
                    self.training, result.grad_norm, self.recipe.optimizer.clip_grad
                ).items():
                    self._log("probe", step, layer=layer, **values)
            self.console.advance(step)
            if self._evaluation_due(step) and not stop:
                self._evaluate(step)
            if saving:
                self._save(step)
                if last:
                    self._finish_save(wait=True)
            if stop:
                return stop
        return 0

    def _probe_recorder(self, step: int) -> Any:
        return recorder(self.start.folder, step) if self.recipe.tracking.probe_tensors else None

    def _log(self, kind: str, step: int, **values: Any) -> None:
        if self.tracker is not None:
            self.tracker.log(kind, step, **values)

    def _log_step(self, step: int, result: StepResult, seconds: float) -> None:
        tokens = self.recipe.train.global_batch_size * self.recipe.train.seq_length
        rate = tokens / seconds
        per_device = self.flops.total * rate / self.launch.world_size / 1e12
        figures: dict[str, Any] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_s": rate,
            "step_ms": 1e3 * seconds,
            "mfu": None if self.peak is None else per_device / self.peak,
        }
        self.console.figures(step, **figures)
        on_gpu = self.device.type == "cuda"
        self._log(
            "train",
            step,
            tokens=step * tokens,
            tflops_per_gpu=per_device if on_gpu else None,
            **figures,
        )

    def _evaluation_due(self, step: int) -> bool:
        train = self.recipe.train
        return self.valid is not None and (_due(step, train.eval_interval) or step == train.steps)

    def _was_stopped_before_evaluating(self) -> bool:
        """Whether the life before left out an evaluation, because a stop does not wait for one. Collective."""
        step = self.start.step
        if step == 0 or not self._evaluation_due(step):
            return False

        def is_missing() -> bool:
            found = read_run(self.start.folder).events
            return not any(event["type"] == "eval" and event["step"] == step for event in found)

        return in_first_process(is_missing)

    def _evaluate(self, step: int) -> None:
        assert self.valid is not None
        loss = evaluate(self.training, self.recipe, self.valid, self.device)
        self._log("eval", step, loss=loss, split="valid")
        self.console.say(f"step {step}: validation loss {loss:.4f}")
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {step}: the validation loss is {loss}; {describe_newest(self.start.checkpoints)}"
            )

    def _save(self, step: int) -> None:
        """Save, or begin to, when the one before is done."""
        if self.recipe.train.async_save:
            self.saves.start(step, self.training)
            return
        path = save_checkpoint(
            self.start.checkpoints, step, self.training, self.recipe, self.data_fingerprint
        )
        self._saved(step, path)

    def _finish_save(self, *, wait: bool) -> None:
        """Publish a checkpoint that was written in the background, if it is done; with `wait` when it is."""
        published = self.saves.finish(wait=wait)
        if published is not None:
            self._saved(*published)

    def _saved(self, step: int, path: Path) -> None:
        self._log("checkpoint", step, path=str(path.relative_to(self.start.folder)))
        self.console.say(f"step {step}: saved {path}")

    def _nonfinite(self, step: int, result: StepResult) -> str:
        return f"step {step}: loss={result.loss}, grad_norm={result.grad_norm}: not finite, training stops; {describe_newest(self.start.checkpoints)}"


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
