import math
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from fp4mega.tracking import read_run
from fp4mega.train.data.datasets import (
    Batches,
    build_datasets,
    check_files,
    data_fingerprint,
    prepare_missing,
)
from fp4mega.train.data.prepare import Request, prepare
from fp4mega.train.data.tokenizers import ByteTokenizer
from fp4mega.train.launch import find_launch, start_process_groups, stop_process_groups
from fp4mega.train.recipe import Recipe, RecipeError


class Numbered:
    """Sample i holds only the number i."""

    def __getitem__(self, i):
        ids = torch.full((8,), i)
        return {
            "tokens": ids,
            "labels": ids,
            "loss_mask": torch.ones(8),
            "position_ids": torch.arange(8),
        }


@pytest.fixture
def process_group(content):
    recipe = Recipe.parse(content)
    start_process_groups(find_launch({}), recipe.parallel)
    yield
    stop_process_groups()


def text_of(sample):
    return ByteTokenizer().detokenize([*sample["tokens"].tolist(), int(sample["labels"][-1])])


def build(content, tmp_path):
    recipe = Recipe.parse(content)
    checked = check_files(recipe)
    return recipe, checked, *build_datasets(recipe, checked, tmp_path / "index")


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_share_each_global_batch_whatever_their_number(content, dp_size):
    content["model"]["vocab_size"] = 1000
    content["train"] |= {"micro_batch_size": 2, "global_batch_size": 16}
    recipe = Recipe.parse(content)
    for batch in (0, 7):
        seen = []
        for rank in range(dp_size):
            micro = Batches(Numbered(), recipe, rank, dp_size).load(batch, torch.device("cpu"))
            assert len(micro) == 16 // (2 * dp_size)
            seen += [int(row[0]) for m in micro for row in m["tokens"]]
        assert sorted(seen) == list(range(batch * 16, batch * 16 + 16))


def test_an_id_outside_the_vocabulary_stops_the_batch(content):
    with pytest.raises(
        RecipeError, match=r"samples 264 to 265: token id 265, model.vocab_size=264"
    ):
        Batches(Numbered(), Recipe.parse(content), 0, 1).load(66, torch.device("cpu"))


def test_samples_are_pieces_of_the_prepared_text(content, corpus, tmp_path, process_group):
    _, _, train, valid = build(content, tmp_path)
    for prefix, dataset in ((f"{corpus}_train", train), (f"{corpus}_valid", valid)):
        ids = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
        documents = ByteTokenizer().detokenize([int(i) if i < 256 else 0 for i in ids]).split("\0")
        for i in range(8):
            pieces = text_of(dataset[i]).split("\n")
            assert all(any(piece in document for document in documents) for piece in pieces)
            assert torch.equal(dataset[i]["tokens"][1:], dataset[i]["labels"][:-1])


def test_fingerprint_follows_the_data_and_the_seed_only(content, corpus, tmp_path, process_group):
    def fingerprint():
        recipe, checked, train, _ = build(content, tmp_path)
        return data_fingerprint(train, checked, recipe)

    first = fingerprint()
    content["attention"]["policy"] = "nvfp4_qk_fp8_pv"
    content["optimizer"]["lr"] = 2e-2
    assert fingerprint() == first
    content["train"]["seed"] = 5
    assert fingerprint() != first


def test_a_blend_draws_by_weight(content, corpus, tmp_path, process_group):
    content["data"]["train"] = {f"{corpus}_train": 3.0, f"{corpus}_valid": 1.0}
    content["train"]["steps"] = 50
    _, _, train, _ = build(content, tmp_path)
    drawn = np.bincount(train.dataset_index[:200], minlength=2) / 200
    assert drawn == pytest.approx([0.75, 0.25], abs=0.01)


def test_a_list_of_prefixes_weighs_tokens_and_repeats_as_needed(
    content, corpus, tmp_path, process_group
):
    content["data"]["train"] = [f"{corpus}_train", f"{corpus}_valid"]
    content["train"]["steps"] = 500  # several passes over the data
    recipe, checked, train, _ = build(content, tmp_path)
    tokens = np.array([file.tokens for file in checked.train])
    drawn = np.bincount(train.dataset_index[:2000], minlength=2) / 2000
    assert len(train) >= 2000
    assert drawn == pytest.approx(tokens / tokens.sum(), abs=0.01)


def test_a_batch_of_a_blend_holds_the_samples_it_drew(content, corpus, tmp_path, process_group):
    """Whatever else Megatron's datasets tell about a sample."""
    content["data"]["train"] = {f"{corpus}_train": 1.0, f"{corpus}_valid": 1.0}
    recipe, _, train, _ = build(content, tmp_path)
    micro_batches = Batches(train, recipe, 0, 1).load(3, torch.device("cpu"))
    drawn = [train[i] for i in range(12, 16)]
    assert {int(sample["dataset_id"]) for sample in drawn} == {0, 1}
    assert [sorted(m) for m in micro_batches] == [
        ["labels", "loss_mask", "position_ids", "tokens"]
    ] * 2
    for name in micro_batches[0]:
        rows = torch.cat([m[name] for m in micro_batches])
        assert torch.equal(rows, torch.stack([sample[name] for sample in drawn]))


@pytest.mark.parametrize("kind", ["weights", "list", "split", "valid"])
def test_a_blend_trains_and_evaluates(content, corpus, run_dir, train, kind):
    both = [f"{corpus}_train", f"{corpus}_valid"]
    content["data"] |= {
        "weights": {"train": dict.fromkeys(both, 0.5)},
        "list": {"train": both},
        "split": {"train": both, "valid": None, "split": "70,30,0"},
        "valid": {"valid": both},
    }[kind]
    assert train(steps=3) == 0
    history = read_run(run_dir).events
    losses = [e["loss"] for e in history if "loss" in e]
    assert [e["type"] for e in history if "loss" in e] == ["train"] * 3 + ["eval"]
    assert losses[0] == pytest.approx(math.log(264), abs=0.1)
    assert losses[-1] < losses[0] - 0.3


def test_rewritten_files_are_not_read_through_an_old_index(content, tmp_path, process_group):
    prefix, texts = tmp_path / "d", {}
    content["data"] |= {"train": [str(prefix)], "valid": None, "split": "100,0,0"}
    content["train"]["eval_interval"] = None
    for version, word in enumerate(("first ", "second ")):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / "a.txt").write_text(word * (100 + version))
        Path(f"{prefix}.json").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            Path(f"{prefix}{ending}").unlink(missing_ok=True)
        prepare(
            Request(source=str(tmp_path / "in"), valid_fraction=0.0), str(prefix), ByteTokenizer()
        )
        texts[word] = text_of(build(content, tmp_path)[2][0])
    assert "first" in texts["first "]
    assert "second" in texts["second "]
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_a_split_that_leaves_nothing_is_refused(content, corpus):
    content["data"] |= {"valid": None, "split": "999,1,0"}
    content["train"]["eval_interval"] = 2
    with pytest.raises(
        RecipeError, match=r"data.split='999,1,0': leaves no document for valid of the \d+ in"
    ):
        check_files(Recipe.parse(content))


@pytest.mark.parametrize(
    ("split", "evaluates"), [("98,2,0", False), ("80,19,1", False), ("80,18,2", True)]
)
def test_shares_that_nobody_reads_may_be_without_a_document(
    content, corpus, tmp_path, process_group, monkeypatch, split, evaluates
):
    """Megatron would look for their tokens forever."""
    monkeypatch.setattr(GPTDataset, "_get_num_epochs", within_limits(GPTDataset._get_num_epochs))
    write_documents(tmp_path / "few", [[i] * (40 + i) for i in range(10)])
    content["data"] |= {"train": [str(tmp_path / "few")], "valid": None, "split": split}
    content["train"]["eval_interval"] = 3 if evaluates else None
    _, _, train, valid = build(content, tmp_path)
    in_train = 10 if split.startswith("98") else 8
    drawn = {int(i) for n in range(len(train)) for i in train[n]["tokens"]}
    assert drawn == set(range(in_train))
    assert (valid is not None) == evaluates
    if evaluates:
        assert {int(i) for n in range(len(valid)) for i in valid[n]["tokens"]} == {8, 9}


def within_limits(count_epochs):
    """`_get_num_epochs` that fails where it would never return."""

    def count(self, tokens_per_epoch):
        assert tokens_per_epoch > 0
        return count_epochs(self, tokens_per_epoch)

    return count


def write_documents(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in documents:
        builder.add_document(np.array(ids, dtype=np.uint16), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def test_a_resume_on_other_processes_continues_the_order_over_an_epoch(
    content, tmp_path, process_group
):
    """Documents shorter and longer than a sample, an empty one, and a last sample that is only begun."""
    write_documents(tmp_path / "d", [[7 * i % 250] * (5 * i) for i in range(1, 20)] + [[], [3]])
    write_documents(tmp_path / "v", [[7, 256]])  # one evaluation reads it 64 times
    content["data"] |= {"train": [str(tmp_path / "d")], "valid": [str(tmp_path / "v")]}
    content["train"]["steps"] = 40

    def batches(micro_batch_size, dp_size, steps):
        content["train"]["micro_batch_size"] = micro_batch_size
        recipe, checked, train, valid = build(content, tmp_path / f"{micro_batch_size}{dp_size}")
        ranks = [Batches(train, recipe, rank, dp_size) for rank in range(dp_size)]
        loaded = [[m for r in ranks for m in r.load(n, torch.device("cpu"))] for n in steps]
        assert valid[7]["tokens"].tolist() == [7, 256] * 16
        epoch = (checked.train[0].tokens - 1) // 32
        return epoch, [
            sorted(tuple(row.tolist()) for m in step for row in m["tokens"]) for step in loaded
        ]

    epoch, whole = batches(2, 1, range(40))
    assert epoch < 4 * 20  # the resume at 20 lies beyond the first pass
    for micro_batch_size, dp_size in ((1, 4), (4, 1), (2, 2)):
        assert batches(micro_batch_size, dp_size, range(20, 40))[1] == whole[20:]


def test_a_tokenizer_larger_than_the_model_is_refused(content):
    content["model"]["vocab_size"] = 256
    with pytest.raises(
        RecipeError, match=r"model.vocab_size=256: the byte tokenizer has 257 tokens"
    ):
        check_files(Recipe.parse(content))


def test_missing_data_is_prepared_once(content, tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.md").write_text(f"note {i} " * 20)
    content["data"] |= {
        "train": [str(tmp_path / "p_train")],
        "valid": [str(tmp_path / "p_valid")],
        "prepare": {"source": str(tmp_path / "in")},
    }
    data = Recipe.parse(content).data
    prepare_missing(data)
    made = (tmp_path / "p_train.bin").stat()
    prepare_missing(data)
    assert (tmp_path / "p_train.bin").stat() == made
    check_files(Recipe.parse(content))


def test_prepared_prefixes_must_be_named_as_prepare_names_them(content, tmp_path):
    content["data"] |= {"train": ["a"], "valid": ["b"], "prepare": {"source": str(tmp_path)}}
    with pytest.raises(RecipeError, match=r"data.prepare makes PREFIX_train and PREFIX_valid"):
        prepare_missing(Recipe.parse(content).data)
