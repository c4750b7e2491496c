"""Track the tests, classes and branches around each claim of a test file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swerl.grading import languages as known
from swerl.grading.syntax import Call, Source

if TYPE_CHECKING:
    from tree_sitter import Node

_QUOTED = re.compile(r"['\"`]([^'\"`$#{%]+)")
_SCRIPTS = frozenset({"py", "js", "ts", "tsx", "rb", "php"})
"""Languages whose statements may stand outside of functions."""


@dataclass(slots=True)
class Scope:
    start: int
    end: int
    node: Node
    name: str = ""
    is_test: bool = False
    is_outer: bool = False
    is_function: bool = False
    is_closed: bool = False
    """Nothing in it may change: a skipped test, a helper, code that is not reached."""
    depth: int = 0
    names: dict[str, list[Node]] = field(default_factory=dict)
    """Of a function: name -> nodes that give its expected values."""
    is_table: bool = False
    """Not a function: only the columns of tables have values in it."""


class Scopes:
    """The open scopes of a sweep in file order."""

    def __init__(self, source: Source, is_declared: Callable[[str], bool] | None) -> None:
        self._source = source
        # Names of tests follow no rule in C, so the declared ones decide.
        self._is_declared = is_declared if source.language in ("c", "cpp") else None
        self._open: list[Scope] = []
        self.columns: dict[str, list[Node]] = {}
        """Parameters of the next function whose values stand in its decorator."""

    def move_to(self, start: int) -> None:
        """Close the scopes that end before a byte."""
        while self._open and self._open[-1].end <= start:
            self._open.pop()

    def active(self, node: Node) -> Iterator[Scope]:
        """Yield the scopes around a node; some are announced before they begin."""
        return (scope for scope in self._open if scope.start <= node.start_byte < scope.end)

    def is_wanted(self, node: Node, is_wanted: Callable[[str], bool] | None) -> bool:
        """Return True for nodes of a wanted test, and for those that may open one."""
        tests = [scope.name for scope in self.active(node) if scope.is_test]
        return is_wanted is None or not tests or is_wanted(tests[-1])

    def is_in_test(self, node: Node) -> bool:
        scopes = list(self.active(node))
        if any(scope.is_test for scope in scopes):
            return True
        return self._source.language in _SCRIPTS and not any(
            scope.is_function or scope.is_outer for scope in scopes
        )

    def function(self, node: Node) -> Scope | None:
        """Return the scope in which names of a claim are looked up."""
        scopes = [s for s in self.active(node) if s.is_function or s.is_test]
        return scopes[-1] if scopes else None

    def open(
        self,
        node: Node,
        *,
        name: str = "",
        is_test: bool = False,
        is_outer: bool = False,
        is_function: bool = False,
        is_closed: bool = False,
        depth: int = 0,
    ) -> Scope:
        flags = (is_test, is_outer, is_function, is_closed, depth)
        scope = Scope(node.start_byte, node.end_byte, node, name, *flags)
        self._open.append(scope)
        return scope

    def open_function(self, node: Node) -> bool:
        """Open a function; return True if it is a test."""
        name = self._source.name_of(node)
        marks = self._source.marks(node)
        macro = known.TEST_MACRO.match(name)
        is_inner = any(scope.is_test for scope in self.active(node))
        is_test = bool(macro or known.TEST_NAME.match(name) or known.TEST_MARK.search(marks))
        if self._source.language in ("rs", "java") and not is_inner:
            is_test = bool(known.TEST_MARK.search(marks)) or (
                self._source.language == "java" and name.startswith("test")
            )
        if self._is_declared and name and not is_inner:
            is_test = is_test or self._is_declared(name)
        is_skipped = re.search(rb"@(?:Disabled|Ignore)\b|\[ignore\b", marks) is not None
        if is_inner:
            # Nobody knows whether the test calls it.
            scope = self.open(node, is_function=True, depth=1)
        elif name == "main" or is_test:
            names = []
            if macro:
                declared = node.child_by_field_name("declarator")
                inside = (
                    self._source.source(declared).partition("(")[2].rstrip(")") if declared else ""
                )
                names = [each.strip() for each in inside.split(",")]
                if len(names) > 1:
                    self.open(node, name=names[0], is_outer=True)
            title = names[-1] if names else "" if name == "main" else name
            closed = is_skipped
            scope = self.open(node, name=title, is_test=True, is_function=True, is_closed=closed)
        else:
            scope = self.open(node, is_function=True, is_closed=True)
        scope.names, self.columns = self.columns, {}
        return scope.is_test and not scope.is_closed

    def open_with(self, node: Node) -> None:
        """Close the body of a block that ends with an exception."""
        body = node.child_by_field_name("body")
        if body is None:
            return
        clause = self._source.text[node.start_byte : body.start_byte]
        if re.search(rb"raises|assertRaises|suppress", clause):
            self.open(body, is_closed=True)
        elif re.search(rb"subTest", clause):
            self.open(body)

    def open_block(self, call: Call) -> bool:
        """Open the scope of a test or group that is a call with a title."""
        arguments = call.node.child_by_field_name("arguments")
        block = call.node.child_by_field_name("block")
        end = arguments.start_byte if arguments else call.name_node.end_byte
        head = self._source.text[call.node.start_byte : min(end, call.node.start_byte + 60)].decode(
            errors="replace"
        )
        match = re.match(r"(?:(?:RSpec|t|b|QUnit|self|s\.T\(\))\.)?(\w+)((?:\.\w+)*)", head)
        name, more = match.groups() if match else ("", "")
        is_test, is_outer = name in known.TEST_CALLS, name in known.OUTER_CALLS
        is_skipped = name in known.SKIP_CALLS or re.search(r"\.(?:skip|todo|failing|fails)", more)
        titles = name in known.TITLE_BLOCKS
        if not (is_test or is_outer or is_skipped or titles):
            return False
        has_body = block is not None or (
            bool(call.args) and re.search("func|arrow|lambda", call.args[-1].type) is not None
        )
        first = call.args[0] if call.args else None
        title = ""
        if first is not None and first.type in known.STRINGS:
            title = max(_QUOTED.findall(self._source.source(first)), key=len, default="")
        elif first is not None and is_outer:
            title = self._source.source(first)
        if titles:
            parent = call.node.parent
            body = parent.next_named_sibling if parent is not None else None
            if body is None or body.type != "compound_statement":
                return False
            # Sections of a test case have no status of their own.
            self.open(body, name=title, is_test=is_test)
        elif not has_body:
            return False
        else:
            # A test without a title gets one from its values, and one of a table from its row.
            is_free = is_test and not title
            closed = bool(is_skipped) or (is_free and block is not None and not call.args)
            is_inner = any(scope.is_test for scope in self.active(call.node))
            is_own = is_test and (bool(title) or (bool(call.args) and not is_inner))
            scope = self.open(call.node, name=title, is_test=is_own, is_outer=is_outer)
            scope.is_closed = closed
            if is_own and ".each" in more:
                # The rows of its table are tests of their own.
                scope.start = call.args[-1].start_byte
        return True

    def leave(self) -> None:
        """Note that the rest of the function may be left out."""
        for scope in reversed(self._open):
            if scope.is_function or scope.is_test:
                scope.depth += 1
                return
