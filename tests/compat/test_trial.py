"""Whole trials: swerl's own agent in every case, and a real CLI in the hardest ones."""

from __future__ import annotations

import pytest

from swerl.engines.families import tiny
from swerl.sandboxes import local
from swerl.sandboxes.local import LocalBackend
from tests.compat import report, trial
from tests.compat.cases import CASES, Agent, Case, Fill, RunShell, Say, choose_agents
from tests.compat.trial import Figures, Trial, TrialOutcome, TrialResult, TrialResults, run

BUILTIN = Agent("builtin")
ABLE = [case for case in CASES.values() if not case.needs]
REFUSED = {"over-long", "lost"}
"""Cases in which the gateway refuses a request at least once."""


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return local.build(local.Options())


async def play(agent: Agent, case: Case, backend: LocalBackend) -> TrialResult:
    return await run(Trial(agent, case, "tiny"), tiny.build(None), backend)


def figures_of(row: TrialResult) -> Figures:
    assert row.figures, row.reason
    return row.figures


@pytest.mark.parametrize("case", ABLE, ids=lambda case: case.name)
async def test_the_built_in_agent_keeps_every_token(case: Case, backend: LocalBackend) -> None:
    row = await play(BUILTIN, case, backend)
    assert row.outcome.value in [end.value for end in case.ends], row.reason
    figures = figures_of(row)
    assert (figures.branches, figures.samples) == (1, 1)
    assert (figures.trained, figures.packed) == (1.0, 1.0)
    assert figures.outside is None, "it runs in the controller, where nobody watches"
    assert (figures.extra > 0) == (case.name in REFUSED)


async def test_what_an_agent_does_not_have_is_no_failure(backend: LocalBackend) -> None:
    row = await play(BUILTIN, CASES["compaction"], backend)
    assert row.outcome is TrialOutcome.CANNOT
    assert "compaction" in row.reason


async def test_what_a_release_does_not_have_is_no_failure(backend: LocalBackend) -> None:
    row = await play(Agent("codex", "0.94.0"), CASES["compaction"], backend)
    assert row.outcome is TrialOutcome.CANNOT
    assert "never compacts" in row.reason


async def test_a_script_that_is_not_played_to_its_end_is_a_failure(backend: LocalBackend) -> None:
    case = Case("cut", "", {"main": (RunShell(("ls",)), Say(), RunShell(("ls",)), Say())})
    row = await play(BUILTIN, case, backend)
    assert row.outcome is TrialOutcome.FAILED
    assert "gave up" in row.reason
    assert row.log


async def test_a_limit_that_was_never_reached_is_a_failure(backend: LocalBackend) -> None:
    case = Case("short", "", {"main": (Fill(), Say())}, ends=CASES["over-long"].ends)
    row = await play(BUILTIN, case, backend)
    assert row.outcome is TrialOutcome.FAILED
    assert "never reached" in row.reason


async def test_results_keep_their_order_and_a_family_without_a_model_is_reported(
    backend: LocalBackend,
) -> None:
    cases = [CASES["tools"], CASES["parallel"]]
    trials = trial.plan([BUILTIN], cases, ["tiny", "qwen3"])
    reported: list[TrialResult] = []
    found = await trial.run_all(trials, backend, jobs=4, on_done=reported.append)
    assert [(row.family, row.case) for row in found.rows] == [
        ("tiny", "tools"), ("tiny", "parallel"), ("qwen3", "tools"), ("qwen3", "parallel"),
    ]  # fmt: skip
    assert [row.outcome for row in found.rows[2:]] == [TrialOutcome.CANNOT] * 2
    assert len(reported) == 4
    assert not found.failed


def test_the_small_matrix_meets_every_agent_once_and_every_family_once() -> None:
    chosen = choose_agents(("builtin", "codex"))
    small = trial.plan(chosen, [CASES["tools"]], ["tiny", "qwen3"])
    assert len(chosen) == 3, "codex comes in two releases"
    assert choose_agents(("codex", "codex@0.94.0")) == chosen[1:]
    assert len(small) == 4
    assert len(trial.plan(chosen, [CASES["tools"]], ["tiny", "qwen3"], full=True)) == 6


@pytest.fixture(scope="module")
def codex(backend: LocalBackend) -> Agent:
    """The real CLI; skips where it cannot be had."""
    from swerl.core.errors import SwerlError

    agent = Agent("codex", "0.169.0")
    try:
        agent.build(CASES["tools"])
    except SwerlError as error:
        pytest.skip(f"no Codex bundle: {error}")
    return agent


@pytest.mark.agents
@pytest.mark.parametrize(
    ("name", "branches"), [("parallel", 1), ("sub-agents", 3), ("compaction", 3)]
)
async def test_a_real_agent_keeps_every_token(
    codex: Agent, name: str, branches: int, backend: LocalBackend
) -> None:
    row = await play(codex, CASES[name], backend)
    assert row.outcome is TrialOutcome.DONE, (row.reason, row.log)
    figures = figures_of(row)
    assert figures.trained == 1.0
    assert (figures.branches, figures.samples) == (branches, branches)
    assert (figures.packed == 1.0) == (branches == 1)
    assert figures.outside == ()
    # it asks once more where a sub-agent ends after the wait for it
    assert figures.extra <= int(name == "sub-agents")


@pytest.mark.agents
async def test_a_real_agent_waits_for_an_engine_that_comes_back(
    codex: Agent, backend: LocalBackend
) -> None:
    row = await play(codex, CASES["lost"], backend)
    assert row.outcome is TrialOutcome.DONE, (row.reason, row.log)
    assert figures_of(row).extra == CASES["lost"].num_lost


def test_failed_trials_are_found() -> None:
    rows = [TrialResult("a", "tools", "tiny", outcome) for outcome in TrialOutcome]
    assert [row.outcome for row in TrialResults(tuple(rows), 1.0).failed] == [TrialOutcome.FAILED]


async def test_a_sub_agent_that_never_came_about_is_a_failure(backend: LocalBackend) -> None:
    case = Case("alone", "", {"main": (RunShell(("ls",)), Say()), "subtask-1": (Say(),)})
    row = await play(BUILTIN, case, backend)
    assert row.outcome is TrialOutcome.FAILED
    assert "subtask-1" in row.reason


@pytest.mark.parametrize("case", ["parallel", "malformed", "over-long"])
async def test_every_turn_of_the_built_in_agent_replays(case: str, backend: LocalBackend) -> None:
    found = Trial(BUILTIN, CASES[case], "tiny")
    row = await run(found, tiny.build(None), backend, replay=True)
    assert row.replay
    assert (row.replay.replayed, row.replay.problem) == (row.replay.turns, "")
    assert row.replay.turns == figures_of(row).turns


async def test_a_turn_that_does_not_replay_is_reported(backend: LocalBackend) -> None:
    case = Case("random", "", {"main": (RunShell(("echo $RANDOM$RANDOM",)), Say())})
    row = await run(Trial(BUILTIN, case, "tiny"), tiny.build(None), backend, replay=True)
    assert row.replay
    assert (row.replay.replayed, row.replay.turns) == (1, 2)
    assert "turn 2 of 2 differs: result of call 1" in row.replay.problem
    assert report.replayed_share([row]) == 0.5
    assert "1 of 2 turns replay: 50.00 %." in report.replay_markdown(TrialResults((row,), 1.0))
