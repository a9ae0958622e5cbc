"""Translation of integer Python to z3 terms, from the source of functions or their parts, and claims that z3 decides.

The translator supports:

- `if`, `return`, `assert`, and assignments to names;
- min, max, divmod, range, round, math.ceil and `where`;
- comparisons, and/or/not, + - * // %, and bit operations on words;
- lists of repeated values.

It raises `NotUnderstood` for anything else.
"""

import ast
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import z3

from conformance.paths import ROOT

# A z3 term, a Python int or bool, or a tuple of terms.
Term: TypeAlias = Any


class NotUnderstood(TypeError):
    """Error for source outside the supported subset, or for a given expression that does not occur in the source."""


@dataclass(frozen=True)
class Run:
    """List of `count` entries with the same `value`."""

    value: Term
    count: Term


@dataclass(frozen=True)
class Code:
    """Sources of the project. `edits` maps `file:function` to a replacement of text, which a proof must detect."""

    edits: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def function(self, place: str) -> tuple[ast.FunctionDef, dict[str, Term]]:
        """Return the function (or Class.method) at `package/module.py:name`, and the integer globals of its module."""
        file, _, name = place.partition(":")
        scope = _statements(file)
        constants = _integer_constants(scope)
        for part in name.split("."):
            node = next((n for n in scope if getattr(n, "name", None) == part), None)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                raise NotUnderstood(f"{file} has no {name}")
            scope = node.body
        if not isinstance(node, ast.FunctionDef):
            raise NotUnderstood(f"{place} is no function")
        return self._edited(place, node), constants

    def _edited(self, place: str, node: ast.FunctionDef) -> ast.FunctionDef:
        if place not in self.edits:
            return node
        old, new = self.edits[place]
        body = node.body[1:] if ast.get_docstring(node) else node.body
        text = ast.unparse(ast.FunctionDef(**{**vars(node), "body": body}))
        if text.count(old) != 1:
            raise NotUnderstood(f"{place}: {old!r} does not stand there once")
        edited = ast.parse(text.replace(old, new)).body[0]
        assert isinstance(edited, ast.FunctionDef)
        return edited

    def returned(self, place: str, given: Mapping[str, Term] | None = None, **arguments: Term) -> Term:
        """Return the result of the function for these arguments."""
        return self.reading(place, given, **arguments).result

    def reading(self, place: str, given: Mapping[str, Term] | None = None, **arguments: Term) -> "Reading":
        """Execute the function for these arguments. `given` contains values of expressions outside the subset."""
        node, constants = self.function(place)
        reading = Reading({**constants, **arguments}, dict(given or {}))
        reading.result = reading.block(node.body, reading.names)
        reading.finish(place)
        return reading

    def part(
        self, place: str, *heads: str, given: Mapping[str, Term] | None = None, terms: list[Term] | None = None,
        **names: Term,
    ) -> Term:
        """Return the value of the last of `heads`, each like "c =", "start +=", "for a" or "store X", in this order.

        Each integer that arithmetic produces is appended to `terms`.
        """
        node, constants = self.function(place)
        reading = Reading({**constants, **names}, dict(given or {}))
        for head in heads:
            value = reading.value(_only_part(node, head, place), reading.names)
            if head.endswith(" ="):
                reading.names.update(_bound(head[:-2].split(", "), value))
        reading.finish(place)
        if terms is not None:
            terms += reading.terms
        return value


@cache
def _statements(file: str) -> Sequence[ast.stmt]:
    return ast.parse((ROOT / file).read_text(encoding="utf-8")).body


def _integer_constants(body: Sequence[ast.stmt]) -> dict[str, Term]:
    """Return the integer constants at the top of a module, such as NAME = 5 and NAME: T = constexpr(5)."""
    result = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, int):
                result[target.id] = value.value
    return result


def _only_part(node: ast.FunctionDef, head: str, place: str) -> ast.expr:
    result = [value for inner in ast.walk(node) for name, value in _parts(inner) if name == head]
    if len(result) != 1:
        raise NotUnderstood(f"{place} has {len(result)} parts {head!r}, not one")
    return result[0]


def _parts(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[target], value=value):
            yield f"{ast.unparse(target).strip('()')} =", value
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            yield f"{ast.unparse(target)} +=", value
        case ast.For(target=target, iter=values):
            yield f"for {ast.unparse(target)}", values
        case ast.Call(func=called, args=[where, value, *_]) if _last_name(called) == "store":
            yield f"store {ast.unparse(where)}", value


def _bound(names: Sequence[str], value: Term) -> dict[str, Term]:
    values = value if len(names) > 1 else (value,)
    return dict(zip(names, values, strict=True))


class Reading:
    """Symbolic execution: the result, and all integers that arithmetic produced."""

    def __init__(self, names: dict[str, Term], given: dict[str, Term]) -> None:
        self.names = names
        self.given = {ast.unparse(ast.parse(text, mode="eval").body): term for text, term in given.items()}
        self.used: set[str] = set()
        self.terms: list[Term] = []
        self.result: Term = None

    def finish(self, place: str) -> None:
        """Raise `NotUnderstood` if the source lacks a given expression, because the source must have changed."""
        if unused := self.given.keys() - self.used:
            raise NotUnderstood(f"{place} does not hold {', '.join(sorted(unused))}")

    def block(self, statements: Sequence[ast.stmt], names: dict[str, Term]) -> Term:
        """Return the value that the statements return."""
        if not statements:
            raise NotUnderstood("a path returns nothing")
        head, *rest = statements
        match head:
            case ast.Expr(value=ast.Constant()):  # docstring
                return self.block(rest, names)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(
                target=ast.Name(id=name), value=ast.expr() as value
            ):
                return self.block(rest, {**names, name: self.value(value, names)})
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                bound = _bound([ast.unparse(t) for t in targets], self.value(value, names))
                return self.block(rest, {**names, **bound})
            case ast.Assert(test=test) if self.value(test, names) is True:
                return self.block(rest, names)
            case ast.Return(value=ast.expr() as value):
                return self.value(value, names)
            case ast.If(test=test, body=body, orelse=orelse):
                decided = self.value(test, names)
                if isinstance(decided, bool):
                    return self.block([*(body if decided else orelse), *rest], names)
                return choose(decided, self.block([*body, *rest], names), self.block([*orelse, *rest], names))
        raise NotUnderstood(ast.unparse(head))

    def value(self, e: ast.expr, names: dict[str, Term]) -> Term:
        """Return the term of an expression."""
        text = ast.unparse(e)
        if text in self.given:
            self.used.add(text)
            return self.given[text]
        match e:
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Constant(value=int(number)):
                return number
            case ast.Tuple(elts=elements):
                return tuple(self.value(element, names) for element in elements)
            case ast.Subscript(value=whole, slice=ast.Constant(value=int(index))):
                return self.value(whole, names)[index]
            case ast.UnaryOp(op=operator, operand=operand):
                return self._unary(operator, self.value(operand, names), text)
            case ast.BinOp(left=ast.List(elts=[element]), op=ast.Mult(), right=count):
                return (Run(self.value(element, names), self.value(count, names)),)
            case ast.BinOp(left=left, op=operator, right=right):
                return self._binary(operator, self.value(left, names), self.value(right, names), text)
            case ast.BoolOp(op=operator, values=values):
                join = z3.And if isinstance(operator, ast.And) else z3.Or
                return join(*(self.value(value, names) for value in values))
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARE:
                return COMPARE[type(operator)](self.value(left, names), self.value(right, names))
            case ast.IfExp(test=test, body=then, orelse=other):
                return choose(self.value(test, names), self.value(then, names), self.value(other, names))
            case ast.Call(func=ast.Attribute(value=word, attr="to"), args=[ast.Attribute(attr="int64")]):
                return z3.SignExt(32, self.value(word, names))
            case ast.Call(func=called, args=arguments, keywords=[]) if _last_name(called) in CALLS:
                term = CALLS[_last_name(called)](*(self.value(argument, names) for argument in arguments))
                self._note(term)
                return term
        raise NotUnderstood(text)

    def _note(self, terms: Term) -> None:
        if z3.is_int(terms) or z3.is_bv(terms):
            self.terms.append(terms)

    def _unary(self, operator: ast.unaryop, operand: Term, text: str) -> Term:
        if isinstance(operator, ast.Not):
            return z3.Not(operand)
        if isinstance(operator, ast.USub):
            self._note(-operand)
            return -operand
        raise NotUnderstood(text)

    def _binary(self, operator: ast.operator, left: Term, right: Term, text: str) -> Term:
        if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(operator, ast.Add):
            return left + right
        logical = {ast.BitOr: z3.Or, ast.BitAnd: z3.And}
        if z3.is_bool(left) and type(operator) in logical:
            return logical[type(operator)](left, right)
        table = BITS if z3.is_bv(left) and type(operator) in BITS else ARITHMETIC
        if type(operator) not in table:
            raise NotUnderstood(text)
        term = table[type(operator)](left, right)
        self._note(term)
        return term


def _last_name(called: ast.expr) -> str:
    return ast.unparse(called).rpartition(".")[2]


def choose(test: Term, then: Term, other: Term) -> Term:
    """Return `then` if the test holds, else `other`. Tuples are chosen element by element."""
    if isinstance(then, tuple):
        return tuple(z3.If(test, a, b) for a, b in zip(then, other, strict=True))
    return z3.If(test, then, other)


def floor_divide(a: Term, b: Term) -> Term:
    """Return the result of Python's //. z3 rounds towards the floor only for positive divisors."""
    return z3.If(b > 0, a / b, (-a) / (-b))


def modulo(a: Term, b: Term) -> Term:
    """Return the result of Python's %, which has the sign of the divisor."""
    return z3.If(b > 0, a % b, -((-a) % (-b)))


def half_to_even(x: Term) -> Term:
    """Return the result of Python's round for a rational number."""
    low = z3.ToInt(x)
    above = x - z3.ToReal(low)
    half = z3.RealVal("1/2")
    return z3.If(z3.Or(above > half, z3.And(above == half, low % 2 == 1)), low + 1, low)


def least(*terms: Term) -> Term:
    """Return the minimum of at least two terms."""
    first, *rest = terms
    for term in rest:
        first = z3.If(term < first, term, first)
    return first


def largest(*terms: Term) -> Term:
    """Return the maximum of at least two terms."""
    first, *rest = terms
    for term in rest:
        first = z3.If(term > first, term, first)
    return first


COMPARE: dict[type[ast.cmpop], Any] = {
    ast.LtE: lambda a, b: a <= b, ast.Lt: lambda a, b: a < b, ast.GtE: lambda a, b: a >= b,
    ast.Gt: lambda a, b: a > b, ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b,
}
ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: floor_divide, ast.Mod: modulo,
}
BITS: dict[type[ast.operator], Any] = {
    ast.BitOr: lambda a, b: a | b, ast.BitXor: lambda a, b: a ^ b, ast.BitAnd: lambda a, b: a & b,
    ast.LShift: lambda a, b: a << b, ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b,
}
CALLS: dict[str, Any] = {
    "min": least, "max": largest, "where": choose, "range": lambda a, b: (a, b),
    "divmod": lambda a, b: (floor_divide(a, b), modulo(a, b)), "round": half_to_even,
    "ceil": lambda x: -z3.ToInt(-x),
}

OUTCOMES = {"unsat": "proved", "sat": "refuted"}
TIMEOUT_MS = 20_000


@dataclass(frozen=True)
class Claim:
    """Statement about the code that implements an item. `true` is the expected answer of z3."""

    item: str
    name: str
    formula: Term
    true: bool = True


@dataclass(frozen=True)
class Verdict:
    """Result for a claim: "proved", "refuted" or "unknown"."""

    claim: Claim
    outcome: str
    seconds: float
    counterexample: str = ""

    @property
    def surprising(self) -> bool:
        return self.outcome != ("proved" if self.claim.true else "refuted")

    def __str__(self) -> str:
        expected = "" if self.claim.true else "(false) "
        line = f"{self.outcome.upper()} {expected}{self.claim.item}: {self.claim.name} ({self.seconds * 1e3:.0f} ms)"
        return f"{line}\n    counterexample: {self.counterexample}" if self.counterexample else line


def decide(claim: Claim) -> Verdict:
    """Search for values for which the claim fails."""
    started = time.perf_counter()
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT_MS)
    solver.add(z3.Not(claim.formula))
    answer = solver.check()
    outcome = OUTCOMES.get(str(answer), "unknown")
    shown = _shown(solver.model()) if answer == z3.sat else ""
    return Verdict(claim, outcome, time.perf_counter() - started, shown)


def _shown(model: z3.ModelRef) -> str:
    constants = {str(d): model[d] for d in model.decls() if d.arity() == 0}
    return ", ".join(f"{name} = {constants[name]}" for name in sorted(constants))
