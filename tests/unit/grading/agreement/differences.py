"""Classes in which swerl's verdict may differ from the swebench package's, with reasons.

All other verdicts must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from swerl.core.grade import Grade, TestStatus, Verdict

from .asking import Theirs
from .replay import Lists, Log

CLASSES = {
    "worst line": "a failure counts, whatever another line or report says of the test",
    "error": "an error with a message counts for its test",
    "subtest": "a failed subtest fails its test",
    "misspelt": "a line such as `PASSED: id` is no status line",
    "marker": "the package's own markers mean nothing where a test prints them",
    "outside": "what is printed outside of the tests never counts",
    "printed": "what a test prints before or after the summary of pytest is no status",
    "mixed": "an id that is cut has to pass in all of its tests",
    "no test": "a task with no test to mend is invalid",
    "results": "results of Maven beyond those of the test commands are not believed",
    "breaks": "a log at which the package breaks is read as far as it goes",
    "exit code": "4.1 believes a command that fails without a failing test",
    "skipped": "4.1 counts a skipped test that the patch must fix as neither good nor bad",
    "names": "4.1 cuts more ids at their first space, and takes a count of skips for a test",
}
"""Classes of differences; the last three concern 4.1 alone."""

_SUMMARY_END = re.compile(r"^=+ .*\bin [\d.]+s", re.MULTILINE)
_VALID = {status.name for status in TestStatus}
_WEIGHT = {"FAILED": 2, "ERROR": 2, "SKIPPED": 1}
_FAILING = {TestStatus.FAILED, TestStatus.ERROR}


def status_classes(log: Log, theirs: Mapping[str, str] | None) -> dict[str, set[str]]:
    """Return the classes in which a whole log is read differently, with their ids.

    An empty set of ids means all of them.
    """
    if theirs is None:
        return {"breaks": set()}
    found: dict[str, set[str]] = {}
    if ">>>>> " in log.text and not theirs:
        found["marker"] = set()
    if ">>>>> End Test Output" in log.text:
        found["marker"] = set()
    if log.before:
        found["outside"] = set()
    if log.parser == "parse_log_doctest" and log.text.count("<doctest") > 1:
        found["worst line"] = set()
    if log.parser == "parse_log_maven" and _has_more_results(log.text):
        found["results"] = set()
    misspelt = {name for name, word in theirs.items() if word not in _VALID}
    errors = {
        name.split(" - ", 1)[0]
        for name, word in theirs.items()
        if word == "ERROR" and " - " in name and log.parser == "parse_log_pytest_v2"
    }
    printed = set[str]()
    if log.parser != "parse_log_seaborn":
        _, heading, rest = log.text.partition("= short test summary info =")
        end = max((each.end() for each in _SUMMARY_END.finditer(rest)), default=len(rest))
        printed = {name for name in theirs if heading and name not in rest[:end]}
    failed = [line for line in log.text.split("\n") if "SUBFAIL" in line]
    subtests = {word for line in failed for word in line.split() if "::" in word}
    sets = {"misspelt": misspelt, "error": errors, "printed": printed, "subtest": subtests}
    return found | {name: ids for name, ids in sets.items() if ids}


def _has_more_results(text: str) -> bool:
    """Return True if Maven prints a result before the first test command, or one too many."""
    early, _, _ = text.partition("-Dtest=")
    return "] BUILD " in early or text.count("] BUILD ") > text.count("-Dtest=")


def verdict_class(
    log: Log, lists: Lists, ours: Grade, theirs: Theirs, statuses: Mapping[str, TestStatus]
) -> str:
    """Return the class to which a difference in the verdict belongs; empty for none of them."""
    if not lists.fail_to_pass:
        return "no test" if ours.verdict is Verdict.INVALID else ""
    classes = status_classes(log, theirs.statuses)
    if not theirs.statuses and log.exit_code and _FAILING & set(statuses.values()):
        # Their last lines hide every failure, and then they believe nothing.
        return "worst line"
    declared = {*lists.fail_to_pass, *lists.pass_to_pass}
    for name, ids in classes.items():
        if not ids or _concerns(ids, declared):
            return name
    worse = {name for name in declared if _is_worse(name, statuses, theirs.statuses or {})}
    if worse and theirs.resolved:
        return "worst line"
    mixed = {name for name in declared if _is_mixed(name, statuses)}
    return "mixed" if mixed and theirs.resolved else ""


def classic_class(
    log: Log, lists: Lists, ours: Grade, theirs: Theirs, statuses: Mapping[str, TestStatus]
) -> str:
    """Return the class of a difference from 4.1 alone; empty for none of them."""
    said = theirs.statuses or {}
    if theirs.resolved and any(said.get(name) == "SKIPPED" for name in lists.fail_to_pass):
        return "skipped"
    failing = _FAILING & set(statuses.values())
    if theirs.resolved and log.exit_code and not failing:
        return "exit code"
    declared = (*lists.fail_to_pass, *lists.pass_to_pass)
    unlike = {name for name in declared if (name in said) != (name in statuses)}
    return "names" if unlike else ""


def _concerns(ids: set[str], declared: set[str]) -> bool:
    return any(name == each or each.startswith(name) for name in declared for each in ids)


def _is_worse(name: str, ours: Mapping[str, TestStatus], theirs: Mapping[str, str]) -> bool:
    keys = {key for key in {*ours, *theirs} if key == name or _is_cut(name, key)}
    return any(
        key in ours and _WEIGHT.get(ours[key].name, 0) > _WEIGHT.get(theirs.get(key, ""), 0)
        for key in keys
    )


def _is_mixed(name: str, ours: Mapping[str, TestStatus]) -> bool:
    return name not in ours and len({ours[key] for key in ours if _is_cut(name, key)}) > 1


def _is_cut(name: str, key: str) -> bool:
    return name.count("[") > name.count("]") and key.startswith(name)
