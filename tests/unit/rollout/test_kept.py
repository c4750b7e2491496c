"""The choice of recorded Episodes, and the rows that are trained of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.episode import Episode
from swerl.core.errors import RecipeError, RunError
from swerl.core.events import Event, Notice, ignore
from swerl.core.files import write_json
from swerl.core.sample import to_samples
from swerl.engines.families import tiny
from swerl.recipe.schema import Recipe
from swerl.rollout import record
from swerl.rollout.kept import KeptSchedule, Reader, choose, open_kept, read
from swerl.rollout.versions import Versions
from swerl.training import batch
from swerl.training.algorithms import sft
from tests.unit import made

FAMILY = tiny.build(None)
STOP = FAMILY.stop_ids[0]


def _episode(
    id: str, ids: tuple[int, ...], verdict: str = "solved", reward: float = 1.0
) -> Episode:
    """Return an Episode with a root Turn, a reply to it, and a fork."""
    turns = (
        made.turn(0, None, (5, 6), (*ids, STOP), "000001"),
        made.turn(1, 0, (7,), (8, *ids, STOP), "000001"),
        made.turn(2, 0, (9, 9), (10, STOP), "000001"),
    )
    return made.episode(id, *turns, verdict=verdict, reward=reward)


def _run(root: Path, *episodes: Episode) -> Path:
    """Write a run folder with these Episodes, whose ids begin with their stage."""
    recipe = {"harness": {"type": "builtin"}, "model": {"family": "tiny"}}
    root.mkdir()
    write_json(root / "recipe.resolved.json", recipe)
    for each in episodes:
        record.write(root / "episodes" / each.id, each)
    return root


def _recipe(*sources: Path, **keys: object) -> Recipe:
    section = {"sources": sources, **keys}
    return Recipe.model_validate({"name": "a", "sft": section, "algorithm": {"type": "sft"}})


def _reader(tmp_path: Path, **changes: object) -> Reader:
    return replace(Reader(FAMILY, "tiny", tmp_path / "model", 512, 1000), **changes)  # type: ignore[arg-type]


def test_episodes_are_chosen_by_outcome_and_each_reason_is_counted(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "run",
        _episode("00000/a.0", (20,)),
        _episode("00000/a.1", (20,)),
        _episode("00000/a.2", (21,)),
        _episode("00000/a.3", (22,)),
        _episode("00000/b.0", (23,), "unsolved", 0.0),
        _episode("00000/b.1", (24,), "solved", 0.4),
        _episode("00000/b.2", (25,) * 50),
        _episode("eval-heldout-00000/c.0", (26,)),
    )
    (run / "episodes" / "00000" / "b.3").mkdir()
    (run / "episodes" / "00000" / "b.3" / "patch.diff").touch()
    damaged = record.write(run / "episodes" / "00000" / "b.4", _episode("00000/b.4", (27,)))
    (run / "episodes" / damaged.id / "trajectory.json").write_text("{")
    recipe = _recipe(run, max_per_task=2)
    kept, left_out = choose(recipe, _reader(tmp_path))
    assert [each.task for each in kept] == ["a", "a", "b", "b"]
    assert left_out == {
        "copies": 1,
        "unsolved": 1,
        "unfinished or damaged": 2,
        "over sft.max_per_task": 1,
    }
    assert kept == choose(recipe, _reader(tmp_path))[0]


def test_the_rows_of_a_step_train_each_sampled_token_once_in_its_own_prefix(
    tmp_path: Path,
) -> None:
    episodes = [_episode(f"00000/{name}.0", (20 + n, 40)) for n, name in enumerate("abcde")]
    run = _run(tmp_path / "run", *episodes)
    recipe = _recipe(run, episodes_per_step=3)
    kept = open_kept(recipe, tmp_path, _reader(tmp_path), ignore)
    for each in kept:
        found = read(each, routed=False)
        [whole] = [one for one in episodes if one.task_id == each.task]
        rows = to_samples(found.trajectory, episode="", task="")
        expected = to_samples(whole.trajectory, episode="", task="")
        assert [(row.ids, row.mask, row.logprobs, row.share) for row in rows] == [
            (row.ids, row.mask, row.logprobs, row.share) for row in expected
        ]
        assert sum(row.num_trained_tokens for row in rows) == whole.trajectory.num_sampled_tokens
        # A version of another run must not be taken for one of this run's.
        assert rows[0].weight_versions == ("run/000001",)


async def test_every_epoch_takes_every_episode_once_and_one_vote_each(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", *(_episode(f"00000/{n}.0", (20 + n,)) for n in range(6)))
    recipe = _recipe(run, episodes_per_step=3)
    kept = open_kept(recipe, tmp_path, _reader(tmp_path), ignore)
    schedule = KeptSchedule(kept, recipe, Versions(), ignore)
    steps = [await schedule.take(number) for number in range(4)]
    ids = [[e.id for g in each.kept for e in g.episodes] for each in steps]
    assert sorted(ids[0] + ids[1]) == sorted(ids[2] + ids[3]) == [each.id for each in kept]
    assert ids[:2] != ids[2:]
    collected = batch.collect(0, steps[0].kept, sft.build(sft.Options()))
    assert sum(batch.weights(collected.batch)) == pytest.approx(1.0)
    assert collected.batch.num_episodes == 3


def test_a_resumed_run_keeps_its_choice_and_notices_a_changed_episode(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _episode("00000/a.0", (20,)))
    recipe, events = _recipe(run), list[Event]()
    kept = open_kept(recipe, tmp_path, _reader(tmp_path), events.append)
    [notice] = events
    assert isinstance(notice, Notice) and "kept 1 episodes, 7 tokens" in notice.text
    record.write(run / "episodes" / "00000" / "b.0", _episode("00000/b.0", (21,)))
    assert open_kept(recipe, tmp_path, _reader(tmp_path), ignore) == kept
    record.write(run / "episodes" / "00000" / "a.0", _episode("00000/a.0", (22,)))
    with pytest.raises(RunError, match="not as it was"):
        read(kept[0], routed=False)


def test_sessions_that_nothing_graded_train_as_they_are(tmp_path: Path) -> None:
    whole = _episode("1", (20, 21))
    rows = to_samples(whole.trajectory, episode="1", task="serve")
    session = tmp_path / "serve" / "1"
    session.mkdir(parents=True)
    record.write_trajectory(session, whole.trajectory)
    with pytest.raises(RecipeError, match=r"keeps no Episode .* 1 ungraded"):
        open_kept(_recipe(session.parent), tmp_path, _reader(tmp_path), ignore)
    recipe = _recipe(session.parent, verdicts=("ungraded",))
    [kept] = open_kept(recipe, tmp_path, _reader(tmp_path), ignore)
    episode = read(kept, routed=False)
    again = to_samples(episode.trajectory, episode="1", task="serve")
    assert [(row.ids, row.mask, row.share) for row in again] == [
        (row.ids, row.mask, row.share) for row in rows
    ]
    assert episode.learnable


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 15}, "has the token id 20 of a vocabulary of 15"),
        ({"family_name": "qwen3"}, "model.family of it is 'tiny'"),
        ({"model": "tokenizer"}, "differs from"),
        ({"family": "stops"}, "none of its replies ends with a stop token"),
    ],
)
def test_rows_of_another_model_are_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    run = _run(tmp_path / "run", _episode("00000/a.0", (20,)))
    if "model" in changes:
        for folder, text in ((run / "initial_model", "a"), (tmp_path / "own", "b")):
            folder.mkdir()
            (folder / "tokenizer.json").write_text(text)
        changes = {"model": tmp_path / "own"}
    if "family" in changes:
        other = tiny.build(None)
        other.stop_ids = (444,)
        changes = {"family": other}
    with pytest.raises(RecipeError, match="was not sampled in the tokens of") as caught:
        choose(_recipe(run), _reader(tmp_path, **changes))
    assert why in str(caught.value)
    assert caught.value.hint
