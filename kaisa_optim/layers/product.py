"""The product of a small module, as the source of its forward states it.

The sizes of a layer's factors must be known before the first pass: a checkpoint may be loaded then.
The source tells whether a matrix is stored ``[inputs, outputs]``, and which bias its product adds.
No forward runs for this: it might leave tensors in the module's caches. The calls of a real pass
decide what is gathered. If they differ from the source, the parameters keep raw gradients.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import CodeType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter


class Product(NamedTuple):
    """The weight that multiplies a module's input, and the bias that the same call adds."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool


class _Stated(NamedTuple):
    """One call of ``linear`` or ``addmm`` in a source: the names of its own parameters."""

    weight: str
    bias: str | None
    transposed: bool


def product_of(module: nn.Module) -> Product | None:
    """Return a module's only product, if the module has one matrix and at most one vector."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    plain = not module._modules and not module._buffers
    if not plain or sorted(p.dim() for p in own.values()) not in ([2], [1, 2]):
        return None
    if any(isinstance(p, UninitializedParameter) for p in own.values()):
        return None
    matrix = next(name for name, p in own.items() if p.dim() == 2)
    vector = next((name for name, p in own.items() if p.dim() == 1), None)
    # Code holds no variables of the forward's surroundings, so that a cache of it keeps no model.
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    stated = None if code is None else _stated(code, matrix, vector)
    if stated is None:
        return None
    weight, bias = own[matrix], None if stated.bias is None else own[stated.bias]
    outputs = weight.shape[1 if stated.transposed else 0]
    if bias is not None and bias.numel() != outputs:
        bias = None
    return Product(weight, bias, stated.transposed)


@functools.lru_cache(maxsize=256)
def _stated(forward: CodeType, matrix: str, vector: str | None) -> _Stated | None:
    """Return the product with ``self.matrix``, if the source uses the matrix nowhere else."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):  # no source, or a part of an expression
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return None
    me = definition.args.args[0].arg
    uses = _uses(tree, me)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [stated for call in calls if (stated := _product(call, me)) and stated.weight == matrix]
    if len(found) != 1 or uses.count(matrix) != 1:
        return None
    alone = found[0].bias == vector and vector is not None and uses.count(vector) == 1
    return found[0] if alone else found[0]._replace(bias=None)


def _uses(tree: ast.AST, me: str) -> list[str]:
    """Return each use of an attribute by name; comparisons such as ``is None`` are no uses."""
    if isinstance(tree, ast.Compare):
        return []
    name = _own_name(tree, me)
    inner = [use for child in ast.iter_child_nodes(tree) for use in _uses(child, me)]
    return inner if name is None else [name, *inner]


def _product(call: ast.Call, me: str) -> _Stated | None:
    """Return the product of ``linear(x, weight, bias)`` or ``addmm(bias, x, weight)``."""
    function = getattr(call.func, "attr", getattr(call.func, "id", None))
    given = dict(enumerate(call.args)) | {word.arg: word.value for word in call.keywords}
    if function == "linear":
        weight, bias, transposed = given.get(1, given.get("weight")), given.get(2), False
        bias = given.get("bias", bias)
    elif function == "addmm" and len(call.args) == 3 and not call.keywords:
        bias, _, weight = call.args
        transposed = True
    else:
        return None
    name = _own_name(weight, me)
    return None if name is None else _Stated(name, _own_name(bias, me), transposed)


def _own_name(node: Any, me: str) -> str | None:
    """Return ``name`` of a node ``self.name``."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == me else None
