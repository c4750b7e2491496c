"""The pages of `swerl view`.

Paths: `index.html`, `r/RUN/index.html`, `r/RUN/s/STAGE.html`, `r/RUN/e/STAGE/EPISODE/index.html`
and `…/tN.html`, the tokens of a Turn. Links are relative.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swerl.core.errors import InputError, RunError, SwerlError
from swerl.core.files import read_json
from swerl.rollout import record
from swerl.runs import index, prompts, why
from swerl.runs.history import HistoryReader, RunHistory, read_progress
from swerl.runs.index import RECIPE, Attempt, FoundRun
from swerl.runs.layout import RunFolder
from swerl.runs.status import run_status
from swerl.runs.tables import TrainedEpisode, read_trained
from swerl.view import charts, conversation, evaluations, tokens
from swerl.view.conversation import ShownTurn
from swerl.view.evaluations import slug_of

HERE = Path(__file__).parent
ASSETS = {"style.css": "text/css", "icon.svg": "image/svg+xml"}
GROUPS_A_PAGE = 64
"""Groups whose summaries a Step page reads; more are on its next pages."""
TOKENS_A_PAGE = 4096
_TURNS_AFTER = 4
"""Turns that a comparison shows from the first different one on."""
_LOG_BYTES = 4_000
"""End of a log that a run's page shows."""
MARKS = {
    "solved": "✓", "unsolved": "✗", "timeout": "◷", "cheat": "⚑", "infra": "⚡", "invalid": "∅",
}  # fmt: skip
"""Verdict -> its sign, so that no page needs colour to be read."""


@dataclass(frozen=True, slots=True)
class Page:
    """One rendered file."""

    body: bytes
    type: str = "text/html"


class Site:
    """Renders the pages of a folder; keeps only what the next page would read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._histories: dict[Path, HistoryReader] = {}
        self._family = lru_cache(maxsize=4)(conversation.family_of)
        self._trained = lru_cache(maxsize=8)(_trained_in)
        # The last step is a part of the key: a live run is diagnosed again after each step.
        self._diagnosis = lru_cache(maxsize=8)(lambda run, last_step: why.diagnose(run.root))

    def page(self, path: str) -> Page:
        """Render the page at a path. Raises InputError if there is none, RunError on damage."""
        from jinja2 import TemplateError

        try:
            return self._page(path)
        except (*index.DAMAGE, TemplateError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"the files of this page are not readable: {reason}") from error

    def _page(self, path: str) -> Page:
        match path.split("/"):
            case [""] | ["index.html"]:
                return self._runs()
            case [name] if name in ASSETS:
                return Page((HERE / name).read_bytes(), ASSETS[name])
            case ["evals.html"]:
                rows = evaluations.overview(self.runs().values())
                return self._render("evals.html", path, rows=rows, folder=self.folder.resolve())
            case ["r", run, "index.html"]:
                return self._run(self._found(run))
            case ["r", run, "v", name] if name.endswith(".html"):
                return self._evaluation(path, self._found(run), name.removesuffix(".html"))
            case ["r", run, "v", name, "vs", other, file] if file.endswith(".html"):
                ends = (self._found(run), name), (self._found(other), file.removesuffix(".html"))
                return self._render(
                    "versus.html", path, run=ends[0][0], **evaluations.versus(*ends)
                )
            case ["r", run, "s", name] if name.endswith(".html"):
                stage, _, number = name.removesuffix(".html").partition("~")
                if (number or "1").isdecimal():
                    return self._step(self._found(run), stage, int(number or 1))
            case ["r", run, "e", stage, name, "index.html"]:
                return self._episode(self._found(run), stage, name)
            case ["r", run, "e", stage, name, "vs", other, at, file] if file.endswith(".html"):
                second = (self._found(other), at, file.removesuffix(".html"))
                return self._compare(path, (self._found(run), stage, name), second)
            case ["r", run, "e", stage, name, file] if file.startswith("t"):
                turn, _, part = file.removesuffix(".html")[1:].partition("~")
                if turn.isdecimal() and (part or "1").isdecimal():
                    return self._tokens(self._found(run), stage, name, int(turn), int(part or 1))
        raise InputError(f"there is no page {path!r}", hint="begin at the list of runs")

    def problem(self, path: str, error: SwerlError) -> Page:
        """Render the reason why a page cannot be shown."""
        return self._render("problem.html", path, text=str(error), hint=error.hint)

    def runs(self) -> dict[str, FoundRun]:
        """Return the runs of the folder by their names in paths, newest first."""
        return {slug_of(name): run for name, run in index.find_runs(self.folder).items()}

    def _found(self, slug: str) -> FoundRun:
        if (run := self.runs().get(slug)) is None:
            raise InputError(f"there is no run {slug!r} in {self.folder}")
        return run

    def _render(self, template: str, path: str, **values: Any) -> Page:
        root = "../" * path.count("/")
        if (run := values.get("run")) is not None:
            values["base"] = f"{root}r/{quote(slug_of(run.name))}/"
        loaded = _templates().get_template(template)
        text = loaded.render(root=root, marks=MARKS, **values)
        return Page(text.encode("utf-8"))

    def _history(self, run: FoundRun) -> RunHistory:
        reader = self._histories.setdefault(run.root, HistoryReader(RunFolder(run.root).events))
        return reader.read()

    def _runs(self) -> Page:
        rows = [self._facts(run) for run in self.runs().values()]
        return self._render(
            "runs.html",
            "index.html",
            rows=rows,
            folder=self.folder.resolve(),
            is_live=any(row["state"] == "running" for row in rows),
            has_evals=any(row["has_evals"] for row in rows),
        )

    def _facts(self, run: FoundRun) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": run.name,
            "href": f"r/{quote(slug_of(run.name))}/index.html",
            "state": "recorded",
            "problem": f"you may not read {run.root}" if run.is_closed else "",
            "age_s": max(0.0, time.time() - index.changed(run)),
            "has_evals": bool(run.evaluations()),
        }
        if not run.is_trained or run.is_evaluated:
            folders = map(run.stage, run.stages())
            attempts = (names for folder in folders for names in index.groups(folder).values())
            doing = evaluations.state(run) if run.is_trained else "recorded"
            score = evaluations.score(run)
            return facts | {
                "state": doing, "num_episodes": sum(map(len, attempts)), "score": score
            }  # fmt: skip
        status, problem = index.part(lambda: run_status(run.root))
        history, trouble = index.part(lambda: self._history(run))
        recipe, damage = index.part(lambda: _recipe(run))
        state, lost = index.part(lambda: RunFolder(run.root).read_state())
        last = history.steps[max(history.steps)] if history and history.steps else {}
        return facts | {
            "state": str(status.status) if status else "unreadable",
            "error": status.process.error if status and status.process else "",
            "step": state.step if state else None,
            "steps": (recipe or {}).get("steps"),
            "reward": history.series("reward") if history else [],
            "dollars": last.get("dollars"),
            "cap": ((recipe or {}).get("cost") or {}).get("max_dollars"),
            "problem": problem or trouble or damage or lost,
        }

    def _run(self, run: FoundRun) -> Page:
        path = f"r/{slug_of(run.name)}/index.html"
        facts = self._facts(run)
        if not run.is_trained:
            return self._step(run, index.ALL, 1, path)
        if run.is_evaluated:
            values = {"rows": evaluations.overview([run]), "other": _other_stages(run)}
            return self._render("evals.html", path, run=run, facts=facts, folder=run.root, **values)
        history, _ = index.part(lambda: self._history(run))
        is_live = facts["state"] == "running"
        progress = index.part(partial(read_progress, run.root))[0] if is_live else None
        stages = run.stages()
        history = history or RunHistory()
        diagnosis, _ = index.part(lambda: self._diagnosis(run, max(history.steps, default=-1)))
        last = history.steps[max(history.steps)] if history.steps else {}
        numbers = [stage for stage in stages if stage.isdecimal()]
        steps = [{"name": n, "metrics": history.steps.get(int(n), {})} for n in numbers]
        return self._render(
            "run.html",
            path,
            run=run,
            facts=facts,
            progress=progress,
            panels=charts.panels(history),
            diagnosis=diagnosis,
            agents=history.by_agent(),
            evaluations=evaluations.overview([run]),
            last=last,
            steps=steps,
            other=_other_stages(run),
            recipe=flat(index.part(partial(_recipe, run))[0] or {}),
            logs=_logs(run.root),
            is_live=is_live,
        )

    def _evaluation(self, path: str, run: FoundRun, name: str) -> Page:
        others = evaluations.comparable(self.runs().values(), run, name)
        values = evaluations.task_by_task(run, name)
        return self._render("eval.html", path, run=run, name=name, others=others, **values)

    def _step(self, run: FoundRun, stage: str, number: int, path: str = "") -> Page:
        folder = run.stage(stage)
        groups = index.groups(folder)
        first = (number - 1) * GROUPS_A_PAGE
        page_groups = list(groups.items())[first : first + GROUPS_A_PAGE]
        ledger = self._used(run, stage)
        rows = [self._group_row(run, stage, folder, names, ledger) for _, names in page_groups]
        counts = Counter(cell["verdict"] for row in rows for cell in row["cells"])
        stages = run.stages()
        place = stages.index(stage)
        return self._render(
            "step.html",
            path or f"r/{slug_of(run.name)}/s/{stage}.html",
            run=run,
            stage=stage,
            rows=rows,
            counts=counts,
            width=max((len(row["cells"]) for row in rows), default=0),
            before=stages[place - 1] if place else None,
            after=stages[place + 1] if place + 1 < len(stages) else None,
            page=number,
            num_pages=num_pages(len(groups), GROUPS_A_PAGE),
            numbered=numbered_path,
            num_groups=len(groups),
            is_live=run.is_trained and run_status(run.root).status == "running",
        )

    def _used(self, run: FoundRun, stage: str) -> dict[str, prompts.GroupEntry]:
        """Return Task -> the line of the ledger of its Group in this stage."""
        entries, _ = index.part(lambda: prompts.read(RunFolder(run.root).prompts))
        return {entry.task: entry for entry in entries or () if entry.stage == stage}

    def _group_row(
        self,
        run: FoundRun,
        stage: str,
        folder: Path,
        names: Sequence[str],
        ledger: Mapping[str, prompts.GroupEntry],
    ) -> dict[str, Any]:
        attempts = index.read_attempts(folder, names)
        entry = ledger.get(attempts[0].task)
        advantages: Mapping[str, TrainedEpisode] = {}
        if entry is not None:
            path = RunFolder(run.root).samples(entry.step)
            advantages = self._trained(path) if path.exists() else {}
        cells = [self._cell(run, stage, attempt, advantages) for attempt in attempts]
        rewards = [cell["reward"] for cell in cells if cell["reward"] is not None]
        return {
            "task": attempts[0].task,
            "agent": entry.agent if entry else "",
            "cells": cells,
            "solved": sum(cell["verdict"] == "solved" for cell in cells),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "tokens": sum(cell["tokens"] for cell in cells),
            "seconds": max(cell["seconds"] for cell in cells),
            "fate": str(entry.fate) if entry else "",
            "step": entry.step if entry else None,
        }

    def _cell(
        self,
        run: FoundRun,
        stage: str,
        attempt: Attempt,
        advantages: Mapping[str, TrainedEpisode],
    ) -> dict[str, Any]:
        summary = attempt.summary
        trained = advantages.get(str(summary.get("id")))
        verdict = str(summary.get("verdict", ""))
        return {
            "name": attempt.name,
            "href": f"e/{quote(stage)}/{quote(attempt.name)}/index.html",
            "verdict": verdict or "unfinished",
            "mark": MARKS.get(verdict, "…"),
            "number": attempt.number,
            "reward": summary.get("reward") if verdict not in ("infra", "invalid") else None,
            "advantage": trained.advantage if trained else None,
            "tokens": summary.get("sampled_tokens", 0),
            "turns": summary.get("turns", 0),
            "seconds": (summary.get("timings") or {}).get("total", 0.0),
            "problem": attempt.problem or summary.get("error", ""),
        }

    def _episode(self, run: FoundRun, stage: str, name: str) -> Page:
        folder = run.episode(stage, name)
        parent = folder if run.stage(stage) == folder else folder.parent
        names = next((g for g in index.groups(parent).values() if name in g), [name])
        attempts = index.read_attempts(parent, names)
        attempt = attempts[names.index(name)]
        ledger = self._used(run, stage)
        group = self._group_row(run, stage, parent, names, ledger)
        trajectory, no_tokens = index.part(lambda: record.read_trajectory(folder))
        grade, no_grade = index.part(lambda: record.read_grade(folder))
        family, no_text = index.part(
            lambda: self._family(run.root, conversation.is_scripted(trajectory))
        )
        turns, no_turns = index.part(lambda: conversation.turns_of(folder, trajectory, family))
        patch, no_patch = index.part(lambda: conversation.read_tail(folder / "patch.diff"))
        log, _ = index.part(lambda: conversation.read_tail(folder / "agent.log"))
        written = any((folder / f"transcript.{end}").is_file() for end in ("json", "jsonl"))
        return self._render(
            "episode.html",
            f"r/{slug_of(run.name)}/e/{stage}/{name}/index.html",
            run=run,
            stage=stage,
            attempt=attempt,
            summary=attempt.summary,
            cell=group["cells"][names.index(name)],
            group=group,
            trained=self._rows_of(run, ledger.get(attempt.task), attempt),
            trajectory=trajectory,
            grade=grade,
            turns=turns or [],
            lanes=charts.lanes(attempt.summary.get("timings") or {}, turns or []),
            patch=conversation.coloured_patch(patch) if patch else "",
            log=log,
            has_text=written or family is not None,
            problems={
                "tokens": no_tokens, "conversation": no_turns, "text": "" if written else no_text,
                "grade": no_grade, "patch": no_patch,
            },
            folder=folder,
        )  # fmt: skip

    def _compare(
        self, path: str, a: tuple[FoundRun, str, str], b: tuple[FoundRun, str, str]
    ) -> Page:
        """Show two attempts, each (run, stage, name), from the first Turn in which they differ."""
        folders = [run.episode(stage, name) for run, stage, name in (a, b)]
        readings = [
            index.part(partial(self._turns, run, folder))
            for (run, *_), folder in zip((a, b), folders, strict=True)
        ]
        first, second = ([*(turns or ())] for turns, _ in readings)
        pairs = zip(map(_words, first), map(_words, second), strict=False)
        same = next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(first), len(second)))
        both = [turns[same : same + _TURNS_AFTER] for turns in (first, second)]
        sides = []
        for at, folder, turns, (_, problem) in zip((a, b), folders, both, readings, strict=True):
            run, stage, name = at
            (attempt,) = index.read_attempts(folder.parent, [folder.name])
            place = f"r/{quote(slug_of(run.name))}/e/{quote(stage)}/{quote(name)}/"
            sides.append(
                {
                    "name": attempt.name,
                    "where": f"{run.name}, {stage}" if a[:2] != b[:2] else "",
                    "number": attempt.number,
                    "verdict": str(attempt.summary.get("verdict", "")),
                    "problem": attempt.problem or problem,
                    "turns": turns,
                    "place": place,
                }
            )
        return self._render(
            "compare.html",
            path,
            run=a[0],
            sides=sides,
            same=same,
            ended=not any(both),
            same_prompt=all(both) and both[0][0].prompt == both[1][0].prompt,
        )

    def _turns(self, run: FoundRun, folder: Path) -> list[ShownTurn]:
        trajectory, _ = index.part(lambda: record.read_trajectory(folder))
        family, _ = index.part(lambda: self._family(run.root, conversation.is_scripted(trajectory)))
        return conversation.turns_of(folder, trajectory, family)

    def _rows_of(
        self, run: FoundRun, entry: prompts.GroupEntry | None, attempt: Attempt
    ) -> TrainedEpisode | None:
        if entry is None:
            return None
        path, name = RunFolder(run.root).samples(entry.step), str(attempt.summary.get("id"))
        trained, _ = index.part(lambda: read_trained(path, name).get(name))
        return trained

    def _tokens(self, run: FoundRun, stage: str, name: str, number: int, part: int) -> Page:
        folder = run.episode(stage, name)
        trajectory = record.read_trajectory(folder)
        if not 1 <= number <= len(trajectory.turns):
            raise InputError(f"{name} has no turn {number}; it has {len(trajectory.turns)}")
        turn = trajectory.turns[number - 1]
        family, no_text = index.part(
            lambda: self._family(run.root, conversation.is_scripted(trajectory))
        )
        before = sum(len(t.prompt_ids) + len(t.output_ids) for t in trajectory.path(turn)[:-1])
        attempt = index.read_attempts(folder.parent, [name])[0]
        entry = self._used(run, stage).get(attempt.task)
        episode = str(attempt.summary.get("id"))
        trainer, no_trainer = index.part(
            lambda: tokens.trainer_logprobs(RunFolder(run.root), entry, episode, trajectory)
        )
        strip = tokens.strip(turn, family, before, (trainer or {}).get(turn.index, ()))
        first = (part - 1) * TOKENS_A_PAGE
        return self._render(
            "tokens.html",
            f"r/{slug_of(run.name)}/e/{stage}/{name}/t{number}.html",
            run=run,
            stage=stage,
            name=name,
            turn=turn,
            number=number,
            num_turns=len(trajectory.turns),
            before=before,
            far=tokens.FAR,
            tokens=strip[first : first + TOKENS_A_PAGE],
            gaps=[abs(token.gap) for token in strip if token.gap is not None],
            mean=sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else None,
            trained=self._rows_of(run, entry, attempt),
            sampled=trajectory.num_sampled_tokens,
            problems=(no_text, no_trainer),
            page=part,
            num_pages=num_pages(len(strip), TOKENS_A_PAGE),
            numbered=numbered_path,
        )


def _logs(root: Path) -> list[tuple[str, str]]:
    """Return the name and the end of each log of the newest attempt; those with errors first."""
    attempts = sorted((root / "logs").glob("attempt-*"))
    paths = sorted(attempts[-1].glob("*.log")) if attempts else []
    ends = [(path.name, index.part(partial(_tail, path))[0] or "") for path in paths]
    return sorted(ends, key=lambda end: "Error" not in end[1])


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return file.read().decode("utf-8", "replace")


def _other_stages(run: FoundRun) -> list[str]:
    """Return the stages that are neither steps nor finished evaluations, at most a page."""
    finished = run.evaluations()
    other = [name for name in run.stages() if not name.isdecimal() and name not in finished]
    return [] if evaluations.OWN in finished else other[:GROUPS_A_PAGE]


def _recipe(run: FoundRun) -> dict[str, Any]:
    return dict(read_json(run.root / RECIPE))


def flat(recipe: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the full name of each key of a recipe -> its value as text."""
    keys: dict[str, str] = {}
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            keys |= flat(value, f"{above}{name}.")
        else:
            keys[f"{above}{name}"] = json.dumps(value)
    return keys


def _words(turn: ShownTurn) -> tuple[object, ...]:
    return (turn.parent, list(turn.prompt), turn.thinking, turn.text, list(turn.calls))


def num_pages(count: int, size: int) -> int:
    return max(1, -(-count // size))


def numbered_path(name: str, page: int) -> str:
    return f"{name}.html" if page == 1 else f"{name}~{page}.html"


def _trained_in(path: Path) -> Mapping[str, TrainedEpisode]:
    trained, _ = index.part(lambda: read_trained(path))
    return trained or {}


@lru_cache(maxsize=1)
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=conversation.clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {
        "edit": conversation.edit,
        "slug": slug_of,
        "url": quote,
    }
    environment.filters |= charts.FILTERS | filters
    return environment
