"""Which small changes a file of the product can have: a comparison flipped, a condition negated, a statement left out."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

_PAIRS: list[tuple[Any, Any]] = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
]  # fmt: skip
_OTHER = {each: other for pair in _PAIRS for each, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    file: str
    function: int  # the first line of the innermost function, with its decorators; 0: outside of functions
    line: int
    start: int  # in bytes
    end: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._function = 0

    def _add(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = " ".join(self._source[start:end].decode().split())
        self.found.append(Mutant(self._file, self._function, node.lineno, start, end, kind, before, after))

    def _replace(self, kind: str, node: ast.expr, by: ast.expr) -> None:
        self._add(kind, node, f"({ast.unparse(by)})")

    # --- what is passed over: types, decorators, texts, and where parentheses or places are not what they seem

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, min(each.lineno for each in (node, *node.decorator_list))
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)
        self._function = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Match(self, node: ast.Match) -> None:
        for statement in (statement for case in node.cases for statement in case.body):
            self.visit(statement)

    def _pass_over(self, node: ast.JoinedStr | ast.Assert) -> None:
        """A text's parts have no true places before Python 3.12."""

    # --- what is changed

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            ops = [*node.ops[:place], _OTHER[type(operator)](), *node.ops[place + 1 :]]
            self._replace("compared", node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._replace("joined", node, ast.BoolOp(_OTHER[type(node.op)](), node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in (node.left, node.right))  # fmt: skip
        if type(node.op) in _OTHER and not text:
            self._replace("calculated", node, ast.BinOp(node.left, _OTHER[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add("constant", node, repr(node.value + 1))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, (ast.Constant, ast.Compare)):  # a comparison is flipped
            self._replace("negated", node.test, ast.UnaryOp(ast.Not(), node.test))
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for place, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                others = node.keywords[:place] + node.keywords[place + 1 :]
                self._replace("without an argument", node, ast.Call(node.func, node.args, others))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)) and not ast.unparse(node.value).startswith("log."):
            self._remove(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A local name that is missing would fail at once; what is not written to an object may go unnoticed."""
        if self._function and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._remove(node)
        else:
            self.generic_visit(node)

    def _remove(self, node: ast.stmt) -> None:
        self._add("removed", node, "pass")
        if not isinstance(node, ast.Raise):  # its words are a person's
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_JoinedStr = visit_Assert = _pass_over
    visit_While = visit_IfExp = visit_If
    visit_AugAssign = visit_Continue = visit_Break = visit_Delete = visit_Raise = _remove
