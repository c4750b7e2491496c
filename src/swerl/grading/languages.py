"""Languages whose test files can be parsed, and the words that their tests use.

Node types and assertion names rarely mean two things, so all languages share one table of each.
The grammars are tree-sitter's; one is imported when a file of its language is first parsed.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tree_sitter

_GRAMMARS = {
    "py": ("tree_sitter_python", "language"),
    "js": ("tree_sitter_javascript", "language"),
    "ts": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "go": ("tree_sitter_go", "language"),
    "rs": ("tree_sitter_rust", "language"),
    "java": ("tree_sitter_java", "language"),
    "rb": ("tree_sitter_ruby", "language"),
    "php": ("tree_sitter_php", "language_php"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
}
"""Language -> package and entry of its grammar."""
_OTHER_SUFFIXES = {
    **{"jsx": "js", "mjs": "js", "cjs": "js", "mts": "ts", "cts": "ts"},
    **dict.fromkeys(("cc", "cxx", "hpp", "hh", "hxx", "h"), "cpp"),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Return both directions of pairs written as `one/other`."""
    pairs = [pair.split("/") for pair in text.split()]
    return {one: other for pair in pairs for one, other in (pair, reversed(pair))}


def _places(text: str) -> dict[str, int]:
    """Return name -> argument index of a table with rows `index: name name …`."""
    rows = [row.split(":") for row in text.strip().splitlines()]
    return {name: int(index) for index, names in rows for name in names.split()}


# Node types of all grammars.
STRINGS = _words(
    "string string_literal raw_string_literal interpreted_string_literal template_string"
    " encapsed_string bare_string"
)
TEXT_PIECES = _words(
    "string_content string_fragment raw_string_content interpreted_string_literal_content"
    " multiline_string_fragment regex_pattern heredoc_content"
)
REGEXES = _words("regex")
INTERPOLATIONS = _words(
    "interpolation template_substitution variable_name string_interpolation format_expression"
    " dynamic_variable_name member_access_expression subscript_expression"
)
NUMBERS = _words(
    "integer float number integer_literal float_literal int_literal number_literal"
    " decimal_integer_literal hex_integer_literal decimal_floating_point_literal"
)
BOOLEANS = _words("true false boolean boolean_literal")
CHARACTERS = _words("char_literal character_literal rune_literal")
SYMBOLS = _words("simple_symbol")
IDENTIFIERS = _words("identifier variable_name constant type_identifier name")
CONTAINERS = _words(
    "list tuple set dictionary array object hash composite_literal literal_value literal_element"
    " array_expression tuple_expression array_creation_expression initializer_list"
    " compound_literal_expression array_initializer field_initializer_list struct_expression"
    " parenthesized_expression unary_operator unary_expression unary unary_op_expression"
    " reference_expression binary_operator binary_expression binary concatenated_string"
    " chained_string string_array type_conversion_expression argument argument_list arguments"
    " expression_list as_expression cast_expression type_cast_expression object_creation_expression"
    " new_expression array_creation_expression pointer_expression parenthesized_statements"
)
"""Nodes that are literals if all their children are."""
PAIRS = _words(
    "pair keyed_element field_initializer array_element_initializer initializer_pair"
    " keyword_argument"
)
"""Entries of containers; the value is the last child."""
ROWS = _words("pair keyed_element composite_literal")
"""Rows of a table of cases; the claim about them stands elsewhere in the test."""
ROW_LOOPS = {
    "for_in_statement": ("left", "right"),
    "for_expression": ("pattern", "value"),
    "for_range_loop": ("declarator", "right"),
    "enhanced_for_statement": ("name", "value"),
}
"""Loops over rows -> fields of the names and of the rows."""
ROW_PATTERNS = _words(
    "array_pattern tuple_pattern pattern_list structured_binding_declarator list_literal"
)
"""Names for the cells of one row."""
ROW_WRAPPERS = _words(
    "reference_expression parenthesized_expression as_expression satisfies_expression argument"
)
CONDITION_WRAPPERS = _words(
    "parenthesized_expression parenthesized_statements condition_clause expression_statement"
    " let_condition"
)
ROW_CALLS = _words("iter into_iter freeze stream items entries sorted list")
"""Calls that give the rows of what they are called on, or of their argument."""
NAME_WRAPPERS = _words("reference_pattern lexical_declaration reference_declarator")
FIELDS = _words(
    "attribute member_expression selector_expression field_expression field_access"
    " member_access_expression"
)
INDEXED = _words("subscript subscript_expression array_access element_reference index_expression")
CONSTANTS = _words(
    "none null nil undefined null_literal identifier constant self this name type_identifier"
    " qualified_type slice_type array_type map_type generic_type primitive_type scoped_identifier"
    " scoped_type_identifier class_literal field_identifier variable_name integral_type"
    " floating_point_type type_arguments template_type qualified_identifier namespace_name"
    " qualified_name void_type pointer_type type_descriptor predefined_type namespace_identifier"
    " shorthand_field_identifier scope_resolution nullptr dimensions hash_key_symbol comment"
    " line_comment block_comment"
)
"""Nodes without code under test in them, which hold no value to replace."""
NOTHING = _words("nil NULL nullptr null None undefined")
CALLS = _words(
    "call call_expression method_invocation macro_invocation member_call_expression"
    " scoped_call_expression function_call_expression nullsafe_member_call_expression"
    " object_creation_expression"
)
FUNCTIONS = _words(
    "function_definition function_declaration method_definition method_declaration function_item"
    " method singleton_method"
)
CLASSES = _words(
    "class_definition class_declaration class class_specifier mod_item module"
    " namespace_definition impl_item internal_module struct_specifier"
)
CONDITIONS = _words("if_statement if unless if_expression if_modifier unless_modifier")
"""Conditions that may end in a failure; other statements inside them may be left out."""
BRANCHES = CONDITIONS | _words(
    "except_clause catch_clause rescue match_statement switch_statement match_expression case"
    " conditional_expression ternary_expression expression_switch_statement select_statement"
    " elif_clause else_clause switch_expression conditional finally_clause ensure"
)
MATCHES = _words(
    "match_statement switch_statement match_expression case expression_switch_statement"
    " switch_expression"
)
ARMS = _words(
    "match_arm case_clause expression_case default_case switch_case switch_default case_statement"
    " default_statement switch_block_statement_group switch_rule match_conditional_expression"
    " match_default_expression when else"
)
PATTERNS = _words(
    "match_pattern tuple_struct_pattern struct_pattern field_pattern tuple_pattern slice_pattern"
    " reference_pattern negative_literal case_pattern list_pattern class_pattern keyword_pattern"
    " dict_pattern pattern parenthesized_expression unary_expression unary_operator"
    " unary_op_expression unary"
)
"""Nodes of a pattern that holds only if all in it do."""
LOOPS = _words(
    "for_statement while_statement for_in_statement foreach_statement for_expression"
    " enhanced_for_statement do_statement while for until for_range_loop while_expression"
    " loop_expression"
)
LEAVES = _words("return_statement return return_expression")
ASSIGNMENTS = {
    "assignment": ("left", "right"),
    "augmented_assignment": ("left", "right"),
    "variable_declarator": ("name", "value"),
    "short_var_declaration": ("left", "right"),
    "var_spec": ("name", "value"),
    "const_spec": ("name", "value"),
    "let_declaration": ("pattern", "value"),
    "const_item": ("name", "value"),
    "assignment_expression": ("left", "right"),
    "init_declarator": ("declarator", "value"),
}
"""Node type -> fields of the name and of its value."""
SEVERAL = _words(
    "expression_list pattern_list tuple_pattern tuple tuple_expression array_pattern array"
    " list_literal array_creation_expression left_assignment_list right_assignment_list"
)
"""Lists of names or values in one assignment."""

# Names of assertions.
EQUAL = _words(
    "assert_identical assertSame assertIs eq_ eq assertLinesMatch assert_produces assert_same"
    " equal strictEqual deepEqual deepStrictEqual eql equals same is strictSame looseEqual Equal"
    " EqualValues Exactly JSONEq YAMLEq ElementsMatch DeepEqual ASSERT_STREQ EXPECT_STREQ"
    " ASSERT_STRCASEEQ EXPECT_STRCASEEQ QCOMPARE Diff EXPECT_THAT ASSERT_THAT REQUIRE_THAT"
    " CHECK_THAT matches assert_matches sameMembers sameDeepMembers sameOrderedMembers deepInclude"
)
"""Assertions of equality of the first two arguments."""
EQUAL_FORM = re.compile(
    r"(?!(?i:.*(?:not|unequal|almost|approx|near|close|less|greater|refute|wont|or_?equal)))"
    r"\w*(?:[eE]quals?|EQUALS?|_eq|_EQ)f?(?:$|_|[A-Z0-9])"
)
"""Other assertions of equality, of libraries and projects."""
EQUAL_CALL = re.compile(
    r"(?:equals(?:IgnoreCase)?|contentEquals|eql\?|eq|Equal|DeepEqual|matches)$"
)
"""Functions and methods that are true of equal values."""
NEAR = _places("""
0: assertAlmostEqual assertAlmostEquals assert_almost_equal assert_allclose
0: assert_array_almost_equal assert_approx_equal assertFloatsEqual closeTo approximately
0: assertEqualsWithDelta assert_in_delta assert_in_epsilon InDelta InEpsilon EXPECT_NEAR
0: ASSERT_NEAR EXPECT_DOUBLE_EQ EXPECT_FLOAT_EQ ASSERT_DOUBLE_EQ ASSERT_FLOAT_EQ
0: BOOST_CHECK_CLOSE assert_relative_eq assert_abs_diff_eq
""")
"""Assertions of equality within a tolerance -> index of the first side."""
CONTAINED = _places("""
0: assertIn assertStringContainsString assertArrayHasKey
0: assertCount assertStringStartsWith assertStringEndsWith fnmatch_lines
0: re_match_lines
1: assertContains assertRegex assertRegexpMatches assert_includes Contains Len
1: assertRedirects assertTemplateUsed EqualError ErrorContains lengthOf include HasPrefix
1: assertStringContains contain
0: assertNumQueries expectExceptionMessage expectExceptionCode expectMessage assert_response
0: expectOutputString assert_output assertStatus assertJson assertSee expectExceptionMessageMatches
0: assertMatchesRegularExpression assertRegExp assertStringMatchesFormat expectExceptionObject
1: match hasAllKeys calledWith calledOnceWith calledWithExactly calledOnceWithExactly callCount
2: propertyVal
""")
"""Assertions of which one argument is the expected value -> its index."""
RAISES = _places("""
0: raises assertRaises assertRaisesRegex assertRaisesRegexp assertRaisesMessage assertWarns
0: assertWarnsRegex assertWarnsMessage warns assert_raises
0: assertThrows assertThrowsExactly assert_raise expectException assert_throws
1: throws rejects THROWS_AS REQUIRE_THROWS_AS CHECK_THROWS_AS EXPECT_THROW ASSERT_THROW
0: throw rejectedWith toThrow toThrowError raise_error raise_exception isInstanceOf
0: isExactlyInstanceOf expect
1: BOOST_CHECK_THROW ErrorIs
""")
"""Assertions of an exception -> index of its type or message."""
MATCHERS = _words(
    "toBe toEqual toStrictEqual toMatchObject toHaveLength toContain toContainEqual toMatch"
    " toHaveBeenCalledTimes toHaveBeenCalledWith toHaveBeenLastCalledWith toHaveBeenNthCalledWith"
    " toReturnWith toHaveReturnedWith toHaveTextContent toMatchInlineSnapshot toHaveAttribute"
    " equal equals eql eq deepEqual eqls include includes contain string members lengthOf length"
    " property isEqualTo isSameAs hasSize contains containsExactly containsExactlyInAnyOrder"
    " containsOnly hasMessage hasMessageContaining hasToString startsWith endsWith"
    " containsSequence must_equal must_include must_match match start_with end_with have_attributes"
    " match_array contain_exactly be is equalTo containsString toHaveCount toHaveKey calledWith"
    " calledOnceWith calledOnceWithExactly calledWithExactly hasValue containsEntry"
    " isSameInstanceAs toHaveProperty toHaveNthReturnedWith toHaveValue toHaveClass toHaveStyle"
    " exactly keys value returns hasFieldOrPropertyWithValue isEqualToIgnoringCase withMessage"
    " hasItem hasItems hasEntry is_equal_to Equal BeEquivalentTo HaveLen ContainElement ConsistOf"
    " MatchError HaveKeyWithValue MatchJSON equal_to"
)
"""Methods of an expectation chain whose arguments are expected values."""
RSPEC = MATCHERS | _words(
    "by from to with output yield_with_args yield_successive_args exactly have_http_status be_eql"
    " have_content"
)
"""Those and further methods in the argument of RSpec's `to`."""
TO = ("to", "not_to", "to_not", "To", "Should", "should", "should_not")
CALLED = _words(
    "assert_called_with assert_called_once_with assert_any_call assert_has_calls"
    " assert_awaited_with assert_awaited_once_with"
)
"""Assertions of a mock about the arguments of its calls."""
NEAR_MATCHERS = _words("toBeCloseTo isCloseTo closeTo approximately must_be_close_to")
"""Those that allow a tolerance; the expected value is their first argument."""
BE_WITHIN = re.compile(r"be_within\((\d[\d_]*(?:\.\d+)?(?:e-?\d+)?)\)$")
"""The tolerance in front of `of`."""
CHAIN = re.compile(
    r"^\W*(?:(?:chai|self|this|Assertions|Truth|\w*Assert)[.:\->$]*)?"
    r"(?:await\s+)?(?:[eE]xpect\w*|assert_?[tT]hat\w*|_|value|that|Eventually|jsonPath|content|header)\s*[({]|\.should\b|\.must\b|\bis_expected\b"
)
"""Receivers of expectation chains."""
NEGATED_CHAIN = re.compile(r"(?:\.|->)(?:not|isNot|never)\b")
SHORT = _words(
    "equal strictEqual deepEqual deepStrictEqual eql equals same is strictSame looseEqual Equal"
    " EqualValues Exactly JSONEq YAMLEq ElementsMatch DeepEqual Contains Len EqualError eq throw"
    " ErrorContains lengthOf include HasPrefix contain throws rejects ErrorIs InDelta InEpsilon"
    " closeTo approximately True False Nil NotNil NoError Error Empty NotEmpty isTrue isFalse Diff"
    " isNull isNotNull ok notOk exists notExists isDefined isUndefined raises warns Truef Falsef"
    " rejectedWith toThrow toThrowError raise_error raise_exception isInstanceOf expect"
    " isExactlyInstanceOf isOk isNotOk NotContains Contains NotEqual notEqual notStrictEqual"
    " notDeepEqual match matches equals"
)
"""Assertions with names so common that their receiver must be a test library."""
LIBRARY = re.compile(
    r"(?:^|[.:])(?:assert\w*|require|chai|t|test|should|pytest|reflect|cmp|a|is|r|s|qunit|self"
    r"|this|Assert|tt|suite|thrown|exceptionRule|expectedException|ok|expect)$",
    re.IGNORECASE,
)
GO_LIBRARY = re.compile(
    r"(?:assert|require|Assert\(\)|Require\(\)|reflect|cmp|is|qt|check|(?:^|\.)(?:s|ts|suite))$"
)
FLIPS = _pairs(
    """
assertTrue/assertFalse assertIn/assertNotIn assertIs/assertIsNot assertIsNone/assertIsNotNone
assertIsInstance/assertNotIsInstance assertEqual/assertNotEqual assertEquals/assertNotEquals
assertGreater/assertLessEqual assertLess/assertGreaterEqual assertRegex/assertNotRegex
assertContains/assertNotContains assertTemplateUsed/assertTemplateNotUsed
assertSame/assertNotSame assertNull/assertNotNull assertEmpty/assertNotEmpty
assertStringContainsString/assertStringNotContainsString assertArrayHasKey/assertArrayNotHasKey
assertFileExists/assertFileDoesNotExist assertInstanceOf/assertNotInstanceOf
assertCount/assertNotCount assert_equal/refute_equal assert_nil/refute_nil
assert_includes/refute_includes assert_match/refute_match assert_empty/refute_empty
assert_predicate/refute_predicate assert_kind_of/refute_kind_of assert_same/refute_same
assert_respond_to/refute_respond_to assert_operator/refute_operator assert_true/assert_false
toBeTruthy/toBeFalsy toBeDefined/toBeUndefined True/False Nil/NotNil NoError/Error
NotEmpty/Empty Contains/NotContains Equal/NotEqual
assert_eq/assert_ne is_ok/is_err is_some/is_none isTrue/isFalse isNull/isNotNull
isEmpty/isNotEmpty be_truthy/be_falsey
EXPECT_TRUE/EXPECT_FALSE ASSERT_TRUE/ASSERT_FALSE EXPECT_EQ/EXPECT_NE ASSERT_EQ/ASSERT_NE
CHECK/CHECK_FALSE REQUIRE/REQUIRE_FALSE EXPECT_STREQ/EXPECT_STRNE ASSERT_STREQ/ASSERT_STRNE
EXPECT_GT/EXPECT_LE EXPECT_LT/EXPECT_GE ASSERT_GT/ASSERT_LE ASSERT_LT/ASSERT_GE
TEST_ASSERT_TRUE/TEST_ASSERT_FALSE TEST_ASSERT_NULL/TEST_ASSERT_NOT_NULL
must_be_nil/wont_be_nil must_equal/wont_equal must_include/wont_include
equal/notEqual strictEqual/notStrictEqual deepEqual/notDeepEqual isDefined/isUndefined
deepStrictEqual/notDeepStrictEqual exists/notExists toBeVisible/toBeHidden
"""
)
"""Assertion -> the one that holds when it does not."""
CHAINED = MATCHERS | NEAR_MATCHERS | RAISES.keys() | FLIPS.keys()
"""All methods of an expectation chain."""
OPERATORS = _pairs("==/!= ===/!== is/is_not in/not_in </>= >/<=")
_TRUE = _words(
    "assert assertTrue assert_true ok isTrue ASSERT_TRUE EXPECT_TRUE CHECK REQUIRE BOOST_CHECK"
    " BOOST_REQUIRE BOOST_TEST TEST_ASSERT_TRUE TEST_ASSERT ck_assert debug_assert True"
    " ASSERT assert_ cl_assert g_assert QVERIFY CPPUNIT_ASSERT TEST_CHECK mu_assert ck_assert_msg"
)
_FALSE = _words(
    "assertFalse assert_false refute isFalse ASSERT_FALSE EXPECT_FALSE CHECK_FALSE"
    " REQUIRE_FALSE TEST_ASSERT_FALSE False notOk"
)
TRUTHS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
"""Assertions of a condition -> the value that it must have."""
ASSERTIONS = frozenset().union(FLIPS, TRUTHS, EQUAL, NEAR, CONTAINED, RAISES, CALLED)
"""Names of assertions that have arguments."""
ASSERTION_FORM = re.compile(r"_*(?:assert|check|verify|expect)(?:$|_|[A-Z])")
DISTANCES = _words("abs Abs fabs fabsf fabsl")
"""Functions of a difference that must be small."""

# Names of tests.
TEST_NAME = re.compile(r"test|.*(?:_tests?|Test|_spec)$", re.IGNORECASE)
TEST_MARK = re.compile(rb"[@#\[:(\s](?:\w*[Tt]est\w*|theory|Theory|rstest|wasm_bindgen_test)\b")
TEST_MACRO = re.compile(r"(?:[A-Z_]*TEST[A-Z_]*|BENCHMARK)$")
TEST_CALLS = _words("it test specify scenario example Run fit should TEST_CASE SCENARIO subtest")
TITLE_BLOCKS = _words("TEST_CASE SCENARIO SECTION TEST_CASE_METHOD SUBCASE GIVEN WHEN THEN")
"""Macros that a block follows."""
OUTER_CALLS = _words("describe context suite feature fdescribe module group shared_examples")
SKIP_CALLS = _words("xit xdescribe xtest xspecify todo skip pending xcontext")
EXPECTED_NAME = re.compile(r"\$?(?:want|expect|exp$|correct)", re.IGNORECASE)
"""Names of expected values."""
EXPECTED_FIELD = re.compile(
    r"want|expect|exp$|results?$|output$|out$|answer|res$|ref$|correct|code$|ret_code"
    r"|status$|exit_code",
    re.IGNORECASE,
)
"""Columns of a table of cases that hold the expected value."""
MACROS = _words(
    "assert assert_eq assert_ne debug_assert debug_assert_eq assert_relative_eq assert_str_eq"
    " matches assert_matches prop_assert prop_assert_eq assert_equal json hashmap concat"
    " assert_abs_diff_eq vec"
)
"""Rust macros whose arguments are parsed."""
CONSTRUCTOR = re.compile(
    r"(?:^|[.:>])(?:[A-Z]\w*|set|frozenset|dict|list|tuple|bytes|bytearray|str|int|float|array"
    r"|dedent|cleandoc|join|encode|strip|lstrip|to_string|to_owned|into|from|freeze|asList|of"
    r"|datetime|date|timedelta|time|approx|u|b|vec|byte|to_vec|namedtuple|r_|Symbol|symbols"
    r"|u?int(?:8|16|32|64)|uint|float(?:32|64)|rune"
    r"|new|from_(?:secs|millis|micros|nanos)|make_(?:pair|tuple)|string(?:_view)?|call|json|hashmap"
    r"|concat)$"
)
"""Calls that make an expected value out of literals, such as `Decimal("1.5")`."""
GMOCK = _words(
    "Eq StrEq HasSubstr StartsWith EndsWith ElementsAre UnorderedElementsAre SizeIs Pair"
)
"""Matchers of GoogleMock, whose arguments are expected values."""
FAILS = re.compile(
    rb"\.(?:Error|Fatal|Fail)\w*\(|\bpanic!?\(|\bfail|\bFAIL|\babort\(|\bexit\(|\bthrow\b"
    rb"|\braise\b|\breturn\s+(?:-?[1-9]|false|False|EXIT_FAILURE)"
    rb"|\b\w*(?:err|fail)\w*(?:\+\+|\s*\+=)"
)
"""Text of a failing branch."""
LEAVES_ONLY = re.compile(rb"[{:\s]*return\s*;?[\s}]*")
"""Text of a branch that leaves the test, which passes then."""
ENDS = re.compile(
    FAILS.pattern + rb"|\breturn\s+Err\(|\bunreachable!|\bflunk\b"
    rb"|\bassert!?\s*\(?\s*(?:[Ff]alse|0)\s*(?:[),;}\n]|$)"
)
"""Text of a branch that fails in any case."""
CUSTOM = re.compile(
    r"_*(?:(?i:assert|check|verify|validate|expect)(?:$|_|[A-Z])"
    r"|(?i:(?:\w*_)?run_?test|invoke_assert))"
)
"""Helpers of a project that hold assertions."""
ALL_OF = _words("all")
"""Functions of a comparison of arrays."""
ARRAYS_EQUAL = {"array_equal": False, "array_equiv": False, "allclose": True, "isclose": True}
"""Functions that compare arrays -> True within a tolerance."""
COMPARERS = _words("strcmp strncmp memcmp strcasecmp wcscmp bcmp Compare")
COMMON_EXCEPTIONS = {
    "py": "ValueError TypeError KeyError IndexError AttributeError RuntimeError",
    "js": "TypeError RangeError SyntaxError",
    "ts": "TypeError RangeError SyntaxError",
    "tsx": "TypeError RangeError SyntaxError",
    "java": "IllegalArgumentException IllegalStateException NullPointerException"
    " IndexOutOfBoundsException UnsupportedOperationException",
    "rb": "ArgumentError TypeError KeyError IndexError NameError",
    "php": "InvalidArgumentException RuntimeException DomainException TypeError",
    "cpp": "std::invalid_argument std::out_of_range std::runtime_error std::domain_error",
}
"""Language -> exceptions that tests of any project expect."""
ODD_EXCEPTIONS = {
    "py": "RecursionError",
    "js": "URIError",
    "ts": "URIError",
    "tsx": "URIError",
    "java": "ArrayStoreException",
    "rb": "FloatDomainError",
    "php": "DivisionByZeroError",
    "cpp": "std::bad_cast",
}
"""Language -> an exception that no project makes a kind of."""
EXCEPTION_KINDS = {
    "java": {
        "RuntimeException": COMMON_EXCEPTIONS["java"],
        "IllegalArgumentException": "NumberFormatException",
        "IndexOutOfBoundsException": "ArrayIndexOutOfBoundsException"
        " StringIndexOutOfBoundsException",
        "IOException": "FileNotFoundException UnsupportedEncodingException",
        "NoSuchElementException": "InputMismatchException",
        "ArithmeticException": "",
        "ClassCastException": "",
    },
    "rb": {
        "IndexError": "KeyError StopIteration",
        "NameError": "NoMethodError",
        "RangeError": "FloatDomainError",
        "RuntimeError": "FrozenError",
    },
    "php": {
        "LogicException": "InvalidArgumentException DomainException LengthException"
        " OutOfRangeException BadFunctionCallException BadMethodCallException",
        "RuntimeException": "OutOfBoundsException OverflowException RangeException"
        " UnderflowException UnexpectedValueException",
    },
    "cpp": {
        "logic_error": "invalid_argument out_of_range domain_error length_error",
        "runtime_error": "range_error overflow_error underflow_error system_error",
    },
}
"""Language -> exception -> those that are kinds of it. Python's own are looked up."""


def opposite(sign: str) -> str:
    """Return the operator that holds when this one does not, "" if there is none."""
    return OPERATORS.get(sign.replace(" ", "_"), "").replace("_", " ")


def own_exceptions(language: str) -> set[str]:
    """Return the exceptions that a language has by itself, as far as is known."""
    if language == "py":
        return {name for name, each in vars(builtins).items() if isinstance(each, type)}
    table = EXCEPTION_KINDS.get(language, {})
    listed = [*table, *table.values(), COMMON_EXCEPTIONS.get(language, "")]
    return {re.split(r"[.:\\]", name)[-1] for name in " ".join(listed).split()}


def language_of(path: str) -> str:
    """Return the language of a file by its suffix, "" if no grammar reads it."""
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    name = _OTHER_SUFFIXES.get(suffix, suffix)
    return name if name in _GRAMMARS else ""


@functools.cache
def grammar(name: str) -> tree_sitter.Language:
    """Import a language's grammar."""
    import tree_sitter

    package, entry = _GRAMMARS[name]
    return tree_sitter.Language(getattr(importlib.import_module(package), entry)())


@functools.cache
def query(name: str, types: frozenset[str]) -> tree_sitter.Query:
    """Return a query that finds nodes of those of the types that a language has."""
    import tree_sitter

    language = grammar(name)
    known = [kind for kind in sorted(types) if language.id_for_node_kind(kind, True) is not None]
    return tree_sitter.Query(language, f"[{' '.join(f'({kind})' for kind in known)}] @node")
