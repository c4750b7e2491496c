"""Find the expected values in a test file by its syntax tree.

One query finds the scopes and claims of a file: assertions, failing ifs, tables of cases. A sweep
over them in file order knows the tests, classes and branches around each. Of a comparison only the
expected side counts: the one made of literals, without code under test in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from swerl.grading import languages as known
from swerl.grading.names import Sides
from swerl.grading.scopes import Scopes
from swerl.grading.syntax import MAX_NODES, Call, Claim, Content, Expectation, Helper, Source, below

if TYPE_CHECKING:
    from tree_sitter import Node

_MAX_CLAIMS = 2_000
"""Claims read in one file; of the rest of a huge one only those of wanted tests are read."""
_SCOPES = known.FUNCTIONS | known.CLASSES | known.BRANCHES | known.LOOPS | known.LEAVES
_CLAIMS = known.CALLS | {
    "assert_statement", "member_expression", "keyed_element", "pair",
    "decorated_definition", "with_statement", "let_declaration", "ERROR",
}  # fmt: skip
_OWN = ("", "self", "this", "$this", "static", "Self", "cls")
"""Receivers of a helper of the file."""


def claims(language: str, text: bytes, is_wanted: Callable[[str], bool] | None) -> list[Claim]:
    """Return the assertions of a test file, those without a value to replace included."""
    reader = _Reader(Source(language, text), is_wanted)
    reader.read(is_wanted)
    return reader.outer_claims()


def read(language: str, text: bytes, is_wanted: Callable[[str], bool] | None) -> list[Expectation]:
    """Return the expectations of a test file in its order; none if it does not parse."""
    return _Reader(Source(language, text), is_wanted).read(is_wanted)


class _Reader(Sides):
    def __init__(self, file: Source, is_wanted: Callable[[str], bool] | None) -> None:
        super().__init__(file, Scopes(file, is_wanted))
        self._helpers = {name: _Helper(helper) for name, helper in file.helpers().items()}

    def read(self, is_wanted: Callable[[str], bool] | None) -> list[Expectation]:
        if self._file.root.type == "ERROR":
            return []
        num_claims = 0
        for node in self._file.nodes(self._file.root, _SCOPES | _CLAIMS):
            self._scopes.move_to(node.start_byte)
            before = len(self._found) + len(self._sides)
            if num_claims > _MAX_CLAIMS and is_wanted is None:
                break
            if num_claims <= _MAX_CLAIMS or self._scopes.is_wanted(node, is_wanted):
                self._visit(node)
                num_claims += len(self._found) + len(self._sides) > before
        self._look_up_names()
        return sorted(self._found.values(), key=lambda found: (found.start, found.end))

    # Scopes: which test a claim belongs to, and whether the test surely reaches it.

    def _visit(self, node: Node) -> None:
        """Open the scope that the node begins, and read the claim that it makes."""
        kind = node.type
        if any(scope.is_closed for scope in self._scopes.active(node)):
            return
        if kind in known.FUNCTIONS:
            self._tables.read(node)
            if self._scopes.open_function(node):
                self._read_marks(node)
        elif kind in known.CLASSES:
            # The root of a Python file has the type of a Ruby module.
            if name := self._file.name_of(node):
                self._scopes.open(node, name=name, is_outer=True)
        elif kind in known.LEAVES:
            self._scopes.leave()
        elif kind in known.CALLS:
            self._tables.read(node)
            self._read_call(node)
        elif kind in known.BRANCHES or kind in known.LOOPS:
            if kind in known.CONDITIONS:
                self._read_if(node)
            elif kind in known.MATCHES and self._scopes.is_in_test(node):
                self._read_match(node)
            self._tables.read(node)
            self._scopes.open(node, depth=1)
        elif kind == "ERROR":
            self._scopes.open(node, is_closed=True)
        elif kind == "decorated_definition":
            self._names.read_decorators(node)
        elif kind == "with_statement":
            self._scopes.open_with(node)
        elif self._scopes.is_in_test(node):
            self._read_other(node)

    # Claims: statements of a test about a value.

    def _read_call(self, node: Node) -> None:
        call = self._file.call(node)
        if call is None or self._scopes.open_block(call) or not self._scopes.is_in_test(node):
            return
        name, args = call.name, call.args
        if call.receiver in _OWN and name in self._helpers and self._read_own(call):
            self._add_claim(node)
            return
        chained = call.is_chained
        is_bare = not call.receiver and (
            name in ("raises", "warns", "eq_", "ok", "throws", "Run") or name in known.EQUAL
        )
        language = self._file.language
        is_of_answer = language in ("js", "ts") and name == "expect" and call.receiver[-1:] == ")"
        library = known.GO_LIBRARY if language == "go" else known.LIBRARY
        is_short = name in known.SHORT and not (chained or is_bare or is_of_answer)
        if is_short and not library.search(call.receiver):
            return
        is_matcher = chained and (name in known.CHAINED or name in known.TO)
        is_named = name in known.ASSERTIONS or known.ASSERTION_FORM.match(name)
        if is_of_answer or is_matcher or (args and (is_named or known.EQUAL_FORM.match(name))):
            self._add_claim(node)
        if chained and name in known.CHAINED:
            self._read_matcher(call)
        elif args and name in (known.TO if chained else ("should", "should_not")):
            self._read_rspec(call)
        elif re.match("assert_?[tT]hat$", name) and len(args) in (2, 3):
            self._read_hamcrest(call)
        elif is_of_answer or name in known.CALLED or call.receiver.startswith("verify("):
            for arg in [*args, *call.keywords.values()]:
                self._expect(arg, node)
        else:
            self._read_assertion(call)

    def _read_assertion(self, call: Call) -> None:
        """Read a call such as `assertEqual(found, expected)`."""
        name, args, node = call.name, call.args, call.node
        opposite = known.FLIPS.get(name, "")
        if self._file.language == "rb":
            opposite = {"assert": "refute", "refute": "assert"}.get(name, opposite)
        if opposite and args:
            self._add(Content.OPERATOR, call.name_node, node, opposite=opposite)
        if name in known.TRUTHS and args:
            self._read_condition(args[0], known.TRUTHS[name], node)
        elif name == "assert_operator" and len(args) > 2:
            if self._file.source(args[1]) == ":==":
                self._compare(args[0], args[2], node)
        elif name in known.EQUAL or (known.EQUAL_FORM.match(name) and name not in known.NEAR):
            self._read_equality(args if len(args) > 1 else [*call.keywords.values()], node)
        elif name in known.NEAR and len(args) >= 2:
            size = self._file.number(args[2]) if len(args) > 2 else 0.0
            if re.search("psilon|CLOSE", name):
                size *= max(self._file.number(args[0]), self._file.number(args[1]))
                size /= 100 if name.endswith("CLOSE") else 1
            self._compare(args[0], args[1], node, within=size)
        elif name in known.CONTAINED and len(args) > known.CONTAINED[name]:
            self._expect(args[known.CONTAINED[name]], node)
        elif name in known.RAISES:
            self._read_raises(call, args[known.RAISES[name] :])
        elif known.CUSTOM.match(name) and name not in known.FLIPS:
            self._read_custom(call)

    def _read_own(self, call: Call) -> bool:
        """Read a call of a helper of the file; return False if it compares no parameter."""
        helper = self._helpers[call.name]
        is_other = self._file.language == "go" and len(call.args) != len(helper.parameters)
        if is_other or any(re.search("splat|spread", each.type) for each in call.args):
            return False
        given = dict(zip(helper.parameters, call.args, strict=False)) | call.keywords
        for names, within in helper.claims:
            sides = [given[name] for name in names if name in given]
            if len(sides) == 2:
                self._compare(sides[0], sides[1], call.node, within=within)
            elif len(names) == len(sides) and self._file.score(sides[0]):
                self._expect(sides[0], call.node, within=within)
        return bool(helper.claims)

    def _read_custom(self, call: Call) -> None:
        """Read a helper of the project, such as `check(given, expected)`."""
        plain = [value for key, value in call.keywords.items() if known.EXPECTED_FIELD.match(key)]
        if not plain and not call.args and call.name.lower().startswith("assert"):
            plain = list(call.keywords.values())
        if not plain and len(call.args) >= 2 and self._file.score(call.args[-1]) >= 3:
            plain = [call.args[-1]]
        for value in plain:
            self._expect(value, call.node)

    def _read_equality(self, args: Sequence[Node], claim: Node) -> None:
        """Compare two arguments. JUnit has a message before them, or a tolerance behind them."""
        size: float | None = None
        if len(args) >= 3 and self._file.language == "java":
            if args[0].type in known.STRINGS and args[2].type not in known.STRINGS:
                args = args[1:]
            if len(args) >= 3 and args[2].type not in known.STRINGS and self._file.score(args[2]):
                size = self._file.number(args[2])
        if len(args) >= 2:
            self._compare(args[0], args[1], claim, within=size)

    def _read_raises(self, call: Call, args: Sequence[Node]) -> None:
        """Read the expected exception, and the message if the assertion has one."""
        has_message = (
            re.search(r"Regex|Message|[Tt]hrow(?:s|n)?$|toThrow|raise_|reject", call.name)
            and self._file.language != "java"
        )
        for arg in args[:2] if has_message else args[:1]:
            if arg.type in known.STRINGS or arg.type in known.REGEXES:
                self._expect(arg, call.node, is_text=True)
            elif arg.type in ("object", "dictionary"):
                self._expect(arg, call.node)
            else:
                self._expect_exception(arg, call.node)
        if (match := call.keywords.get("match")) is not None:
            self._expect(match, call.node, is_text=True)

    def _read_matcher(self, call: Call) -> None:
        """Read a call such as `expect(found).toBe(expected)`."""
        is_negated = known.NEGATED_CHAIN.search(call.receiver) is not None
        is_value = call.name in known.MATCHERS | known.RAISES.keys()
        if (opposite := known.FLIPS.get(call.name)) and not is_value:
            self._add(Content.OPERATOR, call.name_node, call.node, opposite=opposite)
        if is_negated:
            return
        if call.name in known.RAISES:
            self._read_raises(call, call.args)
        elif call.name in known.NEAR_MATCHERS and call.args:
            self._expect(call.args[0], call.node, within=self._file.allowed(call))
        elif call.name in known.MATCHERS:
            for arg in call.args:
                self._expect(arg, call.node)
        if self._file.language in ("js", "ts", "tsx") and "expect" in call.receiver[:30]:
            at = call.name_node.start_byte
            self._add_at(Content.OPERATOR, at, at, call.node, opposite="not.")

    def _read_rspec(self, call: Call) -> None:
        """Read `expect(found).to eq(expected)`."""
        opposite = {"to": "not_to", "not_to": "to", "to_not": "to"}.get(call.name, "")
        if opposite:
            self._add(Content.OPERATOR, call.name_node, call.node, opposite=opposite)
        if opposite == "to" or call.name == "should_not":
            return
        if flip := known.FLIPS.get(self._file.source(call.args[0])):
            self._add(Content.OPERATOR, call.args[0], call.node, opposite=flip)
        todo = call.args[:1]
        while todo:
            node = todo.pop()
            inner = self._file.call(node) if node.type in known.CALLS else None
            if inner is None:
                if node.type == "binary" and self._file.source(node.children[1]) == "==":
                    self._expect(node.named_children[1], call.node)
                continue
            if inner.name == "or":
                return
            if inner.name in known.RAISES:
                self._read_raises(inner, inner.args)
            elif inner.name == "of" and (match := known.BE_WITHIN.search(inner.receiver)):
                within = float(match[1].replace("_", ""))
                self._expect(inner.args[0], call.node, within=within)
            elif inner.name in known.RSPEC:
                for arg in inner.args:
                    self._expect(arg, call.node)
            todo += inner.args if inner.name in ("all", "and") else []
            todo += [each for each in [node.child_by_field_name("receiver")] if each]

    def _read_hamcrest(self, call: Call) -> None:
        """Read `assertThat(found, is(equalTo(expected)))`."""
        matcher = call.args[-1]
        while matcher.type in known.CALLS and (inner := self._file.call(matcher)) is not None:
            if inner.name not in known.MATCHERS or not inner.args:
                return
            matcher = inner.args[0]
        if matcher is not call.args[-1]:
            self._expect(matcher, call.node)

    def _read_if(self, node: Node) -> None:
        """Read an if of which one branch fails the test."""
        condition = node.child_by_field_name("condition")
        branch = node.child_by_field_name("consequence") or node.child_by_field_name("body")
        if condition is None or branch is None or not self._scopes.is_in_test(node):
            return
        wanted = node.type in ("unless", "unless_modifier")
        text = self._file.text[branch.start_byte : branch.end_byte][:500]
        if not (known.FAILS.search(text) or self._file.fails(branch.start_byte, branch)):
            others = node.children_by_field_name("alternative")
            if not others and known.LEAVES_ONLY.fullmatch(text):
                others = self._file.following(node)
            if len(others) != 1 or not self._file.fails(others[0].start_byte, others[0]):
                return
            wanted = not wanted
            for let in below(condition, {"let_condition"}):
                self._read_pattern(let.child_by_field_name("pattern"), node)
        self._add_claim(node)
        self._read_condition(condition, wanted, node)
        initial = node.child_by_field_name("initializer")
        if initial is not None:
            for child in initial.children_by_field_name("right"):
                for inner in child.named_children:
                    call = self._file.call(inner) if inner.type in known.CALLS else None
                    if call is not None and call.name == "Diff" and len(call.args) >= 2:
                        self._compare(call.args[0], call.args[1], node)

    def _read_match(self, node: Node) -> None:
        """Read a `match` or `switch` of which all arms but one fail the test."""
        if any(fails for _, fails in self._file.arms(node)):
            self._add_claim(node)
        fields = ("subject", "value", "condition")
        subject = next((each for part in fields if (each := node.child_by_field_name(part))), None)
        if subject is not None and self._file.source(subject).strip("()") not in ("true", "True"):
            self._read_pattern(self._file.only_pattern(node), node)
        elif self._file.language == "go" and subject is None:
            for patterns, fails in self._file.arms(node):
                if not (fails and len(patterns) == 1):
                    return
                self._read_condition(patterns[0], False, node)

    def _read_condition(self, node: Node, wanted: bool, claim: Node) -> None:
        """Read comparisons in a condition that must have the wanted value."""
        todo = [node]
        for _ in range(MAX_NODES):
            if not todo:
                return
            node = todo.pop()
            kind = node.type
            inside = node.named_children
            operators = [child for child in node.children if not child.is_named]
            signs = [self._file.source(child) for child in operators]
            if kind in known.CONDITION_WRAPPERS:
                if kind == "condition_clause":
                    inside = [child for child in [node.child_by_field_name("value")] if child]
                todo.extend(inside[:1])
            elif kind in ("not_operator",) or (
                re.match(r"unary|not", kind) and signs[:1] in (["!"], ["not"])
            ):
                self._read_negation(node, inside[-1], wanted, claim)
            elif len(inside) == 2 and signs and signs[0] in ("and", "&&", "or", "||"):
                # Each part of it decides alone only in one of the two cases.
                if (signs[0] in ("and", "&&")) == wanted:
                    todo.extend(reversed(inside))
            elif len(inside) == 2 and len(signs) == 1 and known.opposite(signs[0]):
                self._read_comparison(inside, operators[0], signs[0], wanted, claim)
            elif kind in known.CALLS:
                self._read_truth(node, wanted, claim)
            elif kind in ("identifier", "attribute", "subscript"):
                self._insert_not(node, claim)

    def _read_negation(self, node: Node, inner: Node, wanted: bool, claim: Node) -> None:
        """Read `not x`; without the `not` it claims the opposite."""
        call = self._file.call(inner) if inner.type in known.CALLS else None
        names = known.COMPARERS if wanted else known.COMPARERS | known.EQUAL
        if call is not None and len(call.args) >= 2 and call.name in names:
            self._compare(call.args[0], call.args[1], claim)
        self._add_at(Content.OPERATOR, node.start_byte, inner.start_byte, claim, opposite="")
        while inner.type.startswith("parenthesized") and inner.named_children:
            inner = inner.named_children[0]
        sides = inner.named_children
        sign = "".join(self._file.source(each) for each in inner.children if not each.is_named)
        if len(sides) == 2 and self._is_equal(sides, sign, not wanted):
            self._compare(sides[0], sides[1], claim)

    def _is_equal(self, sides: Sequence[Node], sign: str, wanted: bool) -> bool:
        """Return True if a comparison claims that its sides are equal, and none is nothing."""
        texts = {self._file.source(side) for side in sides}
        signs = ("==", "===", "is") if wanted else ("!=", "!==", "is not")
        return sign in signs and not texts & known.NOTHING

    def _read_comparison(
        self, sides: Sequence[Node], operator: Node, sign: str, wanted: bool, claim: Node
    ) -> None:
        """Read `found == expected` or another comparison."""
        if sign[:1] == ("<" if wanted else ">") and (pair := self._file.distance(sides[0])):
            self._compare(*pair, claim, within=self._file.number(sides[1]))
        is_equal = self._is_equal(sides, sign, wanted)
        for side, other in (sides, tuple(reversed(sides))):
            call = self._file.call(side) if side.type in known.CALLS else None
            if call is not None and call.name in known.COMPARERS and len(call.args) >= 2:
                if is_equal and self._file.source(other) == "0":
                    self._compare(call.args[0], call.args[1], claim)
                return
        texts = {self._file.source(side) for side in sides}
        is_diff = (
            '""' in texts and b"Diff(" in self._file.text[claim.start_byte : operator.start_byte]
        )
        if is_equal and not is_diff:
            self._compare(sides[0], sides[1], claim)
        if sign == "in" and wanted:
            self._expect(sides[0], claim)
        self._add(Content.OPERATOR, operator, claim, opposite=known.opposite(sign))

    def _read_truth(self, node: Node, wanted: bool, claim: Node) -> None:
        """Read a call that must be true, such as `x.is_ok()` or `isinstance(x, int)`."""
        call = self._file.call(node)
        if call is None:
            return
        if call.name in known.ARRAYS_EQUAL and wanted and len(call.args) >= 2:
            within = 0.0 if known.ARRAYS_EQUAL[call.name] else None
            self._compare(call.args[0], call.args[1], claim, within=within)
        elif call.name in known.ALL_OF and wanted:
            function = node.child_by_field_name("function")
            receiver = function.child_by_field_name("object") if function is not None else None
            for inner in [*call.args[:1], *([receiver] if receiver is not None else [])]:
                if "comparison" in inner.type or "parenthesized" in inner.type:
                    self._read_condition(inner, True, claim)
        if (opposite := known.FLIPS.get(call.name)) and call.name.startswith("is_"):
            self._add(Content.OPERATOR, call.name_node, claim, opposite=opposite)
            return
        if known.EQUAL_CALL.match(call.name) and wanted:
            found = node.child_by_field_name("receiver") or node.child_by_field_name("object")
            sides = [*call.args, found] if len(call.args) == 1 and found else call.args
            if len(sides) >= 2:
                self._compare(sides[0], sides[1], claim)
        if call.name != "DeepEqual":
            self._insert_not(node, claim)

    def _insert_not(self, node: Node, claim: Node) -> None:
        """Offer a `not` unless the assertion has an opposite by name."""
        call = self._file.call(claim) if claim.type in known.CALLS else None
        sign = {"py": "not ", "rb": ""}.get(self._file.language, "!")
        if sign and (call is None or call.name not in known.FLIPS):
            self._add_at(Content.OPERATOR, node.start_byte, node.start_byte, claim, opposite=sign)

    def _read_other(self, node: Node) -> None:
        """Read the claims of nodes that are neither calls nor branches."""
        kind = node.type
        other = node.child_by_field_name("alternative") if kind == "let_declaration" else None
        if other is not None and self._file.fails(other.start_byte, other):
            self._add_claim(node)
            self._read_pattern(node.child_by_field_name("pattern"), node)
        elif kind == "assert_statement":
            # Java has a statement of this name, too.
            self._add_claim(node)
            self._read_condition(node.named_children[0], True, node)
        elif kind == "member_expression":
            name = node.child_by_field_name("property")
            if name is not None and (
                opposite := {"true": "false", "false": "true"}.get(self._file.source(name))
            ):
                head = self._file.source(node)[:60]
                if known.CHAIN.search(head) or ".should." in self._file.source(node)[-40:]:
                    self._add_claim(node)
                    self._add(Content.OPERATOR, name, node, opposite=opposite)
        elif kind in ("pair", "keyed_element"):
            inside = node.named_children
            if len(inside) == 2 and known.EXPECTED_NAME.match(
                self._file.source(inside[0]).strip("'\":")
            ):
                self._expect(inside[1], node)

    def _read_marks(self, node: Node) -> None:
        """Read the exception that an annotation or attribute of a test expects."""
        if self._file.language == "rs":
            before = node.prev_named_sibling
            while before is not None and before.type == "attribute_item":
                if b"should_panic" in (before.text or b""):
                    for each in below(before, known.STRINGS):
                        self._expect(each, node, is_text=True)
                before = before.prev_named_sibling
        elif self._file.language == "java" and node.named_children:
            for pair in below(node.named_children[0], {"element_value_pair"}):
                key, value = pair.child_by_field_name("key"), pair.child_by_field_name("value")
                if key is not None and value is not None and self._file.source(key) == "expected":
                    self._expect_exception(value, node)


class _Helper(_Reader):
    """Reads the parameters that a helper compares, and uses in no other way."""

    def __init__(self, helper: Helper) -> None:
        Sides.__init__(self, helper.file, Scopes(helper.file, None))
        self._helpers, self._body = {}, helper.body
        self._compared: list[tuple[tuple[str, ...], Node, float | None]] = []
        self.parameters = helper.parameters

    @cached_property
    def claims(self) -> list[tuple[tuple[str, ...], float | None]]:
        """The parameters that each call compares, with each other or an answer, and how nearly."""
        body = self._scopes.open(self._body, is_test=True, is_function=True)
        for node in self._file.nodes(self._body, _SCOPES | _CLAIMS):
            self._scopes.move_to(node.start_byte)
            self._visit(node)
        own = {n: [c for names, c, _ in self._compared if n in names] for n in self.parameters}
        only = {n for n, found in own.items() if self._names.is_only_expected(body, n, found)}
        return [(names, within) for names, _, within in self._compared if only >= {*names}]

    def _compare(self, one: Node, two: Node, claim: Node, *, within: float | None = None) -> None:
        self._note((one, two), claim, within)

    def _read_matcher(self, call: Call) -> None:
        is_equal = call.name == "toBe" or known.EQUAL_FORM.match(call.name)
        if is_equal and not known.NEGATED_CHAIN.search(call.receiver):
            self._note(call.args[:1], call.node, None)

    def _note(self, sides: Sequence[Node], claim: Node, within: float | None) -> None:
        given = [self._file.source(self._file.plain(side)).strip("()") for side in sides]
        names = tuple(name for name in given if name in self.parameters)
        if names and not sum(scope.depth for scope in self._scopes.active(claim)):
            self._compared.append((names, claim, within))
