"""The small faults that tests/mutation/mutate.py tries, and how each of them gets into a file of the library."""

from __future__ import annotations

import ast
import copy
import importlib.machinery
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# methods whose call is dropped: x.clamp(...) becomes x
DROPPED = {"clamp", "abs", "sign", "to", "detach"}


class Mutator(ast.NodeTransformer):
    """Counts the possible faults of a tree, and applies the one of this number."""

    def __init__(self, number: int = -1):
        self.number, self.count, self.line, self.what = number, 0, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        # messages of errors and annotations are not mathematics
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return node
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
            elif isinstance(value, ast.AST) and name not in ("annotation", "returns"):
                setattr(node, name, self.visit(value))
        fault = self.fault(copy.copy(node))
        if fault is None:
            return node
        self.count += 1
        if self.count - 1 != self.number:
            return node
        self.line, self.what = node.lineno, f"{ast.unparse(node)}  ->  {ast.unparse(fault)}"
        return ast.copy_location(fault, node)

    def fault(self, node: ast.AST) -> ast.AST | None:
        match node:
            case ast.Constant(value=bool(value)):
                node.value = not value
            case ast.Constant(value=int(value) | float(value)):
                node.value = value + 1
            case ast.Compare(ops=[operator]):
                node.ops = [COMPARISONS[type(operator)]()]
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
                node.op = OPERATORS[type(operator)]()
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                return operand
            case ast.IfExp(orelse=other) | ast.Call(func=ast.Attribute(attr="where"), args=[_, _, other]):
                return other
            case ast.Call(func=ast.Attribute(attr=method, value=value)) if method in DROPPED:
                return value
            case _:
                return None
        return node


class Mutant:
    def __init__(self, path: Path, number: int):
        tree, mutator = ast.parse(path.read_text()), Mutator(number)
        mutator.visit(tree)
        self.path, self.number, self.line, self.what, self.killer = path, number, mutator.line, mutator.what, ""
        self.code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        # the log knows it by this
        self.digest = sha256(ast.unparse(tree).encode()).hexdigest()

    def replace(self, functions: list[FunctionType]) -> set[str]:
        """Give the functions of the imported file their faulty code. Returns the names of the faulty ones."""
        codes, replaced = {function_name(code): code for code in _inner(self.code)}, set()
        for function in functions:
            right = function.__code__
            code = codes.get(function_name(right), right) if right.co_filename == str(self.path) else right
            if code != right and code.co_freevars == right.co_freevars:
                function.__code__ = code
                replaced.add(function_name(right))
        return replaced

    def import_instead(self) -> None:
        """Let the file's import give the faulty module."""
        load = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
            return self.code if loader.path == str(self.path) else load(loader, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code


def function_name(code: CodeType) -> str:
    return f"{code.co_qualname}:{code.co_firstlineno}"


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)
