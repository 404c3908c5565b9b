"""A plan as text: what each process holds, and what it sends over which link."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fp4mega.attention import AttentionProblem, get_policy
from fp4mega.train.backends import attention_problem
from fp4mega.train.plan import Plan, attention_saves
from fp4mega.train.recipe import ParallelSection, Recipe, RecipeError
from fp4mega.train.validate import describe, layer_policies, parameter_count


@dataclass(frozen=True, slots=True)
class Machines:
    """Where ranks sit: in order, `per_node` to a machine, `per_domain` to a group of machines that NVLink joins."""

    per_node: int
    per_domain: int

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.per_domain < 1 or self.per_domain % self.per_node:
            raise RecipeError(
                f"--gpus-per-node={self.per_node} --gpus-per-domain={self.per_domain}: expected 1 or more, the second a "
                "multiple of the first"
            )

    def link(self, ranks: Sequence[int]) -> str:
        """The widest way that these processes talk to one another over."""
        for size, name in ((self.per_node, "node"), (self.per_domain, "domain")):
            if len({rank // size for rank in ranks}) == 1:
                return name
        return "network"


def format_plan(plan: Plan, machines: Machines) -> str:
    """The plan to read: a summary of the recipe, a table of memory and one of messages, in GiB and GB (10^9)."""
    recipe = plan.recipe
    lines = [describe(recipe, plan.world_size), "", *_memory_table(plan), ""]
    lines += _attention_lines(recipe)
    lines += ["", *_traffic_table(plan, machines)]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_MEMORY = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "held for backward, a micro-batch": "held",
    "most, forward and backward": "forward_backward",
    "most, update": "update",
}


def _memory_table(plan: Plan) -> list[str]:
    stages = plan.stages
    head = ("memory, GiB", *(f"stage {stage.stage}" for stage in stages), "all processes")
    rows = [head]
    rows.append(
        (
            "processes",
            *(str(plan.processes_per_stage) for _ in stages),
            str(plan.world_size),
        )
    )
    rows.append(
        (
            "parameters, number",
            *(f"{stage.parameters:,}" for stage in stages),
            f"{parameter_count(plan.recipe.model):,} distinct",
        )
    )
    for name, figure in _MEMORY.items():
        total = _gib(plan.total(figure)) if figure.endswith("_bytes") else ""
        rows.append((name, *(_gib(getattr(stage, figure)) for stage in stages), total))
    rows.append(("forwards in flight", *(str(stage.in_flight) for stage in stages), ""))
    return _table(rows)


def _attention_lines(recipe: Recipe) -> Iterator[str]:
    """What each policy keeps in a layer, beside BF16."""
    saved: Counter[tuple[str, AttentionProblem]] = (
        Counter()
    )  # policy and shape of the problem, to the number of its layers
    for layer, name in enumerate(layer_policies(recipe)):
        saved[name, _share(attention_problem(recipe, layer), recipe.parallel)] += 1
    for (name, problem), count in saved.items():
        size = attention_saves(problem, get_policy(name))
        plain = attention_saves(problem, get_policy("bf16"))
        if recipe.train.recompute == "none":
            yield (
                f"attention, {count} layers of {name}: {size / 2**20:,.1f} MiB a layer and micro-batch held for "
                f"backward, {100 * size / plain:.0f} % of what bf16 holds ({plain / 2**20:,.1f} MiB)"
            )
        else:
            yield (
                f"attention, {count} layers of {name}: recomputed; {size / 2**20:,.1f} MiB for the layer at hand"
            )


def _share(problem: AttentionProblem, parallel: ParallelSection) -> AttentionProblem:
    """What one context-parallel process keeps of a sequence: its rows, or by `a2a` all rows of its heads."""
    ranks = 1 if parallel.cp_comm_type == "a2a" else parallel.context
    return replace(problem, seqlen_q=problem.seqlen_q // ranks, seqlen_k=problem.seqlen_k // ranks)


def _traffic_table(plan: Plan, machines: Machines) -> Iterator[str]:
    yield (
        f"messages of one process in an update (GB = 10^9 bytes; {machines.per_node} GPUs a node, "
        f"{machines.per_domain} a domain)"
    )
    rows = [("stage", "when", "what", "group", "processes", "link", "messages", "of GB", "sent GB")]
    everywhere: Counter[str] = Counter()
    for stage in plan.stages:
        for t in stage.traffic:
            link = machines.link(t.ranks)
            everywhere[link] += t.sent * plan.processes_per_stage
            rows.append(
                (
                    str(stage.stage),
                    t.when,
                    t.kind,
                    t.group,
                    str(len(t.ranks)),
                    link,
                    str(t.count),
                    _gb(t.payload),
                    _gb(t.sent),
                )
            )
    if len(rows) == 1:
        yield "none: one process talks to nobody"
        return
    yield from _table(rows)
    yield "all processes together: " + ", ".join(
        f"{_gb(sent)} GB over {link}" for link, sent in everywhere.items()
    )
