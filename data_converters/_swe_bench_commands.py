"""Test commands of SWE-bench's repositories in SWE-bench's images, for rows without a script."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.core.errors import TaskError

from ._common import test_files

ACTIVATE = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""Shell commands that activate the environment of the dataset's images."""

_EDITABLE = "python -m pip install -e ."
_UTF8 = "export LANG=en_US.UTF-8\nexport LANGUAGE=en_US:en\nexport LC_ALL=en_US.UTF-8"


@dataclass(frozen=True, slots=True)
class Runner:
    """Install command, test command and log parser of one repository."""

    test: str = "pytest -rA"
    install: str = _EDITABLE
    parser: str = "pytest"


_DJANGO_TEST = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_SYMPY_TEST = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
_ASTROPY = Runner(install=f"{_EDITABLE}[test] --verbose", parser="pytest_coloured")
_ASTROPY_OLD_TEST = "pytest -rA -vv -o console_output_style=classic --tb=no"

_RUNNERS = {
    "astropy/astropy": _ASTROPY,
    "django/django": Runner(_DJANGO_TEST, parser="django"),
    "marshmallow-code/marshmallow": Runner(install="python -m pip install -e '.[dev]'"),
    "matplotlib/matplotlib": Runner(parser="matplotlib"),
    "mwaskom/seaborn": Runner("pytest --no-header -rA", f"{_EDITABLE}[dev]", "seaborn"),
    "pallets/flask": Runner(),
    "psf/requests": Runner(install="python -m pip install .", parser="pytest_options"),
    "pvlib/pvlib-python": Runner(install=f"{_EDITABLE}[all]"),
    "pydata/xarray": Runner(),
    "pydicom/pydicom": Runner(parser="pytest_options"),
    "pylint-dev/astroid": Runner(),
    "pylint-dev/pylint": Runner(parser="pytest_options"),
    "pytest-dev/pytest": Runner(),
    "pyvista/pyvista": Runner(),
    "scikit-learn/scikit-learn": Runner(
        install="python -m pip install -v --no-use-pep517 --no-build-isolation -e .",
        parser="pytest_coloured",
    ),
    "sphinx-doc/sphinx": Runner(
        "tox --current-env -epy39 -v --", f"{_EDITABLE}[test]", "pytest_coloured"
    ),
    "sqlfluff/sqlfluff": Runner(),
    "sympy/sympy": Runner(_SYMPY_TEST, parser="sympy"),
}

PARSERS = {
    f"parse_log_{repo.split('/')[1].split('-')[0]}": runner.parser
    for repo, runner in _RUNNERS.items()
}
"""SWE-bench's parser names -> the names in Tasks."""
PARSERS |= {
    "parse_log_pytest_options": "pytest_options",
    "parse_log_pytest_v2": "pytest_coloured",
    "parse_log_pytest_v3": "pytest_coloured",
    "parse_log_gotest": "go_test",
    "parse_log_gradle_custom": "gradle",
    "parse_log_micropython_test": "micropython",
    "parse_log_rspec_transformed_json": "rspec",
}
PARSERS |= {
    f"parse_log_{name}": name
    for name in (
        "jest", "jest_json", "vitest", "karma", "tap", "maven", "ant", "redis", "jq", "doctest",
        "googletest", "cargo", "phpunit", "minitest", "cucumber", "ruby_unit",
    )
}  # fmt: skip
_PARSERS_OF_TASKS = {
    "jekyll__jekyll-8047": "minitest",
    "jekyll__jekyll-8167": "minitest",
    "jekyll__jekyll-9141": "minitest",
    "jekyll__jekyll-8761": "cucumber",
    "jekyll__jekyll-8771": "cucumber",
    "immutable-js__immutable-js-2005": "jest_json",
    "immutable-js__immutable-js-2006": "jest",
}
"""Parsers by task, for repositories that changed their test runner under one parser name."""
_CHANGING = {"parse_log_jekyll", "parse_log_immutable_js"}


def log_parser(name: str, task_id: str = "") -> str:
    """Return the name in Tasks of a row's parser; an unknown parser keeps its name.

    Raises TaskError if the name is not an identifier.
    """
    if not name.isidentifier():
        raise TaskError(f"log_parser {name!r:.40} is not a parser name")
    if name in _CHANGING:
        return _PARSERS_OF_TASKS.get(task_id, name)
    return PARSERS.get(name, name)


def runner(repo: str) -> Runner:
    """Return the commands of this repository. Raises TaskError if they are unknown."""
    if repo not in _RUNNERS:
        raise TaskError(f"repository {repo} is unknown and the row has no evaluation script")
    return _RUNNERS[repo]


def test_command(repo: str, version: str, test_patch: str) -> str:
    """Return the shell script that tests one row in its image."""
    how = runner(repo)
    steps = [_locale(repo, version), ACTIVATE, _install(repo, version, how)]
    arguments = test_files(test_patch)
    if repo == "django/django":
        arguments = [_dotted(path) for path in arguments]
    steps.append(" ".join([_test(repo, version, how), *arguments]))
    return "\n".join(step for step in steps if step)


def _test(repo: str, version: str, how: Runner) -> str:
    if repo == "astropy/astropy" and version.startswith(("0.", "1.")):
        return _ASTROPY_OLD_TEST
    if repo == "django/django" and version == "1.9":
        return "./tests/runtests.py --verbosity 2"
    return how.test


def _install(repo: str, version: str, how: Runner) -> str:
    major = version.split(".")[0]
    if repo == "django/django" and major in {"1", "2"}:
        return "python setup.py install"
    if repo == "matplotlib/matplotlib" and version in {"3.8", "3.9"}:
        return 'python -m pip install --no-build-isolation -e ".[dev]"'
    if repo == "matplotlib/matplotlib" and major in {"1", "2"}:
        return "python setup.py build; python setup.py install"
    if repo == "mwaskom/seaborn" and version == "0.11":
        return _EDITABLE
    return how.install


def _locale(repo: str, version: str) -> str:
    if repo != "django/django" or version in {"1.4", "1.5", "1.6"}:
        return ""
    major = version.split(".")[0]
    if major in {"1", "2"}:
        return f"{_UTF8}\nexport PYTHONIOENCODING=utf8"
    unlock = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"
    return f"{unlock}\n{_UTF8}" if major == "3" else ""


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removeprefix("tests/").replace("/", ".")
