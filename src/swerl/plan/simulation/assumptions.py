"""What a simulation assumes, each number with its unit and where it is from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from swerl.core.errors import InputError, unknown
from swerl.plan.cost.estimate import Assumption
from swerl.plan.cost.rollouts import LOST_SHARE, PASSING_SHARE
from swerl.recipe.schema import Recipe

_BOOT_S = {"e2b": 1.0, "docker": 2.0, "local": 0.1}
"""Seconds from wanting a sandbox to its first command, its image at hand."""
_FIRST_PROMPT = {"claude-code": 11_000, "codex": 9_000, "opencode": 8_000, "qwen-code": 20_000}
"""Tokens of an agent's first request; others say little."""
_SMALL_PROMPT = 1_500


def assumptions(recipe: Recipe) -> tuple[Assumption, ...]:
    """Return everything that a recipe does not say."""
    return (*_episodes(recipe), *_machines(recipe))


def override(rows: Iterable[Assumption], settings: Iterable[str]) -> tuple[Assumption, ...]:
    """Replace values by `key=number` texts. Raises InputError, UnknownNameError."""
    found = {row.key: row for row in rows}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in found:
            raise unknown("assumption", key, found)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise InputError(
                f"--set {setting!r} is not key=number", hint="for example --set train_mfu=0.3"
            )
        found[key] = replace(found[key], value=value, source="--set")
    return tuple(found.values())


def values(rows: Iterable[Assumption]) -> Mapping[str, float]:
    """Return the numbers by key."""
    return {row.key: row.value for row in rows}


def _episodes(recipe: Recipe) -> Iterator[Assumption]:
    agent, sandbox = recipe.harness.type, recipe.sandbox.type
    prompt = _FIRST_PROMPT.get(agent, _SMALL_PROMPT)
    yield Assumption(
        "first_prompt", prompt, "tokens", f"{agent}'s first request, measured to a few thousand"
    )
    yield from _generated() if recipe.tasks.source == "twin" else _repositories()
    boot = _BOOT_S.get(sandbox, 5.0)
    yield from _spread("boot_s", boot, 0.5, "s", f"{sandbox}'s start with the image at hand")
    yield Assumption(
        "lost_share", LOST_SHARE, "of episodes", "assumed: lost to machinery, run again"
    )
    passing = "assumed: groups with solved and unsolved episodes, of all"
    yield Assumption("passing_share", PASSING_SHARE, "of groups", passing)


def _repositories() -> Iterator[Assumption]:
    """Yield what work on real repositories takes."""
    yield from _spread("turns", 30, 0.6, "turns", "assumed; published SWE runs cap at 100 to 200")
    length = "with it the mean row is some 31k tokens, as NVIDIA's SWE runs publish (31.6k)"
    yield from _spread("reply_tokens", 150, 1.1, "tokens a turn", length)
    yield from _spread("result_tokens", 180, 1.0, "tokens a turn", length)
    seconds = "assumed: with it sandbox-seconds are near the published low case, 520"
    yield from _spread("tool_s", 2.5, 1.5, "s a turn", seconds)
    yield from _spread("grading_s", 150, 0.6, "s", "assumed: a second start and the tests")


def _generated() -> Iterator[Assumption]:
    """Yield what the twin's small repositories take, with a model that explains itself."""
    yield from _spread("turns", 5, 0.4, "turns", "assumed: look, edit, test, submit")
    yield from _spread("reply_tokens", 150, 0.8, "tokens a turn", "assumed")
    yield from _spread("result_tokens", 100, 0.5, "tokens a turn", "the twin's files")
    yield from _spread("tool_s", 0.3, 0.5, "s a turn", "docs/start/twin.md: a local sandbox")
    yield from _spread("grading_s", 1.0, 0.3, "s", "docs/start/twin.md: local, a few tests")


def _spread(
    key: str, median: float, spread: float, unit: str, source: str
) -> tuple[Assumption, Assumption]:
    return (
        Assumption(f"{key}.median", median, unit, source),
        Assumption(f"{key}.spread", spread, "of its logarithm", "assumed"),
    )


def _machines(recipe: Recipe) -> Iterator[Assumption]:
    yield Assumption(
        "train_mfu",
        0.30 if recipe.trainer.expert_parallel == 1 else 0.05,
        "of the GPU's peak",
        "assumed: 0.3 dense, 0.05 with experts; a published run at 64k has 0.033",
    )
    yield Assumption("imbalance", 0.03, "of a step", "docs/design/packing.md: at most, measured")
    yield Assumption(
        "prompt_mfu",
        0.40 if recipe.trainer.expert_parallel == 1 else 0.20,
        "of the GPU's peak",
        "assumed: reading prompts",
    )
    yield Assumption("bandwidth_share", 0.6, "of the GPU's peak", "assumed: decoding")
    yield Assumption("layer_s", 0.0001, "s a layer", "assumed: its kernels' start and all-reduce")
    yield Assumption("host_bytes_per_s", 25e9, "bytes/s a GPU", "assumed: PCIe 5, half of its peak")
    yield Assumption("host_adam_per_s", 2e9, "parameters/s a node", "assumed: offloaded optimizer")
    yield Assumption("update_bytes_per_s", 10e9, "bytes/s a GPU", "assumed: weights to engines")
    yield Assumption("update_fixed_s", 3.0, "s", "assumed: pause, names, checksum, resume")
    yield Assumption("switch_fixed_s", 5.0, "s a step", "assumed: memory released and resumed")
    yield Assumption("step_fixed_s", 5.0, "s a step", "assumed: batch, hand-over, commit")
    yield Assumption("gateway_s", 0.02, "s a turn", "docs/measurements/gateway.md, on a busy core")
