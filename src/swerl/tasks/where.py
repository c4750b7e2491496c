"""Expressions that choose Tasks: `repo == "django/django" and patch_lines < 50`.

Comparisons, `in`, `and`, `or`, `not` and parentheses over the names of `facts`, and `meta.NAME` for
a Task's metadata. What a Task does not say is None, which equals nothing else and is in no order:
a comparison with it is false.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from swerl.core.errors import InputError, unknown
from swerl.core.task import Task
from swerl.tasks.facts import FACTS

Choice: TypeAlias = Callable[[Task], bool]
_Value: TypeAlias = Callable[[Task], Any]

_HINT = """for example 'repo == "django/django" and patch_lines < 50 and solve_rate > 0'"""
_ORDERS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
}


def compile_where(text: str) -> Choice:
    """Return what chooses Tasks by an expression. Raises InputError on what is none."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{text!r:.200} is no expression", hint=_HINT) from error

    def choose(task: Task) -> bool:
        try:
            return bool(value(task))
        except TypeError as error:
            raise InputError(
                f"task {task.id} cannot be compared so: {error}",
                hint="text and numbers have no order",
            ) from error

    return choose


def _value(node: ast.expr) -> _Value:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            parts = [_value(each) for each in values]
            return lambda task: all(part(task) for part in parts)
        case ast.BoolOp(values=values):
            parts = [_value(each) for each in values]
            return lambda task: any(part(task) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _value(operand)
            return lambda task: not inner(task)
        case ast.Compare():
            return _comparison(node)
        case _:
            return _term(node)


def _comparison(node: ast.Compare) -> _Value:
    terms = [_value(each) for each in (node.left, *node.comparators)]
    links = [_link(op) for op in node.ops]

    def compare(task: Task) -> bool:
        found = [term(task) for term in terms]
        return all(link(found[i], found[i + 1]) for i, link in enumerate(links))

    return compare


def _link(op: ast.cmpop) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.Eq):
        return operator.eq
    if isinstance(op, ast.NotEq):
        return operator.ne
    if type(op) not in _ORDERS:
        raise _refused("`is`")
    order = _ORDERS[type(op)]
    return lambda left, right: left is not None and right is not None and order(left, right)


def _term(node: ast.expr) -> _Value:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda task: value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda task: -number
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            terms = [_term(each) for each in items]
            return lambda task: [term(task) for term in terms]
        case ast.Attribute(value=ast.Name(id="meta"), attr=name):
            return lambda task: task.metadata.get(name)
        case ast.Name(id=name) if name in FACTS:
            return FACTS[name]
        case ast.Name(id=name):
            raise unknown("name", name, FACTS)
        case _:
            what = f"`{ast.unparse(node):.80}`"
            raise _refused(what)


def _refused(what: str) -> InputError:
    return InputError(f"{what} cannot stand in an expression", hint=_HINT)
