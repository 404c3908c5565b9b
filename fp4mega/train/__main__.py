"""`python -m fp4mega.train RECIPE [section.field=value ...]`: run a recipe, alone or under torchrun.

Exit codes: 0 finished, 1 training failed, 2 bad input (one message, nothing started), 130 and 143 stopped by SIGINT and
SIGTERM after a whole step and a checkpoint.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp4mega.train", description="Run a recipe, alone or under torchrun."
    )
    parser.add_argument(
        "recipe", help="a YAML file, such as recipes/runs/tiny_nvfp4_qk_fp8_pv.yaml"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="replace fields of the recipe"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the resolved recipe and its digest, and stop"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the recipe, print a summary, and stop"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory and messages of every process of a job of --world-size, and stop",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="processes that --dry-run and --plan assume (default 1)",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, help="GPUs of one machine, for --plan (default 4)"
    )
    parser.add_argument(
        "--gpus-per-domain",
        type=int,
        help="GPUs that NVLink joins, for --plan (default: those of a node; 72 in an NVL72 rack)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device that --dry-run and --plan assume (default cuda)",
    )
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, none of which is ignored: one that has no meaning beside the others ends the command."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.plan and (options.print or options.dry_run):
        parser.error("--plan: not allowed with --print or --dry-run; call it on its own")
    needs = {
        "--world-size": "--dry-run or --plan",
        "--device": "--dry-run or --plan",
        "--gpus-per-node": "--plan",
        "--gpus-per-domain": "--plan",
    }
    for option, needed in needs.items():
        value = getattr(options, option.removeprefix("--").replace("-", "_"))
        if value is not None and not (options.plan or (options.dry_run and "dry" in needed)):
            parser.error(f"{option} {value}: needs {needed}")
    if options.world_size is None:
        options.world_size = 1
    options.device = options.device or "cuda"
    return options


def _check_only(options: argparse.Namespace) -> int:
    """--print and --dry-run: neither Megatron nor a device."""
    from fp4mega.train import load_recipe, resolved_yaml
    from fp4mega.train.validate import describe, validate

    recipe = load_recipe(options.recipe, options.overrides)
    if options.print:
        sys.stdout.write(f"# digest {recipe.digest}\n{resolved_yaml(recipe)}")
    if options.dry_run:
        validate(recipe, options.world_size, options.device)
        sys.stdout.write(f"{describe(recipe, options.world_size)}\n")
    return 0


def _plan(options: argparse.Namespace) -> int:
    """--plan: Megatron on the meta device."""
    from fp4mega.train import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    # Of Megatron and torch, about each other and what is not installed.
    warnings.filterwarnings("ignore")
    from fp4mega.train.plan import make_plan
    from fp4mega.train.plan_table import Machines, format_plan

    per_node = 4 if options.gpus_per_node is None else options.gpus_per_node
    per_domain = per_node if options.gpus_per_domain is None else options.gpus_per_domain
    machines = Machines(per_node, per_domain)
    plan = make_plan(recipe, options.world_size, options.device)
    sys.stdout.write(f"{format_plan(plan, machines)}\n")
    return 0


def _train(options: argparse.Namespace) -> int:
    from fp4mega.train import load_recipe
    from fp4mega.train.launch import find_launch

    recipe = load_recipe(options.recipe, options.overrides)
    launch = find_launch()
    # What is not installed is known from the manifest; Megatron says it a dozen times on import.
    warnings.filterwarnings("ignore", message=r".*Apex (is|are) not installed")
    # A default of Megatron's own configuration.
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    from fp4mega.train.loop import run

    logging.basicConfig(format="%(message)s")
    logging.getLogger("fp4mega").setLevel(logging.INFO if launch.is_first else logging.ERROR)

    return run(recipe, launch)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from fp4mega.train import RecipeError

    options = _parse(arguments)
    try:
        if options.print or options.dry_run:
            return _check_only(options)
        return _plan(options) if options.plan else _train(options)
    except RecipeError as error:
        return _fail(2, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except (OSError, RuntimeError) as error:
        from fp4mega.train.checkpoint import CheckpointError
        from fp4mega.train.loop import TrainingError

        # A full disk fails the checkpoint first, and then the event that says so.
        told = error.__context__ if isinstance(error, OSError) else error
        if isinstance(told, TrainingError | CheckpointError):
            return _fail(1, told)
        if isinstance(error, OSError):
            return _fail(1, error)
        raise


def _fail(code: int, error: object) -> int:
    sys.stderr.write(f"error: {error}\n")
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
