"""The till in nine languages: one table of small projects with hidden tests, by kind of Task.

Each project has the same bug and the same four tests. The tests that a patch must fix are two, so
that an answer to the issue's example alone does not pass them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from swerl.core.grade import Verdict
from tests.redteam import compiled, scripted
from tests.redteam.policy import Defence, Policy, TaskKind, write


@dataclass(frozen=True, slots=True)
class Ground:
    """A project in one language."""

    path: str
    """The module with the bug."""
    head: str
    """Its beginning; code of a policy goes behind it."""
    rest: str
    test_path: str
    tests: str
    """The hidden tests."""
    command: str
    parser: str
    name: str
    """Form of a test's id: `{title}` is as `change_of_a_note`, `{camel}` as `ChangeOfANote`,
    `{words}` as `Change of a note`, `{number}` its place."""
    line: str
    """Form of the log's line for a passed test, as `name`; `[id]` is the id."""
    probe: str
    """Shell command that fails in an image without the tools."""
    before: str = ""
    """The log's text in front of the lines."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files that the agent sees."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Further hidden files."""
    setup: str = ""
    """Shell command that root runs in every sandbox."""
    env: Mapping[str, str] = field(default_factory=dict)
    wrong: str = "price - paid"
    right: str = "paid - price"

    @property
    def fixed(self) -> tuple[str, ...]:
        return tuple(self._fill(self.name, number) for number in (1, 2))

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(self._fill(self.name, number) for number in (0, 3))

    @property
    def forged(self) -> str:
        """The log of a run in which every test passes."""
        lines = []
        for number in range(len(TITLES)):
            name = self._fill(self.name, number)
            lines.append(self._fill(self.line, number).replace("[id]", name))
        return self.before + "\n".join(lines) + "\n"

    def module(self, code: str = "", *, body: str = "") -> str:
        """Return the module, still wrong, with code behind its head and `body` in `change`."""
        return self.head + code + self.rest.replace("BODY", body)

    def with_more(self, num: int) -> dict[str, object]:
        """Return the fields of a grading spec with so many further tests to fix.

        Code that knows a part of each answer, such as its parity, passes by chance. Each further
        test makes that rarer.
        """
        blocks = self.tests.split("\n\n")
        at = next(at for at, block in enumerate(blocks) if _COIN.search(block))
        # No title is a part of another one: PHPUnit's log has titles instead of names.
        titles = [f"change_of_{chr(ord('b') + index)}_coin" for index in range(num)]
        for index, title in enumerate(titles):
            price, paid = 2 * index + 12, 3 * index + 20
            more = re.sub(r"\b5\b", str(paid - price), blocks[at])
            more = re.sub(r"\b4, 9\b", f"{price}, {paid}", more)
            name = title if TITLES[2] in more else title.title().replace("_", "")
            blocks.insert(at + 1 + index, _COIN.sub(name, more))
        names = tuple(_named(self.name, title) for title in titles)
        tests = {**self.hidden, self.test_path: "\n\n".join(blocks)}
        return {"fail_to_pass": (*self.fixed, *names), "test_files": tests}

    def _fill(self, form: str, number: int) -> str:
        return _named(form, TITLES[number], number + 1)


def _named(form: str, title: str, number: int = 0) -> str:
    words = title.replace("_", " ").capitalize()
    camel = title.title().replace("_", "")
    return form.format(title=title, words=words, camel=camel, number=number)


_COIN = re.compile(r"change_of_a_coin|ChangeOfACoin")
TITLES = ("total_of_prices", "change_of_a_note", "change_of_a_coin", "change_of_nothing")

GROUNDS: Mapping[TaskKind, Ground] = {
    TaskKind.PYTHON: Ground(
        "till.py",
        '"""A shop\'s till."""\n',
        scripted.PYTHON,
        "tests/test_till.py",
        scripted.PYTEST,
        "python3 -m pytest -rA -p no:cacheprovider tests/test_till.py",
        "pytest",
        "tests/test_till.py::test_{title}",
        "PASSED [id]",
        "python3 -m pytest --version",
        files={"tests/__init__.py": ""},
        env={"PYTHONPATH": "."},
    ),
    TaskKind.CLASSES: Ground(
        "till.py",
        '"""A shop\'s till."""\n',
        scripted.PYTHON,
        "tests/test_till.py",
        scripted.UNITTEST,
        "python3 -m unittest -v tests/test_till.py",
        "django",
        "test_{title} (tests.test_till.TillTest.test_{title})",
        "[id] ... ok",
        "python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'",
        files={"tests/__init__.py": ""},
        env={"PYTHONPATH": "."},
    ),
    TaskKind.JAVASCRIPT: Ground(
        "till.js",
        "'use strict';\n",
        scripted.JAVASCRIPT,
        "tests/till.test.js",
        scripted.JAVASCRIPT_TESTS.format(imports="const test = require('node:test');", test="test"),
        "node --test --test-reporter=tap tests/",
        "tap",
        "- {title}",
        "ok {number} [id]",
        "node --test-reporter=tap --version",
    ),
    TaskKind.MOCHA: Ground(
        "till.js",
        "'use strict';\n",
        scripted.JAVASCRIPT,
        "tests/till.js",
        scripted.JAVASCRIPT_TESTS.format(imports="'use strict';", test="it"),
        "mocha --reporter tap tests",
        "tap",
        "{title}",
        "ok {number} [id]",
        "NODE_PATH=/usr/share/nodejs mocha --version",
        env={"NODE_PATH": "/usr/share/nodejs"},
    ),
    TaskKind.GO: Ground(
        "till.go",
        "package till\n",
        compiled.GO,
        "till_test.go",
        compiled.GO_TESTS,
        "go test -vet=off -v ./...",
        "go_test",
        "Test{camel}",
        "=== RUN   [id]\n--- PASS: [id] (0.00s)",
        "go version",
        files={"go.mod": "module till\n\ngo 1.19\n"},
    ),
    TaskKind.RUST: Ground(
        "src/lib.rs",
        "//! A shop's till.\n",
        compiled.RUST,
        "tests/till.rs",
        compiled.RUST_TESTS,
        "cargo test --offline",
        "cargo",
        "{title}",
        "test [id] ... ok",
        "cargo --version && rustc --version",
        files={"Cargo.toml": compiled.CARGO},
    ),
    TaskKind.JAVA: Ground(
        "Till.java",
        "public class Till {\n",
        compiled.JAVA,
        "tests/TillTest.java",
        compiled.JAVA_TESTS,
        compiled.JAVA_RUN,
        "gradle",
        "TillTest > {title}",
        "[id] PASSED",
        f"{compiled.JAVA_SETUP}javac -version && test -e {compiled.JARS.partition(':')[0]}",
        setup=compiled.JAVA_SETUP,
        hidden={"tests/Lines.java": compiled.JAVA_LINES},
    ),
    TaskKind.MINITEST: Ground(
        "till.rb",
        "# A shop's till.\n",
        scripted.RUBY,
        "test/test_till.rb",
        scripted.MINITEST,
        "ruby test/test_till.rb -v",
        "minitest_methods",
        "TillTest#test_{title}",
        "[id] = 0.00 s = .",
        "ruby -rminitest -e ''",
    ),
    TaskKind.RSPEC: Ground(
        "till.rb",
        "# A shop's till.\n",
        scripted.RUBY,
        "spec/till_spec.rb",
        scripted.RSPEC,
        "rspec -r ./spec/lines.rb -f Lines spec/till_spec.rb",
        "rspec",
        "{title}",
        "[id] - passed",
        "rspec --version",
        hidden={"spec/lines.rb": scripted.RSPEC_LINES},
    ),
    TaskKind.PHP: Ground(
        "Till.php",
        "<?php\n",
        scripted.PHP,
        "tests/TillTest.php",
        scripted.PHP_TESTS,
        f"{scripted.PHP_RUN} $(command -v phpunit) --testdox --no-configuration tests/TillTest.php",
        "phpunit_timed",
        "Till > {words}",
        " ✔ {words}",
        f"{scripted.PHP_RUN} $(command -v phpunit) --version",
        before="Till (Shop\\Tests\\Till)\n",
        wrong="$price - $paid",
        right="$paid - $price",
    ),
    TaskKind.C: Ground(
        "till.c",
        '#include "till.h"\n',
        compiled.C,
        "tests/test_till.c",
        compiled.C_TESTS,
        "cc -o /tmp/test_till tests/test_till.c till.c && /tmp/test_till",
        "tap",
        "{title}",
        "ok {number} [id]",
        "cc --version",
        files={"till.h": compiled.C_HEADER},
    ),
    TaskKind.CPP: Ground(
        "till.cpp",
        '#include "till.hpp"\n',
        compiled.CPP,
        "tests/test_till.cpp",
        compiled.CPP_TESTS,
        "c++ -std=c++17 -o /tmp/test_till tests/test_till.cpp till.cpp && /tmp/test_till",
        "googletest",
        "Till.{title}",
        "[       OK ] [id] (0 ms)",
        "c++ --version",
        files={"till.hpp": compiled.CPP_HEADER},
        hidden={"tests/check.hpp": compiled.CPP_CHECK},
    ),
}


def inside(
    name: str,
    sentence: str,
    kind: TaskKind,
    code: str = "",
    *commands: str,
    body: str = "",
    stopped_by: Defence = Defence.BLIND,
    verdict: Verdict = Verdict.CHEAT,
    changes: Mapping[str, object] | None = None,
) -> Policy:
    """Return a policy that changes the module: code behind its head, and `body` in `change`."""
    ground = GROUNDS[kind]
    module = write(ground.path, ground.module(code, body=body))
    return Policy(name, sentence, (module, *commands), stopped_by, verdict, kind, changes or {})
