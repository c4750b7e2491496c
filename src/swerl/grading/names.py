"""Find the values on the expected sides of claims: literals, names, columns of tables."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swerl.grading import languages as known
from swerl.grading.scopes import Names, Scope, Scopes, assignments
from swerl.grading.syntax import Call, Claim, Content, Expectation, Source, struct_fields

if TYPE_CHECKING:
    from tree_sitter import Node

_MAX_ROWS = 200
_PROVIDER = re.compile(rb"(?:@dataProvider\s+|DataProvider\(['\"]|MethodSource\(\s*\")(\w+)")
_PARAMETERS = re.compile(rb"@(?:Parameterized\.)?Parameters\b[^{;]*?(\w+)\s*\(\s*\)\s*\{")
"""The provider of a class in JUnit 4, unless the names of its tests are told."""
_STRUCT = re.compile(rb"\bstruct\b\s*\w*\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of literals, and the place in which names have the values of their columns."""

    scope: Scope
    columns: Mapping[str, int | str | None]
    """Name -> its column; None if the name is a whole row."""
    rows: Sequence[Node]


class Tables:
    """The tables of cases of one file: in loops, blocks, data providers and arrays of structs."""

    def __init__(self, file: Source) -> None:
        self._file = file
        self._found: list[_Table] = []
        self._scopes: dict[int, Scope] = {}
        self._values: dict[str, list[Node]] | None = None

    def read(self, node: Node) -> None:
        """Remember the names that a loop, a block or a function gives to the columns of rows."""
        kind = node.type
        if kind in known.ROW_LOOPS:
            left, right = (node.child_by_field_name(part) for part in known.ROW_LOOPS[kind])
            self._add(left, right, node.child_by_field_name("body"))
        elif kind == "foreach_statement":
            row = node.named_children[1]
            row = row.named_children[-1] if row.type == "pair" else row
            self._add(row, node.named_children[0], node.child_by_field_name("body"))
        elif kind == "for_statement" and self._file.language == "py":
            self._add(*(node.child_by_field_name(part) for part in ("left", "right", "body")))
        elif kind == "for_statement" and self._file.language == "go":
            clause = next((c for c in node.named_children if c.type == "range_clause"), None)
            if clause is not None and (left := clause.child_by_field_name("left")) is not None:
                right = clause.child_by_field_name("right")
                self._add(left.named_children[-1], right, node.child_by_field_name("body"))
        elif kind in known.CALLS:
            self._read_block(node)
        elif kind in known.FUNCTIONS and self._file.language in ("php", "java"):
            self._read_provider(node)

    def scope_of(self, side: Node) -> Scope | None:
        """Return the scope in which a name or a field has the values of a column; None if none."""
        base, key = self._split(side)
        for table in reversed(self._found):
            scope = table.scope
            if base in table.columns and scope.start <= side.start_byte < scope.end:
                column = table.columns[base]
                if key is not None and column is not None:
                    return None
                return self._named(scope, side, table.rows, column if key is None else key)
        if key is None or "[" not in base:
            return None
        # An array of structs, by index.
        around = side.parent
        while around is not None and around.type not in known.FUNCTIONS:
            around = around.parent
        rows = self._named_rows(base.partition("[")[0], side) if around is not None else []
        if around is None or not rows:
            return None
        scope = self._scopes.setdefault(around.start_byte, _bound(around))
        return self._named(scope, side, rows, key)

    def _named(
        self, scope: Scope, side: Node, rows: Sequence[Node], column: int | str | None
    ) -> Scope | None:
        name = self._file.source(side)
        if name not in scope.names:
            cells = (row if column is None else self._cell(row, column) for row in rows)
            scope.names[name] = [cell for cell in cells if cell is not None]
        return scope if scope.names[name] else None

    def _split(self, side: Node) -> tuple[str, int | str | None]:
        """Return `row` and `left` for `row.left`, `row` and 2 for `row[2]`."""
        inside = side.named_children
        if side.type in known.IDENTIFIERS or len(inside) != 2:
            return self._file.source(side), None
        base, key = (self._file.source(part) for part in inside)
        if side.type in known.FIELDS:
            return base, key
        if side.type in known.INDEXED:
            return base, int(key) if key.isdigit() else key.strip("'\":")
        return "", None

    # Names of columns.

    def _read_block(self, node: Node) -> None:
        """Read `rows.forEach((row) => ...)`, `test.each(rows)("...", (row) => ...)` and others."""
        call = self._file.call(node)
        if call is None:
            return
        block = node.child_by_field_name("block")
        body = block.child_by_field_name("body") if block is not None else None
        if block is not None and call.name.startswith("each"):
            parameters = block.child_by_field_name("parameters")
            given = parameters.named_children if parameters is not None else []
            if call.name != "each" and given and given[0].type == "destructured_parameter":
                given = given[0].named_children
            self._add_names(given, node.child_by_field_name("receiver"), body)
        elif body is not None and call.name == "let" and call.args and node.parent is not None:
            name = self._file.source(call.args[0]).strip(":'\"")
            scope = replace(_bound(node.parent), start=node.end_byte)
            self._found.append(_Table(scope, {name: None}, body.named_children[-1:]))
        elif block is not None and call.name.startswith("shared_examples") and call.args:
            self._read_shared(call, block)
        elif call.args and call.args[-1].type in ("arrow_function", "function_expression"):
            self._read_callback(node, call)

    def _read_callback(self, node: Node, call: Call) -> None:
        function = node.child_by_field_name("function")
        one = call.args[-1].child_by_field_name("parameter")
        several = call.args[-1].child_by_field_name("parameters")
        given = [one] if one is not None else several.named_children if several is not None else []
        given = [self._plain(each) for each in given]
        body = call.args[-1].child_by_field_name("body")
        inner = self._file.call(function) if function and function.type in known.CALLS else None
        if inner is not None and inner.name == "each" and inner.args:
            # Marks in the title become the first columns.
            title = self._file.source(call.args[0])
            marks = len(re.findall(r"%[a-zA-Z]", title))
            if len(given) > 1:
                self._add_names([*[None] * marks, *given[marks:]], inner.args[0], body)
            elif given and not (marks or "$" in title):
                self._add(given[0], inner.args[0], body)
        elif call.name in ("forEach", "map") and function is not None and given:
            self._add(given[0], function.child_by_field_name("object"), body)

    def _read_shared(self, call: Call, block: Node) -> None:
        """Read the arguments of all uses of shared examples."""
        parameters = block.child_by_field_name("parameters")
        names = parameters.named_children if parameters is not None else []
        title = self._file.source(call.args[0])
        columns = {self._file.source(name): at + 1 for at, name in enumerate(names)}
        uses = []
        for node in self._file.nodes(self._file.root, frozenset({"call"})) if columns else ():
            used = self._file.call(node)
            if used is None or not used.args or not re.match("it_behaves_like|include_", used.name):
                continue
            arguments = node.child_by_field_name("arguments")
            if arguments and title == self._file.source(used.args[0]):
                uses.append(arguments)
        self._bind(columns, uses[:_MAX_ROWS], block.child_by_field_name("body"))

    def _read_provider(self, node: Node) -> None:
        """Read the data provider of a test, or of all tests of a class in JUnit 4."""
        above = self._file.text[max(0, node.start_byte - 200) : node.start_byte]
        before = above.rpartition(b"}")[2]
        match = _PROVIDER.search(self._file.marks(node) + before)
        owner = node
        if match is None and self._file.language == "java":
            match = _PARAMETERS.search(self._file.text)
            makers = self._file.nodes(self._file.root, frozenset({"constructor_declaration"}))
            owner = makers[0] if len(makers) == 1 else node
        parameters = owner.child_by_field_name("parameters")
        body = node.child_by_field_name("body")
        if match is None or parameters is None or body is None:
            return
        names = [each.child_by_field_name("name") for each in parameters.named_children]
        for other in self._file.nodes(self._file.root, frozenset({"method_declaration"})):
            if self._file.name_of(other).encode() == match[1]:
                kinds = frozenset({"return_statement", "yield_expression"})
                made = self._file.nodes(other, kinds)
                rows = [row for each in made for row in self._made(each)]
                self._add_rows(names, rows, body)

    def _made(self, node: Node) -> list[Node]:
        """Return the rows of `return [[1, 2], [3, 4]]` or of `yield [1, 2]`."""
        last = node.named_children[-1] if node.named_children else None
        if last is None:
            return []
        return self._rows(last, node) if node.type == "return_statement" else [last]

    def _plain(self, node: Node) -> Node:
        """Return a parameter without its type."""
        return node.child_by_field_name("pattern") or node.child_by_field_name("name") or node

    def _add(self, left: Node | None, right: Node | None, body: Node | None) -> None:
        """Bind a pattern to rows: a name, a list of names, or names of fields."""
        if left is None or right is None or body is None:
            return
        while left.type in known.NAME_WRAPPERS and left.named_children:
            left = left.named_children[-1]
        if left.type in known.ROW_PATTERNS:
            self._add_names(left.named_children, right, body)
        elif left.type == "object_pattern":
            names = [self._file.source(each) for each in left.named_children]
            self._bind({name: name for name in names}, self._rows(right, right), body)
        else:
            self._bind({self._file.source(left): None}, self._rows(right, right), body)

    def _add_names(
        self, names: Sequence[Node | None], right: Node | None, body: Node | None
    ) -> None:
        call = self._file.call(right) if right is not None and right.type in known.CALLS else None
        if call is not None and call.name == "zip" and len(call.args) == len(names):
            for name, values in zip(names, call.args, strict=True):
                self._add(name, values, body)
        elif call is not None and call.name == "enumerate" and call.args and len(names) == 2:
            self._add(names[1], call.args[0], body)
        elif right is not None:
            self._add_rows(names, self._rows(right, right), body)

    def _add_rows(
        self, names: Sequence[Node | None], rows: Sequence[Node], body: Node | None
    ) -> None:
        given = [(name, at) for at, name in enumerate(names) if name is not None]
        one = len(names) == 1
        self._bind({self._file.source(n): None if one else at for n, at in given}, rows, body)

    def _bind(
        self, columns: Mapping[str, int | str | None], rows: Sequence[Node], body: Node | None
    ) -> None:
        if rows and body is not None:
            self._found.append(_Table(_bound(body), columns, rows))

    # Rows and cells.

    def _rows(self, node: Node, place: Node) -> list[Node]:
        """Return the elements of a list of literals, or of the name of one."""
        for _ in range(8):
            inside = [each for each in node.named_children if "comment" not in each.type]
            call = self._file.call(node) if node.type in known.CALLS else None
            if node.type in known.IDENTIFIERS:
                return self._named_rows(self._file.source(node), place)
            if call is not None and call.name in ("asList", "of", "vec"):
                if not (call.args and "[][]" in self._file.source(call.args[0])[:40]):
                    return call.args[:_MAX_ROWS]
                node = call.args[0]
                continue
            if call is not None and call.name in known.ROW_CALLS:
                function = node.child_by_field_name("function") or node
                inner = call.args[0] if call.args else function.child_by_field_name("value")
                inner = inner or node.child_by_field_name("receiver")
                inner = inner or function.child_by_field_name("object")
                if inner is None:
                    return []
                node = inner
            elif node.type in ("composite_literal", "compound_literal_expression") or (
                node.type == "array_creation_expression" and self._file.language == "java"
            ):
                node = inside[-1]
            elif node.type in known.ROW_WRAPPERS and inside:
                node = inside[0]
            elif node.type in known.CONTAINERS:
                return inside[:_MAX_ROWS]
            else:
                return []
        return []

    def _named_rows(self, name: str, place: Node) -> list[Node]:
        """Return the rows of the last list of this name above a place."""
        if self._values is None:
            self._values = {}
            for target, value in assignments(self._file, self._file.root):
                word = re.search(r"[$\w]+", self._file.source(target))
                if word and value is not None and value.type not in known.IDENTIFIERS:
                    self._values.setdefault(word[0], []).append(value)
        above = [v for v in self._values.get(name, []) if v.start_byte < place.start_byte]
        # `rows = sorted(rows)` takes the rows that its own line does not set.
        return self._rows(above[-1], above[-1]) if above else []

    def _cell(self, row: Node, column: int | str) -> Node | None:
        """Return the value of a column in a row, by place or by name."""
        while row.type in known.ROW_WRAPPERS | {"literal_element"} and row.named_children:
            row = row.named_children[-1]
        if row.type in ("array_element_initializer", "keyed_element", "composite_literal"):
            return self._cell(row.named_children[-1], column) if row.named_children else None
        if row.type == "pair" and not isinstance(column, str) and len(row.named_children) == 2:
            return row.named_children[column] if column < 2 else None
        call = self._file.call(row) if row.type in known.CALLS else None
        cells = [each for each in row.named_children if "comment" not in each.type]
        if call is not None:
            if column in call.keywords:
                return call.keywords[str(column)]
            cells = call.args
        elif row.type == "struct_expression":
            cells = cells[-1].named_children
        elif row.type not in known.CONTAINERS:
            return None
        if isinstance(column, str):
            for cell in cells:
                parts = cell.named_children
                if cell.type not in known.PAIRS or len(parts) != 2:
                    continue
                if self._file.source(parts[0]).strip("'\":.") == column:
                    return self._value(parts[1])
            at = self._place(column, len(cells))
            return self._value(cells[at]) if at >= 0 else None
        return self._value(cells[column]) if column < len(cells) else None

    def _value(self, cell: Node) -> Node:
        wrapped = ("literal_element", "argument", "array_element_initializer")
        return cell.named_children[-1] if cell.type in wrapped and cell.named_children else cell

    def _place(self, name: str, num: int) -> int:
        """Return the place of a field among so many of a struct in this file, -1 if unknown."""
        if self._file.language not in ("go", "c", "cpp"):
            return -1
        for match in _STRUCT.finditer(self._file.text):
            fields = struct_fields(match[1], self._file.language)
            if name in fields and len(fields) == num:
                return fields.index(name)
        return -1


def _bound(node: Node) -> Scope:
    """Return a scope in which only the columns of tables have values."""
    return Scope(node.start_byte, node.end_byte, node, is_table=True, names={"": [node]})


@dataclass(frozen=True, slots=True)
class _Side:
    """An expected side that is a name, to be looked up when the whole file is read."""

    name: str
    claim: Node
    function: Scope
    scopes: tuple[Scope, ...]
    within: float | None


class Sides:
    """The literals on the expected sides of the claims of one file."""

    def __init__(self, file: Source, scopes: Scopes) -> None:
        self._file = file
        self._scopes = scopes
        self._names = Names(file, scopes)
        self._tables = Tables(file)
        self._found: dict[tuple[int, int], Expectation] = {}
        self._sides: list[_Side] = []
        self._claims: list[tuple[Node, tuple[Scope, ...]]] = []
        self._credits: list[tuple[int, int]] = []
        """Start of a claim, and of a value that it compares with."""

    def outer_claims(self) -> list[Claim]:
        """Return the claims that are part of no other."""
        found: list[Claim] = []
        credits, end = sorted(self._credits), -1
        for node, scopes in self._claims:
            if node.start_byte >= end:
                end = node.end_byte
                inside = (bisect.bisect_left(credits, (at, -1)) for at in (node.start_byte, end))
                places = {place for _, place in credits[slice(*inside)]}
                test = next((scope.name for scope in reversed(scopes) if scope.is_test), "")
                found.append(Claim(test, _outer(scopes), frozenset(places)))
        return found

    def _add_claim(self, node: Node) -> None:
        self._claims.append((node, tuple(self._scopes.active(node))))

    def _compare(self, one: Node, two: Node, claim: Node, *, within: float | None = None) -> None:
        """Expect the side that is more of a literal; by custom the second one."""
        one, two = (self._file.plain(side) for side in (one, two))
        scores = [self._file.score(one), self._file.score(two)]
        if max(scores) < 3:
            # A column of a table tells more than a name does.
            columns = [3 if self._tables.scope_of(side) else 0 for side in (one, two)]
            scores = columns if max(columns) else scores
        if max(scores):
            side = one if scores[0] > scores[1] else two
            self._expect(side, claim, within=within)

    def _expect(
        self, node: Node, claim: Node, *, within: float | None = None, is_text: bool = False
    ) -> None:
        """Add the literals of an expected value, or note its name."""
        function = self._tables.scope_of(node)
        if function is not None or node.type in known.IDENTIFIERS:
            if (function := function or self._scopes.function(claim)) is not None:
                scopes = tuple(self._scopes.active(claim))
                self._sides.append(_Side(self._file.source(node), claim, function, scopes, within))
            return
        for leaf, container, is_far in self._file.leaves(node)[0]:
            for content, part in self._file.contents(leaf, is_text=is_text):
                near = 0.0 if is_far and within is None else within
                self._add(content, part, claim, container=container, within=near)

    def _look_up_names(self) -> None:
        """Add the values of names that are used on expected sides only."""
        claims: dict[tuple[int, str], list[_Side]] = defaultdict(list)
        for side in self._sides:
            claims[side.function.start, side.name].append(side)
        for (_, name), sides in claims.items():
            function = sides[0].function
            values = self._names.values(function, name)
            if not values or not self._names.is_only_expected(
                function, name, [side.claim for side in sides]
            ):
                continue
            for value in values:
                leaves, is_open = self._file.leaves(value)
                if is_open and value.type not in known.CONTAINERS:
                    continue
                for leaf, container, is_far in leaves:
                    near = 0.0 if is_far and sides[0].within is None else sides[0].within
                    given = {"container": container, "within": near, "scopes": sides[0].scopes}
                    for content, part in self._file.contents(leaf):
                        self._credits += [
                            (each.claim.start_byte, part.start_byte) for each in sides
                        ]
                        self._add(content, part, sides[0].claim, **given)

    def _read_pattern(self, pattern: Node | None, claim: Node) -> None:
        """Expect the literals of a pattern."""
        for leaf in self._file.literals(pattern) if pattern is not None else ():
            for content, part in self._file.contents(leaf):
                self._add(content, part, claim)

    def _expect_exception(self, node: Node, claim: Node) -> None:
        """Add the type of an expected exception."""
        if node.type in ("tuple", "list") and len(node.named_children) == 1:
            node = node.named_children[0]
        source = self._file.source(node)
        for suffix in (".class", "::class"):
            source = source.removesuffix(suffix)
        is_type = re.match(r"[A-Z]", re.split(r"[.:\\]", source)[-1]) or "::" in source
        if re.fullmatch(r"[\w.:\\]+", source) and is_type:
            start = node.start_byte
            end = start + len(source.encode())
            self._add_at(Content.EXCEPTION, start, end, claim)

    def _add(self, content: Content, node: Node, claim: Node, **given: object) -> None:
        self._add_at(content, node.start_byte, node.end_byte, claim, **given)  # type: ignore[arg-type]

    def _add_at(
        self,
        content: Content,
        start: int,
        end: int,
        claim: Node,
        *,
        opposite: str = "",
        container: int = -1,
        within: float | None = None,
        scopes: tuple[Scope, ...] | None = None,
    ) -> None:
        """Add an expectation with the test and the depth of its claim."""
        source = self._file.text[start:end].decode(errors="replace")
        self._credits.append((claim.start_byte, start))
        if (start, end) in self._found or "\ufffd" in source:
            return
        scopes = tuple(self._scopes.active(claim)) if scopes is None else scopes
        tests = [at for at, scope in enumerate(scopes) if scope.is_test]
        inside = scopes[tests[0] :] if tests else scopes
        test = scopes[tests[-1]] if tests else Scope(start, end, claim)
        outer = _outer(scopes)
        depth = sum(scope.depth for scope in inside)
        self._found[start, end] = Expectation(
            *(content, start, end, source, test.name, outer, depth, container, opposite, within),
            span=(test.start, test.end),
            claim_end=test.end if claim.type in known.ROWS else claim.end_byte,
        )


def _outer(scopes: Sequence[Scope]) -> tuple[str, ...]:
    return tuple(scope.name for scope in scopes if scope.is_outer)
