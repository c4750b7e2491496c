"""Why a rank ended: real processes end in every way, and their logs say why."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from swerl.cluster.node import ProcessEnd
from swerl.training.crash_reason import CrashReason, crash_reason, hang_places

NOISE = """
import faulthandler, sys, warnings
faulthandler.enable()
faulthandler.register(10, all_threads=True)
def noise():
    print("[rank0]:[W1122 ProcessGroup.cpp:12] Warning: not destroyed", file=sys.stderr)
    warnings.warn("this is deprecated", FutureWarning)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder `swerl` with a module of the project, whose lines are known."""
    folder = tmp_path / "swerl"
    folder.mkdir()
    (folder / "step.py").write_text(
        "import json, time\n"
        "def learn(text):\n"
        "    return json.loads(text)\n"
        "def wait():\n"
        "    print('ready', flush=True)\n"
        "    __torch_function__(time.sleep, 600)\n"
        "def __torch_function__(called, seconds):\n"
        "    called(seconds)\n"
    )
    return folder


def ended(package: Path, script: str) -> tuple[Path, ProcessEnd]:
    """Run a script beside the package; return its log and how it ended."""
    log = package.parent / "rank.log"
    with log.open("wb") as output:
        command = _command(package, script)
        done = subprocess.run(command, stdout=output, stderr=output, timeout=120)
    return log, ProcessEnd(done.returncode)


def test_an_exception_is_reported_with_its_place_without_later_warnings(package: Path) -> None:
    script = "import atexit, step\natexit.register(noise)\nstep.learn('no json')"
    cause = crash_reason(*ended(package, script))
    assert cause == CrashReason(
        "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (in swerl/step.py:3, learn)"
    )


@pytest.mark.parametrize(
    ("swerl", "place"),
    [
        ("/home/me/swerl/src", "swerl/training/rank/learner.py:7, step"),
        (
            "/home/me/swerl/.venv/lib/python3.11/site-packages",
            "swerl/training/rank/learner.py:7, step",
        ),
        (None, "torch/nn/functional.py:9, embedding"),
    ],
)
def test_libraries_in_a_clone_named_swerl_are_not_the_project(
    tmp_path: Path, swerl: str | None, place: str
) -> None:
    library = "/home/me/swerl/.venv/lib/python3.11/site-packages/torch/nn/functional.py"
    frames = [f'  File "{library}", line 9, in embedding', "    return torch.embedding(ids)"]
    if swerl:
        own = f'  File "{swerl}/swerl/training/rank/learner.py", line 7, in step'
        frames = [own, "    model(batch)", *frames]
    log = tmp_path / "rank.log"
    lines = ["Traceback (most recent call last):", *frames, "IndexError: out of range"]
    log.write_text("\n".join(lines))
    assert crash_reason(log, ProcessEnd(1)) == CrashReason(f"IndexError: out of range (in {place})")


def test_a_missing_package_or_too_little_memory_is_reported_with_a_remedy(package: Path) -> None:
    missing = crash_reason(*ended(package, "import megatron_that_is_not_there"))
    assert missing.text.startswith("ModuleNotFoundError: No module named 'megatron_that_is")
    assert "pip install" in missing.advice
    large = crash_reason(*ended(package, "raise MemoryError('200 GiB')"))
    assert "trainer.tokens_per_micro_batch" in large.advice


def test_a_lost_peer_is_distinguished_from_an_own_reason(package: Path) -> None:
    gone = "raise RuntimeError('[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1')"
    assert crash_reason(*ended(package, gone)).follows
    assert not crash_reason(*ended(package, "raise RuntimeError('no')")).follows


def test_a_crash_is_reported_with_its_place(package: Path) -> None:
    script = "import step, ctypes\nstep.json.loads = lambda _: ctypes.string_at(0)\n"
    log, end = ended(package, f"{script}step.learn('')")
    assert end.by_signal == signal.SIGSEGV
    assert crash_reason(log, end).text.startswith("Segmentation fault (in ")
    assert "Traceback" not in log.read_text()


def test_a_killed_process_is_not_explained_by_an_exception_that_it_survived(package: Path) -> None:
    script = (
        "import step, os, traceback\n"
        "try:\n    step.learn('')\nexcept ValueError:\n    traceback.print_exc()\n"
        "os.kill(os.getpid(), 9)"
    )
    log, end = ended(package, script)
    assert str(end) == "killed by SIGKILL"
    cause = crash_reason(log, end)
    assert cause.text == "it was killed before it could write a reason" and "dmesg" in cause.advice
    starved = crash_reason(log, end, num_oom_kills=2)
    assert starved.text == "out of memory: the kernel killed 2 processes while it ran"
    assert "trainer.recompute" in starved.advice


def test_without_an_exception_the_last_line_that_is_no_warning_is_reported(package: Path) -> None:
    script = "import atexit\natexit.register(noise)\nsys.exit('no such device')"
    assert crash_reason(*ended(package, script)).text == "no such device"
    assert crash_reason(package / "none.log", ProcessEnd(0)).text == "its log shows no reason"


def test_hanging_ranks_are_reported_by_their_places(package: Path) -> None:
    elsewhere = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    scripts = ["import step\nstep.wait()", elsewhere, "import step\nstep.wait()"]
    logs = {rank: hang(package, rank, script) for rank, script in enumerate(scripts)}
    two = "ranks 0, 2 in swerl/step.py:6, wait"
    assert hang_places(logs) == f"rank 1 in <string>:11, <module>; {two}"
    stopped = package.parent / "stopped.log"
    stopped.write_text("older stack")
    assert hang_places(logs | {1: (stopped, 11)}) == f"rank 1 wrote no stack; {two}"


def hang(package: Path, rank: int, script: str) -> tuple[Path, int]:
    """Have a hanging process write its stack; return its log and what it had before that."""
    log = package.parent / f"rank{rank}.log"
    log.write_text("Current thread 0x1 (most recent call first):\n  an old stack\n")
    size = log.stat().st_size
    with log.open("ab") as output:
        process = subprocess.Popen(_command(package, script), stdout=PIPE, stderr=output)
    with process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        until(lambda: _sleeps(process.pid), process)
        process.send_signal(signal.SIGUSR1)
        until(lambda: "<module>" in log.read_text()[size:], process)
        process.kill()
    return log, size


def _command(package: Path, script: str) -> list[str]:
    path = f"import sys; sys.path.insert(0, {str(package)!r})"
    return [sys.executable, "-c", f"{path}\n{NOISE}{script}"]


def until(true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for what a live process brings about."""
    while not true():
        assert process.poll() is None
        time.sleep(0.01)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"
