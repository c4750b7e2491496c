"""Look up the values of names that tests compare with: variables, parameters, loop variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swerl.grading import languages as known
from swerl.grading.scopes import Scope, Scopes
from swerl.grading.syntax import Call, Source

if TYPE_CHECKING:
    from tree_sitter import Node


class Names:
    """The values of names in one file."""

    def __init__(self, file: Source, scopes: Scopes) -> None:
        self._file = file
        self._scopes = scopes
        self._of_module: dict[str, list[Node]] | None = None

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
            values = self._module_values().get(self._file.source(rows), [])
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

    def _module_values(self) -> dict[str, list[Node]]:
        """Return the values that a Python module gives to its own names."""
        if self._of_module is None:
            self._of_module = {}
            for statement in self._file.root.named_children:
                for node in statement.named_children[:1]:
                    left, right = (
                        node.child_by_field_name("left"),
                        node.child_by_field_name("right"),
                    )
                    if node.type == "assignment" and left is not None and right is not None:
                        self._of_module.setdefault(self._file.source(left), []).append(right)
        return self._of_module

    def read_loop(self, node: Node) -> None:
        """Remember the values of loop variables: `for given, expected in [(1, 2), (3, 4)]`."""
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        function = self._scopes.function(node)
        if left is None or right is None or function is None or right.type not in ("list", "tuple"):
            return
        names = [self._file.source(each) for each in left.named_children] or [
            self._file.source(left)
        ]
        for row in right.named_children:
            cells = row.named_children if len(names) > 1 else [row]
            if len(cells) == len(names):
                for name, cell in zip(names, cells, strict=True):
                    function.names.setdefault(name, []).append(cell)

    def values(self, function: Scope, name: str) -> list[Node]:
        """Return the nodes of which one is the value of a name in a function."""
        if not function.names.get("", []):
            function.names[""] = [function.node]
            for node in self._file.nodes(function.node, frozenset(known.ASSIGNMENTS)):
                left, right = known.ASSIGNMENTS[node.type]
                target, value = node.child_by_field_name(left), node.child_by_field_name(right)
                for _ in range(3):
                    if (
                        target is not None
                        and target.type
                        in ("expression_list", "pointer_declarator", "array_declarator")
                        and len(target.named_children) >= 1
                    ):
                        target = (
                            target.named_children[0]
                            if len(target.named_children) == 1 or target.type != "expression_list"
                            else None
                        )
                    if value is not None and value.type == "expression_list":
                        value = value.named_children[0] if len(value.named_children) == 1 else None
                if target is not None:
                    names = function.names.setdefault(self._file.source(target), [])
                    names.append(value if value is not None else target)
        return function.names.get(name, [])

    def is_only_expected(self, function: Scope, name: str, claims: Sequence[Node]) -> bool:
        """Return True if a name is set, compared and reported, and used nowhere else."""
        text = self._file.text[function.node.start_byte : function.node.end_byte]
        spans = [(claim.start_byte, claim.end_byte) for claim in claims]
        pattern = rb"(?<![\w.])%s\b(?!\s*(?::?=[^=]|\bin\b|,\s*\w+\s+in\b))" % re.escape(
            name.encode()
        )
        for match in re.finditer(pattern, text):
            at = function.node.start_byte + match.start()
            if any(start <= at < end for start, end in spans):
                continue
            line = self._file.text[self._file.text.rfind(b"\n", 0, at) + 1 : at]
            after = self._file.text[at : at + 200].partition(b"\n")[0]
            is_set = re.match(
                rb"\s*(?:for|def|async|let|const|var|auto|final|int|double|long|char|String|std::string|bool)\b",
                line,
            )
            is_column = b":=" in after or re.match(rb"\w+\s*\+?=[^=]", after)
            if not (is_set or is_column or re.search(rb"#|//", line)):
                return False
        return True

    def columns(self, node: Node) -> list[Node]:
        """Return the expected values of a Go table whose rows give their fields by position."""
        kind, body = node.child_by_field_name("type"), node.child_by_field_name("body")
        if (
            kind is None
            or body is None
            or kind.type not in ("slice_type", "map_type", "array_type")
        ):
            return []
        struct = kind.named_children[-1]
        if struct.type == "type_identifier":
            pattern = rb"\btype\s+%s\s+struct\s*\{(.*?)\n\s*\}" % re.escape(struct.text or b"")
            match = re.search(pattern, self._file.text, re.DOTALL)
            declared = match[1] if match else b""
        elif struct.type == "struct_type":
            declared = (struct.text or b"").partition(b"{")[2].rpartition(b"}")[0]
        else:
            return []
        fields: list[str] = []
        for line in re.split(r"[;\n]", declared.decode(errors="replace")):
            names = re.match(r"\s*((?:\w+\s*,\s*)*\w+)\s+\S", line.partition("//")[0])
            fields.extend(re.findall(r"\w+", names[1]) if names else [])
        places = [at for at, name in enumerate(fields) if known.EXPECTED_FIELD.match(name)]
        found: list[Node] = []
        for row in body.named_children:
            while row.type in ("literal_element", "keyed_element") and row.named_children:
                row = row.named_children[-1]
            cells = [cell for cell in row.named_children if cell.type == "literal_element"]
            if row.type == "literal_value" and len(cells) == len(fields):
                found += [cells[at] for at in places]
        return found
