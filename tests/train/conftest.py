"""A tiny recipe over a fixed corpus, run in this process or as a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_harness import events, wait_for

from fp4mega.train.data.prepare import Request, prepare
from fp4mega.train.data.tokenizers import ByteTokenizer
from fp4mega.train.launch import find_launch
from fp4mega.train.recipe import Recipe

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "quietly",
    "mix",
    "black",
    "liquids",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of prepared data: 60 documents of a fixed, learnable text."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in").mkdir()
    for i in range(60):
        text = " ".join(WORDS[(i * j + j * j) % len(WORDS)] for j in range(40 + i))
        (folder / "in" / f"{i:02d}.txt").write_text(f"{i}: {text}.\n")
    prepare(
        Request(source=str(folder / "in"), valid_fraction=0.2),
        str(folder / "data"),
        ByteTokenizer(),
    )
    return str(folder / "data")


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory):
    """Prefix of one pair with tokens for 2,000 updates: one pass, whose order does not depend on the number of updates."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "in").mkdir()
    for i in range(30):
        text = f"{i}: " + " ".join(WORDS[(i * j + j * j) % len(WORDS)] for j in range(2500))
        (folder / "in" / f"{i}.txt").write_text(text)
    content = prepare(
        Request(source=str(folder / "in"), valid_fraction=0.0),
        str(folder / "data"),
        ByteTokenizer(),
    )
    assert content["splits"]["train"]["tokens"] > 2000 * 4 * 32
    return str(folder / "data")


@pytest.fixture
def content(corpus, tmp_path):
    """A recipe as plain data: 2 layers, hidden 64, six updates. Tests change fields before they parse it."""
    return {
        "name": "t",
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 264,
        },
        "attention": {"policy": "bf16"},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "decay_steps": 40},
        "data": {"kind": "indexed", "train": [f"{corpus}_train"], "valid": [f"{corpus}_valid"]},
        "train": {
            "seq_length": 32,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "steps": 6,
            "precision": "fp32",
            "eval_interval": 3,
            "eval_batches": 2,
        },
        "tracking": {"dir": str(tmp_path / "runs"), "wandb": {"mode": "disabled"}},
    }


@pytest.fixture
def run_dir(content):
    """The folder of that recipe's run."""
    return Path(content["tracking"]["dir"]) / f"{content['name']}__{content['attention']['policy']}"


@pytest.fixture
def train(content):
    """Train the recipe, with fields of `train` replaced, in this process."""
    from fp4mega.train.loop import run

    def train_here(**changes):
        recipe = Recipe.parse({**content, "train": {**content["train"], **changes}})
        return run(recipe, find_launch({}))

    return train_here


@pytest.fixture
def command(content, tmp_path):
    """Start `python -m fp4mega.train` on the recipe, with overrides; returns the process."""
    path = tmp_path / "recipe.yaml"

    def start(*overrides):
        path.write_text(yaml.safe_dump(content))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "fp4mega.train", str(path), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


@pytest.fixture
def long_run(command, content, run_dir, long_corpus):
    """Start a run that nobody will see the end of, and wait until it has logged some updates; returns the process."""

    def start(*, logged, save_interval):
        content["data"] = {"kind": "indexed", "train": [long_corpus]}
        content["train"] |= {"steps": 2000, "save_interval": save_interval, "eval_interval": None}
        process = command()
        wait_for(lambda: len(events(run_dir, "train")) >= logged)
        return process

    return start
