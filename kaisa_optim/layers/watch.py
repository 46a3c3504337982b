"""Watching the calls in a module's forward that use parameters of its own.

A mode sees every torch function that runs under it, and taps products, tables and convolutions of a
parameter or a view of it. All modules that a thread runs share one mode, so that a call costs the
same for many watched parameters as for one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _ntuple
from torch.overrides import TorchFunctionMode

from .base import Layer
from .conv import ConvLayer
from .kinds import GroupedUse, ProductUse, StackedUse, TableUse


class Operand(NamedTuple):
    """A parameter of a layer among a call's arguments."""

    scope: Scope  # the innermost one that knows the parameter
    layer: Layer
    whole: Tensor  # the parameter, or a tensor that stands in for it; ``view`` is a view of it
    view: Tensor


class Scope:
    """The layers that are watched in one call of a module, or whose uses are searched in it."""

    def __init__(self, layers: Iterable[Layer], *, searches: bool = False) -> None:
        self.layers, self.searches = frozenset(layers), searches
        self.checkpoints = _checkpoints()
        # Parameters and their stand-ins by identity. The tensor beside each is there to keep it
        # alive: the id of a freed stand-in would soon be another tensor's.
        self.known: dict[int, tuple[Tensor, Layer]] = {}
        for layer in self.layers:
            for p in (layer.weight, layer.bias):
                if p is not None:
                    self.known[id(p)] = p, layer


class WatchMode(TorchFunctionMode):
    """Runs the watched modules of a thread, and taps the calls that use their scopes' weights.

    Scopes nest as modules do. Each use counts once, for the innermost scope that knows the weight.
    """

    def __init__(self, around: Any) -> None:
        super().__init__()
        self._around = around  # the Capture
        self.scopes: list[Scope] = []  # of the modules that run, the innermost last

    def __exit__(self, *error: Any) -> None:
        self.scopes.pop()
        if not self.scopes:
            super().__exit__(*error)

    @torch.compiler.disable  # a compiled model runs as it is
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Torch checks the arguments first, so that those who watch may bind them by name.
        out, watch = func(*args, **kwargs), WATCHED.get(func)
        return out if watch is None else watch(self, out, *args, **kwargs)

    def find(self, value: Any) -> Operand | None:
        """Return the layer of a tensor that is its parameter, or a view that trains it."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return None
        base = value._base if value._is_view() else None
        for scope in reversed(self.scopes):
            known = scope.known.get(id(value))
            if known is None and id(base) in scope.known and _trains(value, base):
                known = scope.known[id(base)]
            known = known or self._gathered(scope, value if base is None else base)
            if known is None:
                continue
            operand = Operand(scope, known[1], known[0], value)
            if not self._around.takes(operand.layer):
                break
            if _checkpoints() == scope.checkpoints:
                return operand
            # In a checkpoint that begins within the scope no call may be tapped: it recomputes the
            # calls without the mode, and raises an error if they then save fewer tensors. The
            # module that runs is noted all the same, since a scope of its own begins inside.
            self.note(operand)
            break
        return None

    def tap(
        self, operand: Operand, layer: Layer, output: Tensor, x: Tensor, blocks: Any = slice(None)
    ) -> Tensor:
        self.note(operand)
        return self._around._tap(layer, output, x, blocks)

    def note(self, operand: Operand) -> None:
        if operand.scope.searches:  # the module that runs is one to be watched from now on
            self._around._note(operand.layer)

    def _gathered(self, scope: Scope, base: Tensor) -> tuple[Tensor, Layer] | None:
        # A whole parameter that stands in a sharded one's place now, and its layer. It must be
        # looked for in each call: fully_shard gathers into another tensor each time.
        if not self._around.sharded or not isinstance(base, nn.Parameter):
            return None
        for layer in self._around.sharded & scope.layers:
            if any(base is whole for whole in self._around.wholes(layer)):
                scope.known[id(base)] = base, layer
                return base, layer
        return None

    # ---- uses ----

    def product(
        self, operand: Operand, out: Any, x: Any, kind: Any, input_dim: int, biased: bool = False
    ) -> Any:
        """Tap a product of ``x`` with a view of a matrix whose ``input_dim`` meets the input."""
        layer, place = operand.layer, place_of(operand.view, operand.whole)
        stored, base = layer.input_dim, x._base if x._is_view() else x
        # A product of two matrices of parameters is another weight, and a parameter holds no rows;
        # a stack of learned queries, of three dimensions, does.
        known = any(id(base) in scope.known for scope in self.scopes)
        is_weight = x.dim() <= 2 and (known or isinstance(base, nn.Parameter))
        if place is None or stored is None or is_weight:
            return out
        used = 1 - input_dim if place.transposed else input_dim
        in_part = place.first is not None and used == 0  # of the inputs
        # The bias of a layer by use belongs to its own product alone.
        if in_part or (layer.covers[1] and layer.by_use):
            return out
        use = kind(layer, crossed=used != stored)
        use.biased, use.first = biased, place.first
        return self.tap(operand, use, out, x, place.blocks)

    def rows(
        self, operand: Operand, out: Tensor, indices: Tensor, padding: int | None = None
    ) -> Tensor:
        """Tap rows of a weight, picked by indices; ``padding`` is a row without a gradient."""
        layer, place = operand.layer, place_of(operand.view, operand.whole)
        whole = place is not None and not place.transposed and place.first is None
        is_table = layer.input_dim is not None and layer.blocks == 1 and not layer.covers[1]
        if not whole or operand.view.dim() != 2 or not is_table:
            return out
        use = TableUse(layer, padding, crossed=layer.input_dim == 1)
        return self.tap(operand, use, out, indices)


class Place(NamedTuple):
    """A view of a matrix or of a stack of matrices."""

    blocks: slice  # the matrices that the view has
    transposed: bool
    first: int | None  # the first row of the matrix that the view has; None: all rows


def place_of(view: Tensor, whole: Tensor) -> Place | None:
    """Return the place of a view of ``whole``, a matrix or stack; ``None`` for other views."""
    if whole.dim() not in (2, 3) or not 2 <= view.dim() <= whole.dim():
        return None
    offset, blocks = int(view.storage_offset()) - int(whole.storage_offset()), slice(None)
    count = view.shape[0] if view.dim() == 3 else 1
    if whole.dim() == 3:
        block, offset = divmod(offset, whole.stride(0))
        if count > 1 and view.stride(0) != whole.stride(0):
            return None
        if count < whole.shape[0]:
            blocks = slice(block, block + count)
    first, column = divmod(offset, whole.stride(-2))
    steps, size, step = whole.stride()[-2:], view.shape[-2:], view.stride()[-2:]
    for transposed in (False, True):
        if transposed:
            size, step = size[::-1], step[::-1]
        # A dimension of size 1 may have any stride.
        aligned = all([n == 1 or x == y for n, x, y in zip(size, step, steps, strict=True)])
        fits = size[1] == whole.shape[-1] and first + size[0] <= whole.shape[-2] and column == 0
        in_part = size[0] < whole.shape[-2]
        if aligned and fits and not (in_part and count > 1):  # no rows of several matrices
            return Place(blocks, transposed, first if in_part else None)
    return None


def _running(module: str) -> Iterator[FrameType]:
    # The frames in which a module's functions run, from the innermost outwards.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back


def running_calls() -> Iterator[dict[str, Any]]:
    """Yield the local variables of the calls of modules, from the innermost outwards."""
    for frame in _running("torch.nn.modules.module"):
        if frame.f_code.co_name == "_call_impl":
            yield frame.f_locals


def _checkpoints() -> int:
    return len([*_running("torch.utils.checkpoint")])  # calls of its functions


def _trains(view: Tensor, base: Any) -> bool:
    # Whether a view's gradient is its base's, too: a view that was made under no_grad begins a
    # graph of its own, and so does a detached one, though both have the base.
    node = view.grad_fn
    while node is not None and node is not base.grad_fn and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and (node is base.grad_fn or getattr(node, "variable", None) is base)


# ---- calls: each takes the result and the arguments of one function, as torch names them ----


def _linear(
    mode: WatchMode, out: Any, input: Any, weight: Any, bias: Any = None, input_dim: int = 1
) -> Any:
    operand = mode.find(weight)
    if operand is None:
        return out
    layer, covers_bias = operand.layer, operand.layer.covers[1]
    added = mode.find(bias) if covers_bias else None
    biased = added is not None and added.layer is layer
    # The layer's own rows stand for a call with all of it alone. A call that lacks the bias, or has
    # a part of the weight, would count for rows that it did not see: it is a use of its own.
    whole = operand.view is operand.whole and (added is None or added.view is added.whole)
    plain = layer.input_dim == input_dim and layer.blocks == 1 and not layer.diagonal_input
    if whole and plain and biased == covers_bias:
        return mode.tap(operand, layer, out, input)
    return mode.product(operand, out, input, ProductUse, input_dim, biased)


def _addmm(mode: WatchMode, out: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 3 or kwargs:  # with scales, or in an older order
        return out
    return _linear(mode, out, args[1], args[2], args[0], input_dim=0)


def _matmul(mode: WatchMode, out: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) < 2:  # by name
        return out
    left, right = args[:2]
    operand = mode.find(right)
    if operand is not None and (right.dim() == 2 or right.shape[:-2] == (1,)):
        return mode.product(operand, out, left, ProductUse, 0)
    if operand is not None and right.dim() == 3 and left.dim() == 3:
        return mode.product(operand, out, left, StackedUse, 0)
    operand = mode.find(left)
    if operand is not None and left.dim() == 2 <= right.dim():
        # Columns ``[..., features, columns]``, as in Mamba, are rows of the transpose.
        return mode.product(operand, out.mT, right.mT, ProductUse, 1).mT
    return out


def _grouped(mode: WatchMode, out: Any, *args: Any, offs: Any = None, **kwargs: Any) -> Any:
    operand = mode.find(args[1]) if len(args) == 2 else None
    if operand is None or offs is None or args[0].dim() != 2 or args[1].dim() != 3:
        return out
    return mode.product(operand, out, args[0], functools.partial(GroupedUse, ends=offs), 0)


def _einsum(mode: WatchMode, out: Any, equation: Any, *operands: Any) -> Any:
    # Equations of rows times a matrix, such as "bi,oi->bo". Torch hands a list on as one operand.
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return out
    terms, result = equation.replace(" ", "").split("->")
    for i, weight in enumerate(operands):
        operand, of_weight, of_x = mode.find(weight), terms.split(",")[i], terms.split(",")[1 - i]
        ends = {of_x[-1:], result[-1:]}
        is_matrix = operand is not None and weight.dim() == 2 and "." not in of_weight
        fits = of_x[:-1] == result[:-1] and len(ends) == 2 and ends == {*of_weight}
        if operand is not None and is_matrix and fits:
            input_dim = of_weight.index(of_x[-1])
            return mode.product(operand, out, operands[1 - i], ProductUse, input_dim)
    return out


def _embedding(
    mode: WatchMode, out: Any, input: Any, weight: Any, padding_idx: Any = None, **options: Any
) -> Any:
    operand = mode.find(weight)
    # max_norm writes into the table; scaled and sparse gradients are no sums of the rows.
    refused = [options.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")]
    if operand is None or any(refused):
        return out
    padding = None if padding_idx is None else padding_idx % operand.whole.shape[0]
    return mode.rows(operand, out, input, padding)


def _picked(mode: WatchMode, out: Any, *args: Any, **kwargs: Any) -> Any:
    # table[indices], and index_select along rows.
    if not args:  # all by name
        return out
    operand, last = mode.find(args[0]), args[-1]
    along_rows = len(args) == 2 or (len(args) == 3 and args[1] == 0)
    plain = isinstance(last, Tensor) and last.dtype in (torch.int32, torch.int64) and last.dim() > 0
    if operand is None or not along_rows or not plain or kwargs:
        return out
    return mode.rows(operand, out, last)


def _added(mode: WatchMode, out: Any, *args: Any, **kwargs: Any) -> Any:
    # A bias may have a call of its own, as Mamba's: it is added to each row of the product. A sum
    # with a table is no use: with K-FAC, a position table that is added ended a GPT 7 % higher.
    for operand in map(mode.find, args):
        if operand is not None and operand.whole is operand.layer.bias:
            operand.layer.bias_apart = True
    return out


def _cast(mode: WatchMode, out: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    operand = mode.find(tensor)
    is_copy = isinstance(out, Tensor) and out.is_floating_point() and out is not tensor
    if operand is not None and is_copy and operand.view is operand.whole:
        # The gradient of the copy is the parameter's. A copy of a part must not stand in for it:
        # places are told by offsets, and those of a copy begin anew.
        operand.scope.known[id(out)] = out, operand.layer
        mode.note(operand)
    return out


def _conv(
    mode: WatchMode, out: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any
) -> Any:
    operand, added = mode.find(weight), mode.find(bias)
    if operand is None or not isinstance(operand.layer, ConvLayer):
        return out
    layer, module = operand.layer, operand.layer.module
    lacks_bias = layer.bias is not None and (added is None or added.layer is not layer)
    # The layer reads patches by its module's geometry: those of another geometry would be wrong.
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    geometry = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    to_tuple = _ntuple(layer.dims)
    differs = any([to_tuple(x) != to_tuple(getattr(module, n)) for n, x in geometry.items()])
    # A view may have the weight's own shape again, as Mamba's has.
    view, whole = operand.view, operand.whole
    is_whole = view.shape == whole.shape and view.stride() == whole.stride()
    reads = is_whole and not lacks_bias and not differs and module.padding_mode == "zeros"
    return mode.tap(operand, layer, out, input) if reads else out


_CASTS = "to float half bfloat16 double type type_as clone contiguous"

# By the functions that a mode is told: a method of tensors is another one than torch's function.
WATCHED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    F.embedding: _embedding,
    torch.Tensor.__getitem__: _picked,
    torch._grouped_mm: _grouped,
    getattr(F, "grouped_mm", torch._grouped_mm): _grouped,
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm), _matmul),
    **dict.fromkeys((torch.index_select, torch.Tensor.index_select), _picked),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.add_), _added),
    **dict.fromkeys((getattr(torch.Tensor, name) for name in _CASTS.split()), _cast),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _conv),
}
