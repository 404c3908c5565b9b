"""A recipe's data section as Megatron datasets, and global batches drawn from them by position.

Sample i of a run is the same for every policy and every number of processes: update n trains on samples
n * global_batch_size onward, and which data-parallel rank computes a sample is all that parallelism changes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp4mega.train.data.indexed import TokenFile, check_token_file, check_vocabulary
from fp4mega.train.data.prepare import DEFAULT_VALID_FRACTION, Request, is_prepared, prepare
from fp4mega.train.data.tokenizers import Tokenizer, build_tokenizer
from fp4mega.train.recipe import DataSection, Recipe, RecipeError

FINGERPRINT_BATCHES = 2

# What a batch is made of. A dataset may tell more about a sample: Megatron's blend adds the number of its file.
BATCH_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, slots=True)
class CheckedData:
    """Tokenizer and token files of a recipe, found in order."""

    tokenizer: Tokenizer
    train: tuple[TokenFile, ...]
    valid: tuple[TokenFile, ...]


def prepare_missing(data: DataSection) -> None:
    """Make the files that `data.prepare` describes, unless they are there. Raises ValueError on anything in the way."""
    if data.prepare is None:
        return
    tokenizer = build_tokenizer(data.tokenizer.kind, data.tokenizer.path)
    assert data.train is not None  # the schema checks it
    train, valid = list(data.train), list(data.valid or ())
    out = train[0]
    fraction = 0.0
    if valid:
        out = train[0].removesuffix("_train")
        fraction = DEFAULT_VALID_FRACTION
        if train != [f"{out}_train"] or valid != [f"{out}_valid"]:
            raise RecipeError(
                f"data.train={train}, data.valid={valid}: data.prepare makes PREFIX_train and PREFIX_valid; "
                "name them so, or let data.valid be null"
            )
    request = Request(
        source=data.prepare.source,
        suffixes=data.prepare.suffixes,
        max_bytes=data.prepare.max_bytes,
        valid_fraction=fraction,
    )
    if not is_prepared(request, out, tokenizer):
        prepare(request, out, tokenizer)


def check_files(recipe: Recipe) -> CheckedData:
    """Everything about the recipe's data that can be known before training. Raises ValueError naming file and sizes."""
    data = recipe.data
    tokenizer = build_tokenizer(data.tokenizer.kind, data.tokenizer.path)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise RecipeError(
            f"model.vocab_size={recipe.model.vocab_size}: the {data.tokenizer.kind} tokenizer has {tokenizer.vocab_size} tokens"
        )
    files: dict[str, tuple[TokenFile, ...]] = {}
    for name, blend in (("train", data.train), ("valid", data.valid)):
        files[name] = tuple(check_token_file(prefix) for prefix in blend or ())
        for file in files[name]:
            check_vocabulary(file, tokenizer, recipe.model.vocab_size)
    if data.split is not None:
        for file in files["train"]:
            _check_split(file, data.split, needs_valid=recipe.train.eval_interval is not None)
    return CheckedData(tokenizer, files["train"], files["valid"])


def _check_split(file: TokenFile, split: str, needs_valid: bool) -> None:
    """Megatron cuts a file by its sequences; a share that gets no token would make it search for tokens forever."""
    shares = np.array([float(share) for share in split.split(",")])
    bounds = np.round(
        np.concatenate([[0.0], np.cumsum(shares / shares.sum())]) * len(file.lengths)
    ).astype(int)
    for i, name in enumerate(("train", "valid") if needs_valid else ("train",)):
        if not file.lengths[bounds[i] : bounds[i + 1]].sum(dtype=np.int64):
            raise RecipeError(
                f"data.split={split!r}: leaves no document for {name} of the {len(file.lengths)} in {file.prefix}.bin"
            )


def _blend(section: tuple[str, ...] | dict[str, float] | None, files: tuple[TokenFile, ...]) -> Any:
    """Megatron's (prefixes, weights). Without weights, several files weigh as many tokens as they hold."""
    if section is None:
        return None
    if isinstance(section, dict):
        return list(section), list(section.values())
    return list(section), None if len(section) == 1 else [float(file.tokens) for file in files]


def build_datasets(recipe: Recipe, checked: CheckedData, cache: Path) -> tuple[Any, Any]:
    """Training and validation datasets of Megatron; validation is None when the recipe never evaluates.

    Collective: needs a process group. `cache` holds Megatron's sample index; a folder for each state of the files, so
    that rewritten files are never read through an old index.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    data, train = recipe.data, recipe.train
    evaluates = train.eval_interval is not None
    identity = "/".join(file.identity for file in (*checked.train, *checked.valid))
    blends: dict[str, Any] = {}
    if data.kind == "indexed" and data.valid is not None:
        valid = _blend(data.valid, checked.valid) if evaluates else None
        blends["blend_per_split"] = [_blend(data.train, checked.train), valid, None]
    elif data.kind == "indexed":
        blends = {"blend": _blend(data.train, checked.train), "split": data.split}
    config = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=train.seq_length,
        path_to_cache=str(cache / hashlib.sha256(identity.encode()).hexdigest()[:16]),
        tokenizer=checked.tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **blends,
    )
    sizes = [
        train.steps * train.global_batch_size,
        train.eval_batches * train.global_batch_size if evaluates else 0,
        0,
    ]
    # A share that nobody reads is not built: of one without a document Megatron would search for tokens forever.
    if config.split_matrix is not None:
        config.split_matrix = [
            share if size else None for share, size in zip(config.split_matrix, sizes, strict=True)
        ]
    kind = MockGPTDataset if data.kind == "mock" else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    return datasets[0], datasets[1] if evaluates else None


class Batches:
    """Micro-batches of this data-parallel rank, by position in the run.

    A micro-batch is a dict of [micro_batch_size, seq_length] tensors: tokens, labels, position_ids (int64) and
    loss_mask (float32). Raises RecipeError when the data holds an id outside the vocabulary.
    """

    def __init__(self, dataset: Any, recipe: Recipe, dp_rank: int, dp_size: int) -> None:
        self.dataset = dataset
        self.vocab_size = recipe.model.vocab_size
        self.micro_batch_size = recipe.train.micro_batch_size
        self.global_batch_size = recipe.train.global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_micro_batches = self.global_batch_size // (self.micro_batch_size * dp_size)

    def samples(self, batch: int) -> Iterator[list[int]]:
        """Positions of the samples in each micro-batch of this rank, for global batch number `batch`."""
        start = batch * self.global_batch_size
        for micro in range(self.num_micro_batches):
            first = start + (micro * self.dp_size + self.dp_rank) * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def load(self, batch: int, device: torch.device) -> list[dict[str, Tensor]]:
        """The micro-batches of global batch number `batch` on `device`."""
        return [self._collate(samples, device) for samples in self.samples(batch)]

    def _collate(self, samples: list[int], device: torch.device) -> dict[str, Tensor]:
        items = [self.dataset[i] for i in samples]
        made = {name: torch.stack([item[name] for item in items]) for name in BATCH_FIELDS}
        for name in ("tokens", "labels"):
            low, high = int(made[name].min()), int(made[name].max())
            if low < 0 or high >= self.vocab_size:
                raise RecipeError(
                    f"samples {samples[0]} to {samples[-1]}: token id {low if low < 0 else high}, "
                    f"model.vocab_size={self.vocab_size} allows 0 to {self.vocab_size - 1}"
                )
        return {name: tensor.to(device, non_blocking=True) for name, tensor in made.items()}


def data_fingerprint(dataset: Any, checked: CheckedData, recipe: Recipe) -> str:
    """SHA-256 of the training files' document lengths and of the first two global batches: equal for runs on the same data."""
    digest = hashlib.sha256()
    for file in checked.train:
        digest.update(file.lengths.tobytes())
    total = recipe.train.steps * recipe.train.global_batch_size
    for i in range(min(total, FINGERPRINT_BATCHES * recipe.train.global_batch_size)):
        sample = dataset[i]
        digest.update(sample["tokens"].numpy().tobytes())
        digest.update(sample["labels"].numpy().tobytes())
    return digest.hexdigest()
