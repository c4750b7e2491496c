"""Read the syntax tree of a test file: calls, literals, marks, in any language alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from swerl.grading import languages as known

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_NODES = 2_000
"""Nodes read in one expected value."""


@dataclass(frozen=True, slots=True)
class Call:
    node: Node
    name: str
    name_node: Node
    receiver: str
    """Text before the name, shortened in its middle."""
    args: list[Node]
    keywords: dict[str, Node]

    @property
    def is_chained(self) -> bool:
        return bool(known.CHAIN.search(self.receiver))


class Content(StrEnum):
    """The kind of an expected value."""

    NUMBER = "number"
    STRING = "string"
    WORDS = "words"
    """Text that keeps its quotes: of several lines, with code in it, or a pattern."""
    BOOLEAN = "boolean"
    EXCEPTION = "exception"
    OPERATOR = "operator"
    """No value: the name or operator of an assertion, which has an opposite."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """A place in a test file that decides whether a test passes."""

    content: Content
    start: int
    end: int
    source: str
    """The text between `start` and `end`."""
    test: str = ""
    outer: tuple[str, ...] = ()
    """Names of the classes and describe blocks around the test, the innermost last."""
    depth: int = 0
    """Branches and loops around it; a passing test surely reaches depth 0."""
    container: int = -1
    """Start of the list around it; elements of one list may change places."""
    opposite: str = ""
    """The text that replaces an operator."""
    within: float | None = None
    """Largest difference that the claim allows, 0 if that is not a number; None if it is exact."""
    span: tuple[int, int] = (0, 0)
    """First and last byte of the test."""
    claim_end: int = 0
    """Last byte of the claim; of the test if it is a row of a table."""

    @property
    def is_near(self) -> bool:
        """True if compared within a tolerance: another value must differ by far."""
        return self.within is not None

    @property
    def is_outside(self) -> bool:
        """True for a row of a table of which each row is a test of its own."""
        return not self.span[0] <= self.start < self.span[1]


class Source:
    """A parsed file."""

    def __init__(self, language: str, text: bytes) -> None:
        import tree_sitter

        self.language = language
        self.text = text
        self._parser = tree_sitter.Parser(known.grammar(language))
        self.root = self._parser.parse(text).root_node

    def nodes(self, node: Node, types: frozenset[str]) -> list[Node]:
        """Return the nodes of some types at or below a node, in file order, the outer first."""
        import tree_sitter

        query = known.query(self.language, types)
        nodes = tree_sitter.QueryCursor(query).captures(node).get("node", [])
        order = sorted((node.start_byte, -node.end_byte, at) for at, node in enumerate(nodes))
        return [nodes[at] for _, _, at in order]

    def source(self, node: Node) -> str:
        return self.text[node.start_byte : node.end_byte].decode(errors="replace")

    def call(self, node: Node) -> Call | None:
        """Return the parts of a call in any of the languages."""
        name: Node | None = None
        for part in ("method", "name", "function", "macro"):
            name = name or node.child_by_field_name(part)
        if name is None:
            return None
        receiver_end = name.start_byte
        for part in ("attribute", "property", "field", "name"):
            if (inner := name.child_by_field_name(part)) is not None:
                name, receiver_end = inner, inner.start_byte
                break
        text = self.text[node.start_byte : receiver_end]
        text = text if len(text) < 400 else text[:200] + text[-100:]
        receiver = text.decode(errors="replace").rstrip(".:->?&\n\t ")
        arguments = node.child_by_field_name("arguments")
        children = arguments.named_children if arguments is not None else []
        if node.type == "macro_invocation":
            children = self._macro_args(node) if self.source(name) in known.MACROS else []
        args: list[Node] = []
        keywords: dict[str, Node] = {}
        for child in children:
            if "comment" in child.type:
                continue
            inside = child.named_children
            if child.type == "argument" and inside:
                child = inside[-1]
            if child.type == "keyword_argument" and len(inside) == 2:
                keywords[self.source(inside[0])] = inside[1]
            else:
                args.append(child)
        source = self.source(name)
        if (
            self.language == "go"
            and args
            and re.match(r"(?:t|b|tb|tt|\w+\.T\(\))$", self.source(args[0]))
        ):
            args = args[1:]
        return Call(node, source, name, receiver, args, keywords)

    def _macro_args(self, node: Node) -> list[Node]:
        """Parse the tokens of a Rust macro as a tuple; positions stay those of the file."""
        import tree_sitter

        tokens = node.named_children[-1]
        place = (tokens.start_point, tokens.end_point, tokens.start_byte, tokens.end_byte)
        self._parser.included_ranges = [tree_sitter.Range(*place)]
        found = self._parser.parse(self.text).root_node
        while found.named_children and found.type not in (
            "tuple_expression",
            "parenthesized_expression",
            "array_expression",
        ):
            found = found.named_children[0]
        return list(found.named_children)

    def leaves(self, node: Node) -> tuple[list[tuple[Node, int, bool]], bool]:
        """Return a value's literals with their lists, and True if code under test is in it."""
        leaves: list[tuple[Node, int, bool]] = []
        is_open = False
        todo: list[tuple[Node, int, bool]] = [(node, -1, False)]
        for _ in range(MAX_NODES):
            if not todo:
                break
            node, container, is_far = todo.pop()
            kind = node.type
            if (
                kind
                in known.STRINGS | known.REGEXES | known.NUMBERS | known.BOOLEANS | known.SYMBOLS
            ):
                leaves.append((node, container, is_far))
            elif kind in known.PAIRS:
                todo.extend((child, container, is_far) for child in node.named_children[-1:])
            elif kind in known.CALLS:
                call = self.call(node)
                made = (
                    f"{call.receiver}.{call.name}"
                    if call and call.receiver
                    else call.name
                    if call
                    else ""
                )
                is_made = known.CONSTRUCTOR.search(made) and not (
                    # In Go and C any function may begin with a capital letter.
                    self.language in ("go", "c", "cpp")
                    and call is not None
                    and call.name[:1].isupper()
                    and call.name not in known.GMOCK
                )
                if kind == "object_creation_expression":
                    todo.extend((each, node.start_byte, is_far) for each in node.named_children)
                    continue
                if call is None or not is_made:
                    is_open = True
                    continue
                receiver = node.child_by_field_name("receiver") or node.child_by_field_name(
                    "object"
                )
                function = node.child_by_field_name("function")
                if receiver is None and function is not None:
                    for part in ("object", "value", "operand"):
                        receiver = receiver or function.child_by_field_name(part)
                inner = call.args + list(call.keywords.values())
                if receiver is not None and receiver.type in known.STRINGS:
                    inner = [receiver, *inner]
                is_far = is_far or call.name == "approx"
                todo.extend((child, node.start_byte, is_far) for child in reversed(inner))
            elif kind in known.CONTAINERS:
                todo.extend(
                    (child, node.start_byte, is_far) for child in reversed(node.named_children)
                )
            elif kind not in known.CONSTANTS:
                is_open = True
        return leaves, is_open

    def contents(self, node: Node, *, is_text: bool = False) -> list[tuple[Content, Node]]:
        """Return the parts of a literal that may be replaced; a mixed text has several."""
        if node.type in known.NUMBERS:
            return [(Content.NUMBER, node)]
        if node.type in known.BOOLEANS:
            return [(Content.BOOLEAN, node)]
        inside = node.named_children
        is_mixed = any(child.type in known.INTERPOLATIONS for child in inside)
        is_long = node.start_point.row != node.end_point.row
        if not (is_mixed or is_text or is_long or node.type in known.REGEXES):
            return [(Content.STRING, node)]
        pieces = [child for child in inside if child.type in known.TEXT_PIECES]
        if not pieces and not is_mixed:
            pieces = [node]
        return [(Content.WORDS, piece) for piece in pieces]

    def plain(self, node: Node) -> Node:
        """Return a name without the sign of a reference, as in `*want`."""
        inside = node.named_children
        is_sign = node.type in ("unary_expression", "pointer_expression", "reference_expression")
        is_name = len(inside) == 1 and inside[0].type in known.IDENTIFIERS
        return inside[0] if is_sign and is_name else node

    def score(self, node: Node) -> int:
        """Return how surely a node is an expected value: 0 if it holds none."""
        if node.type in known.IDENTIFIERS:
            return 2 if known.EXPECTED_NAME.match(self.source(node)) else 1
        leaves, is_open = self.leaves(node)
        if not leaves:
            return 0
        is_made = node.type in known.CALLS
        if not is_open:
            return 4 if is_made else 5
        return 3 if is_made or node.type in known.CONTAINERS else 0

    def number(self, node: Node) -> float:
        """Return the value of a literal number, 0 for any other node."""
        try:
            return number_of(self.source(node))
        except ValueError:
            return 0.0

    def allowed(self, call: Call) -> float:
        """Return the tolerance of a matcher such as `closeTo(2.5, 0.1)`."""
        if call.name == "toBeCloseTo":
            digits = self.number(call.args[1]) if len(call.args) > 1 else 2.0
            return 0.5 / 10 ** min(digits, 20)
        inner = self.call(call.args[-1]) if call.args[-1].type in known.CALLS else None
        args = inner.args if inner is not None else call.args[1:]
        return self.number(args[0]) if args else 0.0

    def distance(self, node: Node) -> tuple[Node, Node] | None:
        """Return the two sides of `abs(one - two)`."""
        call = self.call(node) if node.type in known.CALLS else None
        if call is None or call.name not in known.DISTANCES:
            return None
        inner = call.args[0] if call.args else node.child_by_field_name("receiver")
        if inner is None and (function := node.child_by_field_name("function")) is not None:
            inner = function.child_by_field_name("value")
        while inner is not None and inner.type.startswith("parenthesized"):
            inner = inner.named_children[0]
        if inner is None or len(inner.named_children) != 2:
            return None
        signs = [child.type for child in inner.children if not child.is_named]
        one, two = inner.named_children
        return (one, two) if signs == ["-"] else None

    def name_of(self, node: Node) -> str:
        name = node.child_by_field_name("name") or node.child_by_field_name("declarator")
        name = name or node.child_by_field_name("type")
        while name is not None and (inner := name.child_by_field_name("declarator")) is not None:
            name = inner
        return self.source(name).rpartition("::")[2] if name is not None else ""

    def marks(self, node: Node) -> bytes:
        """Return the text of annotations and attributes of a function."""
        if self.language == "java":
            first = node.named_children[0] if node.named_children else None
            return (first.text or b"") if first is not None and first.type == "modifiers" else b""
        if self.language not in ("rs", "php"):
            return b""
        texts = [child.text or b"" for child in node.children if child.type == "attribute_list"]
        before = node.prev_named_sibling
        while before is not None and before.type in ("attribute_item", "comment", "line_comment"):
            texts.append(before.text or b"")
            before = before.prev_named_sibling
        return b"\n".join(texts)


def below(node: Node, kinds: frozenset[str] | set[str]) -> Iterator[Node]:
    """Yield the nodes of some types at or below a node."""
    todo = [node]
    for _ in range(MAX_NODES):
        if not todo:
            return
        node = todo.pop()
        if node.type in kinds:
            yield node
        todo.extend(reversed(node.named_children))


def number_of(source: str) -> float:
    """Return the value of a number as a program spells it. Raises ValueError."""
    return float(re.sub(r"_?(?:[fFdDlL]|f32|f64)$|_", "", source))


def struct_fields(body: bytes, language: str) -> list[str]:
    """Return the names of a struct's fields in Go, C or C++."""
    found: list[str] = []
    for line in re.split(r"[;\n]", body.decode(errors="replace")):
        line = line.partition("//")[0].strip()
        if language == "go":
            names = re.match(r"((?:\w+\s*,\s*)*\w+)\s+\S", line)
            found += re.findall(r"\w+", names[1]) if names else []
        elif line:
            found += re.findall(r"(\w+)\s*(?:\[\w*\])?\s*(?=,|$)", line)
    return found
