"""`python -m fp4mega.train`: what it prints, and how it refuses bad input."""

import pytest
import yaml

from fp4mega.train.__main__ import main
from fp4mega.train.loader import load_recipe
from fp4mega.train.recipe import Recipe


@pytest.fixture
def recipe_file(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(autouse=True)
def no_process_groups(monkeypatch):
    """Nothing here may get as far as a process group."""
    import torch.distributed

    monkeypatch.setattr(torch.distributed, "init_process_group", None)


def test_print_shows_a_recipe_that_loads_to_the_same_digest(recipe_file, tmp_path, capsys):
    assert main([recipe_file, "train.steps=9", "attention.policy=nvfp4_qk_fp8_pv", "--print"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    recipe = load_recipe(tmp_path / "again.yaml")
    assert printed.startswith(f"# digest {recipe.digest}\n")
    assert (recipe.train.steps, recipe.attention.policy) == (9, "nvfp4_qk_fp8_pv")


def test_dry_run_checks_for_other_machines(recipe_file, capsys):
    assert main([recipe_file, "--dry-run", "--world-size", "2", "--device", "cuda"]) == 0
    summary = capsys.readouterr().out
    assert "107,840" in summary
    assert "data 2" in summary
    assert main([recipe_file, "--dry-run", "--world-size", "3"]) == 2
    assert "train.global_batch_size=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=3"], "train.stepz=3: unknown field; nearest is 'steps'"),
        (["attention.policy=nvfp4"], 'attention.policy="nvfp4": unknown policy'),
        (["attention.backend=tritan"], "attention.backend='tritan'"),
        (["parallel.tensor=2"], "world_size=1: must be a multiple of parallel.tensor"),
        (["parallel.context=2"], "world_size=1: must be a multiple of parallel.tensor"),
        (["data.train=[nowhere]"], "nowhere.idx: no such file"),
        (["model.vocab_size=200"], "model.vocab_size=200"),
        (["data.tokenizer={kind: huggingface, path: none.json}"], "none.json is not a file"),
        (["optimizer.state_dtype=bf16"], "set distributed=true"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(recipe_file, capsys, overrides, message):
    assert main([recipe_file, *overrides]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "64"], "--world-size 64: needs --dry-run or --plan"),
        (["--device", "cuda"], "--device cuda: needs --dry-run or --plan"),
        (["--print", "--world-size", "1"], "--world-size 1: needs --dry-run or --plan"),
        (["--gpus-per-node", "8"], "--gpus-per-node 8: needs --plan"),
        (["--dry-run", "--gpus-per-domain", "0"], "--gpus-per-domain 0: needs --plan"),
        (["--print", "--plan"], "--plan: not allowed with --print or --dry-run"),
        (["--dry-run", "--plan"], "--plan: not allowed with --print or --dry-run"),
    ],
)
def test_no_option_is_ignored(recipe_file, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        main([recipe_file, *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--gpus-per-domain", "--gpus-per-node"])
def test_a_plan_for_no_gpus_is_refused(recipe_file, capsys, option):
    assert main([recipe_file, "--plan", option, "0"]) == 2
    assert f"{option}=0" in capsys.readouterr().err


def test_a_truncated_file_is_refused_with_its_sizes(recipe_file, content, corpus, tmp_path, capsys):
    for ending in ("_train.bin", "_train.idx"):
        with open(f"{corpus}{ending}", "rb") as stream:
            (tmp_path / f"cut{ending}").write_bytes(stream.read())
    size = (tmp_path / "cut_train.bin").stat().st_size
    with open(tmp_path / "cut_train.bin", "r+b") as stream:
        stream.truncate(size - 1000)
    assert main([recipe_file, f"data.train=[{tmp_path}/cut_train]"]) == 2
    told = capsys.readouterr().err
    assert f"cut_train.bin: {size - 1000} bytes" in told
    assert f"= {size} bytes" in told


def test_a_disk_that_is_full_is_told_as_such(recipe_file, capsys, monkeypatch):
    def full(recipe, launch):
        raise OSError(28, "No space left on device", "events.jsonl")

    monkeypatch.setattr("fp4mega.train.loop.run", full)
    assert main([recipe_file]) == 1
    assert "No space left on device: 'events.jsonl'" in capsys.readouterr().err


def test_an_error_nobody_expected_keeps_its_traceback(recipe_file, monkeypatch):
    def broken(recipe, launch):
        raise ValueError("a bug")

    monkeypatch.setattr("fp4mega.train.loop.run", broken)
    with pytest.raises(ValueError, match="a bug"):
        main([recipe_file])


def test_the_recipe_of_the_fixture_is_valid(recipe_file, content):
    assert load_recipe(recipe_file) == Recipe.parse(content)
