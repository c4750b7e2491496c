"""Measure `swerl view` on synthetic runs: first page, Step, Episode, memory.

    python bench/view.py                 100 steps of 512 short Episodes
    python bench/view.py --long          64 Episodes of 96,000 tokens in 200 Turns

Each figure is from a new process, as a user meets it; memory is the peak of that process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from swerl.core.sample import to_samples
from swerl.engines.families.tiny import byte_tokenizer, save_tokenizer
from swerl.rollout import record
from swerl.runs import prompts, tables
from swerl.runs.layout import RunFolder
from swerl.runs.prompts import Fate, GroupEntry
from swerl.view.site import Site

GROUP = 8
PHASES = ("boot", "agent", "diff", "grade")


def make(root: Path, *, steps: int, episodes: int, turns: int, tokens: int) -> None:
    """Write a run with the names, files and events of a real one."""
    run = root / "big"
    save_tokenizer(byte_tokenizer(), run / "initial_model")
    (run / "initial_model" / "config.json").write_text('{"model_type": "qwen3"}')
    (run / "recipe.resolved.json").write_text(json.dumps({"name": "big", "steps": steps}))
    (run / "state.json").write_text(json.dumps({"step": steps, "finished": True, "evals_done": []}))
    rng = random.Random(0)
    trajectory = json.dumps(_trajectory(rng, turns, tokens))
    with (run / "events.jsonl").open("w") as events:
        for step in range(steps):
            names = [f"task-{number // GROUP}.{number % GROUP}" for number in range(episodes)]
            for name in names:
                _episode(run / "episodes" / f"{step:05d}" / name, f"{step:05d}/{name}", trajectory)
                for phase in PHASES:
                    line = {"time": 0.0, "episode": name, "phase": phase}
                    events.write(json.dumps({"event": "PhaseStarted", **line}) + "\n")
                    events.write(json.dumps({"event": "PhaseEnded", **line, "seconds": 1}) + "\n")
            _trained(RunFolder(run), step, names, tokens // 2)
            metrics = {f"metric_{n}": rng.random() for n in range(60)} | {"reward": rng.random()}
            ended = {"event": "StepEnded", "time": 0.0, "step": step, "metrics": metrics}
            events.write(json.dumps(ended) + "\n")


def _trajectory(rng: random.Random, turns: int, tokens: int) -> dict[str, object]:
    each = tokens // turns // 2
    made = [
        {
            "index": n,
            "parent": n - 1 if n else None,
            "prompt_ids": [rng.randrange(74, 100) for _ in range(each)],
            "output_ids": [rng.randrange(74, 100) for _ in range(each)],
            "logprobs": [-rng.random() for _ in range(each)],
            "finish": "stop",
            "weight_version": "1",
            "started_s": float(n),
            "duration_s": 0.5,
        }
        for n in range(turns)
    ]
    return {"session": "s", "turns": made, "dropped": {}, "rewritten": 0}


def _episode(folder: Path, name: str, trajectory: str) -> None:
    folder.mkdir(parents=True)
    summary = {
        "id": name, "task_id": name.split("/")[1][:-2], "status": "completed", "verdict": "solved",
        "reward": 1.0, "turns": 20, "sampled_tokens": 4000, "timings": {"agent": 9, "total": 10},
    }  # fmt: skip
    grade = {"verdict": "solved", "tests": {"a": "passed"}, "restored": []}
    (folder / "grade.json").write_text(json.dumps(grade))
    (folder / "trajectory.json").write_text(trajectory)
    (folder / "patch.diff").write_text("")
    (folder / "episode.json").write_text(json.dumps(summary))


def _trained(run: RunFolder, step: int, names: list[str], sampled: int) -> None:
    """Write the files of the step that trains these Episodes."""
    tree = record.read_trajectory(run.episode(f"{step:05d}", names[0]))
    [row] = to_samples(tree, episode="", task="")
    rows = [replace(row, episode=f"{step:05d}/{name}", advantage=0.5) for name in names]
    tables.write_samples(run.samples(step), rows, [1 / len(rows)] * len(rows), {})
    trained = [logp - 0.01 for logp, on in zip(row.logprobs, row.mask, strict=True) if on]
    tables.write_logprobs(run.logprobs(step), [(each.episode, trained) for each in rows])
    fate, solved = Fate.TRAINED, ("solved",) * GROUP
    sizes, learned = (sampled,) * GROUP, (True,) * GROUP
    tasks = dict.fromkeys(name.rpartition(".")[0] for name in names)
    stage = f"{step:05d}"
    entries = [GroupEntry(step, t, stage, fate, (), sizes, learned, "", solved) for t in tasks]
    prompts.append(run.prompts, entries)


def _page(root: Path, path: str) -> None:
    site, seconds = Site(root), []
    for _ in range(2):
        start, busy = time.perf_counter(), time.process_time()
        site.page(path)
        seconds.append((time.perf_counter() - start, time.process_time() - busy))
    (first, cpu), (again, cpu_again) = seconds
    print(
        f"  {path:34} {first:6.2f} s first ({cpu:.2f} s of CPU), "
        f"{again:5.2f} s again ({cpu_again:.2f} s), {_peak_mib():4.0f} MiB",
        flush=True,
    )


def _peak_mib() -> float:
    """Return the peak memory of this program; `getrusage` also counts the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Make a run, time its pages, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    chosen = parser.parse_args()
    size = {"steps": chosen.steps, "episodes": 512, "turns": 2, "tokens": 80}
    if chosen.long:
        size = {"steps": 1, "episodes": 64, "turns": 200, "tokens": 96_000}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, **size)
        print(f"{size}")
        context = multiprocessing.get_context("spawn")
        episode = "r/big/e/00000/task-3.1"
        paths = ["index.html", "r/big/index.html", "r/big/s/00000.html"]
        for path in (*paths, f"{episode}/index.html", f"{episode}/t2.html"):
            process = context.Process(target=_page, args=(root, path))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
