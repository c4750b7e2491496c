"""Exported rows, read back, equal the rows that the run trained."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.episode import Group
from swerl.core.errors import InputError, SwerlError
from swerl.core.learning import Batch
from swerl.core.turn import RoutedExperts, Turn
from swerl.runs import export, tables
from swerl.runs.layout import RunFolder
from swerl.training import batch as batches
from swerl.training.algorithms import grpo
from swerl.training.batch import collect
from tests.unit import made


def turn(index: int, parent: int | None) -> Turn:
    base = 10 * (index + 1)
    start, num_positions = (0, 3) if parent is None else (3, 4)
    routed = RoutedExperts(start, 1, 1, 1, b"\1" * num_positions) if index < 2 else None
    output = (base + 1, base + 3)
    return made.turn(index, parent, (base, base + 2), output, logprobs=(-0.25, -1.5), routed=routed)


FORK = (turn(0, None), turn(1, 0), turn(2, 0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps; in each an Episode of two rows, one of one row, and one lost to machinery."""
    folder = RunFolder(tmp_path / "run")
    for name in ("samples", "turns"):
        (folder.root / name).mkdir(parents=True)
    algorithm = grpo.build(grpo.Options())
    for step in (0, 1):
        episodes = (
            made.episode(f"{step}/a.0", *FORK),
            made.episode(f"{step}/a.1", turn(0, None), verdict="unsolved"),
            made.episode(f"{step}/a.2", turn(0, None), verdict="infra"),
        )
        tables.write_turns(folder.turns(step), episodes)
        batches.write(folder.samples(step), collect(step, [Group("a", episodes)], algorithm).batch)
    return folder.root


def batch(run: Path, step: int) -> Batch:
    return batches.read(RunFolder(run).samples(step))


def swerl(*words: object) -> Result:
    return CliRunner().invoke(typer_app, ["export", *map(str, words)], catch_exceptions=False)


def test_the_native_rows_are_the_batches_with_their_rewards(run: Path, tmp_path: Path) -> None:
    done = export.export(run, tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    samples = [sample for step in (0, 1) for sample in batch(run, step).samples]
    assert (done.num_rows, done.num_steps) == (6, 2)
    assert [row["ids"] for row in found] == [list(sample.ids) for sample in samples]
    assert [row["mask"] for row in found] == [list(sample.mask) for sample in samples]
    assert [row["logprobs"] for row in found] == [list(sample.logprobs) for sample in samples]
    assert [row["advantage"] for row in found] == [sample.advantage for sample in samples]
    assert [row["step"] for row in found] == [0, 0, 0, 1, 1, 1]
    assert [(row["reward"], row["verdict"]) for row in found[:3]] == [
        (1.0, "solved"), (1.0, "solved"), (0.0, "unsolved"),
    ]  # fmt: skip


def test_row_groups_bound_the_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_GROUP_TOKENS", 9)
    export.export(run, tmp_path / "out.parquet")
    with pq.ParquetFile(tmp_path / "out.parquet") as file:
        assert file.num_row_groups > 2
        assert file.metadata.num_rows == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{run}", "--samples", "--step", "7"), "holds no samples of step 7"),
        (("{tmp}", "--samples"), "holds no samples"),
    ],
)
def test_missing_data_is_one_clear_error(
    run: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    arguments = [word.format(run=run, tmp=tmp_path) for word in words]
    with pytest.raises(SwerlError, match=message) as caught:
        swerl(*arguments, "-o", tmp_path / "o.parquet")
    assert caught.value.hint
    assert not (tmp_path / "o.parquet").exists()


def test_a_damaged_file_costs_its_own_step(run: Path, tmp_path: Path) -> None:
    RunFolder(run).samples(0).write_bytes(b"not Parquet")
    answer = swerl(run, "--samples", "-o", tmp_path / "o.parquet")
    assert answer.exit_code == 1
    assert "left out:" in answer.output and "3 rows of 1 step" in answer.output
    alone = swerl(run, "--samples", "--step", 1, "-o", tmp_path / "x" / "o.parquet")
    assert alone.exit_code == 0
    assert "3 rows of 1 step" in alone.output


def test_an_export_leaves_an_existing_file_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("a dataset")
    with pytest.raises(InputError, match="exists already"):
        swerl(run, "--samples", "-o", tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == "a dataset"


def test_turns_of_another_run_are_refused(run: Path, tmp_path: Path) -> None:
    folder = RunFolder(run)
    tables.write_turns(folder.turns(0), [made.episode("x", turn(0, None))])
    with pytest.raises(SwerlError, match=r"lack the episode 0/a\.0"):
        list(export.step_rows(run, [0]))
    assert not list(tmp_path.glob(".*part"))
