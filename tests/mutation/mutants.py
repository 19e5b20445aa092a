"""Mutants of a module: its source with one operator, constant, call or statement changed."""

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
OPPOSITES = [("min", "max"), ("any", "all"), ("minimum", "maximum"), ("zeros", "ones")]
OPPOSITES += [("less", "less_equal"), ("greater", "greater_equal"), ("logical_and", "logical_or")]
NAMES = dict(OPPOSITES) | {second: first for first, second in OPPOSITES}
NOT_CODE = {"annotation", "returns", "decorator_list", "bases"}
C_TOKENS = ["< <=", "<= <", "> >=", ">= >", "== !=", "!= ==", "&& ||", "+ -", "- +", "* /", "/ *"]
C_TOKENS += ["% /", "& |", "| &", "<< >>", ">> <<", "+= -=", "-= +=", "|= &=", "&= |=", "? &&"]


@dataclass(frozen=True)
class Mutant:
    """A whole mutated source, and the lines in which it differs, without their indentation."""

    line: int
    was: str
    becomes: str
    source: str


def python_mutants(source: str) -> list[Mutant]:
    """List the mutants of a Python module; annotations, asserts and decorators stay."""
    tree = ast.parse(source)
    stored = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    found = {}
    for place, new in _edits(tree, stored):
        start = starts[place.lineno - 1] + place.col_offset
        end = starts[place.end_lineno - 1] + place.end_col_offset
        mutant = _mutant(source.encode(), start, end, _text(new).encode())
        ast.parse(mutant.source)
        found[mutant.source] = mutant
    return list(found.values())


def c_mutants(source: str) -> list[Mutant]:
    """List the mutants of a C file in this project's format: spaced operators, numbers, calls."""
    code = re.sub(r"/\*.*?\*/|^#.*?$|^enum.*?$", _blank, source, flags=re.DOTALL | re.MULTILINE)
    found = []
    for token in C_TOKENS:
        old, new = token.split()
        for match in re.finditer(f"(?<= ){re.escape(old)}(?= )", code):
            found.append(_mutant(source.encode(), *match.span(), new.encode()))
    for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        found.append(_mutant(source.encode(), *match.span(), b"%d" % (int(match[0]) + 1)))
    for match in re.finditer(r"(?<=\n)\s+(?:mem\w+|mark|free)\(.*\);|continue|[!~](?=[\w(])", code):
        found.append(_mutant(source.encode(), *match.span(), b""))
    return found


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _mutant(source: bytes, start: int, end: int, new: bytes) -> Mutant:
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    was, becomes = source[first:last], source[first:start] + new + source[end:last]
    whole = (source[:start] + new + source[end:]).decode()
    line = source.count(b"\n", 0, start) + 1
    return Mutant(line, *(" ".join(text.decode().split()) for text in (was, becomes)), whole)


def _text(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    operators = ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.Compare | ast.IfExp
    return f"({text})" if isinstance(node, operators) else text


def _edits(node: ast.AST, stored: Counter[str]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node below `node` that is replaced, and by what."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return
        case ast.Subscript(value=ast.Name("Literal")) | ast.Call(func=ast.Name("TypeVar")):
            return
        case ast.keyword(arg="strict"):
            return
        case ast.Raise():
            yield node, ast.Pass()
            for text in ast.walk(node):
                yield from ((text, new) for new in _shorter_texts(text))
            return
    yield from ((node, new) for new in _alternatives(node))
    yield from _statement_edits(node, stored)
    yield from ((node, new) for new in _shorter_texts(node))
    for field, value in ast.iter_fields(node):
        if field in NOT_CODE or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _edits(child, stored)


def _statement_edits(node: ast.AST, stored: Counter[str]) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Return(value=ast.expr() as value):
            yield value, ast.Constant(None)
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Assign(targets=[ast.Name(name)]) if stored[name] < 2:
            return
        case ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield node, ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield node, ast.Pass()


def _shorter_texts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an f-string without each of its values."""
    if isinstance(node, ast.JoinedStr):
        for place, value in enumerate(node.values):
            if isinstance(value, ast.FormattedValue):
                yield _with(node, values=node.values[:place] + node.values[place + 1 :])


def _alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of an expression."""
    yield from _other_calls(node)
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:place], other(), *ops[place + 1 :]])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from values
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Slice(lower=lower, upper=upper):
            yield from (_with(node, lower=None) for _ in [lower] if lower)
            yield from (_with(node, upper=None) for _ in [upper] if upper)
        case ast.Constant(value):
            yield from map(ast.Constant, _other_values(value))
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for place, loop in enumerate(node.generators):
                if loop.ifs:
                    changed = copy.deepcopy(node)
                    changed.generators[place].ifs = []
                    yield changed


def _other_calls(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a call with its arguments swapped, without a keyword, or of the opposite function."""
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            field = "id" if isinstance(func, ast.Name) else "attr"
            name = getattr(func, field, "")
            if name in NAMES:
                yield _with(node, func=_with(func, **{field: NAMES[name]}))
            elif len(args) > 1 and not any(isinstance(each, ast.Starred) for each in args[:2]):
                yield _with(node, args=[args[1], args[0], *args[2:]])
            for place, keyword in enumerate(keywords):
                if keyword.arg != "strict":
                    yield _with(node, keywords=keywords[:place] + keywords[place + 1 :])


def _other_values(value: object) -> list[object]:
    match value:
        case bool():
            return [not value]
        case int():
            return [2, 0] if value == 1 else [value + 1]
        case float():
            return [value * 0.9, value * 1.1] if value else [1.0]
        case str():
            return ["" if value else "mutated"]
    return []


def _with(node: ast.AST, **changes: object) -> ast.AST:
    fields = dict(ast.iter_fields(node)) | changes
    return type(node)(**fields)
