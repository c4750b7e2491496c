from collections import Counter

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
