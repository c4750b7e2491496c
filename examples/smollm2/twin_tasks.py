"""Write 48 training and 16 held-out tasks of the twin: train.jsonl and heldout.jsonl."""

from pathlib import Path

from swerl.core.task import write_tasks
from swerl.tasks.twin import make_tasks

for split, count in (("train", 48), ("heldout", 16)):
    tasks = make_tasks(Path("tasks") / split, split=split, count=count, seed=0)
    write_tasks(Path(f"{split}.jsonl"), tasks)
