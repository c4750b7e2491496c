"""Simulate sequential comparisons of two policies: `python bench/evaluation.py --pairs 1000`.

A Task's solve rate is drawn from the Beta distribution that has DeepSWE-Preview's published figures
on SWE-bench Verified: pass@1 42.2 % (mean of 16) and pass@16 71.0 %. The other policy's rates are
shifted on the logit scale until their mean differs by the gain. With a spread, each Task's shift
also has normal noise, so some Tasks get harder. The baseline has 4 attempts a Task and is stored;
the Episodes are those of the new policy. Prints a table and writes evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from math import exp, lgamma, log
from pathlib import Path

from swerl.runs.evaluation import TaskResult, blocks
from swerl.runs.statistics import Z95, Decision, SequentialTest, adjusted_mean

PASS_AT_1, PASS_AT_16 = 0.422, 0.710
GOALS = {"null": 0.05, "power": 0.8, "share": 0.35}
SURE = 1e-9
"""Distance of a rate from 0 and 1 below which a Task is taken as impossible or sure."""


@dataclass(frozen=True)
class Scenario:
    name: str
    gain: float = 0.0
    spread: float = 0.0
    """Standard deviation of a Task's own shift, in logits."""
    num_tasks: int = 500
    k: int = 4


@dataclass(frozen=True)
class Outcome:
    decisions: dict[str, float]
    """Share of the pairs by decision."""
    share: float
    """Mean share of the planned Episodes."""
    full: float
    """Share of pairs that all Episodes, judged once at 5 %, call different."""


SCENARIOS = (
    Scenario("same policy"),
    Scenario("same mean, other tasks", spread=1.0),
    Scenario("same policy, 100 tasks", num_tasks=100),
    Scenario("+4 points", gain=0.04),
    Scenario("+4 points, other tasks too", gain=0.04, spread=1.0),
    Scenario("+8 points", gain=0.08),
)


def main() -> None:
    """Print a line a scenario and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    chosen = parser.parse_args()
    a, b = beta_of(PASS_AT_1, PASS_AT_16, 16)
    print(f"solve rates: Beta({a:.3f}, {b:.3f}); {chosen.pairs} pairs a line")
    print("| pair | better | worse | alike | open | Episodes | full evaluation: different |")
    print("|---|---|---|---|---|---|---|")
    found = {}
    for scenario in SCENARIOS:
        began = time.monotonic()
        outcome = simulate(scenario, chosen.pairs, a, b)
        found[scenario.name] = asdict(outcome)
        shares = " | ".join(f"{outcome.decisions[d]:.1%}" for d in Decision)
        print(f"| {scenario.name} | {shares} | {outcome.share:.1%} | {outcome.full:.1%} |", end="")
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    null, gain = found["same policy"], found["+4 points"]
    error = null["decisions"]["better"] + null["decisions"]["worse"]
    print(f"type-I error {error:.1%} (goal: at most {GOALS['null']:.0%})")
    print(f"power {gain['decisions']['better']:.1%} (goal: at least {GOALS['power']:.0%})")
    print(f"Episodes {gain['share']:.1%} (goal: at most {GOALS['share']:.0%})")
    Path("evaluation.json").write_text(json.dumps(found, indent=1) + "\n")


def beta_of(pass_at_1: float, pass_at_k: float, k: int) -> tuple[float, float]:
    """Return the Beta distribution of solve rates with these means; a + b is found by bisection."""
    low, high = 0.01, 100.0
    for _ in range(100):
        size = (low * high) ** 0.5
        a, b = pass_at_1 * size, (1 - pass_at_1) * size
        never = exp(lgamma(b + k) - lgamma(b) + lgamma(size) - lgamma(size + k))
        low, high = (size, high) if 1 - never < pass_at_k else (low, size)
    return a, b


def simulate(scenario: Scenario, num_pairs: int, a: float, b: float) -> Outcome:
    """Compare pairs of policies, with seeds 0 … num_pairs - 1."""
    runs = [compare(random.Random(seed), scenario, a, b) for seed in range(num_pairs)]
    return Outcome(
        {each.value: sum(run[0] is each for run in runs) / num_pairs for each in Decision},
        sum(run[1] for run in runs) / num_pairs,
        sum(run[2] for run in runs) / num_pairs,
    )


def compare(
    draws: random.Random, scenario: Scenario, a: float, b: float
) -> tuple[Decision, float, bool]:
    """Return the decision, its share of the planned Episodes, and the full evaluation's answer."""
    names = [str(number) for number in range(scenario.num_tasks)]
    old = {name: draws.betavariate(a, b) for name in names}
    new = shifted(old, scenario, draws)
    attempts = {name: [draws.random() < new[name] for _ in range(scenario.k)] for name in names}
    baseline = {
        name: TaskResult(name, 4, sum(draws.random() < old[name] for _ in range(4)), ())
        for name in names
    }
    # Ids are the same in each pair, so the order of Tasks is drawn again by their rates alone.
    test, num_done, given = SequentialTest(), 0, dict.fromkeys(names, 0)
    planned = scenario.num_tasks * scenario.k
    for block in blocks(baseline, scenario.k):
        given.update(block)
        num_done += len(block)
        differences = [
            sum(attempts[name][:count]) / count - baseline[name].value
            for name, count in given.items()
            if count
        ]
        look = test.look(differences, num_done / planned)
        if look.decision is not Decision.OPEN:
            break
    everything = [sum(attempts[n]) / scenario.k - baseline[n].value for n in names]
    middle, error = adjusted_mean(everything)
    return look.decision, num_done / planned, abs(middle) > Z95 * error


def shifted(old: dict[str, float], scenario: Scenario, draws: random.Random) -> dict[str, float]:
    """Return the new policy's rates, whose mean differs by the gain."""
    logits = {
        name: log(rate / (1 - rate)) + draws.gauss(0, scenario.spread)
        for name, rate in old.items()
        if SURE < rate < 1 - SURE
    }
    target = sum(old.values()) + scenario.gain * len(old)
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        new = {**old, **{name: 1 / (1 + exp(-middle - each)) for name, each in logits.items()}}
        low, high = (middle, high) if sum(new.values()) < target else (low, middle)
    return new


if __name__ == "__main__":
    main()
