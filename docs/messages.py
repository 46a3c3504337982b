"""The texts of all errors and warnings of the package, read from its source.

A value that is known at run time alone is an ellipsis. A text that is passed to a function is
looked up where that function is called.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "kaisa_optim"
VALUE = "…"
MANY = 60  # texts of one place
DEEP = 3  # calls between a text and its error
SOURCES = "invalid", "invalid_because"
WARN = "warn", "warnings.warn", "agree.warn"
# Names that hold parts of messages: looked up inside of another text, too.
PARTS = "must", "why", "reason", "remedy", "rest", "text", "cause"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    """One text, the class of the error or ``"warning"``, and the module that it comes from."""

    kind: str
    text: str
    module: str


class Place(NamedTuple):
    """An expression with the functions around it, the innermost first, and its module."""

    node: ast.expr
    around: tuple[Function, ...]
    module: str


class Source:
    """All modules of the package, with each call and each function by its name."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        self.calls: list[tuple[ast.Call, tuple[Function, ...], str]] = []
        self.functions: dict[str, list[tuple[Function, tuple[Function, ...], str]]] = {}
        self.modules: dict[str, ast.Module] = {}
        self._known: dict[tuple[Place, int], list[str]] = {}
        for path in sorted(folder.rglob("*.py")):
            module = path.relative_to(folder).with_suffix("").as_posix()
            self.modules[module] = tree = joined(ast.parse(path.read_text()))
            self._read(tree, (), module)
        self.calls_of: dict[str, list[tuple[ast.Call, tuple[Function, ...], str]]] = {}
        for found in self.calls:
            self.calls_of.setdefault(called(found[0]), []).append(found)

    def _read(self, node: ast.AST, around: tuple[Function, ...], module: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                self.functions.setdefault(child.name, []).append((child, around, module))
            if isinstance(child, ast.Call):
                self.calls.append((child, around, module))
            inner = (child, *around) if isinstance(child, Function) else around
            self._read(child, inner, module)

    @cached_property
    def messages(self) -> list[Message]:
        """All texts, in the order of the modules, each once."""
        found = []
        self.unknown: list[str] = []  # places whose text was not found
        for call, around, module in self.calls:
            name = called(call)
            if (around and around[0].name in SOURCES) or not is_source(name):
                continue
            if name == "warn" and ast.unparse(call.func) not in WARN:
                continue
            if (module, around[0].name if around else "") == ("comm/agreement", "warn"):
                continue  # its callers are sources
            texts = [" ".join(x.split()) for x in self._told(name, call, around, module)]
            texts = [x for x in texts if any(word.isalpha() for word in x.split())]
            texts = [x for x in texts if " ;" not in x]  # of a part that is empty
            texts = [x for x in texts if not any(y != x and y.startswith(x) for y in texts)]
            found += [Message(kind_of(name), text, module) for text in texts]
            if not texts and call.args:
                self.unknown.append(f"{module}:{call.lineno}")
        return list(dict.fromkeys(found))

    def _told(
        self, name: str, call: ast.Call, around: tuple[Function, ...], module: str
    ) -> Iterator[str]:
        parts = [self.texts(Place(node, around, module)) for node in call.args]
        if name in SOURCES:  # an argument's name, and what is wrong with it
            title = parts[0][0] if len(parts[0]) == 1 else VALUE
            given = f"{VALUE}; " if name == "invalid" else ""
            yield from (f"Invalid {title}: {given}{why}" for why in parts[-1])
        elif len(parts) > 1 and ast.unparse(call.func) == "agree.warn":
            yield from parts[1]
        elif parts:
            yield from parts[0]

    # ---- from an expression to its texts ----

    def texts(self, place: Place, deep: int = 0) -> list[str]:
        """Return what an expression may be, at most ``MANY`` texts."""
        key = place, deep
        if key not in self._known:
            found = list(dict.fromkeys(self._texts(place, deep)))
            self._known[key] = found if 0 < len(found) <= MANY else [VALUE]
        return self._known[key]

    def _texts(self, place: Place, deep: int) -> Iterator[str]:
        node, around, module = place
        if deep > DEEP + 1:
            yield VALUE
        elif isinstance(node, ast.Constant):
            yield node.value if isinstance(node.value, str) else VALUE
        elif isinstance(node, ast.JoinedStr):
            yield from self._joined([Place(x, around, module) for x in node.values], deep)
        elif isinstance(node, ast.FormattedValue):
            plain = node.conversion == -1 and node.format_spec is None
            # A number or a name of the user's is passed on as often as a text.
            inner = Place(node.value, around, module)
            part = isinstance(node.value, ast.Name) and node.value.id in PARTS
            deep = deep + 1 if part else max(deep + 1, DEEP)
            yield from self.texts(inner, deep) if plain else [VALUE]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [Place(x, around, module) for x in (node.left, node.right)]
            yield from self._joined(sides, deep)
        elif isinstance(node, ast.IfExp):
            for side in (node.body, node.orelse):
                yield from self.texts(Place(side, around, module), deep)
        elif isinstance(node, ast.BoolOp):
            for side in node.values:
                yield from self.texts(Place(side, around, module), deep)
        elif isinstance(node, ast.Name):
            yield from self._named(node.id, place, deep)
        elif isinstance(node, ast.Call):
            yield from self._returned(called(node), deep)
        else:
            yield VALUE

    def _joined(self, places: list[Place], deep: int) -> Iterator[str]:
        choices = [self.texts(x, deep) for x in places]
        while len(list(itertools.product(*choices))) > MANY:
            widest = max(range(len(choices)), key=lambda i: len(choices[i]))
            choices[widest] = [VALUE]
        for parts in itertools.product(*choices):
            yield "".join(parts)

    def _named(self, name: str, place: Place, deep: int) -> Iterator[str]:
        """Yield what is assigned to a name, or what callers pass for it."""
        for i, function in enumerate(place.around):
            given = latest(function, list(assigned(function, name)), place.node.lineno)
            for node in given:
                yield from self.texts(Place(node, place.around[i:], place.module), deep + 1)
            names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
            names += [x.arg for x in function.args.kwonlyargs]
            if name in names and deep < DEEP:
                yield from self._passed(function.name, name, names, deep)
            elif name in names:
                yield VALUE
            if given or name in names:
                return
        given = list(assigned(self.modules[place.module], name))
        for node in given:
            yield from self.texts(Place(node, (), place.module), deep + 1)
        if not given:
            yield VALUE

    def _passed(self, function: str, name: str, names: list[str], deep: int) -> Iterator[str]:
        index = names.index(name) - (names[0] in ("self", "cls"))
        for call, around, module in self.calls_of.get(function, []):
            for keyword in call.keywords:
                if keyword.arg == name:
                    yield from self.texts(Place(keyword.value, around, module), deep + 1)
            if 0 <= index < len(call.args):
                yield from self.texts(Place(call.args[index], around, module), deep + 1)

    def _returned(self, name: str, deep: int) -> Iterator[str]:
        """Yield the texts that a function of the package returns."""
        found = self.functions.get(name, [])
        if len(found) != 1:
            yield VALUE
            return
        function, around, module = found[0]
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from self.texts(Place(node.value, (function, *around), module), deep + 1)


def joined(tree: ast.Module) -> ast.Module:
    """Join the pieces that statements add to a text one right after the other."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, _joined(block))
    return tree


def _joined(block: list[ast.stmt]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for x in block:
        before = statements[-1] if statements else None
        targets = before.targets if isinstance(before, ast.Assign) else []
        targets = [before.target] if isinstance(before, ast.AugAssign) else targets
        if (
            isinstance(x, ast.AugAssign)
            and isinstance(x.op, ast.Add)
            and isinstance(before, ast.Assign | ast.AugAssign)
            and [ast.unparse(target) for target in targets] == [ast.unparse(x.target)]
        ):
            longer = ast.BinOp(before.value, ast.Add(), x.value)
            before.value = ast.copy_location(longer, before.value)
        else:
            statements.append(x)
    return statements


def called(call: ast.Call) -> str:
    node = call.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_source(name: str) -> bool:
    return name in SOURCES or name == "warn" or (name.endswith("Error") and name[0].isupper())


def kind_of(name: str) -> str:
    return "ValueError" if name in SOURCES else "warning" if name == "warn" else name


def assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield the values that a scope itself assigns to a name."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _matched(target, node.value, name)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _matched(node.target, node.value, name)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            before = ast.copy_location(ast.Name(node.target.id), node.value)
            longer = ast.copy_location(ast.BinOp(before, ast.Add(), node.value), node.value)
            yield from _matched(node.target, longer, name)
        yield from assigned(node, name)


def latest(function: Function, values: list[ast.expr], line: int) -> list[ast.expr]:
    """Return the values that were assigned after the last error above this line, or all."""
    values = [x for x in values if not x.lineno <= line <= (x.end_lineno or 0)]  # not its own
    above = [x.lineno for x in ast.walk(function) if isinstance(x, ast.Raise)]
    last = max((x for x in above if x < line), default=0)
    return [x for x in values if last < x.lineno <= line] or values


def _matched(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _matched(one, its, name)
