"""Each swap of a small project makes its own test fail and no other, with the real toolchains."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.grading.plausible import Kind
from swerl.grading.swaps import belongs, candidates, swapped

pytestmark = pytest.mark.nightly

JARS = [Path("/usr/share/java") / name for name in ("junit4.jar", "hamcrest-all.jar")]
Outcome = dict[str, bool]
"""Test id -> True if it passed."""


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, timeout=300, encoding="utf-8", errors="replace"
    )
    return done.stdout + done.stderr


def _tap(folder: Path) -> Outcome:
    text = _run(folder, "node", "--test-reporter=tap", "it.test.js")
    return {name: not bad for bad, name in re.findall(r"^\s*(not )?ok \d+ - (.+)$", text, re.M)}


def _npm(*packages: str) -> Path:
    """Return a folder with npm packages, installed once per machine."""
    folder = Path(tempfile.gettempdir()) / ("swerl-npm-" + "-".join(packages).replace("@", ""))
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        try:
            done = subprocess.run(command, capture_output=True, timeout=240)
        except subprocess.TimeoutExpired:
            pytest.skip("npm install takes too long here")
        if done.returncode:
            pytest.skip("npm installs nothing here")
        (folder / "done").touch()
    return folder / "node_modules"


def _mocha(folder: Path) -> Outcome:
    modules = _npm("mocha", "chai@4")
    link = folder / "node_modules"
    if not link.exists():
        link.symlink_to(modules)
    text = _run(folder, str(modules / ".bin/mocha"), "--reporter", "json", "it.test.js")
    found = json.loads(text[text.index("{") :])
    failed = {each["fullTitle"] for each in found["failures"]}
    return {each["fullTitle"]: each["fullTitle"] not in failed for each in found["tests"]}


def _jest(folders: Sequence[Path]) -> list[Outcome]:
    root, jest = folders[0].parent, _npm("jest") / ".bin/jest"
    (root / "package.json").write_text("{}")
    text = _run(root, str(jest), "--json", "--maxWorkers=2", "--rootDir", str(root))
    files = json.loads(text[text.index('{"num') :].splitlines()[0])["testResults"]
    found = {
        Path(file["name"]).parent.name: {
            each["fullName"]: each["status"] == "passed" for each in file["assertionResults"]
        }
        for file in files
    }
    return [found[folder.name] for folder in folders]


def _go(folder: Path) -> Outcome:
    (folder / "go.mod").write_text("module solution\n\ngo 1.19\n")
    text = _run(folder, "go", "test", "-v", ".")
    return {name: word == "PASS" for word, name in re.findall(r"--- (PASS|FAIL): (\S+)", text)}


def _rust(folder: Path) -> Outcome:
    built = _run(folder, "rustc", "--test", "--edition", "2021", "-o", "it", "it.rs")
    assert (folder / "it").exists(), built
    text = _run(folder, "./it", "--test-threads=1")
    pattern = r"^test (\S+?)(?: - should panic)? \.\.\. (ok|FAILED)"
    return {name: word == "ok" for name, word in re.findall(pattern, text, re.M)}


def _java(folders: Sequence[Path]) -> list[Outcome]:
    # One compiler and one runner for all: each copy is a package.
    root = folders[0].parent
    sources = [path for folder in folders for path in sorted(folder.glob("*.java"))]
    for path in sources:
        path.write_text(f"package {path.parent.name};\n{path.read_text()}")
    jars = ":".join(map(str, [*JARS, root]))
    built = _run(root, "javac", "-cp", jars, *map(str, sources))
    assert (folders[-1] / "ItTest.class").exists(), built
    classes = [f"{folder.name}.ItTest" for folder in folders]
    text = _run(root, "java", "-cp", jars, "org.junit.runner.JUnitCore", *classes)
    failed = set(re.findall(r"^\d+\) (\w+)\((\w+)\.ItTest\)", text, re.M))
    tests = re.findall(r"public void (\w+)", sources[0].read_text())
    return [
        {f"ItTest.{name}": (name, folder.name) not in failed for name in tests}
        for folder in folders
    ]


def _minitest(folder: Path) -> Outcome:
    text = _run(folder, "ruby", "-I.", "it_test.rb", "-v")
    return {name: mark == "." for name, mark in re.findall(r"^(\S+) = [\d.]+ s = (\S)", text, re.M)}


def _rspec(folder: Path) -> Outcome:
    text = _run(folder, "rspec", "-I.", "--format", "json", "it_spec.rb")
    found, _ = json.JSONDecoder().raw_decode(text[text.index('{"version') :])
    return {each["full_description"]: each["status"] == "passed" for each in found["examples"]}


def _phpunit(folder: Path) -> Outcome:
    _run(folder, "phpunit", "--log-junit", "out.xml", "ItTest.php")
    cases = ElementTree.parse(folder / "out.xml").getroot().iter("testcase")
    return {f"{case.get('class')}::{case.get('name')}": len(case) == 0 for case in cases}


def _native(compiler: str, name: str) -> Callable[[Path], Outcome]:
    def run(folder: Path) -> Outcome:
        built = _run(folder, compiler, "-w", "-I.", "-o", "it", name)
        assert (folder / "it").exists(), built
        tests = re.findall(r"(?:void |TEST\(\w+, )(test_\w+)", (folder / name).read_text())
        return {
            test: not subprocess.run([folder / "it", test], capture_output=True).returncode
            for test in tests
        }

    return run


def _each(run: Callable[[Path], Outcome]) -> Callable[[Sequence[Path]], list[Outcome]]:
    return lambda folders: [run(folder) for folder in folders]


@dataclass(frozen=True, slots=True)
class Ground:
    tools: Sequence[str]
    path: str
    text: str
    others: dict[str, str]
    run: Callable[[Sequence[Path]], list[Outcome]]
    num_tests: int
    num_unchanged: int = 0


JS_SOLUTION = """\
exports.double = (n) => {
  if (typeof n !== 'number') throw new TypeError('cannot double text');
  return 2 * n;
};
exports.slug = (title) => title.toLowerCase().split(' ');
exports.isEven = (n) => n % 2 === 0;
"""
JS_TOP = "const { double, slug, isEven } = require('./solution.js');\n"
RUBY_SOLUTION = """\
def double(number)
  raise ArgumentError, "cannot double text" unless number.is_a?(Numeric)
  2 * number
end

def slug(title) = title.downcase.split

def nothing = nil
"""
GROUNDS = {
    "node": Ground(
        ["node"],
        "it.test.js",
        "const test = require('node:test');\nconst assert = require('node:assert');\n"
        + JS_TOP
        + """\
test('doubles numbers', () => {
  assert.strictEqual(double(4), 8);
  const expected = 34;
  assert.equal(double(17), expected);
  if (double(50) !== 100) throw new Error('wrong');
});
test('cuts titles', () => {
  assert.deepStrictEqual(slug('Hello World'), ['hello', 'world']);
  assert.deepStrictEqual({ a: slug('Red'), b: 5 }, { a: ['red'], b: 5 });
});
test('rejects text', () => {
  assert.throws(() => double('x'), TypeError);
  assert.throws(() => double('x'), /cannot double/);
  assert.ok(isEven(2));
  assert(double(3) === 6);
});
const holds = (n, want) => assert.strictEqual(double(n), want);
test('answers', () => {
  switch (double(61)) { case 122: break; default: throw new Error('wrong'); }
  holds(72, 144);
});
""",
        {"solution.js": JS_SOLUTION},
        _each(_tap),
        4,
    ),
    "mocha": Ground(
        ["node", "npm"],
        "it.test.js",
        "const { expect, assert } = require('chai');\n"
        + JS_TOP
        + """\
describe('numbers', () => {
  it('doubles numbers', () => {
    expect(double(4)).to.equal(8);
    expect(double(21)).to.eql(42);
    assert.isTrue(isEven(2));
    assert.isFalse(isEven(3));
  });
  it('knows even ones', () => {
    expect(isEven(2)).to.be.true;
    expect(isEven(3)).to.be.false;
  });
});
describe('titles', function () {
  it('cuts titles', function () {
    expect(slug('Hello World')).to.deep.equal(['hello', 'world']);
    expect(slug('One')).to.have.lengthOf(1);
  });
  it('rejects text', function () {
    expect(() => double('x')).to.throw(TypeError, 'cannot double text');
  });
});
""",
        {"solution.js": JS_SOLUTION},
        _each(_mocha),
        4,
    ),
    "jest": Ground(
        ["node", "npm"],
        "it.test.js",
        JS_TOP
        + """\
describe('numbers', () => {
  it('doubles numbers', () => {
    expect(double(4)).toBe(8);
    expect(double(21)).not.toEqual(43);
    expect(double(0.1)).toBeCloseTo(0.2);
  });
  test('knows even ones', () => {
    expect(isEven(2)).toBeTruthy();
    expect(isEven(3)).toBeFalsy();
    expect(isEven(4)).toBe(true);
  });
  it('rejects text', () => {
    expect(() => double('x')).toThrow('cannot double');
    expect(() => double('y')).toThrow(TypeError);
  });
});
test('cuts titles', () => {
  expect(slug('Hello World')).toEqual(['hello', 'world']);
  expect(slug('A B C')).toHaveLength(3);
});
""",
        {"solution.js": JS_SOLUTION},
        _jest,
        4,
    ),
    "go": Ground(
        ["go"],
        "it_test.go",
        """\
package solution

import (
	"reflect"
	"testing"
)

func TestDouble(t *testing.T) {
	if got := Double(4); got != 8 {
		t.Errorf("Double(4) = %d, want 8", got)
	}
	want := 34
	if got := Double(17); got != want {
		t.Fatalf("got %d, want %d", got, want)
	}
}

func TestSlug(t *testing.T) {
	if !reflect.DeepEqual(Slug("Hello World"), []string{"hello", "world"}) {
		t.Fatal("wrong words")
	}
}

func TestTable(t *testing.T) {
	tests := []struct {
		name string
		in   int
		want int
	}{
		{"small", 1, 2},
		{name: "large", in: 300, want: 600},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if got := Double(tc.in); got != tc.want {
				t.Errorf("got %d, want %d", got, tc.want)
			}
		})
	}
}

func doubles(t *testing.T, n, want int) {
	if got := Double(n); got != want {
		t.Errorf("got %d, want %d", got, want)
	}
}

func TestBranches(t *testing.T) {
	switch got := Double(61); got {
	case 122:
	default:
		t.Errorf("got %d", got)
	}
	doubles(t, 72, 144)
}

func TestErrors(t *testing.T) {
	if err := Check(-1); err == nil {
		t.Error("no error")
	}
	if err := Check(1); err != nil {
		t.Error(err)
	}
}
""",
        {
            "solution.go": """\
package solution

import (
	"errors"
	"strings"
)

func Double(n int) int { return 2 * n }

func Slug(title string) []string { return strings.Fields(strings.ToLower(title)) }

func Check(n int) error {
	if n < 0 {
		return errors.New("negative")
	}
	return nil
}
"""
        },
        _each(_go),
        7,
    ),
    "rust": Ground(
        ["rustc"],
        "it.rs",
        """\
fn double(n: i32) -> i32 { if n < 0 { panic!("cannot double {}", n) } 2 * n }
fn slug(title: &str) -> Vec<String> { title.to_lowercase().split(' ').map(String::from).collect() }
fn parse(text: &str) -> Result<i32, String> { text.parse().map_err(|_| "no number".to_string()) }

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! holds {
        ($n:expr, $want:expr) => { assert_eq!(double($n), $want) };
    }

    #[test]
    fn answers() {
        match parse("61") { Ok(61) => {}, other => panic!("{:?}", other) }
        let Ok(83) = parse("83") else { panic!("no number") };
        holds!(72, 144);
    }

    #[test]
    fn doubles() {
        assert_eq!(double(4), 8);
        assert!(double(21) == 42, "a message");
        let expected = 34;
        assert_eq!(double(17), expected);
    }

    #[test]
    fn cuts() {
        assert_eq!(slug("Hello World"), vec!["hello", "world"]);
        assert_eq!(slug("Red")[0], "red".to_string());
    }

    #[test]
    fn parses() {
        assert!(parse("7").is_ok());
        assert!(parse("x").is_err());
        assert_eq!(parse("12"), Ok(12));
    }

    #[test]
    #[should_panic(expected = "cannot double")]
    fn panics() {
        double(-1);
    }
}
""",
        {},
        _each(_rust),
        5,
    ),
    "junit": Ground(
        ["javac", "java"],
        "ItTest.java",
        """\
import static org.junit.Assert.*;
import static org.hamcrest.CoreMatchers.*;
import org.junit.Test;

public class ItTest {
    @Test
    public void doubles() {
        assertEquals(8, Solution.twice(4));
        assertEquals("of a larger number", 42, Solution.twice(21));
        assertThat(Solution.twice(17), is(equalTo(34)));
        assertEquals(0.5, Solution.half(1), 0.001);
    }

    @Test
    public void cuts() {
        assertArrayEquals(new String[] {"hello", "world"}, Solution.slug("Hello World"));
        String expected = "red";
        assertEquals(expected, Solution.slug("Red")[0]);
    }

    @Test
    public void isEven() {
        assertTrue(Solution.isEven(2));
        assertFalse(Solution.isEven(3));
        assertNotNull(Solution.slug("x"));
    }

    @Test(expected = IllegalArgumentException.class)
    public void rejectsNegative() {
        Solution.twice(-1);
    }

    private static void check(int n, int want) { assertEquals(want, Solution.twice(n)); }

    @Test
    public void answers() {
        switch (Solution.twice(61)) { case 122: break; default: fail(); }
        check(72, 144);
    }

    @Test
    public void throwsIt() {
        assertThrows(IllegalArgumentException.class, () -> Solution.twice(-2));
    }
}
""",
        {
            "Solution.java": """\
class Solution {
    static int twice(int n) {
        if (n < 0) throw new IllegalArgumentException("negative");
        return 2 * n;
    }
    static double half(int n) { return n / 2.0; }
    static String[] slug(String title) { return title.toLowerCase().split(" "); }
    static boolean isEven(int n) { return n % 2 == 0; }
}
"""
        },
        _java,
        6,
    ),
    "minitest": Ground(
        ["ruby"],
        "it_test.rb",
        """\
require "minitest/autorun"
require "solution"

class ItTest < Minitest::Test
  def test_doubles
    assert_equal 8, double(4)
    expected = 34
    assert_equal expected, double(17)
    assert_in_delta 0.5, double(0.25)
  end

  def test_cuts
    assert_equal ["hello", "world"], slug("Hello World")
    assert_equal({ size: 3, name: :red }, { size: slug("a b c").size, name: :red })
  end

  def holds(number, want)
    assert_equal want, double(number)
  end

  def test_answers
    case double(61)
    when 122 then nil
    else flunk
    end
    holds 72, 144
  end

  def test_even
    assert double(2).even?
    refute 3.even?
    assert_nil nothing
  end

  def test_rejects
    error = assert_raises(ArgumentError) { double("x") }
    assert_equal "cannot double text", error.message
  end
end
""",
        {"solution.rb": RUBY_SOLUTION},
        _each(_minitest),
        5,
    ),
    "rspec": Ground(
        ["rspec"],
        "it_spec.rb",
        """\
require "solution"

describe "numbers" do
  it "doubles numbers" do
    expect(twice(4)).to eq 8
    expect(twice(21)).to eq(42)
    expect(twice(1)).not_to eq(3)
  end

  it "rejects text" do
    expect { twice("x") }.to raise_error(ArgumentError, "cannot double text")
  end

  context "with even ones" do
    it "knows them" do
      expect(twice(2).even?).to be_truthy
      expect(twice(2).even?).to be true
    end
  end
end

describe "titles" do
  it "cuts titles" do
    expect(slug("Hello World")).to eq(["hello", "world"])
    expect(slug("One two")).to include("one")
  end

  let(:doubled) { 34 }
  it "doubles a prime" do
    expect(twice(17)).to eq(doubled)
  end

  { 13 => 26, 15 => 30 }.each do |given, left|
    it "doubles #{given}" do
      expect(twice(given)).to eq(left)
    end
  end

  subject { twice(2) }
  it { is_expected.to eq 4 }
end
""",
        {"solution.rb": RUBY_SOLUTION.replace("double(", "twice(")},
        _each(_rspec),
        8,
        num_unchanged=1,
    ),
    "phpunit": Ground(
        ["php", "phpunit"],
        "ItTest.php",
        """\
<?php
require_once __DIR__ . '/solution.php';

use PHPUnit\\Framework\\TestCase;

class ItTest extends TestCase
{
    public function testDoubles(): void
    {
        $this->assertSame(8, twice(4));
        self::assertEquals(42, twice(21), 'of a larger number');
        $expected = 34;
        $this->assertSame($expected, twice(17));
    }

    public function testCuts(): void
    {
        $this->assertSame(['hello', 'world'], slug('Hello World'));
        $found = ['size' => count(slug('a b c')), 'name' => 'red'];
        $this->assertEquals(['size' => 3, "name" => "red"], $found);
        $this->assertCount(2, slug('One two'));
    }

    private function holds($n, $want): void
    {
        $this->assertSame($want, twice($n));
    }

    public function testAnswers(): void
    {
        switch (twice(61)) { case 122: break; default: $this->fail('wrong'); }
        $this->holds(72, 144);
    }

    /** @test */
    public function knowsEvenOnes(): void
    {
        $this->assertTrue(isEven(2));
        $this->assertFalse(isEven(3));
    }

    public function testRejects(): void
    {
        $this->expectException(InvalidArgumentException::class);
        $this->expectExceptionMessage('cannot double text');
        twice('x');
    }
}
""",
        {
            "solution.php": """\
<?php
function twice($n) {
    if (!is_int($n)) { throw new InvalidArgumentException('cannot double text'); }
    return 2 * $n;
}
function slug($title) { return explode(' ', strtolower($title)); }
function isEven($n) { return $n % 2 === 0; }
"""
        },
        _each(_phpunit),
        5,
    ),
    "c": Ground(
        ["gcc"],
        "it.c",
        """\
#include <assert.h>
#include <stdlib.h>
#include <string.h>

static int doubled(int n) { return 2 * n; }
static int is_even(int n) { return n % 2 == 0; }
static const char *color(int n) { return n ? "red" : "green"; }

static void test_doubles(void) {
    assert(doubled(4) == 8);
    assert(doubled(21) == 42 && is_even(2));
}

static void test_colors(void) {
    assert(strcmp(color(1), "red") == 0);
    if (strcmp(color(0), "green") != 0) {
        exit(1);
    }
}

static void test_ifs(void) {
    if (doubled(17) != 34) exit(1);
    assert(is_even(2));
}

#define HOLDS(a, b) do { if ((a) != (b)) exit(1); } while (0)

static void test_answers(void) {
    switch (doubled(61)) { case 122: break; default: exit(1); }
    HOLDS(doubled(72), 144);
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "test_answers")) test_answers();
    if (!strcmp(argv[1], "test_doubles")) test_doubles();
    if (!strcmp(argv[1], "test_colors")) test_colors();
    if (!strcmp(argv[1], "test_ifs")) test_ifs();
    return 0;
}
""",
        {},
        _each(_native("gcc", "it.c")),
        4,
    ),
    "cpp": Ground(
        ["g++"],
        "it.cpp",
        """\
#include "mini.h"

static int doubled(int n) { if (n < 0) throw std::invalid_argument("negative"); return 2 * n; }
static std::vector<int> both(int n) { return {n, doubled(n)}; }

TEST(Numbers, test_doubles) {
    EXPECT_EQ(8, doubled(4));
    ASSERT_EQ(doubled(21), 42);
    EXPECT_TRUE(doubled(1) == 2);
}

TEST(Numbers, test_both) {
    EXPECT_EQ(both(7), std::vector<int>({7, 14}));
    EXPECT_FALSE(both(1).empty());
    EXPECT_TRUE(both(1).size() == 2);
}

TEST(Numbers, test_throws) {
    EXPECT_THROW(doubled(-1), std::invalid_argument);
}
""",
        {
            "mini.h": """\
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>
static std::map<std::string, void (*)()> tests;
#define TEST(suite, name) \\
    static void name(); static int reg_##name = (tests[#name] = name, 0); static void name()
#define EXPECT_EQ(a, b) do { if (!((a) == (b))) exit(1); } while (0)
#define EXPECT_NE(a, b) do { if ((a) == (b)) exit(1); } while (0)
#define ASSERT_EQ EXPECT_EQ
#define ASSERT_NE EXPECT_NE
#define EXPECT_TRUE(a) do { if (!(a)) exit(1); } while (0)
#define EXPECT_FALSE(a) do { if (a) exit(1); } while (0)
#define EXPECT_THROW(a, e) \\
    do { try { a; exit(1); } catch (const e &) {} catch (...) { exit(1); } } while (0)
int main(int argc, char **argv) { tests.at(argv[1])(); return 0; }
"""
        },
        _each(_native("g++", "it.cpp")),
        3,
    ),
}


@pytest.mark.parametrize("name", GROUNDS)
def test_each_swap_makes_its_test_fail_and_no_other(name: str, tmp_path: Path) -> None:
    ground = GROUNDS[name]
    if missing := [tool for tool in ground.tools if shutil.which(tool) is None]:
        pytest.skip(f"no {missing[0]} on this machine")
    if name == "junit" and not all(jar.exists() for jar in JARS):
        pytest.skip("no JUnit 4 on this machine")
    text = ground.text.encode()
    found = candidates(ground.path, text, random.Random(0))
    folders = []
    for at, copy in enumerate([text, *(swapped(text, [each]) for each in found)]):
        folders.append(tmp_path / f"copy{at}")
        folders[-1].mkdir()
        for path, other in ground.others.items():
            (folders[-1] / path).write_text(other)
        (folders[-1] / ground.path).write_bytes(copy)
    honest, *results = ground.run(folders)
    assert len(honest) == ground.num_tests and all(honest.values()), honest
    for value in ("122", "61) =>", "83) =", "144"):
        # A claim in a branch, and one in a helper of the file.
        if (start := ground.text.find(value)) >= 0:
            at = len(ground.text[:start].encode())
            assert any(each.start <= at < each.end for each in found), value
    strong = [each for each in found if each.kind is not Kind.OPERATOR and each.test]
    missing = [test for test in honest if not any(belongs(each, test) for each in strong)]
    # An RSpec example without a title is named by its values, so nothing in it may change.
    assert len(missing) == ground.num_unchanged, missing
    problems: list[object] = []
    for each, result in zip(found, results, strict=True):
        failed = {test for test, passed in result.items() if not passed}
        # A Go test that ends early has no later subtests.
        is_named_alike = result.keys() == honest.keys() or (name == "go" and failed)
        if not is_named_alike or not failed or not all(belongs(each, test) for test in failed):
            problems.append((each, result))
    assert not problems, "\n".join(map(str, problems))
