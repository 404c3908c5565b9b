"""The corpus from archives that lie where the clients would have put them: nothing here asks a registry."""

import gzip
import io
import json
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from fp4mega.train.data import packages
from fp4mega.train.data.corpus import main
from fp4mega.train.data.indexed import check_token_file, check_vocabulary
from fp4mega.train.data.packages import read_files, read_list
from fp4mega.train.data.tokenizers import build_tokenizer

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")


def words(seed, count=60):
    return "".join(
        f"In module {seed} the function number {i} returns value {(seed * 7919 + i * 31) % 1009}.\n"
        for i in range(count)
    )


def make_wheel(folder, name, files, *, licence="License-Expression: MIT\n"):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\nLicense: no header",
        )


def make_deb(folder, name, files):
    root = folder / "root"
    for path, content in {"DEBIAN/control": CONTROL.format(name=name), **files}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "usr" / "link.txt").symlink_to("elsewhere.txt")
    made = folder / f"{name}_1%3a2.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", root, made], check=True, capture_output=True)
    shutil.rmtree(root)


CONTROL = (
    "Package: {name}\nVersion: 1:2.0\nArchitecture: all\nMaintainer: a <a@b>\nDescription: d\n"
)


@pytest.fixture
def prepared(tmp_path):
    """A list of two wheels, and their archives."""
    archives = tmp_path / "c_work" / "archives"
    make_wheel(
        archives / "pypi_one",
        "one",
        {f"one/m{i}.py": words(i) for i in range(60)} | {"one/data.bin": b"\0" * 900},
    )
    make_wheel(
        archives / "pypi_two",
        "two",
        {f"two/m{i}.py": words(100 + i) for i in range(30)}
        | {"two/copy.py": words(3), "two/nearly.py": words(4) + "# end of the module here\n"},
        licence="Classifier: License :: OSI Approved :: BSD License\n",
    )
    (tmp_path / "list.txt").write_text("pypi one==1.0\npypi two==1.0 max_mb=9 # why\n")
    return tmp_path


def build(folder, *options):
    return main([str(folder / "list.txt"), "--out", str(folder / "c"), *SMALL, *options])


SMALL = ("--vocab-size", "600", "--valid-fraction", "0.1")


def read(folder):
    tokenizer = build_tokenizer("huggingface", str(folder / "c_tokenizer.json"))
    split = {}
    for name in ("train", "valid"):
        dataset = IndexedDataset(str(folder / f"c_{name}"))
        split[name] = [tokenizer.detokenize(dataset[i].tolist()) for i in range(len(dataset))]
    return split


def test_documents_come_back_once_each_and_are_held_out_whole(prepared):
    assert build(prepared) == 0
    split = read(prepared)
    kept = [*(words(i) for i in range(60)), *(words(100 + i) for i in range(30))]
    assert sorted(split["train"] + split["valid"]) == sorted(kept)
    assert 0 < len(split["valid"]) < 30
    manifest = json.loads((prepared / "c_manifest.json").read_text())
    assert manifest["outcome"] == {"kept": 90, "exact_duplicate": 1, "near_duplicate": 1}
    one, two = manifest["packages"]
    assert (one["licence"], two["licence"]) == ("MIT", "BSD License")
    assert (one["version"], one["documents"], two["kept_documents"]) == ("1.0", 60, 30)
    assert two["kept_bytes"] == sum(len(words(100 + i)) for i in range(30))


def test_files_are_those_that_training_checks(prepared):
    assert build(prepared) == 0
    tokenizer = build_tokenizer("huggingface", str(prepared / "c_tokenizer.json"))
    file = check_token_file(str(prepared / "c_train"))
    check_vocabulary(file, tokenizer, 600)
    made = json.loads((prepared / "c.json").read_text())
    assert made["splits"]["train"]["tokens"] == file.tokens
    dataset = IndexedDataset(str(prepared / "c_train"))
    assert all(dataset[i][-1] == tokenizer.eod for i in range(len(dataset)))


def test_the_same_archives_give_the_same_files(prepared, tmp_path):
    assert build(prepared) == 0
    names = ("c_train.bin", "c_train.idx", "c_valid.bin", "c_tokenizer.json", "c.json")
    before = {name: (prepared / name).read_bytes() for name in names}
    for name in (*names, "c_valid.idx", "c_manifest.json"):
        (prepared / name).unlink()
    shutil.rmtree(prepared / "c_work" / "text")
    (prepared / "c_work" / "kept.json").unlink()
    assert build(prepared) == 0
    assert {name: (prepared / name).read_bytes() for name in names} == before


def test_an_interrupted_call_goes_on_with_what_it_has(prepared, monkeypatch):
    from fp4mega.train.data import corpus

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "train_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(prepared)
    assert not (prepared / "c.json").exists()
    monkeypatch.setattr(corpus, "read_files", None)
    monkeypatch.setattr(corpus, "deduplicate", None)
    assert build(prepared) == 0
    assert len(read(prepared)["train"]) > 50


def test_nothing_is_done_twice_and_nothing_else_is_replaced(prepared, capsys):
    assert build(prepared) == 0
    time = (prepared / "c_train.bin").stat().st_mtime_ns
    assert build(prepared) == 0
    assert (prepared / "c_train.bin").stat().st_mtime_ns == time
    assert main([str(prepared / "list.txt"), "--out", str(prepared / "c")]) == 2
    assert "made from another list or with other options" in capsys.readouterr().err


def test_more_text_than_max_bytes_is_cut_by_content(prepared):
    (prepared / "list.txt").write_text("pypi one==1.0\npypi two==1.0\n")
    folder = prepared / "c_work" / "archives" / "pypi_big"
    make_wheel(folder, "big", {f"big/m{i}.py": words(500 + i, 2400) for i in range(10)})
    (prepared / "list.txt").write_text("pypi big==1.0 max_mb=1\n")
    assert build(prepared) == 0
    entry = json.loads((prepared / "c_manifest.json").read_text())["packages"][0]
    assert 500_000 < entry["bytes"] <= 1_000_000
    assert entry["documents"] + entry["skipped"]["beyond_max_bytes"] == 10


def test_one_in_n_takes_some_files(prepared):
    (prepared / "list.txt").write_text("pypi one==1.0 one_in=3\n")
    assert build(prepared) == 0
    entry = json.loads((prepared / "c_manifest.json").read_text())["packages"][0]
    assert 8 < entry["documents"] < 35


def test_a_package_without_a_licence_is_an_error_until_the_list_names_it(prepared, capsys):
    make_wheel(
        prepared / "c_work" / "archives" / "pypi_two", "two", {"two/m.py": words(7)}, licence=""
    )
    assert build(prepared) == 2
    assert "state no licence that could be read: pypi two" in capsys.readouterr().err
    (prepared / "list.txt").write_text("pypi one==1.0\npypi two==1.0 licence=Zlib\n")
    assert build(prepared) == 0


def test_a_damaged_archive_is_named(prepared, capsys):
    path = next((prepared / "c_work" / "archives" / "pypi_one").glob("*.whl"))
    path.write_bytes(path.read_bytes()[:500])
    assert build(prepared) == 2
    assert f"{path}: damaged archive" in capsys.readouterr().err


def test_what_the_client_says_is_passed_on(prepared, capsys, monkeypatch):
    class Done:
        returncode, stdout, stderr = 1, "", "looking\nERROR: No matching distribution\n"

    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: Done)
    (prepared / "list.txt").write_text("pypi absent==3.0\n")
    assert build(prepared) == 2
    assert "pypi absent==3.0" in (said := capsys.readouterr().err)
    assert "ERROR: No matching distribution" in said


@needs_dpkg
def test_debian_packages_archives_inside_and_links(tmp_path):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as tar:
        info = tarfile.TarInfo("src/inner.c")
        info.size = len(words(1).encode())
        tar.addfile(info, io.BytesIO(words(1).encode()))
    make_deb(
        tmp_path,
        "doc",
        {
            "usr/share/doc/doc/guide.txt.gz": gzip.compress(words(2).encode()),
            "usr/share/doc/doc/copyright": "Format: x\nFiles: *\nLicense: GPL-2+\n Text\n\nLicense: MIT\n\nLicense: Permission is granted to anyone to do this\n",
            "usr/src/all.tar.xz": inner.getvalue(),
            "usr/src/broken.tar.gz": b"",
            "usr/src/large.txt": b"x" * 300_000,
        },
    )
    archive = next(tmp_path.glob("*.deb"))
    found = dict(read_files(archive, (".c", ".txt", "/copyright")))
    assert {name.rpartition("/")[2] for name in found} == {"inner.c", "guide.txt", "copyright"}
    assert found["./usr/share/doc/doc/guide.txt"].decode() == words(2)
    package = packages.Package("debian", "doc")
    stated = found["./usr/share/doc/doc/copyright"]
    assert packages.licence_of(package, archive, stated) == "GPL-2+, MIT"
    assert packages.version_of(archive) == "1:2.0"
    assert (
        packages.licence_of(package, archive, b"see /usr/share/common-licenses/GPL-3.") == "GPL-3"
    )
    archive.write_bytes(archive.read_bytes()[:-900])
    with pytest.raises(ValueError, match=r"damaged archive|dpkg-deb ended with"):
        dict(read_files(archive, (".c",)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("npm left-pad", "REGISTRY one of pypi, debian"),
        ("pypi", "expected REGISTRY NAME"),
        ("pypi ../x", "name='../x'"),
        ("pypi one max_mb=0", "max_mb=N and one_in=N with N of 1 or more"),
        ("pypi one colour=red", "'colour=red'"),
        ("pypi one\npypi one==2", "listed twice: pypi one"),
        ("# nothing", "lists no package"),
    ],
)
def test_a_wrong_list_names_its_line(tmp_path, line, message):
    (tmp_path / "list.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"list\.txt") as told:
        read_list(tmp_path / "list.txt")
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "100"], "vocab_size=100"),
        (["--valid-fraction", "0"], "valid_fraction=0.0"),
        (["--sample-bytes", "0"], "sample_bytes=0"),
    ],
)
def test_options_out_of_range(prepared, capsys, options, message):
    assert build(prepared, *options) == 2
    assert message in capsys.readouterr().err


def test_the_list_of_the_study_is_well_formed(pytestconfig):
    listed = read_list(pytestconfig.rootpath / "launch" / "corpus.txt")
    assert len(listed) > 80
    assert all(p.version for p in listed if p.registry == "pypi")
