from collections import Counter
from dataclasses import replace

from swerl.rollout.scheduler import choose
from swerl.task import GradingSpec, Task

TASKS = [Task(str(i), "r", "host", "/w", "p", GradingSpec("command")) for i in range(7)]


def test_every_task_comes_once_an_epoch_in_a_new_order() -> None:
    chosen = [task.id for step in range(7) for task in choose(TASKS, step, 3, seed=0)]
    epochs = [chosen[i : i + 7] for i in range(0, 21, 7)]
    assert all(Counter(epoch) == Counter(task.id for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_step_chooses_the_same_tasks_again_after_a_restart() -> None:
    assert choose(TASKS, 4, 3, seed=1) == choose(TASKS, 4, 3, seed=1)
    assert choose(TASKS, 4, 3, seed=1) != choose(TASKS, 4, 3, seed=2)


def test_a_curriculum_goes_from_easy_to_hard_and_chance_decides_ties() -> None:
    rates = [0.2, None, 0.9, 0.5, 0.5, 0.5, 0.5]
    tasks = [
        replace(task, metadata={} if rate is None else {"solve_rate": rate})
        for task, rate in zip(TASKS, rates, strict=True)
    ]
    epochs = [choose(tasks, epoch, 7, seed=0, easy_first=True) for epoch in range(8)]
    for epoch in epochs:
        assert [task.metadata.get("solve_rate") for task in epoch] == [
            *(0.9, 0.5, 0.5, 0.5, 0.5, 0.2),
            None,
        ]
    assert len({tuple(task.id for task in epoch) for epoch in epochs}) > 1
