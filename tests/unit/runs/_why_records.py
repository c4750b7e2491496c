"""Write the records of a small healthy run, with the writers of `swerl train`; tests change them.

Four Tasks a step, four attempts each: a prompt, a reply with a call, its result, a last reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from swerl.core.chat import Finish
from swerl.core.episode import Episode
from swerl.core.events import StepEnded
from swerl.core.files import write_json
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.turn import Turn
from swerl.engines.families.tiny import byte_tokenizer, save_tokenizer
from swerl.rollout import record
from swerl.runs import tables
from swerl.runs.history import EventLog
from tests.unit import made

ATTEMPTS = 4
METRICS = {
    "entropy": 0.3,
    "grad_norm": 0.2,
    "groups_with_signal": 4.0,
    "lr": 1e-4,
    "mismatch": 1e-6,
    "solve_rate": 0.5,
    "kl": 0.001,
}
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\ncat a{}.py\n</parameter>\n</function>\n"
RECIPE = {
    "name": "run",
    "rollout": {"max_turns": 8, "max_new_tokens": 400, "max_context_tokens": 4000},
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text, add_special_tokens=False).ids)


def turn(number: int, parent: int | None, prompt: str, reply: str, **facts: object) -> Turn:
    said = ids(reply)
    noise = tuple(-0.3 + 0.01 * (place % 5) for place in range(len(said)))
    return made.turn(number, parent, ids(prompt), said, "000000", logprobs=noise, **facts)


def healthy_episode(step: int, task: int, attempt: int) -> Episode:
    name = f"{step:05d}/task-{step}-{task}.{attempt}"
    is_solved = (task + attempt) % 2 == 0
    prompt = f"<|im_start|>user\nRepair {task}{step}.<|im_end|>\n<|im_start|>assistant\n"
    result = f"\n<|im_start|>user\n<tool_response>\nx = {task}\n</tool_response>\n<|im_end|>\n"
    call = f"{CALL.format(attempt)}</tool_call><|im_end|>"
    turns = (
        turn(0, None, prompt, call, finish=Finish.TOOL_CALLS),
        turn(1, 0, f"{result}<|im_start|>assistant\n", f"Done with {attempt}.<|im_end|>"),
    )
    status = TestStatus.PASSED if is_solved else TestStatus.FAILED
    verdict = Verdict.SOLVED if is_solved else Verdict.UNSOLVED
    return made.episode(
        name,
        *turns,
        verdict=verdict,
        grade=Grade(verdict, tests={"test_new": status, "test_old": TestStatus.PASSED}),
        session=name,
        patch=f"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+x{attempt}\n",
        timings={"total": 1.0},
        log="x = 1\n",
    )


def make_run(
    root: Path,
    *,
    steps: int = 3,
    episode: Callable[[Episode], Episode] = lambda each: each,
    metrics: Callable[[int], Mapping[str, float]] = lambda step: {},
    recipe: Mapping[str, object] | None = None,
) -> Path:
    """Write a run; the functions change each Episode and each step's metrics."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "recipe.resolved.json", recipe or RECIPE)
    save_tokenizer(byte_tokenizer(), root / "initial_model")
    write_json(root / "initial_model" / "config.json", {"model_type": "qwen3"})
    (root / "turns").mkdir(exist_ok=True)
    with EventLog(root / "events.jsonl") as log:
        for step in range(steps):
            episodes = [
                episode(healthy_episode(step, task, attempt))
                for task in range(4)
                for attempt in range(ATTEMPTS)
            ]
            for each in episodes:
                write_episode(root, each)
            tables.write_turns(root / "turns" / f"{step:05d}.parquet", episodes)
            log(StepEnded(step, {**METRICS, **metrics(step)}))
    return root


def write_episode(root: Path, episode: Episode) -> None:
    record.write(root / "episodes" / episode.id, episode)
