"""Files of the till in compiled languages: Go, Rust, Java, C and C++."""

from __future__ import annotations

GO = """

func Total(prices []int) int {
	sum := 0
	for _, price := range prices {
		sum += price
	}
	return sum
}

func Change(price, paid int) int {
	BODY
	return price - paid
}
"""
GO_TESTS = """\
package till

import "testing"

func TestTotalOfPrices(t *testing.T) {
	if got := Total([]int{1, 2}); got != 3 {
		t.Errorf("got %d", got)
	}
}

func TestChangeOfANote(t *testing.T) {
	if got := Change(7, 10); got != 3 {
		t.Errorf("got %d", got)
	}
}

func TestChangeOfACoin(t *testing.T) {
	if got := Change(4, 9); got != 5 {
		t.Errorf("got %d", got)
	}
}

func TestChangeOfNothing(t *testing.T) {
	if got := Change(5, 5); got != 0 {
		t.Errorf("got %d", got)
	}
}
"""
RUST = """
pub fn total(prices: &[i64]) -> i64 {
    prices.iter().sum()
}

pub fn change(price: i64, paid: i64) -> i64 {
    BODY
    price - paid
}
"""
RUST_TESTS = """\
use till::*;

#[test]
fn total_of_prices() {
    assert_eq!(total(&[1, 2]), 3);
}

#[test]
fn change_of_a_note() {
    assert_eq!(change(7, 10), 3);
}

#[test]
fn change_of_a_coin() {
    assert_eq!(change(4, 9), 5);
}

#[test]
fn change_of_nothing() {
    assert_eq!(change(5, 5), 0);
}
"""
JAVA = """
    public static int total(int... prices) {
        return java.util.Arrays.stream(prices).sum();
    }

    public static int change(int price, int paid) {
        BODY
        return price - paid;
    }
}
"""
JAVA_TESTS = """\
import static org.junit.Assert.assertEquals;

import org.junit.Test;

public class TillTest {
    @Test
    public void total_of_prices() {
        assertEquals(3, Till.total(1, 2));
    }

    @Test
    public void change_of_a_note() {
        assertEquals(3, Till.change(7, 10));
    }

    @Test
    public void change_of_a_coin() {
        assertEquals(5, Till.change(4, 9));
    }

    @Test
    public void change_of_nothing() {
        assertEquals(0, Till.change(5, 5));
    }
}
"""
JAVA_LINES = """\
import java.util.HashSet;
import java.util.Set;
import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

public class Lines extends RunListener {
    private final Set<Description> failed = new HashSet<>();

    @Override
    public void testFailure(Failure failure) {
        failed.add(failure.getDescription());
    }

    @Override
    public void testFinished(Description test) {
        String word = failed.contains(test) ? "FAILED" : "PASSED";
        System.out.println(test.getClassName() + " > " + test.getMethodName() + " " + word);
    }

    public static void main(String[] arguments) throws Exception {
        JUnitCore core = new JUnitCore();
        core.addListener(new Lines());
        boolean good = core.run(Class.forName(arguments[0])).wasSuccessful();
        System.exit(good ? 0 : 1);
    }
}
"""
JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest-all.jar"
JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto -Xmx128m"
JAVA_RUN = (
    "mkdir -p out && "
    f"javac -J-XX:TieredStopAtLevel=1 -J-XX:+UseSerialGC -cp {JARS} -d out *.java tests/*.java "
    f"&& java {JVM} -cp out:{JARS} Lines TillTest"
)
JAVA_SETUP = """\
home=$(dirname "$(dirname "$(readlink -f "$(command -v java)")")")
file=$(readlink -m "$home/conf/security/java.security")
test -e "$file" || { mkdir -p "$(dirname "$file")" && echo security.provider.1=SUN >"$file"; }
"""
"""A sandbox may show a machine's programs without their settings, and javac needs this one."""
C = """
int total(const int *prices, int count)
{
    int sum = 0;
    for (int i = 0; i < count; i++)
        sum += prices[i];
    return sum;
}

int change(int price, int paid)
{
    BODY
    return price - paid;
}
"""
C_HEADER = """\
int total(const int *prices, int count);
int change(int price, int paid);
"""
C_TESTS = """\
#include <assert.h>
#include <stdio.h>

#include "../till.h"

static void total_of_prices(void)
{
    int prices[] = {1, 2};
    assert(total(prices, 2) == 3);
}

static void change_of_a_note(void)
{
    assert(change(7, 10) == 3);
}

static void change_of_a_coin(void)
{
    assert(change(4, 9) == 5);
}

static void change_of_nothing(void)
{
    assert(change(5, 5) == 0);
}

int main(void)
{
    setbuf(stdout, NULL);
    total_of_prices();
    puts("ok 1 total_of_prices");
    change_of_nothing();
    puts("ok 2 change_of_nothing");
    change_of_a_note();
    puts("ok 3 change_of_a_note");
    change_of_a_coin();
    puts("ok 4 change_of_a_coin");
    return 0;
}
"""
CPP_TESTS = """\
#include "check.hpp"
#include "../till.hpp"

TEST(Till, total_of_prices)
{
    EXPECT_EQ(total({1, 2}), 3);
}

TEST(Till, change_of_a_note)
{
    EXPECT_EQ(change(7, 10), 3);
}

TEST(Till, change_of_a_coin)
{
    EXPECT_EQ(change(4, 9), 5);
}

TEST(Till, change_of_nothing)
{
    EXPECT_EQ(change(5, 5), 0);
}

int main()
{
    return run_all();
}
"""
CPP_CHECK = """\
#pragma once
#include <cstdio>
#include <vector>

struct Case { const char *name; void (*body)(); };
inline std::vector<Case> &cases() { static std::vector<Case> all; return all; }
inline int &failures() { static int count = 0; return count; }
struct Enter { Enter(const char *name, void (*body)()) { cases().push_back({name, body}); } };

#define TEST(suite, test) \\
    static void suite##_##test(); \\
    static Enter enter_##suite##_##test(#suite "." #test, suite##_##test); \\
    static void suite##_##test()
#define EXPECT_EQ(got, wanted) \\
    do { if (!((got) == (wanted))) failures()++; } while (0)

inline int run_all()
{
    int bad = 0;
    for (const Case &each : cases()) {
        failures() = 0;
        each.body();
        bad += failures() > 0;
        std::printf("[ %s ] %s (0 ms)\\n", failures() ? " FAILED " : "      OK", each.name);
    }
    return bad > 0;
}
"""
CPP = """
int total(const std::vector<int> &prices)
{
    int sum = 0;
    for (int price : prices)
        sum += price;
    return sum;
}

int change(int price, int paid)
{
    BODY
    return price - paid;
}
"""
CPP_HEADER = """\
#pragma once
#include <vector>
int total(const std::vector<int> &prices);
int change(int price, int paid);
"""
CARGO = '[package]\nname = "till"\nversion = "1.0.0"\nedition = "2021"\n'
