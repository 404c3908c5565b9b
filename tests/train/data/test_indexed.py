import json

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from fp4mega.train.data.indexed import check_token_file, check_vocabulary
from fp4mega.train.data.tokenizers import ByteTokenizer


def write_pair(prefix, documents, dtype=np.uint16):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        builder.add_document(np.array(ids, dtype=dtype), [len(ids)])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture
def prefix(tmp_path):
    write_pair(tmp_path / "data", [[1, 2, 3, 256], [5, 256], list(range(100))])
    return str(tmp_path / "data")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_good_pair_reports_its_lengths(tmp_path, dtype):
    write_pair(tmp_path / "x", [[1, 2, 3], [4]], dtype)
    file = check_token_file(str(tmp_path / "x"))
    assert (file.tokens, file.lengths.tolist(), file.dtype) == (4, [3, 1], np.dtype(dtype))


def cut(path, size):
    with open(path, "r+b") as stream:
        stream.truncate(size)


def overwrite(path, offset, content):
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: cut(p + ".bin", 211),
            r"data.bin: 211 bytes, but data.idx describes 106 tokens of 2 bytes = 212 bytes",
        ),
        (lambda p: overwrite(p + ".bin", 212, b"xx"), r"data.bin: 214 bytes, but .* = 212 bytes"),
        (lambda p: cut(p + ".bin", 0), r"data.bin: 0 bytes, but .* = 212 bytes"),
        (lambda p: cut(p + ".idx", 20), r"data.idx: 20 bytes are less than the 34 of a header"),
        (
            lambda p: cut(p + ".idx", 90),
            r"data.idx: 90 bytes, expected 102 for 3 sequences and 4 boundaries",
        ),
        (lambda p: overwrite(p + ".idx", 0, b"GARBAGE"), r"data.idx: starts with b'GARBAGE"),
        (
            lambda p: overwrite(p + ".idx", 17, b"\x06"),
            r"data.idx: dtype code 6 holds no token ids",
        ),
        (
            lambda p: overwrite(p + ".idx", 46, b"\xff" * 8),
            r"data.idx: describes a sequence outside the 212 bytes",
        ),
    ],
)
def test_damage_is_named_with_sizes(prefix, damage, message):
    check_token_file(prefix)
    damage(prefix)
    with pytest.raises(ValueError, match=message):
        check_token_file(prefix)


def test_a_bin_of_another_idx_is_refused(prefix, tmp_path):
    write_pair(tmp_path / "other", [[1] * 50])
    (tmp_path / "other.bin").replace(prefix + ".bin")
    with pytest.raises(ValueError, match=r"data.bin: 100 bytes, but data.idx describes 106 tokens"):
        check_token_file(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_half_is_named(prefix, tmp_path, ending):
    (tmp_path / f"data{ending}").unlink()
    with pytest.raises(
        ValueError, match=rf"data{ending}: no such file; expected the pair data.idx and data.bin"
    ):
        check_token_file(prefix)


def test_no_tokens_is_an_error(tmp_path):
    write_pair(tmp_path / "empty", [])
    with pytest.raises(ValueError, match=r"empty.idx: holds no tokens"):
        check_token_file(str(tmp_path / "empty"))


def test_an_id_outside_the_vocabulary_is_named(prefix):
    file = check_token_file(prefix)
    check_vocabulary(file, ByteTokenizer(), 257)
    with pytest.raises(
        ValueError, match=r"data.bin: holds token id 256, model.vocab_size=256 allows 0 to 255"
    ):
        check_vocabulary(file, ByteTokenizer(), 256)


@pytest.mark.parametrize(
    "text",
    ['{"text": "a"}\n{"text": "b"}\n', "[1]", "", '{"text": "a"}', "\xff", "[" * 100_000, "null"],
    ids=["lines", "list", "empty", "other", "latin", "deep", "null"],
)
def test_a_json_file_that_is_no_description_is_named(tmp_path, text):
    write_pair(tmp_path / "mine_train", [[1, 2]])
    (tmp_path / "mine.json").write_text(text, encoding="latin-1")
    file = check_token_file(str(tmp_path / "mine_train"))
    with pytest.raises(
        ValueError, match=r"mine.json: not a description of prepared data \(.*\); rename it"
    ):
        check_vocabulary(file, ByteTokenizer(), 257)


@pytest.mark.parametrize("split", ["", "_train", "_valid"])
def test_the_tokenizer_of_the_sidecar_must_be_the_recipes(tmp_path, split):
    write_pair(tmp_path / f"d{split}", [[1, 2]])
    (tmp_path / "d.json").write_text(json.dumps({"tokenizer": {"kind": "huggingface"}}))
    with pytest.raises(
        ValueError, match=r"tokenized with .*huggingface.*, the recipe's tokenizer is .*byte"
    ):
        check_vocabulary(check_token_file(str(tmp_path / f"d{split}")), ByteTokenizer(), 257)
