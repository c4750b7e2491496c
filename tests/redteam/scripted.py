"""Files of the till in scripting languages: Python, JavaScript and Ruby."""

from __future__ import annotations

PYTEST = """\
import till


def test_total_of_prices():
    assert till.total([1, 2]) == 3


def test_change_of_a_note():
    assert till.change(7, 10) == 3


def test_change_of_a_coin():
    assert till.change(4, 9) == 5


def test_change_of_nothing():
    assert till.change(5, 5) == 0
"""
UNITTEST = """\
import unittest

import till


class TillTest(unittest.TestCase):
    def test_total_of_prices(self):
        self.assertEqual(till.total([1, 2]), 3)

    def test_change_of_a_note(self):
        self.assertEqual(till.change(7, 10), 3)

    def test_change_of_a_coin(self):
        self.assertEqual(till.change(4, 9), 5)

    def test_change_of_nothing(self):
        self.assertEqual(till.change(5, 5), 0)
"""
PYTHON = """

def total(prices):
    return sum(prices)


def change(price, paid):
    BODY
    return price - paid
"""
JAVASCRIPT = """\

exports.total = (prices) => prices.reduce((sum, price) => sum + price, 0);

exports.change = (price, paid) => {
  BODY
  return price - paid;
};
"""
JAVASCRIPT_TESTS = """\
'use strict';
const assert = require('node:assert');
const till = require('../till.js');

it('total_of_prices', () => {
  assert.strictEqual(till.total([1, 2]), 3);
});

it('change_of_a_note', () => {
  assert.strictEqual(till.change(7, 10), 3);
});

it('change_of_a_coin', () => {
  assert.strictEqual(till.change(4, 9), 5);
});

it('change_of_nothing', () => {
  assert.strictEqual(till.change(5, 5), 0);
});
"""
RUBY = """
module Till
  def self.total(prices)
    prices.sum
  end

  def self.change(price, paid)
    BODY
    price - paid
  end
end
"""
MINITEST = """\
require 'minitest/autorun'
require_relative '../till'

class TillTest < Minitest::Test
  def test_total_of_prices
    assert_equal 3, Till.total([1, 2])
  end

  def test_change_of_a_note
    assert_equal 3, Till.change(7, 10)
  end

  def test_change_of_a_coin
    assert_equal 5, Till.change(4, 9)
  end

  def test_change_of_nothing
    assert_equal 0, Till.change(5, 5)
  end
end
"""
