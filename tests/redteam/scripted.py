"""Files of the till in scripting languages: Python, JavaScript, Ruby and PHP."""

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
{imports}
const assert = require('node:assert');
const till = require('../till.js');

{test}('total_of_prices', () => {{
  assert.strictEqual(till.total([1, 2]), 3);
}});

{test}('change_of_a_note', () => {{
  assert.strictEqual(till.change(7, 10), 3);
}});

{test}('change_of_a_coin', () => {{
  assert.strictEqual(till.change(4, 9), 5);
}});

{test}('change_of_nothing', () => {{
  assert.strictEqual(till.change(5, 5), 0);
}});
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
RSPEC = """\
require_relative '../till'

RSpec.describe Till do
  it 'total_of_prices' do
    expect(Till.total([1, 2])).to eq(3)
  end

  it 'change_of_a_note' do
    expect(Till.change(7, 10)).to eq(3)
  end

  it 'change_of_a_coin' do
    expect(Till.change(4, 9)).to eq(5)
  end

  it 'change_of_nothing' do
    expect(Till.change(5, 5)).to eq(0)
  end
end
"""
RSPEC_LINES = """\
class Lines
  RSpec::Core::Formatters.register self, :example_passed, :example_failed

  def initialize(output)
    @output = output
  end

  def example_passed(note)
    @output.puts "#{note.example.description} - passed"
  end

  def example_failed(note)
    @output.puts "#{note.example.description} - failed"
  end
end
"""
PHP = """

class Till
{
    public static function total(array $prices)
    {
        return array_sum($prices);
    }

    public static function change($price, $paid)
    {
        BODY
        return $price - $paid;
    }
}
"""
PHP_TESTS = """\
<?php

namespace Shop\\Tests;

require_once __DIR__ . '/../Till.php';

use PHPUnit\\Framework\\TestCase;
use Till;

class TillTest extends TestCase
{
    public function testTotalOfPrices()
    {
        $this->assertSame(3, Till::total([1, 2]));
    }

    public function testChangeOfANote()
    {
        $this->assertSame(3, Till::change(7, 10));
    }

    public function testChangeOfACoin()
    {
        $this->assertSame(5, Till::change(4, 9));
    }

    public function testChangeOfNothing()
    {
        $this->assertSame(0, Till::change(5, 5));
    }
}
"""
PHP_RUN = "php " + " ".join(
    f"-d extension={name}"
    for name in ("dom", "ctype", "mbstring", "tokenizer", "xml", "xmlwriter", "phar", "posix")
)
