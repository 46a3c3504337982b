"""The rules of the house that linters do not hold: sizes, words, and what the contract lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "kaisa_optim").rglob("*.py"))
CONTRACT = ROOT / "tests" / "CONTRACT.md"

# Modules without a test file of their own.
NO_NAMESAKE = {"errors.py": "tests of each error hold the texts that it forms"}

MOST_LINES_OF_A_CLASS = 400
MOST_PUBLIC_NAMES_OF_A_CLASS = 12
MOST_ATTRIBUTES_OF_A_CLASS = 20
MOST_LINES_OF_A_FUNCTION = 50

# Users set and ask 17 names of the preconditioner, which it forwards to its parts.
MOST_PUBLIC_NAMES = {"Preconditioner": 26}
# Classes that are still larger than a class may be with its bases, and so are those built on them.
LARGER = {"Capture", "Registry", "Rule", "CoveredModule", "KFACLAMB", "KFACMuon"}
# Constructors of public optimizers, and a functional form.
LONG = {"LAMB.__init__", "Muon.__init__", "lamb"}
# Words that show that a docstring does not begin with a verb.
NO_VERBS = {
    *("A", "All", "An", "Any", "As", "At", "By", "Each", "Every", "For", "From", "How", "In", "It"),
    *("Of", "On", "One", "Or", "That", "The", "This", "Those", "To", "What", "When", "Where"),
    *("Whether", "Which", "Who", "Why", "With"),
    *("Dimensions", "Gradients", "Multiplications", "Neighbours", "Positions", "Rows", "Some"),
    *("Sums", "Views", "Zeros"),
}
# Words that have a new one, as whole identifiers.
RETIRED = {
    *("Run", "Gathered", "Tally", "fed", "overdue", "shelf", "Shelf", "Layout", "Pair", "Members"),
    *("Parcel", "Shipment", "Thing", "Circle", "Piece", "add_up", "all_of", "swap", "spread"),
    *("hand_out", "lay_out", "forget", "go_on", "papers", "parted", "SecondOrder", "Tracking"),
    *("Statistics", "_turn", "_turns", "turns_of", "unseen_layers", "_handed_out"),
}
# Words with another word's meaning, and what stands for it. Each is refused as a whole identifier.
AMBIGUOUS = {
    **{"grad_worker": "gradient worker", "grad_workers": "gradient worker"},
    **{"inv_worker": "owner", "inverse_worker": "owner", "peer": "receiver", "peers": "receiver"},
    **{"stats": "sums", "statistics": "sums", "covariance": "average", "second_order": "state"},
    **{"context": "values", "manager": "registry", "cfg": "options", "process": "rank"},
}
MOST_USERS = 4  # a class that as many other modules import stands in the glossary


def definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield classes and functions of a file with their qualified names."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")

    return walk(ast.parse(path.read_text()), "")


def lines(node: ast.AST) -> int:
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_called(node: ast.AST) -> bool:
    """Return whether this is a function or a method, and no property."""
    if not isinstance(node, ast.FunctionDef):
        return False
    names = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
    return not names & {"property", "setter", "cached_property"}


def is_forwarded(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Forward[")


def public_names(node: ast.ClassDef) -> set[str]:
    """Return the methods, properties and forwarded names that a class itself defines."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    names |= {ast.unparse(x.targets[0]) for x in node.body if is_forwarded(x)}
    return {name for name in names if not name.startswith("_")}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class itself sets: in its body, and of ``self`` in its methods."""
    own = [x for x in node.body if isinstance(x, ast.Assign | ast.AnnAssign)]
    own = [x for x in own if not is_forwarded(x)]
    targets = [t for x in own for t in (x.targets if isinstance(x, ast.Assign) else [x.target])]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
        if ast.unparse(found.value) == "self"
    }


def classes() -> dict[str, ast.ClassDef]:
    found = (pair for path in FILES for pair in definitions(path))
    return {name: node for name, node in found if isinstance(node, ast.ClassDef)}


def family(name: str, known: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class of the package and its bases in the package, each once."""
    bases = [ast.unparse(base).partition("[")[0] for base in known[name].bases]
    return [
        known[name],
        *{id(x): x for b in bases if b in known for x in family(b, known)}.values(),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "kaisa_optim")))
def test_sizes(path):
    for name, node in definitions(path):
        if isinstance(node, ast.ClassDef):
            assert lines(node) <= MOST_LINES_OF_A_CLASS, f"{name} has {lines(node)} lines"
        elif name not in LONG:
            assert lines(node) <= MOST_LINES_OF_A_FUNCTION, f"{name} has {lines(node)} lines"


def test_sizes_with_bases():
    """A class that is split into bases is as large as before: readers meet all of it at once."""
    known, larger = classes(), set()
    for name in known:
        bases = family(name, known)
        names = set().union(*map(public_names, bases))
        own = set().union(*map(attributes, bases))
        most = MOST_PUBLIC_NAMES.get(name, MOST_PUBLIC_NAMES_OF_A_CLASS)
        fits = sum(map(lines, bases)) <= MOST_LINES_OF_A_CLASS and len(names) <= most
        if not fits or len(own) > MOST_ATTRIBUTES_OF_A_CLASS:
            larger |= {name} if not LARGER & {x.name for x in bases[1:]} else set()
    assert larger == LARGER


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "kaisa_optim")))
def test_no_retired_word(path):
    tree = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    named |= {name.rsplit(".", 1)[-1] for name, _ in definitions(path)}
    assert not named & (RETIRED | AMBIGUOUS.keys())


def glossary() -> dict[str, str]:
    """Return the glossary's words, and the modules in which their classes are defined."""
    page = (ROOT / "docs" / "how" / "architecture.md").read_text()
    part = page[page.index("## Glossary") :].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in part.splitlines() if row.startswith("| ")][1:]
    return {
        word.strip(" `"): module.strip(" `")
        for words, module, _ in rows
        for word in words.split(",")
    }


def test_words_of_the_glossary_are_defined_where_it_says():
    words = glossary()
    assert {"owner", "gradient worker", "receiver", "slot", "average", "state"} <= words.keys()
    for word, module in words.items():
        assert bool(module) == word[0].isupper(), word
        if module:
            assert word in dict(definitions(ROOT / "kaisa_optim" / module)), (word, module)


def test_a_class_that_many_modules_use_is_in_the_glossary():
    users: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
                for alias in node.names:
                    users.setdefault(alias.name, set()).add(str(path))
    for path in FILES:
        floor = path.relative_to(ROOT / "kaisa_optim").parts[0]
        for name, node in definitions(path):
            if floor in ("core", "plan", "curvature", "capture", "comm"):
                many = len(users.get(name, set()) - {str(path)}) >= MOST_USERS
                assert not (many and isinstance(node, ast.ClassDef)) or name in glossary(), name


def test_a_class_has_a_name_of_its_own():
    found = [
        name
        for path in FILES
        for name, node in definitions(path)
        if isinstance(node, ast.ClassDef) and "." not in name and not name.startswith("_")
    ]
    assert not {name for name in found if found.count(name) > 1}


def chains(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """Yield line, name and attributes of every longest ``name.a.b.c``."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            attributes, start = [node.attr], node.value
            while isinstance(start, ast.Attribute):
                attributes.insert(0, start.attr)
                start = start.value
            if isinstance(start, ast.Name):
                yield node.lineno, start.id, attributes


def plain_data() -> set[str]:
    """Return the names that may end a chain: of tensors, of containers, of fields of records."""
    types = torch.Tensor, torch.dtype, torch.device, dict, list, set, frozenset, tuple, str, type
    names = {name for kind in types for name in dir(kind)}
    for path in FILES:
        for _, node in definitions(path):
            if isinstance(node, ast.ClassDef):
                kinds = " ".join(map(ast.unparse, [*node.bases, *node.decorator_list]))
                if re.search("NamedTuple|dataclass", kinds):
                    fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
                    names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return names


def test_nobody_reaches_through_two_objects():
    """A chain such as ``optimizer.preconditioner.registry.parameters`` ties three modules."""
    ends = plain_data()
    for path in FILES:
        tree = ast.parse(path.read_text())
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for line, name, attributes in chains(tree):
            while attributes and attributes[-1] in ends:
                attributes.pop()
            most = 3 if name in ("self", "cls") else 2
            chain = ".".join([name, *attributes])
            assert name in imported or len(attributes) <= most, f"{path.name}:{line}: {chain}"


def test_docstrings_of_functions_begin_with_a_verb():
    for path in FILES:
        for name, node in definitions(path):
            text = ast.get_docstring(node) or "Nothing"  # type: ignore[arg-type]
            first = text.split()[0].strip(",;")
            refused = NO_VERBS if is_called(node) else {"What", "Whether"}
            begins_with_a_word = first.isalpha() or not is_called(node)
            assert begins_with_a_word and first not in refused, f"{path.name}: {name}: {text}"


def test_errors_about_arguments_are_built_in_one_place():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ValueError":
                text = ast.unparse(node)
                found = re.match(r"ValueError\(f?['\"]Invalid ", text)
                assert path.name == "errors.py" or not found, f"{path.name}: {text}"


def rules_and_lengths() -> set[str]:
    """Return the names of the classes of rules and of lengths."""
    found: set[str] = {"Rule", "Length"}
    bases = {
        name: {ast.unparse(base) for base in node.bases}
        for path in FILES
        for name, node in definitions(path)
        if isinstance(node, ast.ClassDef)
    }
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found


def test_rules_answer_for_themselves():
    """Nobody asks which class a rule or a length is of: a new one would be forgotten there."""
    names = rules_and_lengths()
    assert {"CholeskyRule", "StoredProductRule", "MuonLength"} <= names
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                asked = {n for n in re.findall(r"\w+", ast.unparse(node.args[-1])) if n in names}
                assert not asked, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_each_module_has_a_test_file_of_its_name():
    package, tests = ROOT / "kaisa_optim", ROOT / "tests"
    lacking = set()
    for path in FILES:
        own = path.relative_to(package)
        namesake = tests / own.with_name(f"test_{own.name}")
        if path.name != "__init__.py" and not namesake.exists():
            lacking.add(str(own))
        elif namesake.exists():
            assert re.search(r"^def test_", namesake.read_text(), flags=re.M), namesake
    assert lacking == NO_NAMESAKE.keys()


def test_the_contract_names_tests_that_exist():
    entries = re.findall(r"^- .* — `([^`]+)`$", CONTRACT.read_text(), flags=re.M)
    promises = [line for line in CONTRACT.read_text().splitlines() if line.startswith("- ")]
    assert len(entries) == len(promises) > 40
    for entry in entries:
        file, _, test = entry.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), flags=re.M), entry
