"""Run every policy of the red team, and print the sheets of docs/measurements/redteam.md.

`python bench/redteam.py [--json FILE] [--jobs 2] [--sheets]`; `--sheets` prints them and runs none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path

from swerl.checks.redteam import runner
from swerl.checks.redteam.languages import GROUNDS
from swerl.checks.redteam.policy import Defence
from swerl.checks.redteam.runner import PolicyOutcome, RedteamReport, RedteamSettings
from swerl.sandboxes import local


def sheet() -> list[str]:
    """Return a line for each policy against the small Python project."""
    lines = ["| policy | what it tries | verdict | what stops it |", "|---|---|---|---|"]
    for topic in runner.FIRST_TOPICS:
        for each in topic.POLICIES:
            cells = (f"`{each.name}`", each.sentence, each.verdict, each.stopped_by)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def topics() -> list[str]:
    """Return a line for each further topic: its policies by project, those that vetting stops."""
    known = {each.name: each for each in runner.all_policies()}
    lines = ["| topic | policies | on | held by vetting |", "|---|---|---|---|"]
    for topic in runner.FURTHER_TOPICS:
        policies = [known[each.name] for each in topic.POLICIES]
        kinds = Counter(each.kind.value for each in policies)
        places = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        text = (topic.__doc__ or "").partition("\n")[0].rstrip(".")
        text = text.removeprefix("Policies that ").removeprefix("Policies whose ")
        name = topic.__name__.rpartition(".")[2]
        vetted = [f"`{each.name}`" for each in policies if each.stopped_by is Defence.VETTED]
        by_vetting = ", ".join(vetted) or "none"
        lines.append(f"| {name}: {text} | {len(policies)} | {places} | {by_vetting} |")
    return lines


async def measure(jobs: int) -> RedteamReport:
    """Run all policies on the local sandbox."""
    settings = RedteamSettings(num_jobs=jobs, naively=True)
    backend = local.build(local.Options())
    return await runner.run(backend, runner.all_policies(), settings)


def main() -> None:
    """Print the sheets, run the policies, and list those that did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sheets", action="store_true")
    chosen = parser.parse_args()
    print("\n".join([*sheet(), "", *topics()]))
    if chosen.sheets:
        return
    report = asyncio.run(measure(chosen.jobs))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items())
    print(f"\n{counts} in {report.duration_s:.0f} s, on {len(GROUNDS)} projects of languages")
    for row in report.rows:
        if row.outcome is not PolicyOutcome.HELD:
            print(f"{row.outcome}: {row.policy.name}: {row.seen}")
        if row.rewarded_naively is False:
            print(f"not rewarded without defences: {row.policy.name}")
    if chosen.json:
        chosen.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
