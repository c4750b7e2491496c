"""Logs in the layouts of test runners that are not installed: other languages', and old ones."""

from __future__ import annotations

GO = """\
=== RUN   TestA
=== RUN   TestA/sub_one
--- FAIL: TestA (0.02s)
    --- PASS: TestA/sub_one (0.00s)
    --- FAIL: TestA/sub_(two) (0.01s)
        a_test.go:9: got (x)
--- SKIP: TestB (0.00s)
--- PASS: TestC (1.20s)
    --- PASS: TestC/with space (0.00s)
=== NAME  TestD
    d_test.go:4: --- PASS: TestD (0.00s)
--- FAIL: TestD (0.00s)
panic: boom
FAIL\tacme/sums\t1.2s
ok  \tacme/other\t0.1s
FAIL
"""
CARGO = """\
   Compiling sums v0.1.0
     Running unittests src/lib.rs (target/debug/deps/sums-1)
running 5 tests
test tests::adds ... ok
test tests::fails ... FAILED
test tests::slow ... ignored
test tests::later ... ignored, needs a network
test tests::panics - should panic ... ok
test src/lib.rs - add (line 3) ... ok
test   spaced   ...   ok
test result: FAILED. 2 passed; 1 failed; 2 ignored
"""
MAVEN = """\
++ mvnd test -B -T 1C -pl core -Dtest=acme.SumsTest#adds
[INFO] Tests run: 1, Failures: 0
[INFO] BUILD SUCCESS
++ mvnd test -B -pl core -Dtest=acme.SumsTest#fails
[ERROR] Failures: SumsTest.fails:9
[INFO] BUILD FAILURE
++ mvnd test -Dtest=acme.SumsTest#never -B
[INFO] Scanning for projects
"""
MAVEN_LATE = """\
++ mvnd test -Dtest=acme.A#one
++ mvnd test -Dtest=acme.A#two
[INFO] BUILD SUCCESS
[INFO] BUILD FAILURE
"""
MAVEN_FORGED = """\
++ mvnd test -Dtest=acme.A#one
[INFO] BUILD SUCCESS
[INFO] BUILD FAILURE
"""
MAVEN_BUILT = """\
[INFO] BUILD SUCCESS
++ mvnd test -Dtest=acme.A#one
[INFO] BUILD FAILURE
++ mvnd test -Dtest=acme.A#two
"""
GRADLE = """\
> Task :core:test
acme.SumsTest > adds PASSED
acme.SumsTest > fails FAILED
    java.lang.AssertionError at SumsTest.java:9
acme.SumsTest > late
WARNING: an illegal access
PASSED
acme.SumsTest > named(int) [1] PASSED
acme.SumsTest > skipped SKIPPED
acme.SumsTest > lost
> Task :core:test FAILED
FAILED
BUILD FAILED
"""
ANT = """\
    [junit] Testsuite: acme.Sums
    [junit] [PASS] adds
    [junit]  [FAIL] fails
[junit] [ERR] breaks (acme)
    [junit] [SKIP] later
"""
REDIS = """\
[ok]: SET and GET (2 ms)
[ok]: Plain name
[err]: Big payload in tests/unit/type/string.tcl
Expected 'a' to be equal to 'b'
[skip]: Needs a cluster
[ignore]: Not here: external
[ok]: With (brackets) inside (15 ms)
[exception]: no
"""
AUTOMAKE = """\
PASS: tests/jqtest
FAIL: tests/shtest
  PASS: tests/with space and: colon
XFAIL: tests/other
# TOTAL: 3
"""
DOCTEST = """\
[doctest] noise
<?xml version="1.0"?>
<doctest binary="unit">
<TestSuite>
<TestCase name="value access">
<SubCase name="object"><Expression success="true"/>
<SubCase name="inner"><Expression success="false"/></SubCase></SubCase>
<SubCase name="array"><Expression success="true"/><Expression success="true"/></SubCase>
<SubCase name="empty"/>
</TestCase>
</TestSuite>
</doctest>
"""
DOCTEST_TWICE = DOCTEST.replace("false", "true") + DOCTEST
DOCTEST_CUT = "<doctest><TestCase name='a'></doctest>\n" + DOCTEST
MICROPYTHON = """\
pass  basics/a.py
FAIL  basics/b.py
skip  basics/c.py
3 tests performed
pass  extmod/d e.py
passing
"""
GOOGLETEST = """\
[==========] Running 3 tests
[ RUN      ] Sums.Adds
[       OK ] Sums.Adds (0 ms)
[ RUN      ] Sums.Fails
a.cc:9: Failure
[  FAILED  ] Sums.Fails (1 ms)
1: [       OK ] Types/0.Works, where T = int (0 ms)
[  FAILED  ] Sums.Fails
 1 FAILED TEST
"""
PHPUNIT = """\
PHPUnit 9.6

Is (Tests\\\\Carbon\\\\Is)
 \u2714 Is weekday true
 \u2718 Is weekend
   \u2502 Failed asserting that false is true.
 \u21a9 Is later
Round (Tests\\\\Round)
 \u2714 Is weekday true with data set "a (b)"
 \u2714 Is
Time: 00:00.1 (x)
"""
PHPUNIT_NO_SUITE = " \u2714 Is\n"
MINITEST = """\
TestSite#test_0001_reads = 0.00 s = .
a site should read files. = 0.01 s = .
a site should write. = 1.20 s = F
a site with e.g. dots should break. = 0.00 s = E
a site should skip. = 0.00 s = S
"""
CUCUMBER = """\
Feature: x
Rendering a page ....
Rendering a file ..F
 A plain line. ....
...
"""
RUBY_UNIT = """\
TestSums:
  test_adds:\t\t\t.: (0.001)
  test: fails with message:\tF
  test_breaks: E
  test_later: O
  test_pending: P
  test_other: Eager
Finished in 0.1 seconds.
"""
RSPEC = """\
reads files - ./spec/a_spec.rb[1:1] - passed
writes - files - ./spec/a_spec.rb[1:2] - failed
waits - ./spec/a_spec.rb[1:3] - pending
"""
JEST = """\
PASS packages/a.test.js
  sums
    \u2713 adds (3 ms)
    \u2715 fails (12ms)
    \u25cb skipped later
    \u2713 handles (brackets)
    \u2713   spaced (1 ms)
    \u270e todo more
Tests: 1 failed, 2 passed
"""
JEST_TWICE = "  \u2713 works\n  \u2715 works\n  \u2713 works\n"
JEST_JSON = "[PASSED] sums adds\n[FAILED] sums fails [x]\n[PENDING] later\nnoise [PASSED] x\n"
VITEST = """\
 \u2713 a.spec.ts > sums > adds 3ms
 \u00d7 a.spec.ts > sums > fails
   \u2192 expected 1 to be 2
 \u2193 a.spec.ts > later [skipped]
 \u2713 a.spec.ts > counts 5
 \u2713 a.spec.ts (4 tests) 12ms
"""
KARMA = """\
START:
  \u2714 early
Starting browser Chrome Headless
  Sums
    \u2714 adds
    \u2716 fails
    nested
      \u2714 adds
  Other
    \u2714 adds
    deep
      deeper
        \u2714 reaches
 x
  last
    \u2714 ends

Finished in 0.1 secs
SUMMARY:
\u2714 5 tests completed
"""
TAP = """\
1..4
ok 1 sums adds
not ok 2 sums fails
  Error: x
ok 3 sums later # SKIP -
    ok 1 nested
not ok 4 sums todo # TODO
# tests 4
"""

OLD_PYTEST = """\
a.py::good PASSED
a.py::t[s k] SKIPPED
a.py::t[s f] FAILED
a.py::t[q k] SKIPPED
a.py::t[q p] PASSED
a.py::t[x p] PASSED
a.py::t[x x] XFAIL
"""

LOGS: dict[str, tuple[str, ...]] = {
    "parse_log_gotest": (GO,),
    "parse_log_cargo": (CARGO,),
    "parse_log_maven": (MAVEN, MAVEN_LATE, MAVEN_FORGED, MAVEN_BUILT),
    "parse_log_gradle_custom": (GRADLE,),
    "parse_log_ant": (ANT,),
    "parse_log_redis": (REDIS,),
    "parse_log_jq": (AUTOMAKE,),
    "parse_log_doctest": (DOCTEST, DOCTEST_TWICE, DOCTEST_CUT),
    "parse_log_micropython_test": (MICROPYTHON,),
    "parse_log_googletest": (GOOGLETEST,),
    "parse_log_phpunit": (PHPUNIT, PHPUNIT_NO_SUITE),
    "parse_log_minitest": (MINITEST,),
    "parse_log_cucumber": (CUCUMBER,),
    "parse_log_ruby_unit": (RUBY_UNIT,),
    "parse_log_rspec_transformed_json": (RSPEC,),
    "parse_log_jest": (JEST, JEST_TWICE),
    "parse_log_jest_json": (JEST_JSON,),
    "parse_log_vitest": (VITEST,),
    "parse_log_karma": (KARMA,),
    "parse_log_tap": (TAP,),
    "parse_log_pytest_v2": (OLD_PYTEST,),
}
"""Logs by the package's name of their parser."""
