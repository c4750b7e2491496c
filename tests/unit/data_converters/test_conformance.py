"""What every converter keeps to; a new dataset adds its example row and passes all of this."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task, from_row, to_row
from swerl.tasks.datasets import converter_names, find_converter

from .examples import EXAMPLES, Row

NAMES = converter_names()
WRONG: tuple[Json, ...] = (None, "", "[]", "{", 7, -1.5, True, [], [1], ["x"], {}, {"a": [None]})
"""Values of every type; a column takes some of them and refuses the others."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)

NEEDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "swebench": (("fail_to_pass",), ("test_command",), ("log_parser",)),
    "r2e": (("expected",), ("test_files",), ("test_command",), ("log_parser",)),
    "swebench_pro": (("fail_to_pass",), ("files",), ("test_setup",), ("report_path",)),
    "script": (("test_files", "test_patch"), ("test_command",), ("log_parser",)),
    "command": (("test_command",),),
    "reward_file": (("files",), ("test_command",), ("test_setup",), ("report_path",)),
}
"""Grader -> groups of fields of a spec; a Task fills one field of each group."""


def converted(name: str, row: Row) -> Task | None:
    """Return the Task, or None where the row is refused; anything else is a failure."""
    try:
        task = find_converter(name).to_task(row)
    except TaskError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 300
        return None
    assert isinstance(task, Task)
    assert from_row(json.loads(json.dumps(to_row(task)))) == task
    return task


def example(name: str) -> Task:
    task = converted(name, EXAMPLES[name])
    assert task
    return task


@pytest.mark.parametrize("name", NAMES)
def test_the_example_converts_and_comes_back_whole(name: str) -> None:
    task = example(name)
    assert task.id and task.repo and task.dataset
    assert task.workdir.startswith("/")
    assert task.image and not set(task.image) & set(" \n\t")
    assert task.grading.timeout_s > 0
    assert find_converter(name).to_task(EXAMPLES[name]) == task


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_says_all_that_its_grader_needs(name: str) -> None:
    spec = example(name).grading
    for group in NEEDS[spec.grader]:
        assert any(getattr(spec, field) for field in group), group


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_tells_nothing_that_decides_the_grade(name: str) -> None:
    task = example(name)
    spec: GradingSpec = task.grading
    secrets = [task.id, task.image, task.gold_patch, spec.test_patch, spec.test_command]
    secrets += [*spec.fail_to_pass, *spec.expected, *spec.test_files.values()]
    secrets += [str(EXAMPLES[name].get("hints_text") or task.id)]
    for secret in filter(None, secrets):
        assert len(secret) < 4 or secret not in task.prompt


@pytest.mark.parametrize("name", NAMES)
def test_an_agents_sandbox_gets_nothing_hidden(name: str) -> None:
    task = example(name)
    shown = "\n".join([task.setup, *task.files.values()])
    for hidden in (*task.grading.files.values(), *task.grading.test_files.values()):
        assert hidden not in shown


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_column_of_any_type_is_taken_or_refused(name: str, value: Json) -> None:
    row = EXAMPLES[name]
    for column in row:
        converted(name, {**row, column: value})
        converted(name, {each: row[each] for each in row if each != column})


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(TaskError, match="is missing"):
        find_converter(name).to_task({})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_columns_are_taken_or_refused(name: str, data: st.DataObject) -> None:
    row = EXAMPLES[name]
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(row)), JSON, min_size=1))
    converted(name, {**row, **changed})


def test_every_dataset_has_its_example() -> None:
    assert sorted(EXAMPLES) == NAMES
