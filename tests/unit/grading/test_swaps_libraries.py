"""Expected values are found in the forms of assertion libraries that no test here can run.

In each text «» surround the expected values. A swap changes these alone, every one of them has
a swap, and the swapped text still parses. Inputs are numbers from 100 on, which no swap may touch.
"""

from __future__ import annotations

import random
import re

import pytest
import tree_sitter

from swerl.grading import languages, swaps
from swerl.grading.swaps import candidates, swapped

pytestmark = pytest.mark.nightly

TEXTS = {
    "testify/sum_test.go": """
package sum

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/stretchr/testify/suite"
)

func TestTwice(t *testing.T) {
	assert.Equal(t, «34», Twice(117))
	require.Equal(t, «"red-sky"», Slug(103), "of a slug")
	assert.Equalf(t, «52», Twice(126), "of %d", 126)
	assert.EqualValues(t, «71», Twice(135))
	assert.ElementsMatch(t, []int{«7», «19»}, Both(107))
	require.Len(t, Both(108), «2»)
	assert.InDelta(t, «8.25», Half(116), 0.01)
	require.EqualError(t, Fail(100), «"no such file"»)
	require.ErrorContains(t, Fail(104), «"such folder"»)
	assert.True(t, IsEven(104))
}

func (s *SumSuite) TestThrice() {
	s.Equal(«66», Thrice(122))
	s.Require().Equal(«93», Thrice(131))
}
""",
    "assertj/SumTest.java": """
class SumTest {
    @Test
    void twice() {
        assertThat(Sum.twice(117)).isEqualTo(«34»);
        assertThat(Sum.slug(103)).as("a slug").isEqualTo(«"red-sky"»).startsWith(«"red-"»);
        assertThat(Sum.both(107)).containsExactly(«7», «19»).hasSize(«2»);
        assertThat(Sum.half(116)).isCloseTo(«8.25», within(0.01));
        assertThatThrownBy(() -> Sum.fail(100)).isInstanceOf(«IllegalStateException.class»)
            .hasMessageContaining(«"such file"»);
        assertThat(Sum.isEven(104)).isTrue();
    }
}
""",
    "junit5/SumTest.java": """
class SumTest {
    @Test
    void twice() {
        assertEquals(«34», Sum.twice(117));
        assertEquals(«"red-sky"», Sum.slug(103), "of a slug");
        assertArrayEquals(new int[] {«7», «19»}, Sum.both(107));
        assertThrows(«IllegalStateException.class», () -> Sum.fail(100));
        assertAll(() -> assertEquals(«52», Sum.twice(126)), () -> assertTrue(Sum.isEven(104)));
    }

    @ParameterizedTest
    @DisplayName("adds three times")
    void thrice() {
        Assertions.assertEquals(«66», Sum.thrice(122));
    }
}
""",
    "gtest/sum_test.cpp": """
TEST(Sum, Twice) {
  EXPECT_EQ(twice(117), «34»);
  ASSERT_EQ(«52», twice(126)) << "of a number";
  EXPECT_STREQ(slug(103), «"red-sky"»);
  EXPECT_NEAR(half(116), «8.25», 0.01);
  EXPECT_THROW(fail(100), «std::out_of_range»);
  EXPECT_THAT(both(107), ElementsAre(«7», «19»));
}
TEST_F(SumFixture, Thrice) { EXPECT_EQ(«66», thrice(122)); }
TEST_P(SumCases, Fourth) { EXPECT_EQ(«71», fourth(135)); }
""",
    "catch2/sum_test.cpp": """
TEST_CASE("twice", "[sum]") {
  REQUIRE(twice(117) == «34»);
  CHECK(slug(103) == «"red-sky"»);
  SECTION("of a larger number") { CHECK(twice(126) == «52»); }
  REQUIRE_THROWS_AS(fail(100), «std::out_of_range»);
}
""",
    "jest/sum.test.ts": """
import { twice, slug, both, fail } from './sum';

describe('sum', () => {
  it.each<[number]>([[1]])('twice', (unused: number): void => {
    expect(twice(117 as number)).toBe(«34»);
    expect(slug(103)).toEqual<string>(«'red-sky'»);
    expect(both(107)).toStrictEqual([«7», «19»] as const);
  });
  test('fails', async (): Promise<void> => {
    await expect(fail(100)).rejects.toThrow(«'no such file'»);
    const result: number = await twice(126);
    expect(result).toBe(«52»);
    expect(both(108)!).toHaveLength(«2»);
  });
});
""",
    "vitest/sum.spec.tsx": """
test('shows', () => {
  render(<Sum of={117} />);
  expect(screen.getByRole('status')).toHaveTextContent(«'thirty-four'»);
  expect(twice(126)).toBe(«52»);
});
""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_swap_changes_an_expected_value_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swaps, "_MAX_PER_TEST", 100)
    marked, spans = TEXTS[name], list[tuple[int, int]]()
    text = ""
    for at, piece in enumerate(re.split("[«»]", marked)):
        start = len(text.encode())
        text += piece
        if at % 2:
            spans.append((start, len(text.encode())))
    path = name.partition("/")[2]
    language = languages.language_of(path)
    parser = tree_sitter.Parser(languages.grammar(language))
    # A macro with a block is no C++, so the grammar reads around it.
    is_odd = parser.parse(text.encode()).root_node.has_error
    assert is_odd == name.startswith("catch2")
    found = candidates(path, text.encode(), random.Random(0))
    reached = set[tuple[int, int]]()
    for each in found:
        if each.kind in ("operator", "negation"):
            continue
        own = [span for span in spans if each.start < span[1] and span[0] < each.end]
        assert own, each
        assert each.test, each
        reached |= set(own)
        new = swapped(text.encode(), [each])
        assert is_odd or not parser.parse(new).root_node.has_error, each
        assert re.findall(rb"\b1\d\d\b", new) == re.findall(rb"\b1\d\d\b", text.encode()), each
    missing = [text.encode()[a:b].decode() for a, b in spans if (a, b) not in reached]
    assert not missing, missing
