"""Reading what compute-sanitizer prints: findings, each with the kernel it names."""

import re
from collections import Counter
from typing import NamedTuple

PREFIX = "========="


class Finding(NamedTuple):
    """One kind of report of one place in one kernel."""

    what: str
    kernel: str
    where: str


def findings(text: str) -> Counter[Finding]:
    """Every report that names a kernel, counted.

    A report is a line behind the prefix and the indented lines under it. A kernel is named as `at NAME+0x1d0` (with `in file:line`
    where there is line information), in racecheck as `access at NAME+0x1d0`, and demangled with its arguments.
    """
    found: Counter[Finding] = Counter()
    for report in _reports(text):
        place = re.search(
            r"\bat (?:void )?([A-Za-z_][\w:]*)(?:[(<][^\n]*?)?\+0x[0-9a-f]+(?: in (\S+))?",
            "\n".join(report),
        )
        if place:
            found[Finding(_heading(report[0]), place[1], place[2] or "")] += 1
    return found


def _reports(text: str) -> list[list[str]]:
    reports: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        rest = line.removeprefix(PREFIX)
        if rest.startswith("  ") and reports:
            reports[-1].append(rest.strip())
        elif rest.strip():
            reports.append([rest.strip()])
    return reports


def _heading(line: str) -> str:
    """Without addresses and counts, so that equal reports are counted together."""
    line = re.sub(r"\b(?:at (?:void )?[A-Za-z_][\w:]*(?:[(<][^+]*)?)?\+0x[0-9a-f]+.*", "", line)
    return re.sub(r"\s*\[\d+ hazards?\]", "", line).strip()


def table(found: Counter[Finding]) -> str:
    """One line a finding, most frequent first."""
    return "\n".join(f"{n:6d}  {f.kernel}  {f.where}  {f.what}" for f, n in found.most_common())
