"""CPU seconds that the leak scan takes for a GiB of Python sources, the slowest common content.

    python bench/scan_leaks.py [--mib 128]

Copies of the standard library's sources lie in a temporary folder, which the program of
`swerl tasks scan-leaks` reads for lines that are in none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path

from swerl.checks import scan_leaks

ROOTS = '(request["workdir"], *ROOTS)'


def main() -> None:
    """Fill the folder, scan it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    size = parser.parse_args().mib << 20
    texts = [path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        written = 0
        for number, text in enumerate(cycle(texts)):
            if written >= size:
                break
            Path(folder, f"{number}.py").write_bytes(text)
            written += len(text)
        found = scan(folder)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    print(f"{found['num_files']:,} files of {written >> 20} MiB: {cpu_s:.1f} CPU seconds,")
    print(f"{cpu_s / written * 2**30:.0f} for each GiB; not checked: {found['unchecked']}")


def scan(folder: str) -> dict[str, object]:
    """Scan the folder alone for a fix that it does not have."""
    program = scan_leaks._program()
    assert ROOTS in program
    request = {
        "workdir": folder,
        "base": "",
        "lines": {"solution": ["return the_fixed_value_of(paid, price)"]},
        "passages": {"solution": [["def fixed_value(a):", "b = a + 1", "return b * 77"]]},
        "added": ["return b * 77"],
        **{key: {} for key in ("blobs", "sources")},
        **{key: [] for key in ("sizes", "words", "tails", "names")},
        "budget_s": 3600,
    }
    argv = [sys.executable, "-S", "-c", program.replace(ROOTS, '(request["workdir"],)')]
    done = subprocess.run(argv, input=json.dumps(request), capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
