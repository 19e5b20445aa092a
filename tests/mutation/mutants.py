"""Mutants of a module: its source with one operator, constant, call or statement changed."""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

_OTHERS = (
    "Lt:LtE,GtE LtE:Lt,Gt Gt:GtE,LtE GtE:Gt,Lt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn "
    "NotIn:In And:Or Or:And Add:Sub Sub:Add Mult:Div Div:Mult FloorDiv:Div Mod:FloorDiv Pow:Mult "
    "LShift:RShift RShift:LShift BitOr:BitAnd BitAnd:BitOr min:max max:min any:all all:any "
    "minimum:maximum maximum:minimum less:less_equal greater:greater_equal logical_and:logical_or"
)
OTHERS = {name: others.split(",") for name, others in (pair.split(":") for pair in _OTHERS.split())}
NOT_CODE = {"annotation", "returns", "decorator_list", "bases"}
_C_OTHERS = (
    "< <=,<= <,> >=,>= >,== !=,!= ==,&& ||,|| &&,+ -,- +,* /,/ *,% /,& |,| &,<< >>,>> <<,"
    "+= -=,-= +=,|= &=,&= |=,? &&"
)


@dataclass(frozen=True)
class Mutant:
    """A whole mutated source, and the lines in which it differs, without their indentation."""

    line: int
    was: str
    becomes: str
    source: str


def python_mutants(source: str) -> list[Mutant]:
    """List the mutants of a Python module; annotations, asserts, decorators and texts stay."""
    data = source.encode()
    lines = data.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    tree = ast.parse(source)
    found = {ast.dump(tree): None}
    for place, new in _edits(tree):
        start = starts[place.lineno - 1] + place.col_offset
        end = starts[place.end_lineno - 1] + place.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new))
        # Parentheses keep the order of operations; a slice has none.
        is_operation = isinstance(
            new, ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.Compare | ast.IfExp
        )
        mutant = _mutant(data, start, end, f"({text})" if is_operation else text)
        found.setdefault(ast.dump(ast.parse(mutant.source)), mutant)
    return [mutant for mutant in found.values() if mutant]


def c_mutants(source: str) -> list[Mutant]:
    """List the mutants of a C file in this project's format: spaced operators, numbers, calls."""
    comments = re.compile(r"/\*.*?\*/|^#.*?$|^enum.*?$", re.DOTALL | re.MULTILINE)
    code = comments.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    found = [
        _mutant(source.encode(), *match.span(), other)
        for token, other in map(str.split, _C_OTHERS.split(","))
        for match in re.finditer(f"(?<= ){re.escape(token)}(?= )", code)
    ]
    for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        found.append(_mutant(source.encode(), *match.span(), str(int(match[0]) + 1)))
    for match in re.finditer(r"(?<=\n)\s+(?:mem\w+|mark|free)\(.*\);|continue|[!~](?=[\w(])", code):
        found.append(_mutant(source.encode(), *match.span(), ""))
    return found


def _mutant(source: bytes, start: int, end: int, new: str) -> Mutant:
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    becomes = source[first:start] + new.encode() + source[end:last]
    was, becomes = (" ".join(each.decode().split()) for each in (source[first:last], becomes))
    whole = source[:start].decode() + new + source[end:].decode()
    return Mutant(source.count(b"\n", 0, start) + 1, was, becomes, whole)


def _edits(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each node at or below `node` that is replaced, and by what."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return
        case ast.Subscript(value=ast.Name("Literal")) | ast.keyword(arg="strict"):
            return
        case ast.Call(func=ast.Name("TypeVar")):
            return
        case ast.Return(value=ast.expr() as value):
            yield value, ast.Constant(None)
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break() | ast.Raise():
            yield node, ast.Pass()
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
    yield from ((node, new) for new in [*_other_expressions(node), *_other_calls(node)])
    for field, value in ast.iter_fields(node):
        # Of what an error says, only the values are mutated.
        if field in NOT_CODE or isinstance(node, ast.JoinedStr) or field == "cause":
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(node, ast.Call) and isinstance(child, ast.Constant)
            if isinstance(child, ast.AST) and not (is_text and _is_error(node)):
                yield from _edits(child)


def _is_error(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id.endswith("Error")


def _other_expressions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for name in OTHERS[type(op).__name__]:
                    other = getattr(ast, name)()
                    yield _with(node, ops=[*ops[:place], other, *ops[place + 1 :]])
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            for name in OTHERS.get(type(op).__name__, []):
                yield _with(node, op=getattr(ast, name)())
            yield from getattr(node, "values", [])
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Slice(lower=lower, upper=upper):
            yield from (_with(node, lower=None) for _ in [lower] if lower)
            yield from (_with(node, upper=None) for _ in [upper] if upper)
        case ast.Constant(value):
            yield from map(ast.Constant, _other_values(value))
        case ast.JoinedStr(values=values):
            for place, value in enumerate(values):
                if isinstance(value, ast.FormattedValue):
                    yield _with(node, values=values[:place] + values[place + 1 :])


def _other_calls(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            field = "id" if isinstance(func, ast.Name) else "attr"
            others = OTHERS.get(getattr(func, field, ""), [])
            yield from (_with(node, func=_with(func, **{field: name})) for name in others)
            if not others and len(args) > 1 and not isinstance(args[0], ast.Starred):
                yield _with(node, args=[args[1], args[0], *args[2:]])
            for place, keyword in enumerate(keywords):
                if keyword.arg != "strict":
                    yield _with(node, keywords=keywords[:place] + keywords[place + 1 :])
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for place in [place for place, loop in enumerate(node.generators) if loop.ifs]:
                unfiltered = copy.deepcopy(node)
                unfiltered.generators[place].ifs = []
                yield unfiltered


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
    return type(node)(**(dict(ast.iter_fields(node)) | changes))
