"""How fast rows become Tasks, in how much memory, and what vetting costs beyond the tests.

`python bench/tasks.py [--json FILE] [--rows 100000]`. Rows are distinct, written for this
benchmark, and of the size of classic SWE-bench rows. Each way to handle them is measured in a
process of its own, so that its peak memory is its own too; rates are per second of processor time,
which is what one core gives, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import _vetting

from swerl.tasks.convert import convert
from swerl.tasks.datasets import find_converter
from swerl.tasks.rows import file_rows

WAYS = ("read JSONL", "convert JSONL", "read Parquet", "convert Parquet", "go on at the end")
ROW_BYTES = 14_000
"""Mean size of a classic row of SWE-bench Lite and Verified."""
TESTS = 75
"""Mean number of declared tests of those rows."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of handling all rows took."""

    way: str
    rows: int
    rows_per_cpu_s: float
    wall_s: float
    peak_mib: float


def make_rows(count: int) -> Iterator[dict[str, str]]:
    """Yield distinct classic rows."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(4000)]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size // 7))

    for number in range(count):
        tests = [f"tests/test_{words[number % 4000]}.py::test_{i}_{number}" for i in range(TESTS)]
        yield {
            "instance_id": f"pallets__flask-{number}",
            "repo": "pallets/flask",
            "base_commit": f"{number:040x}",
            "patch": diff("src/flask/app.py", text(1200)),
            "test_patch": diff("tests/test_basic.py", text(2500)),
            "problem_statement": text(2200).replace(" the ", "\n"),
            "hints_text": text(2000),
            "created_at": "2020-01-01T00:00:00Z",
            "version": "2.0",
            "FAIL_TO_PASS": json.dumps(tests[:2]),
            "PASS_TO_PASS": json.dumps(tests[2:]),
            "environment_setup_commit": f"{number:040x}",
        }


def diff(path: str, text: str) -> str:
    """Return a diff that adds a text, a line for every sixty characters."""
    lines = [f"+    {text[i : i + 60]}" for i in range(0, len(text), 60)]
    header = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1,{len(lines)} @@\n"
    return header + "\n".join(lines) + "\n"


def write_rows(folder: Path, count: int) -> None:
    """Write the rows as JSONL, and as Parquet in groups of a thousand, as the hub keeps them."""
    import pyarrow
    from pyarrow import parquet

    writer = None
    with (folder / "rows.jsonl").open("w") as lines:
        batch = []
        for row in make_rows(count):
            lines.write(json.dumps(row) + "\n")
            batch.append(row)
            if len(batch) == 1000:
                table = pyarrow.Table.from_pylist(batch)
                writer = writer or parquet.ParquetWriter(folder / "rows.parquet", table.schema)
                writer.write_table(table)
                batch = []
    assert writer
    writer.close()


def measure(way: str, folder: Path) -> Cost:
    """Do one thing with all rows in this process."""
    source = file_rows(folder / ("rows.parquet" if way.endswith("Parquet") else "rows.jsonl"))
    out = folder / "tasks.jsonl"
    began, began_cpu = time.perf_counter(), time.process_time()
    if way.startswith("read"):
        count = sum(1 for _ in source.read(0))
    elif way.startswith("convert"):
        count = convert(find_converter("swe-bench"), source, out).num_tasks
    else:
        count = _go_on(folder, out)
    cpu, wall = time.process_time() - began_cpu, time.perf_counter() - began
    return Cost(way, count, count / cpu, wall, _peak_mib())


def _peak_mib() -> float:
    """Return the most memory that this program held; `getrusage` would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _go_on(folder: Path, out: Path) -> int:
    """Take up a conversion that was killed just before its end."""
    from swerl.tasks.convert import Settings, identity_of

    converter, source = find_converter("swe-bench"), file_rows(folder / "rows.jsonl")
    out.rename(out.with_name("tasks.jsonl.part"))
    out.with_name("tasks.rejects.jsonl").rename(out.with_name("tasks.rejects.jsonl.part"))
    identity = identity_of(converter, source, Settings())
    out.with_name("tasks.jsonl.part.json").write_text(identity)
    done = convert(converter, source, out)
    assert done.num_resumed == done.num_tasks
    return done.num_resumed


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=100_000, help="in whole thousands")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        print(json.dumps(asdict(measure(chosen.way, chosen.folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        vetting = _vetting.measure(Path(folder))
        write_rows(Path(folder), chosen.rows)
        costs = [_apart(way, folder) for way in WAYS]
    print(f"{'':<18}{'rows/cpu s':>12}{'wall s':>10}{'peak MiB':>10}")
    for cost in costs:
        rate, wall, peak = (float(cost[k]) for k in ("rows_per_cpu_s", "wall_s", "peak_mib"))
        print(f"{cost['way']:<18}{rate:>12,.0f}{wall:>10.1f}{peak:>10.0f}")
    print(
        f"\nvet {vetting.tasks} tasks, {_vetting.WORKERS} at once: {vetting.wall_s:.1f} s for "
        f"{vetting.test_s:.1f} s of tests, {vetting.share:.2f} x their share"
    )
    print(f"grading beyond its tests: {vetting.overhead_s:.2f} s")
    if chosen.json:
        found = {"conversion": costs, "vetting": asdict(vetting)}
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")
        print(f"written to {chosen.json}")


def _apart(way: str, folder: str) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--way", way, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
