"""Files of the till in compiled languages: Go, Rust and C."""

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
CARGO = '[package]\nname = "till"\nversion = "1.0.0"\nedition = "2021"\n'
