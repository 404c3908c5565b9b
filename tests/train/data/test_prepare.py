import json
import os
import re
import signal
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from fp4mega.train.data.prepare import Request, is_prepared, main, prepare
from fp4mega.train.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


def make_folder(path, count=40):
    texts = {
        f"{i % 3}/file{i:02d}.txt": f"document {i}\n" + "word é " * (i + 1) for i in range(count)
    }
    for name, text in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return list(texts.values())


def documents(prefix):
    dataset = IndexedDataset(str(prefix))
    return [BYTES.detokenize(dataset[i].tolist()) for i in range(len(dataset))]


def test_prepared_data_decodes_back_to_the_text(tmp_path):
    texts = make_folder(tmp_path / "in")
    content = prepare(
        Request(source=str(tmp_path / "in"), valid_fraction=0.2), str(tmp_path / "out"), BYTES
    )
    train, valid = documents(tmp_path / "out_train"), documents(tmp_path / "out_valid")
    assert sorted(train + valid) == sorted(texts)
    assert 0 < len(valid) < len(train)
    assert content["splits"]["train"]["documents"] == len(train)
    assert content["splits"]["valid"]["tokens"] == sum(len(t.encode()) + 1 for t in valid)
    assert json.loads((tmp_path / "out.json").read_text()) == content


def test_every_document_ends_in_eod_and_only_there(tmp_path):
    make_folder(tmp_path / "in", 5)
    prepare(Request(source=str(tmp_path / "in"), valid_fraction=0.0), str(tmp_path / "out"), BYTES)
    dataset = IndexedDataset(str(tmp_path / "out"))
    assert all((dataset[i] == 256).nonzero()[0].tolist() == [len(dataset[i]) - 1] for i in range(5))


def test_the_split_of_a_document_does_not_depend_on_the_others(tmp_path):
    make_folder(tmp_path / "in", 40)
    request = Request(source=str(tmp_path / "in"), valid_fraction=0.3)
    prepare(request, str(tmp_path / "few"), BYTES)
    few = [set(documents(tmp_path / f"few_{name}")) for name in ("train", "valid")]
    make_folder(tmp_path / "in", 80)
    prepare(request, str(tmp_path / "more"), BYTES)
    more = [set(documents(tmp_path / f"more_{name}")) for name in ("train", "valid")]
    assert few[0] < more[0]
    assert few[1] < more[1]


def test_two_preparations_are_the_same_bytes(tmp_path):
    make_folder(tmp_path / "in")
    for name in ("a", "b"):
        prepare(
            Request(source=str(tmp_path / "in"), valid_fraction=0.1), str(tmp_path / name), BYTES
        )
    for ending in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx", ".json"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path):
    folder = tmp_path / "in"
    make_folder(folder, 4)
    (folder / "copy.txt").write_bytes((folder / "0/file00.txt").read_bytes())
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "blank.txt").write_text(" \n\t")
    (folder / "other.bin").write_text("another suffix")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    content = prepare(Request(source=str(folder)), str(tmp_path / "out"), BYTES)
    assert content["skipped_files"] == {"duplicate": 1, "empty": 1, "not_text": 3}
    assert sum(part["documents"] for part in content["splits"].values()) == 4


def test_a_byte_order_mark_is_no_text(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in {
        "a": b"one\n",
        "b": b"\xef\xbb\xbfone\n",
        "c": b"\xef\xbb\xbf two",
    }.items():
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "d.txt").write_bytes(b"\xef\xbb\xbf")
    (folder / "e.txt").write_bytes("two".encode("utf-16"))
    content = prepare(Request(source=str(folder), valid_fraction=0.0), str(tmp_path / "out"), BYTES)
    assert content["skipped_files"] == {"duplicate": 1, "empty": 1, "not_text": 1}
    ids = np.fromfile(tmp_path / "out.bin", dtype=np.uint16).tolist()
    assert sorted([ids[:5], ids[5:]]) == [[*b" two", 256], [*b"one\n", 256]]


def test_max_bytes_is_kept(tmp_path):
    make_folder(tmp_path / "in")
    content = prepare(
        Request(source=str(tmp_path / "in"), max_bytes=900), str(tmp_path / "out"), BYTES
    )
    total = sum(part["bytes"] for part in content["splits"].values())
    assert 600 < total <= 900


def test_an_interrupt_leaves_earlier_files_and_nothing_else(tmp_path):
    make_folder(tmp_path / "in")
    request = Request(source=str(tmp_path / "in"))
    prepare(request, str(tmp_path / "out"), BYTES)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    class Interrupted(ByteTokenizer):
        calls = 0

        def document(self, text):
            self.calls += 1
            if self.calls == 15:
                raise KeyboardInterrupt
            return super().document(text)

    with pytest.raises(KeyboardInterrupt):
        prepare(request, str(tmp_path / "out"), Interrupted())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_is_prepared_compares_request_and_tokenizer(tmp_path):
    make_folder(tmp_path / "in")
    request, out = Request(source=str(tmp_path / "in")), str(tmp_path / "out")
    assert not is_prepared(request, out, BYTES)
    prepare(request, out, BYTES)
    assert is_prepared(request, out, BYTES)
    with pytest.raises(ValueError, match="max_bytes=None there, 5 asked for"):
        is_prepared(Request(source=str(tmp_path / "in"), max_bytes=5), out, BYTES)


@pytest.mark.parametrize(
    "text", ["[1]", '{"request": 5, "tokenizer": {}}', '{"tokenizer": {}}', "x"]
)
def test_a_sidecar_that_is_no_description_is_named(tmp_path, text):
    make_folder(tmp_path / "in", 3)
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(ValueError, match=r"out.json: not a description of prepared data \("):
        is_prepared(Request(source=str(tmp_path / "in")), str(tmp_path / "out"), BYTES)


def test_another_request_does_not_replace_prepared_data(tmp_path, capsys):
    make_folder(tmp_path / "in")
    arguments = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert main([*arguments, "--max-bytes", "900"]) == 2
    told = capsys.readouterr().err
    assert "max_bytes=None there, 900 asked for" in told
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    make_folder(tmp_path / "in", 60)
    assert main(arguments) == 0  # the same request, of a source that grew
    assert (tmp_path / "out_train.bin").stat().st_size > len(before["out_train.bin"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_under_a_temporary_name(
    tmp_path, capsys, monkeypatch, number, code
):
    make_folder(tmp_path / "in")
    handler = signal.getsignal(signal.SIGTERM)
    # A shell starts what runs in the background with SIGINT ignored.
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    document, calls = ByteTokenizer.document, 0

    def signalled(tokenizer, text):
        nonlocal calls
        calls += 1
        if calls == 15:
            os.kill(os.getpid(), number)
        return document(tokenizer, text)

    monkeypatch.setattr(ByteTokenizer, "document", signalled)
    arguments = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    try:
        if number == signal.SIGINT:
            assert main(arguments) == code
            assert "error: interrupted" in capsys.readouterr().err
        else:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            assert ended.value.code == code
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert calls >= 15
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_files_of_somebody_else_are_not_overwritten(tmp_path):
    make_folder(tmp_path / "in")
    (tmp_path / "out_train.bin").write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"out_train.bin: exists"):
        prepare(Request(source=str(tmp_path / "in")), str(tmp_path / "out"), BYTES)
    assert (tmp_path / "out_train.bin").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "{dir}/none"], "none is not a folder"),
        (["--source", "{dir}/in", "--suffixes", ".rs"], "no file under .* ends in .rs"),
        (["--source", "{dir}/in", "--max-bytes", "0"], "max_bytes=0: expected 1 or more"),
        (["--source", "{dir}/in", "--max-bytes", "20"], "too few for valid_fraction=0.02"),
        (["--source", "{dir}/in", "--valid-fraction", "1"], "valid_fraction=1.0"),
        (["--source", "{dir}/in", "--tokenizer", "words"], "tokenizer kind='words'"),
    ],
)
def test_the_command_refuses_bad_input_in_one_message(tmp_path, capsys, arguments, message):
    make_folder(tmp_path / "in", 3)
    arguments = [a.replace("{dir}", str(tmp_path)) for a in arguments]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert not list(tmp_path.glob("out*"))
    assert re.search(message, capsys.readouterr().err)


def test_the_command_prepares_the_standard_library(tmp_path, capsys):
    out = tmp_path / "stdlib"
    command = [
        "--source",
        "python_stdlib",
        "--out",
        str(out),
        "--max-bytes",
        "300000",
        "--valid-fraction",
        "0.1",
    ]
    assert main(command) == 0
    train, valid = documents(f"{out}_train"), documents(f"{out}_valid")
    assert 200_000 < sum(len(t.encode()) for t in train + valid) <= 300_000
    library = Path(sysconfig.get_path("stdlib"))
    own = {
        path.read_text("utf-8", errors="replace")
        for path in library.rglob("*.py")
        if "site-packages" not in path.parts
    }
    assert set(train) | set(valid) <= own
    assert f"{out}_valid: {len(valid)} documents" in capsys.readouterr().err
