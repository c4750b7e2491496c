"""Read the syntax tree of a test file: calls, literals, marks, in any language alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from swerl.grading import languages as known

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_NODES = 2_000
"""Nodes read in one expected value."""
_MAX_HELPER_BYTES = 2_000
_GO_TEST = re.compile(r"(?:t|b|tb|tt|\w+\.T\(\))$")


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


@dataclass(frozen=True, slots=True)
class Claim:
    """An assertion of a test."""

    test: str
    outer: tuple[str, ...]
    places: frozenset[int]
    """Starts of the expectations that it makes; empty if no value in it can be replaced."""


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


@dataclass(frozen=True, slots=True)
class Helper:
    """A function or macro that is no test."""

    file: Source
    """The file; for a macro, its body as a function."""
    body: Node
    parameters: list[str]


class Source:
    """A parsed file."""

    def __init__(self, language: str, text: bytes) -> None:
        import tree_sitter

        self.language = language
        self.text = text
        self._parser = tree_sitter.Parser(known.grammar(language))
        self.root = self._parser.parse(text).root_node
        self._macros: set[str] = set()

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
            is_known = self.source(name) in known.MACROS | self._macros
            children = self._macro_args(node) if is_known else []
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
        if self.language == "go" and args and _GO_TEST.match(self.source(args[0])):
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

    # Helpers of the file.

    def helpers(self) -> dict[str, Helper]:
        """Return the short functions and macros of the file by name, without tests."""
        found: dict[str, list[Helper]] = defaultdict(list)
        makers = {"variable_declarator", "macro_definition", "preproc_function_def"}
        for node in self.nodes(self.root, known.FUNCTIONS | makers):
            name = self.name_of(node)
            if known.TEST_NAME.match(name) or node.end_byte - node.start_byte > _MAX_HELPER_BYTES:
                continue
            helper = self._helper(node)
            if helper is not None:
                found[name].append(helper)
                self._macros |= {name} if node.type == "macro_definition" else set()
        return {name: several[0] for name, several in found.items() if len(several) == 1}

    def _helper(self, node: Node) -> Helper | None:
        if node.type == "macro_definition":
            rules = [each for each in node.named_children if each.type == "macro_rule"]
            if len(rules) != 1:
                return None
            left, right = (rules[0].child_by_field_name(part) for part in ("left", "right"))
            if left is None or right is None:
                return None
            # A name of a macro becomes a plain one.
            names = [f"_{name}" for name in re.findall(r"\$(\w+)\s*:", self.source(left))]
            return self._made("rs", self.source(right)[1:-1].replace("$", "_"), names)
        if node.type == "preproc_function_def":
            left, right = (node.child_by_field_name(part) for part in ("parameters", "value"))
            if left is None or right is None:
                return None
            names = re.findall(r"\w+", self.source(left))
            text = self.source(right).replace("\\\n", " ").strip()
            text = re.sub(r"^do\b(.*)\bwhile\s*\(0\)$", r"\1", text, flags=re.DOTALL)
            return self._made(self.language, text, names)
        maker = node.child_by_field_name("value") if node.type == "variable_declarator" else node
        body = maker.child_by_field_name("body") if maker is not None else None
        if maker is None or body is None:
            return None
        owner: Node | None = maker
        while owner is not None and owner.child_by_field_name("parameters") is None:
            owner = owner.child_by_field_name("declarator")
        given = owner.child_by_field_name("parameters") if owner is not None else None
        names = []
        for each in given.named_children if given is not None else ():
            if each.type.endswith("_separator"):
                continue
            fields = each.children_by_field_name("name") or each.children_by_field_name("pattern")
            for part in fields or [each.child_by_field_name("declarator") or each]:
                # Names for parts of an argument stand for no argument.
                is_plain = part.type not in known.ROW_PATTERNS | {"object_pattern"}
                name = next(below(part, known.IDENTIFIERS), part)
                names.append(self.source(name) if is_plain else "")
            if self.source(each) in ("self", "&self", "cls") or "testing." in self.source(each):
                names = []
        return Helper(self, body, names)

    def _made(self, language: str, text: str, parameters: list[str]) -> Helper | None:
        """Return a macro as a function."""
        head = "fn m()" if language == "rs" else "void m()"
        file = Source(language, f"{head} {{ {text} ; }}".encode())
        body = file.root.named_children[0].child_by_field_name("body")
        return Helper(file, body, parameters) if body is not None else None

    # Branches that end the test.

    def fails(self, start: int, node: Node) -> bool:
        """Return True if the part of a node from a byte on fails the test in any case."""
        text = self.text[start : node.end_byte][:500]
        if not known.ENDS.search(text):
            return False
        inner = self.nodes(node, known.CONDITIONS | known.LOOPS)
        return all(each.start_byte < start for each in inner)

    def following(self, node: Node) -> list[Node]:
        """Return the next statement, [] if there is none."""
        around = node.parent
        if around is not None and around.type == "expression_statement":
            node = around
        return [node.next_named_sibling] if node.next_named_sibling is not None else []

    def arms(self, node: Node) -> list[tuple[list[Node], bool]]:
        """Return the patterns of each arm of a `match` or `switch`; True if the arm fails."""
        found: list[tuple[list[Node], bool]] = []
        for arm in (node.child_by_field_name("body") or node).named_children:
            if arm.type not in known.ARMS:
                continue
            inside = arm.named_children
            if arm.type in ("switch_block_statement_group", "switch_rule"):
                labels = [each for each in inside if each.type == "switch_label"]
                patterns = [each for label in labels for each in label.named_children]
                start = labels[-1].end_byte if labels else arm.start_byte
            else:
                several = arm.child_by_field_name("conditional_expressions")
                value = None if arm.type == "match_arm" else arm.child_by_field_name("value")
                if value is not None and value.type == "expression_list":
                    several, value = value, None
                patterns = [value] if value else several.named_children if several else []
                patterns += arm.children_by_field_name("pattern")
                patterns += [each for each in inside if each.type in ("case_pattern", "if_clause")]
                start = patterns[-1].end_byte if patterns else arm.start_byte
            found.append((patterns, self.fails(start, arm)))
        return found

    def only_pattern(self, node: Node) -> Node | None:
        """Return the pattern of a `match` or `switch` of which all other arms fail, and tell none.

        A patch may answer with any of several patterns that do not fail.
        """
        arms = self.arms(node)
        good = [patterns for patterns, fails in arms if not fails]
        bad = [patterns for patterns, fails in arms if fails]
        if len(good) != 1 or len(good[0]) != 1:
            return None
        rest = re.compile(r"[a-z_]\w*")
        is_whole = node.type == "match_expression" or any(
            len(patterns) < 2 and all(rest.fullmatch(self.source(one)) for one in patterns)
            for patterns in bad
        )
        told = [each for patterns in bad for one in patterns for each in self.literals(one)]
        return good[0][0] if is_whole and not told else None

    def literals(self, pattern: Node) -> list[Node]:
        """Return the literals that a value must have to fit a pattern."""
        found: list[Node] = []
        todo = [pattern]
        while todo and len(found) < MAX_NODES:
            node = todo.pop()
            if node.type in known.STRINGS | known.NUMBERS | known.BOOLEANS | known.SYMBOLS:
                found.append(node)
            elif node.type in known.PATTERNS:
                values = node.children_by_field_name("value")
                todo += reversed(values or node.named_children)
        return found

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
