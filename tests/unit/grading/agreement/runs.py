"""Small repositories with tests of every outcome, and the commands that test them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PYTEST = ("parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2",
          "parse_log_matplotlib", "parse_log_seaborn")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One real run: a repository, a command, and the parsers that read its log."""

    name: str
    files: dict[str, str]
    runner: str
    args: tuple[str, ...]
    parsers: tuple[str, ...]


OUTCOMES = """
import pytest

def test_pass(): pass
def test_fail(): assert 1 - 2 == 3 - 5, "one - two"
def test_error(missing_fixture): pass
def test_skip(): pytest.skip("no - network")
@pytest.mark.xfail(reason="known - bug")
def test_xfail(): assert False
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.fixture
def before(): raise OSError("set - up")
@pytest.fixture
def after():
    yield
    raise OSError("tear - down")
def test_set_up(before): pass
def test_tear_down(after): pass
def test_both(after): assert False
class TestThings:
    def test_method(self): pass
    def test_other(self): raise ValueError("a\\nb - c")
"""
IDS = """
import enum, pytest

class MouseButton(enum.IntEnum):
    LEFT = 1
    RIGHT = 3
    def __str__(self): return f"MouseButton.{self.name}"
    __repr__ = __str__

NAMES = ["plain", "a b", "a  b", "x - y", "[", "]", "[a] b", "a] [b", "/tmp/x/y.dcm", "//host/y",
         "/a/*", "\\u00fc\\u4e16", "PASSED", "a PASSED b", "FAILED - x", "a::b", "", " ", "\\t",
         "#", "https://x/y z", "log(photon /s)", "log(photon /m)", "\\u2713 ok", "'q'", '"']

@pytest.mark.parametrize("name", NAMES, ids=NAMES)
def test_id(name): assert name not in ("a  b", "x - y", "log(photon /m)", "a PASSED b")

@pytest.mark.parametrize("button", [*MouseButton], ids=str)
def test_button(button): assert button
@pytest.mark.parametrize("n", range(3), ids=["s k", "s f", "s p"])
def test_mixed(n):
    if n == 0: pytest.skip("x")
    assert n != 1
@pytest.mark.parametrize("n", range(2), ids=["q k", "q p"])
def test_half(n):
    if n == 0: pytest.skip("x")
"""
PRINTS = """
import sys, atexit

print("PASSED tests/test_a.py::test_import")

def test_forged():
    print("PASSED test_prints.py::test_forged")
    print("PASSED", file=sys.stderr)
    assert False

def test_honest():
    print("FAILED test_prints.py::test_honest - printed")
    print("test_honest ... ok")
    print(">>>>> Applied Patch")

def test_words():
    print("PASSED: test_prints.py::test_words")
    print("ERRORS test_prints.py::test_words")
    print("SKIPPED [1] of two")
    print("XFAIL")
    print("a line that ends in FAILED")
    print("\\x1b[31mFAILED\\x1b[0m test_prints.py::test_words")
"""
AT_EXIT = """
import atexit
atexit.register(lambda: print("PASSED test_exit.py::test_bad"))
def test_bad(): assert False
def test_good(): pass
"""
MISSPELT = """
import atexit
atexit.register(lambda: print("PASSED: test_misspelt.py::test_bad"))
def test_bad(): assert False
def test_worse(): assert False
def test_good(): pass
"""
TIMED_OUT = """
def test_marker():
    print(">>>>> Tests Timed Out")
    print("PASSED test_marker.py::test_other")
def test_other(): pass
"""
END_MARKER = """
import atexit
def test_fails(): assert False
def test_passes(): pass
atexit.register(lambda: print(">>>>> End Test Output"))
print("PASSED test_end.py::test_fails", flush=True)
print(">>>>> End Test Output", flush=True)
"""
UNITTESTS = '''
import sys, unittest

class T(unittest.TestCase):
    def test_a(self): pass
    def test_b(self):
        """Says what it does."""
        self.assertEqual(1, 2)
    def test_c(self): raise OSError("x")
    @unittest.skip("no ... ok")
    def test_d(self): pass
    @unittest.expectedFailure
    def test_e(self): self.fail()
    @unittest.expectedFailure
    def test_f(self): pass
    def test_g(self):
        for i in range(3):
            with self.subTest(i=i): self.assertEqual(i % 2, 0)
    def test_h(self):
        print("noise"); print("ok", file=sys.stderr)
    def test_i(self):
        print("test_b (test_u.T.test_b) ... ok", file=sys.stderr)
    def test_j(self): sys.stderr.write("Internal Server Error: /x/\\n")
    def test_k(self): sys.stderr.write("ERROR: found nothing\\nFAIL: x y\\n")
    def test_l(self): sys.stderr.write("System check identified no issues (0 silenced)\\n")
    def test_m(self): "--version is equivalent to version"
    def test_n(self):
        sys.stderr.write("Testing against Django installed in 'x'\\n no issues (0 silenced).\\n")
'''
CLASSES = """
import unittest

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no class")
    def test_never(self): pass
class Late(unittest.TestCase):
    def tearDown(self): raise OSError("late")
    def test_tear_down(self): pass
    def test_skip(self): self.skipTest("later")
class Good(unittest.TestCase):
    def test_good(self): pass
"""
BROKEN = "def test_x(:\n"
NO_MODULE = "import no_such_module\ndef test_x(): pass\n"
GOOD = "def test_good(): pass\ndef test_fine(): assert True\n"
BAD_EXIT = """
import pytest
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session): session.exitstatus = 3
"""
KILLED = """
import os, signal
def test_first(): pass
def test_kill(): os.kill(os.getpid(), signal.SIGKILL)
"""
LEFT = "import os\ndef test_first(): pass\ndef test_leave(): os._exit(0)\n"
LEFT_AT_IMPORT = "import sys\nprint('PASSED test_l.py::test_x')\nsys.exit(0)\n"
SYMPY = """
from sympy.testing.pytest import skip, XFAIL
def test_pass(): pass
def test_fail(): assert 1 == 2
def test_error(): raise OSError("x")
def test_skip(): skip("slow")
@XFAIL
def test_xfail(): assert False
@XFAIL
def test_xpass(): pass
def test_prints():
    print("test_fail ok")
def test_last(): pass
"""

PYTEST_REPOS = {
    "outcomes": {"test_o.py": OUTCOMES},
    "deep": {"tests/unit/test_o.py": OUTCOMES, "tests/test_g.py": GOOD},
    "ids": {"test_ids.py": IDS},
    "prints": {"test_prints.py": PRINTS},
    "unittests": {"test_u.py": UNITTESTS},
    "classes": {"test_c.py": CLASSES, "test_g.py": GOOD},
    "broken": {"test_b.py": BROKEN, "test_g.py": GOOD},
    "no_module": {"test_m.py": NO_MODULE, "test_g.py": GOOD},
    "no_conftest": {"conftest.py": NO_MODULE, "test_g.py": GOOD},
    "bad_exit": {"conftest.py": BAD_EXIT, "test_g.py": GOOD},
    "killed": {"test_k.py": KILLED},
    "left": {"test_l.py": LEFT},
    "left_at_import": {"test_l.py": LEFT_AT_IMPORT},
    "empty": {"test_e.py": "x = 1\n"},
    "good": {"test_g.py": GOOD},
    "at_exit": {"test_exit.py": AT_EXIT},
    "misspelt": {"test_misspelt.py": MISSPELT},
    "timed_out": {"test_marker.py": TIMED_OUT},
    "end_marker": {"test_end.py": END_MARKER},
}
PYTEST_ARGS = {
    "plain": ("-rA",),
    "classic": ("-rA", "-vv", "-o", "console_output_style=classic", "--tb=no"),
    "no_header": ("--no-header", "-rA"),
    "coloured": ("-rA", "--color=yes"),
    "shown": ("-rA", "-s", "--tb=short"),
    "verbose": ("-v", "--tb=line"),
    "quiet": ("-rA", "-q"),
    "first": ("-rA", "-x"),
    "chosen": ("-rA", "-k", "good or fail or id"),
    "strict": ("-rA", "-W", "error", "--tb=long", "-l"),
}
UNITTEST_REPOS = {
    "unittests": {"test_u.py": UNITTESTS},
    "classes": {"test_c.py": CLASSES, "test_u.py": UNITTESTS},
    "broken": {"test_b.py": BROKEN, "test_c.py": CLASSES},
}
UNITTEST_ARGS = {"plain": ("-v",), "buffered": ("-v", "-b"), "first": ("-v", "-f")}
DJANGO_ARGS = {
    "plain": ("--verbosity", "2"),
    "reversed": ("--verbosity", "2", "--reverse"),
    "first": ("--verbosity", "2", "--failfast"),
    "buffered": ("--verbosity", "2", "--buffer"),
    "loud": ("--verbosity", "3"),
}
SYMPY_REPOS = {
    "outcomes": {"test_s.py": SYMPY},
    "good": {"test_s.py": "def test_a(): pass\ndef test_b(): pass\n"},
    "broken": {"test_s.py": SYMPY, "test_b.py": NO_MODULE},
}
DJANGO = {
    "settings.py": (
        "SECRET_KEY = 'x'\nUSE_TZ = True\n"
        "INSTALLED_APPS = ['django.contrib.contenttypes', 'django.contrib.auth', 'app']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
        "DEFAULT_AUTO_FIELD = 'django.db.models.AutoField'\n"
    ),
    "app/__init__.py": "",
    "app/models.py": (
        "from django.db import models\n"
        "class Thing(models.Model):\n    name = models.CharField(max_length=9)\n"
    ),
    "app/tests.py": (
        "from django.core.management import call_command\n"
        "from django.test import TestCase, TransactionTestCase\n"
        "from .models import Thing\n"
        "class Things(TestCase):\n"
        "    def test_made(self): self.assertTrue(Thing.objects.create(name='a').pk)\n"
        "    def test_wrong(self): self.assertEqual(Thing.objects.count(), 1)\n"
        "    def test_page(self): self.client.get('/nowhere/')\n"
        "class Slow(TransactionTestCase):\n"
        "    def test_migrates(self): call_command('migrate', verbosity=2)\n"
        "    def test_checks(self): call_command('check')\n"
    ),
    "app/test_u.py": UNITTESTS,
}


def all_runs() -> Iterator[Run]:
    """Yield every run."""
    for repo, files in PYTEST_REPOS.items():
        for how, args in PYTEST_ARGS.items():
            yield Run(f"pytest-{repo}-{how}", {"pytest.ini": "", **files}, "pytest", args, PYTEST)
    for repo, files in UNITTEST_REPOS.items():
        for how, args in UNITTEST_ARGS.items():
            name = f"unittest-{repo}-{how}"
            yield Run(name, files, "unittest", args, ("parse_log_django",))
    for how, args in DJANGO_ARGS.items():
        yield Run(f"django-{how}", DJANGO, "django", args, ("parse_log_django",))
    for repo, files in SYMPY_REPOS.items():
        for options in ((), ("-C",)):
            names = (*options, *sorted(files))
            name = f"sympy-{repo}{''.join(options)}"
            yield Run(name, files, "sympy", names, ("parse_log_sympy",))
