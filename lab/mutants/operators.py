"""Operators of mutation: for a node of a syntax tree, the nodes that can replace it.

Some nodes are not changed, because no test can or should detect the change:

- None;
- `strict=` of zip, which is a guard like an assertion;
- conversions that keep the value (int, float, list, tuple, asarray, ascontiguousarray).
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

Change = tuple[str, ast.AST]  # operator, replacement
Signatures = dict[str, list[str]]  # types of positional parameters, by the function's name

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_PAIRS = (
    ("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"), ("floor", "ceil"),
    ("logical_or", "logical_and"), ("zeros", "ones"), ("zeros_like", "ones_like"),
)
OPPOSITES = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
DTYPES = {"float32": "float64", "float64": "float32", "int64": "int32", "int32": "int64", "bool_": "int64"}
UNWRAPPED = {"sort", "sorted", "sqrt", "exp", "abs", "log1p", "log2", "cumsum", "tanh", "round", "reversed", "floor"}
METHODS_UNWRAPPED = {"copy", "astype"}
KEYWORDS = {"right": "left", "left": "right", "stable": "quicksort", "mergesort": "quicksort"}
DROPPED = {"minlength", "default", "initial"}
SWAPPED = {"where": (1, 2), "clip": (1, 2)}
ELSEWHERE = {"axis", "side", "kind", "strict"}  # arguments whose values have a separate operator, or none


def signatures(trees: Iterator[ast.Module]) -> Signatures:
    """Return the parameter types of all functions, and the field types of all records, without array axes."""
    found: Signatures = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [_kind(argument.annotation) for argument in parameters(node)]
            elif isinstance(node, ast.ClassDef):
                fields = [_kind(line.annotation) for line in node.body if isinstance(line, ast.AnnAssign)]
                if fields:
                    found[node.name] = fields
    return found


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the positional parameters of a function, without `self` and `cls`."""
    both = [*function.args.posonlyargs, *function.args.args]
    return [argument for argument in both if argument.arg not in ("self", "cls")]


def _kind(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation).partition(",")[0] if annotation else ""


@dataclass(frozen=True)
class Place:
    """Surroundings of a node that the operators need: known signatures, function and keyword."""

    known: Signatures
    function: ast.FunctionDef | None
    keyword: str | None = None


def changes(node: ast.AST, place: Place) -> Iterator[Change]:
    """Yield all changes to one node. Nodes inside the node have separate changes."""
    if isinstance(node, ast.stmt):
        yield from _statement(node, place)
    elif isinstance(node, ast.Compare):
        for at, comparison in enumerate(node.ops):
            for other in COMPARISONS[type(comparison)]:
                ops = [other() if i == at else op for i, op in enumerate(node.ops)]
                yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.BoolOp):
        yield "and-or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield "unary", node.operand
    elif isinstance(node, ast.Constant):
        yield from _constant(node, place.keyword)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "np":
        if node.attr in DTYPES:
            yield "dtype", ast.Attribute(node.value, DTYPES[node.attr], node.ctx)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        if not isinstance(node.slice, ast.Constant):
            yield "unwrapped", node.value
    elif isinstance(node, ast.Slice):
        yield from _slice(node)
    elif isinstance(node, ast.Call):
        yield from _call(node, place)
    elif isinstance(node, ast.IfExp):
        yield "negation", ast.IfExp(_negated(node.test), node.body, node.orelse)
    elif isinstance(node, ast.comprehension):
        for at, test in enumerate(node.ifs):
            ifs = [_negated(test) if i == at else other for i, other in enumerate(node.ifs)]
            yield "negation", ast.comprehension(node.target, node.iter, ifs, node.is_async)


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _binary(node: ast.BinOp) -> Iterator[Change]:
    if any(isinstance(side, ast.List) for side in ast.walk(node)):
        return  # arithmetic of lists: another operator is a type error
    if type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node.op, ORDERED):
        yield "operands", ast.BinOp(node.right, node.op, node.left)


def _constant(node: ast.Constant, keyword: str | None) -> Iterator[Change]:
    value = node.value
    if keyword == "axis" and isinstance(value, int):
        yield "axis", ast.Constant(0 if value else 1)
    elif keyword in ELSEWHERE:
        return
    elif isinstance(value, bool):
        yield "boolean", ast.Constant(not value)
    elif isinstance(value, int | float):
        for other in dict.fromkeys((value + 1, value - 1, 0 * value, 2 * value)):
            if other != value:
                yield "constant", ast.Constant(other)
    elif isinstance(value, str):
        yield "string", ast.Constant(f"{value}?")


def _slice(node: ast.Slice) -> Iterator[Change]:
    if node.lower:
        yield "slice", ast.Slice(None, node.upper, node.step)
        yield "slice", ast.Slice(_moved(node.lower, ast.Add()), node.upper, node.step)
    if node.upper:
        yield "slice", ast.Slice(node.lower, None, node.step)
        yield "slice", ast.Slice(node.lower, _moved(node.upper, ast.Sub()), node.step)
    if node.step:
        yield "slice", ast.Slice(node.lower, node.upper, None)


def _moved(bound: ast.expr, way: ast.operator) -> ast.expr:
    return ast.BinOp(bound, way, ast.Constant(1))


def _call(node: ast.Call, place: Place) -> Iterator[Change]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in OPPOSITES:
        func = deepcopy(node.func)
        setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", OPPOSITES[name])
        yield "opposite", ast.Call(func, node.args, node.keywords)
    if name in UNWRAPPED and node.args:
        yield "unwrapped", node.args[0]
    if isinstance(node.func, ast.Attribute) and name in METHODS_UNWRAPPED:
        yield "unwrapped", node.func.value
    for i, j in _swaps(name, node, place.known):
        args = list(node.args)
        args[i], args[j] = args[j], args[i]
        yield "arguments", ast.Call(node.func, args, node.keywords)
    if name in ("concatenate", "lexsort") and node.args and isinstance(node.args[0], ast.List | ast.Tuple):
        parts = type(node.args[0])(node.args[0].elts[::-1], ast.Load())
        yield "arguments", ast.Call(node.func, [parts, *node.args[1:]], node.keywords)
    for at, keyword in enumerate(node.keywords):
        others = node.keywords[:at] + node.keywords[at + 1 :]
        value = getattr(keyword.value, "value", None)
        if keyword.arg in ("side", "kind") and value in KEYWORDS:
            new = ast.keyword(keyword.arg, ast.Constant(KEYWORDS[value]))
            yield "keyword", ast.Call(node.func, node.args, [*others, new])
        elif keyword.arg in DROPPED:
            yield "keyword", ast.Call(node.func, node.args, others)


def _swaps(name: str, node: ast.Call, known: Signatures) -> Iterator[tuple[int, int]]:
    """Yield the indices of adjacent arguments that have the same type in the annotations of the called function."""
    if name in SWAPPED and len(node.args) > max(SWAPPED[name]):
        yield SWAPPED[name]
    types = known.get(name, [])
    for i in range(min(len(node.args), len(types)) - 1):
        starred = any(isinstance(argument, ast.Starred) for argument in node.args[: i + 2])
        if not starred and types[i] and types[i] == types[i + 1]:
            yield i, i + 1


def _statement(node: ast.stmt, place: Place) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While):
        swapped = type(node)(_negated(node.test), node.body, node.orelse)
        yield "negation", swapped
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
    if isinstance(node, ast.Return) and node.value is not None and place.function is not None:
        for name in _inputs_of_its_type(place.function):
            yield "returned input", ast.Return(ast.Name(name, ast.Load()))
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            yield "arguments", ast.Return(ast.Tuple(node.value.elts[::-1], ast.Load()))
    if _deletable(node, place.function):
        yield "deletion", ast.Pass()


def _inputs_of_its_type(function: ast.FunctionDef) -> Iterator[str]:
    wanted = _kind(function.returns)
    for argument in parameters(function):
        if wanted and _kind(argument.annotation) == wanted:
            yield argument.arg


def _deletable(node: ast.stmt, function: ast.FunctionDef | None) -> bool:
    """Return True if all names stay defined without the statement. A NameError would be no evidence of a good test."""
    if isinstance(node, ast.If):
        return not node.orelse
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Continue | ast.Break):
        return True
    if not isinstance(node, ast.Assign) or function is None:
        return False
    targets = [n for target in node.targets for n in ast.walk(target)]
    if any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) for n in targets):
        return False
    names = [n.id for n in targets if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    bound = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    bound += [argument.arg for argument in parameters(function)]
    return all(bound.count(name) > names.count(name) for name in names)
