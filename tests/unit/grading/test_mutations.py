"""Values that assertions compare are found in every language; what an honest answer may differ in
is left alone."""

from __future__ import annotations

from datetime import date

import pytest

from swerl.grading.confirm import belongs, candidates_of, edited
from swerl.grading.mutations import Candidate


def read(name: str, text: str, *tests: str) -> list[list[Candidate]]:
    return candidates_of(f"/repo/{name}", text.encode(), tests)


def values(name: str, text: str) -> list[str]:
    """Return the replaced values of all tests in a file."""
    old = [each.old for own in read(name, text) for each in own if each.is_value]
    return sorted(set(old))


PYTHON = "def test_x():\n    {}\n"
FORMS = {
    "assert f(3) == 9": ["9"],
    "assert 9 == f(3)": ["9"],
    "assert f(3) == -9": ["9"],
    "assert f() == [1, {'k': 'v'}]": ["'v'", "'k'", "1"],
    "assert f() == Point(1, name='a')": [],
    "assert 'negative' in str(e)": ["'negative'"],
    "assert f().startswith('Invalid')": ["'Invalid'"],
    "self.assertEqual(f(3), 9, 'a message')": ["9"],
    "self.assertAlmostEqual(f(), 5.0, delta=1)": ["5.0"],
    "assert f() == pytest.approx(3.5, abs=0.5)": ["3.5"],
    "with pytest.raises(ValueError, match='bad'):\n        f()": ["'bad'"],
    "expected = 'q' % x\n    assert f(x) == expected": ["'q'"],
    "out.fnmatch_lines(['*1 passed*'])": ["'*1 passed*'"],
    "mock.assert_called_once_with(4, key=5)": ["4", "5"],
    # An honest answer may be another one, or have another bound.
    "assert f() in (3, 4)": [],
    "assert f() == 1 or f() == 2": [],
    "assert 3 <= f() <= 8": [],
    "assert abs(f() - 10) < 2": [],
    "self.assertIn(f(), (3, 4))": [],
    "self.assertGreater(f(), 3)": [],
    "assert f().issubset({'a', 'b'})": [],
    "assert not set(f()) - {'a', 'b'}": [],
    "assert f() & {'a', 'b'}": [],
    # No mutation of these would be noticed.
    "assert f() != 'old'": [],
    "assert 'secret' not in f()": [],
    # Arguments of the code under test, and values of other code.
    "assert f('x').strip('()') == 'y'": ["'y'"],
    "assert f() % 7 == 0": ["0"],
    "assert f() == f'{x}'": [],
    "x = g(7)": [],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_compared_values_of_an_assertion_are_found(form: str) -> None:
    assert values("test_a.py", PYTHON.format(form)) == sorted(FORMS[form])


LANGUAGES = {
    "a_test.go": (
        "func TestAdd(t *testing.T) {\n\twant := 5\n\tif got := Add(2, 3); got != want {\n"
        '\t\tt.Errorf("got %d", got)\n\t}\n\tassert.Equal(t, 42, Sum(1))\n}\n',
        ["42", "5"],
    ),
    "lib.rs": (
        "#[test]\nfn adds() {\n    assert_eq!(add(17, 25), 42);\n"
        '    assert_eq!(name("a")?, "bob".to_string());\n}\n',
        ["42", '"bob"'],
    ),
    "a.test.ts": (
        'describe("sum", () => {\n  it("adds", () => {\n    expect(sum(1, 2)).toBe(3);\n'
        "    assert.strictEqual(g(4), 'four');\n    expect(x).not.toBe(6);\n  });\n});\n",
        ["3", "'four'"],
    ),
    "CalcTest.java": (
        "class CalcTest {\n  @Test\n  public void adds() {\n    assertEquals(42, add(17));\n"
        '    assertThat(name()).isEqualTo("bob");\n  }\n}\n',
        ["42", '"bob"'],
    ),
    "a_spec.rb": ('  it "adds" do\n    expect(till.sum(1)).to eq(42)\n  end\n', ["42"]),
    "test_a.rb": ("  def test_add\n    assert_equal 42, add(17)\n  end\n", ["42"]),
    "ATest.php": (
        "class ATest {\n  public function testAdd(): void\n  {\n"
        "    $this->assertSame(42, $this->add(17));\n  }\n}\n",
        ["42"],
    ),
    "t.c": ("static void test_add(void)\n{\n    assert(add(17, 25) == 42);\n}\n", ["42"]),
    "t.cpp": ("TEST(Calc, Adds) {\n  EXPECT_EQ(42, add(17));\n}\n", ["42"]),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_language_is_read(name: str) -> None:
    text, expected = LANGUAGES[name]
    assert values(name, text) == sorted(expected)


EXCEPTIONS = {
    "test_a.py": ("def test_x():\n    with pytest.raises(errors.Bad):\n        f()\n", "Bad"),
    "a_spec.rb": ('it "x" do\n  expect { f }.to raise_error(Bad)\nend\n', "Bad"),
    "A.java": ("void x() {\n  assertThrows(Bad.class, () -> f());\n}\n", "Bad"),
    "c.py": ("def test_x(self):\n    self.assertRaises(Bad, f, 3)\n", "Bad"),
    "d.py": ("def test_x(error):\n    with pytest.raises(error):\n        f()\n", "error"),
    "b.py": ("def test_x():\n    with pytest.raises((Bad, Worse)):\n        f()\n", ""),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_single_expected_exception_is_replaced(name: str) -> None:
    text, expected = EXCEPTIONS[name]
    own = [each for unit in read(name, text) for each in unit if not each.is_value]
    assert {each.old for each in own} == ({expected} if expected else set())


@pytest.mark.parametrize("head", ["pytest.warns", "self.assertWarns"])
def test_a_warning_becomes_another_warning_because_no_other_class_can_be_asserted(
    head: str,
) -> None:
    [own] = read("test_a.py", PYTHON.format(f"with {head}(FutureWarning):\n        f()"))
    assert all(issubclass(eval(each.edit.new), Warning) for each in own)


def test_a_changed_date_exists() -> None:
    first = PYTHON.format("assert f() == datetime.date(2021, 5, 17)")
    second = first.replace("test_x", "test_y").replace("2021, 5, 17", "1989, 12, 31")
    third = PYTHON.replace("test_x", "test_z").format("assert f() == 40900")
    found = [each for unit in read("test_a.py", f"{first}\n{second}\n{third}") for each in unit]
    assert {each.old for each in found if each.is_value} == {"2021", "1989", "40900"}
    assert all(1 <= int(each.edit.new) <= 9999 for each in found if each.old in ("2021", "1989"))


def test_a_made_value_has_words_of_the_file_or_is_near_and_its_place_is_random() -> None:
    [own] = read("test_a.py", PYTHON.format("assert f() == 'is near'"))
    assert {eval(each.edit.new) for each in own[:2]} <= {"is test", "test near", "x near", "is x"}
    many = "\n    ".join(f"assert f() == {at}" for at in (311, 407, 523, 689, 737))
    tests = [PYTHON.replace("test_x", f"test_{at}").format(many) for at in range(9)]
    firsts = [unit[0] for unit in read("test_a.py", "\n".join(tests))]
    assert len({each.old for each in firsts}) > 2
    assert all(abs(int(each.edit.new) - int(each.old)) <= 2 for each in firsts)
    [own] = read("test_a.py", PYTHON.format("assert f() == approx(311)"))
    assert all(abs(int(each.edit.new) - 311) >= 100 for each in own if each.is_value)
    [own] = read("test_a.py", PYTHON.format("assert f() == '2024-02-14'"))
    assert all(date.fromisoformat(eval(each.edit.new)) for each in own if each.is_value)
    [own] = read("test_a.py", PYTHON.format("assert f() == 30000"))
    assert all(int(each.edit.new) % 10_000 == 0 for each in own if each.is_value)


@pytest.mark.parametrize("old", ["9", "0", "250", "2.50", "0x1F", "'a-b'", '"two words"', "''"])
def test_a_made_value_is_another_one_of_the_same_form(old: str) -> None:
    [own] = read("test_a.py", PYTHON.format(f"assert f() == {old}"))
    news = [each.edit.new for each in own if each.is_value]
    assert len(news) == 2 or old == "''"
    for new in news:
        assert eval(new) != eval(old)
        assert type(eval(new)) is type(eval(old))
        assert old[0] in "'\"" or len(new) == len(old)


def test_every_word_of_a_pattern_changes_because_each_may_be_an_alternative() -> None:
    text = PYTHON.format(r"assert re.match(r'err(or)?: \d+|bad', f())")
    [own] = read("test_a.py", text)
    assert all(part not in own[0].edit.new for part in ("err", "or)", "bad"))
    assert r"\d+" in own[0].edit.new


def test_a_test_ends_where_the_indentation_falls_back_outside_of_texts() -> None:
    text = 'def test_x():\n    s = """\nleft\n"""\n    assert f(s) == 5\n\n\nx = 6\nassert x == 7\n'
    assert values("test_a.py", text) == ["5"]


@pytest.mark.parametrize("expected", [3, 2.5, "one", [1], {"a": 1}, None, 0, ""])
def test_a_compared_parameter_gets_another_value_of_its_type_before_a_negation(
    expected: object,
) -> None:
    head = "@pytest.mark.parametrize(('n', 'expected'), [(1, 'one'), (2, 'two')])\n"
    [unit] = read("test_a.py", f"{head}def test_x(n, expected):\n    assert f(n) == expected\n")
    *news, last = [each.edit.new for each in unit]
    assert last == "not (f(n) == expected)"
    for new in news:
        changed = eval(new, {"expected": expected})
        assert changed != expected
        # Code could tell a list from a number, or from a text.
        assert type(changed) is type(expected) or changed == [expected]
        assert not expected or type(expected) is dict or changed != [expected]
    [unit] = read("a.test.js", "test.each(cases)('x', (n, e) => {\n  expect(f(n)).toBe(e);\n});\n")
    assert [each.edit.new for each in unit] == ["[e]", "[e, e]"]


def test_a_value_that_stands_elsewhere_or_follows_from_numbers_near_it_is_marked() -> None:
    body = "x = 7\n    assert f(x, 4) == 7\n    assert g() == 68\n    assert h() == 11"
    text = PYTHON.format(
        f"{body}\n    assert name('Big Fox') == 'big-fox'\n    assert u() == 'abc'"
    )
    [own] = read("test_a.py", f"{text}\nTABLE = ['abc']\n")
    alone = {each.old: each.is_alone for each in own if each.is_value}
    assert alone == {"7": False, "68": True, "11": False, "'big-fox'": False, "'abc'": False}
    assert own[0].old == "68"


def test_a_made_number_is_near_and_no_number_beside_it() -> None:
    [own] = read("test_a.py", PYTHON.format("assert f(4, 7) == 5"))
    assert {each.edit.new for each in own if each.is_value} == {"3", "6"}


@pytest.mark.parametrize(
    ("items", "shown"), [("52, 53, 54", True), ("20, 53, 91", False), ("'ab', 53, 'cd'", False)]
)
def test_a_number_is_marked_if_the_order_of_its_list_shows_the_mutation(
    items: str, shown: bool
) -> None:
    [own] = read("test_a.py", PYTHON.format(f"assert f() == [{items}]"))
    assert {each.is_alone for each in own if each.old == "53"} == {not shown}


@pytest.mark.parametrize(
    ("name", "outer", "test_id", "expected"),
    [
        ("test_a", "", "tests/test_x.py::test_a", True),
        ("test_a", "", "tests/test_x.py::test_a[1-2]", True),
        ("test_a", "", "tests/test_x.py::test_ab", False),
        ("test_a", "", "tests/test_y.py::test_a", False),
        ("test_a", "T", "tests/test_x.py::T::test_a", True),
        ("test_a", "U", "tests/test_x.py::T::test_a", False),
        ("test_a", "T", "test_a (tests.test_x.T.test_a)", True),
        ("test_a", "U", "test_a (tests.test_x.T.test_a)", False),
        ("adds two", "", "calc > adds two", True),
        ("adds two", "", "TestCalc/adds_two", True),
        ("adds ${n}", "", "calc adds 3", True),
        ("testChangeOfANote", "", "Till > Change of a note", True),
    ],
)
def test_a_declared_id_belongs_to_its_test(
    name: str, outer: str, test_id: str, expected: bool
) -> None:
    quoted = f"def {name}():" if " " not in name else f'it("{name}", () => {{'
    suffix = "py" if " " not in name else "js"
    body = f"class {outer}:\n    {quoted}\n        assert f() == 5\n" if outer else (
        f"{quoted}\n    assert f() == 5\n"
    )  # fmt: skip
    [[first, *_]] = read(f"tests/test_x.{suffix}", body)
    assert belongs(first, test_id) is expected


def test_edits_replace_bytes_and_not_characters() -> None:
    text = "def test_x():\n    s = 'äöü'\n    assert f(s) == 5\n"
    [own] = read("test_a.py", text)
    changed = edited(text.encode(), [own[0].edit]).decode()
    assert changed.startswith("def test_x():\n    s = 'äöü'\n    assert f(s) == ")
    assert changed != text
