"""Track the tests, classes and branches around each claim, and the values of names in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


class Names:
    """The values of names in one file."""

    def __init__(self, file: Source, scopes: Scopes) -> None:
        self._file = file
        self._scopes = scopes

    def read_decorators(self, node: Node) -> None:
        """Remember the parameters that a decorator gives; close tests that are skipped."""
        definition = node.child_by_field_name("definition")
        self._scopes.columns = {}
        if definition is None:
            return
        head = self._file.text[node.start_byte : definition.start_byte]
        if re.search(rb"^\s*@[\w.]*(?:skip|xfail|expectedFailure)\b", head, re.MULTILINE):
            self._scopes.open(node, is_closed=True)
            return
        if definition.type != "function_definition":
            return
        for decorator in node.named_children[:-1]:
            inner = decorator.named_children[0] if decorator.named_children else None
            call = self._file.call(inner) if inner is not None and inner.type == "call" else None
            if call is not None and call.name == "parametrize" and len(call.args) >= 2:
                self._read_parameters(call)
        scope = self._scopes.open(node, is_closed=True)
        # The names of its tests come from values in a decorator.
        scope.end = definition.start_byte

    def _read_parameters(self, call: Call) -> None:
        names = re.findall(r"\w+", self._file.source(call.args[0]).lstrip("rbu"))
        ids = call.keywords.get("ids")
        is_named = ids is not None and ids.type in ("list", "tuple")
        if ids is not None and not is_named:
            return
        rows = call.args[1]
        if rows.type == "identifier":
            values = self._module_values.get(self._file.source(rows), [])
            if len(values) != 1 or values[0].type not in ("list", "tuple"):
                return
            [rows] = values
        for row in rows.named_children:
            given = self._file.call(row) if row.type == "call" else None
            if given is not None and given.name != "param":
                given = None
            cells = given.args if given else row.named_children if len(names) > 1 else [row]
            cells = [cell for cell in cells if "comment" not in cell.type]
            if len(cells) != len(names):
                continue
            has_id = is_named or (given is not None and "id" in given.keywords)
            for name, cell in zip(names, cells, strict=True):
                # A plain value becomes part of the test's id; a list or an object does not.
                if has_id or cell.type in ("list", "tuple", "dictionary", "set", "call"):
                    self._scopes.columns.setdefault(name, []).append(cell)

    @cached_property
    def _module_values(self) -> Mapping[str, list[Node]]:
        """The values that a Python module gives to its own names."""
        found: dict[str, list[Node]] = {}
        for target, value in assignments(self._file, self._file.root):
            if value and target.start_point[1] == 0:
                found.setdefault(self._file.source(target), []).append(value)
        return found

    def values(self, function: Scope, name: str) -> list[Node]:
        """Return the nodes of which one is the value of a name in a function."""
        self._read_assignments(function)
        if name not in function.names and self._file.language == "py":
            function.names[name] = self._of_fixture(name)
        return function.names.get(name, [])

    def _read_assignments(self, function: Scope) -> None:
        if not function.names.get("", []):
            function.names[""] = [function.node]
            for target, value in assignments(self._file, function.node):
                for _ in range(3):
                    inside = target.named_children
                    if target.type in ("pointer_declarator", "array_declarator") and inside:
                        target = inside[0]
                function.names.setdefault(self._file.source(target), []).append(value or target)

    @cached_property
    def _fixtures(self) -> Mapping[str, Node]:
        """The functions of pytest's fixtures, by name."""
        found: dict[str, Node] = {}
        for node in self._file.nodes(self._file.root, frozenset({"decorated_definition"})):
            maker = node.child_by_field_name("definition")
            if maker and b"fixture" in self._file.text[node.start_byte : maker.start_byte]:
                found.setdefault(self._file.name_of(maker), maker)
        return found

    def _of_fixture(self, name: str) -> list[Node]:
        """Return the values that pytest's fixture of this name returns."""
        if (maker := self._fixtures.get(name)) is None:
            return []
        inside = Scope(maker.start_byte, maker.end_byte, maker)
        self._read_assignments(inside)
        made = self._file.nodes(maker, frozenset({"return_statement", "yield"}))
        values = [each.named_children[0] for each in made if each.named_children]
        return [v for each in values for v in inside.names.get(self._file.source(each), [each])]

    def is_only_expected(self, function: Scope, name: str, claims: Sequence[Node]) -> bool:
        """Return True if a name is set, compared and reported, and used nowhere else."""
        text, word = self._file.text[function.start : function.end], re.escape(name.encode())
        spans = [(claim.start_byte, claim.end_byte) for claim in claims]
        if function.is_table:
            used = re.finditer(rb"(?<![\w.$])(?<!let\(:)%s(?!\w)" % word, text)
            places = (function.start + match.start() for match in used)
            return all(any(start <= at < end for start, end in spans) for at in places)
        pattern = rb"(?<![\w.])%s\b(?!\s*(?::?=[^=]|\bin\b|,\s*\w+\s+in\b))" % word
        for match in re.finditer(pattern, text):
            at = function.start + match.start()
            if any(start <= at < end for start, end in spans):
                continue
            line = self._file.text[self._file.text.rfind(b"\n", 0, at) + 1 : at]
            after = self._file.text[at : at + 200].partition(b"\n")[0]
            is_set = re.match(
                rb"\s*(?:for|def|async|let|const|var|auto|final|int|double|long|char|String|std::string|bool)\b",
                line,
            )
            is_column = b":=" in after or re.match(rb"[$\w]+(?:, *[$\w]+)*[\])]?\s*\+?=[^=]", after)
            if not (is_set or is_column or re.search(rb"#|//", line)):
                return False
        return True


def assignments(file: Source, node: Node) -> Iterator[tuple[Node, Node | None]]:
    """Yield the name and the value, None if not given, of each assignment in a node."""
    for each in file.nodes(node, frozenset(known.ASSIGNMENTS)):
        name, value = (each.child_by_field_name(part) for part in known.ASSIGNMENTS[each.type])
        if name is None:
            continue
        if name.type not in known.SEVERAL:
            yield name, value
        elif value is not None and len(name.named_children) == len(value.named_children):
            yield from zip(name.named_children, value.named_children, strict=True)
