"""The contract of a kind of layer, and the register of kinds.

One canonical layout: rows are ``[blocks, batch, positions, features]``. A block is one Kronecker
pair: a plain layer has one, a grouped convolution one for each group.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import invalid, invalid_because
from ..linalg.moments import second_moment
from .sampling import WHOLE, Part, Sample


class Moments(NamedTuple):
    """Sums that one backward pass of one layer adds to the statistics of ``blocks``.

    Moments of a part of the pass are weighted up to stand for the whole, as the counts do.
    """

    a: Tensor  # Σ a aᵀ [blocks, n, n], or its diagonal [blocks, n]; one block may stand for all
    g: Tensor  # Σ (∂L/∂s)(∂L/∂s)ᵀ, likewise
    rows: int
    positions: int
    blocks: slice
    rows_of_block: Sequence[int] | None = None  # each block's rows, if they differ
    unit: Tensor | None = None  # the output gradients were divided by it; None: by 1


class PassSettings:
    """The settings of the moments of one call of a layer."""

    __slots__ = "blocks", "dtype", "part", "reduce"

    def __init__(
        self,
        reduce: bool,  # one row for each example: ā, Σ ∂L/∂s
        dtype: torch.dtype,  # the moments' dtype
        blocks: slice = slice(None),  # the layer's blocks that the call sees
        part: Part = WHOLE,  # the part of the pass that is read
    ) -> None:
        self.reduce, self.dtype, self.blocks, self.part = reduce, dtype, blocks, part


Tap = Callable[["Layer", Tensor, Tensor, slice], Tensor]

# What a layer's hook does in the passes up to the next step: nothing; note the passes that come to
# the layer; add their moments to the sums; and compare their rows with the gradient, too.
LEAVE, COUNT, GATHER, COMPARE = range(4)


# The last input's moment, for the next layer that is given the very same input. The moment is
# dropped with its input, so that it lives no longer than the layers that use it.
Shared = WeakIdKeyDictionary


class Layer:
    """One covered module: how its tensors become rows and its gradient a matrix.

    A kind for a module of your own is a subclass under :func:`register_layer` that sets
    ``in_shape`` and ``outputs`` in its ``__init__`` and answers :meth:`input_rows` and
    :meth:`output_rows`; the module must compute s = W a + b on its rows, with parameters called
    ``weight`` ``[outputs, *in_shape]`` and ``bias`` ``[outputs]`` (or none). The other methods are
    for kinds that store their parameters differently or know a shorter way to a moment.

    The factors' sizes follow ``covers``: a frozen bias appends no 1; a frozen weight leaves only
    the 1 in A.
    """

    in_papers = False  # among the kinds that the papers' own code preconditions
    divided_by_positions = False  # the papers' normalization divides rows by the positions
    cast_by_autocast = False  # autocast runs this kind in half precision
    diagonal_input = False  # A is diagonal whatever its size
    reads_input = True  # output_rows reads the input, too
    reads_dense_only = False  # nested and sparse inputs are refused
    keeps_another = False  # the forward keeps a tensor made of its input, and not the input
    unseen_output = False  # nothing keeps the output, not even the backward of the forward
    watchable = False  # calls with its weight tell all that its statistics need
    input_dim: int | None = None  # of a matrix weight: the dimension that meets the input

    name: str
    module: nn.Module
    covers: tuple[bool, bool]  # weight and bias: trained, not frozen when statistics were taken
    parameters: tuple[nn.Parameter, ...]  # the covered ones, weight first
    names = "weight", "bias"  # as the module calls its parameters
    number = 0  # in the order of the model's layers
    tag = ""  # tells layers apart that may share a parameter
    blocks: int = 1
    in_shape: tuple[int, ...]  # shape of one row of one block, as the weight stores it
    outputs: int  # rows of one block's weight matrix
    # Modules in which calls with this layer's parameters are watched; empty: the output of its own
    # module tells all.
    watched_in: tuple[nn.Module, ...] = ()
    crossed = False  # a call's A enters the primary's G, and the call's G the primary's A
    bias_apart = False  # the bias is added by a call of its own
    by_use = False  # no kind stands for the module's forward: calls alone tell the use
    tied = False  # the weight has uses in both directions, plain and crossed ones
    turned = False  # the weight has crossed uses alone: G's side holds the inputs
    task = LEAVE  # the one field that a hook reads; capture writes it once a step

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.weight: nn.Parameter | None = module._parameters.get("weight")
        self.bias: nn.Parameter | None = module._parameters.get("bias")
        self.trained = (False, False)  # whether weight and bias are in the optimizer's groups
        self.cover((False, False))
        self.wide = math.inf  # a side wider than this is diagonal
        self.shared = Shared()  # one for all layers of a model, once they are captured

    def cover(self, covers: tuple[bool, bool]) -> None:
        """Cover weight and bias, or one of them."""
        self.covers = covers
        own = [*zip((self.weight, self.bias), covers, self.trained, strict=True)]
        self.parameters = tuple([p for p, covered, _ in own if covered and p is not None])
        # The parameters in the optimizer's groups, and whether each is covered.
        self.trainable = [p for p, _, trained in own if trained]
        self.flags = [covered for _, covered, trained in own if trained]

    @property
    def inputs(self) -> int:
        return math.prod(self.in_shape)

    @property
    def a_dim(self) -> int:
        return self.a_dim_of(self.covers)

    @property
    def g_dim(self) -> int:
        return self.g_dim_of(self.covers)

    def a_dim_of(self, covers: tuple[bool, bool]) -> int:
        return self.inputs * covers[0] + covers[1]

    def g_dim_of(self, covers: tuple[bool, bool]) -> int:
        return self.outputs

    @property
    def diagonal_a(self) -> bool:
        return self.has_diagonal_a(self.covers)

    def has_diagonal_a(self, covers: tuple[bool, bool]) -> bool:
        return self.diagonal_input or self.a_dim_of(covers) > self.wide

    @property
    def diagonal_g(self) -> bool:
        return self.has_diagonal_g(self.covers)

    def has_diagonal_g(self, covers: tuple[bool, bool]) -> bool:
        return self.g_dim_of(covers) > self.wide

    def covers_now(self) -> tuple[bool, bool]:
        """Return whether a backward pass now would give weight and bias a gradient to train by."""
        weight, bias = self.weight, self.bias
        return (
            self.trained[0] and weight is not None and weight.requires_grad,
            self.trained[1] and bias is not None and bias.requires_grad,
        )

    def same_place(self, other: Layer) -> bool:
        """Return whether both stand for the same parameters of the same module."""
        return (
            self.module is other.module and self.weight is other.weight and self.bias is other.bias
        )

    # ---- rows of one call ----

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return rows a, without the bias's 1, of a module's input (and its output's gradient)."""
        raise NotImplementedError

    def input_rows_key(self) -> Hashable:
        """Return a key: layers with equal keys make the same rows of one input, or ``None``."""
        return None

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        """Return rows ∂L/∂s of the gradient of the module's output."""
        raise NotImplementedError

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        """Return Σ g aᵀ ``[blocks, outputs, inputs]`` of one call; ``None`` where rows do not tell.

        It is the call's part of the weight's gradient.
        """
        try:
            a, g = self.input_rows(x, grad), self.output_rows(x, grad)
        except NotImplementedError:  # a kind that knows shorter ways to its moments
            return None
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return g.flatten(1, 2).to(dtype).mT @ a.flatten(1, 2).to(dtype)

    def unbatched(self, x: Tensor) -> bool:
        """Return whether this input is a single example without a batch dimension."""
        return False

    def example_dim(self, output: Tensor) -> int | None:
        """Return the dimension of the examples, alike in input and output; ``None``: it has none.

        ``statistics_fraction`` takes a part of it.
        """
        return None if self.unbatched(output) else 0

    def part(self, x: Tensor, output: Tensor, sample: Sample | None) -> Part:
        """Return the part of a pass that statistics read."""
        dim = None if sample is None else self.example_dim(output)
        if sample is None or dim is None:
            return WHOLE
        part = sample.part(dim, output.shape[dim])
        if part is not WHOLE and x.shape[dim : dim + 1] != (part.whole,):
            must = (
                f"layer {self.name!r} has an input {tuple(x.shape)} and an output "
                f"{tuple(output.shape)}, of which statistics_fraction takes the same examples; "
                "name a dimension that both have alike, or None"
            )
            raise invalid("example_dim", dim, must)
        return part

    # ---- moments of rows; a kind that knows a shorter way overrides them ----

    def moments(
        self,
        x: Tensor | None,
        grad: Tensor,
        covers: tuple[bool, bool],
        how: PassSettings,
        known_a: Tensor | None = None,
    ) -> Moments:
        """Return both moments of one backward pass.

        ``known_a`` is the input's moment, where an earlier pass has made it.
        """
        reduce, dtype, part, blocks = how.reduce, how.dtype, how.part, how.blocks
        here, own = None if x is None else part.of(x), part.of(grad)
        wide = self.has_diagonal_g(covers)
        moment_g, batch, positions = self._output_moment(
            here, own, reduce=reduce, diagonal=wide, dtype=dtype
        )
        moment_g = part.weighted(moment_g)
        batch = batch * part.whole // part.taken
        rows = batch if reduce else batch * positions
        diagonal = self.has_diagonal_a(covers)
        if known_a is not None:
            moment_a = known_a
        elif covers[0] and x is not None and here is not None:
            asked = {"reduce": reduce, "diagonal": diagonal, "append_one": covers[1]}
            # Layers with one input, as query and key, make its moment once. Input or moment may
            # have been written into since.
            key = self.input_rows_key()
            said = key, part, *asked.values(), dtype, x._version
            known, version, moment_a = self.shared.get(x, (None, None, None))
            if known == said and moment_a._version == version and key is not None:
                moment_a = moment_a.clone()
            else:
                moment_a = part.weighted(self.input_moment(here, own, dtype=dtype, **asked))
                if key is not None:
                    self.shared.clear()
                    self.shared[x] = said, moment_a._version, moment_a
        else:
            blocks_seen = moment_g.shape[0]
            shape = (blocks_seen, self.a_dim_of(covers)) if diagonal else (blocks_seen, 1, 1)
            moment_a = moment_g.new_full(shape, rows)
        return Moments(moment_a, moment_g, rows, positions, blocks)

    def _check_rows(self, method: str, rows: Tensor, features: int) -> None:
        # A call may see some of the blocks, and one block of inputs may stand for all.
        if rows.dim() != 4 or rows.shape[3] != features or rows.shape[0] > self.blocks:
            why = (
                f"{tuple(rows.shape)} in layer {self.name!r}; it must return rows [blocks, batch, "
                f"positions, features], here [{self.blocks}, batch, positions, {features}]"
            )
            raise invalid_because(f"{type(self).__name__}.{method}", why)

    def _output_moment(
        self,
        x: Tensor | None,
        grad: Tensor,
        *,
        reduce: bool,
        diagonal: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int, int]:
        """Return Σ (∂L/∂s)(∂L/∂s)ᵀ of this gradient, and how many examples and positions it has."""
        g = self.output_rows(x, grad)
        self._check_rows("output_rows", g, self.outputs)
        _, batch, positions, _ = g.shape
        g = g.sum(2, dtype=dtype) if reduce else g.flatten(1, 2)
        return second_moment(g, dtype, diagonal=diagonal), batch, positions

    def input_moment(
        self,
        x: Tensor,
        grad: Tensor,
        *,
        reduce: bool,
        diagonal: bool,
        append_one: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return Σ a aᵀ of this input."""
        a = self.input_rows(x, grad)
        self._check_rows("input_rows", a, self.inputs)
        a = a.mean(2, dtype=dtype) if reduce else a.flatten(1, 2)
        return second_moment(a, dtype, diagonal=diagonal, append_one=append_one)

    # ---- the kind ----

    @classmethod
    def layers_of(cls, name: str, module: nn.Module) -> list[Layer]:
        """Return the layers that a module of this kind makes; most make one."""
        return [cls(name, module)]

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """Return why this module can't be covered, or ``None``."""
        return None

    @classmethod
    def interceptor(cls, layers: list[Layer], tap: Tap) -> TorchFunctionMode | None:
        """Return a mode to run the module's forward under, if the output alone tells too little.

        The mode calls ``tap(layer, output, input, blocks)`` for every call that belongs to one of
        these ``layers``, and goes on with the tensor that ``tap`` returns.
        """
        return None

    @property
    def sections(self) -> int:
        """The number of equal parts of the blocks that a call may see alone; most kinds have 1."""
        return self.blocks if self.intercepts() else 1

    @classmethod
    @functools.cache
    def intercepts(cls) -> bool:
        """Return whether this kind looks into its module's forward."""
        return _overrides(cls, "interceptor")

    @property
    def primary(self) -> Layer:
        """The layer whose statistics a call enters: itself, or the layer whose weight it uses."""
        return self

    @property
    def adds_bias(self) -> bool:
        """Return whether the rows of a call have a 1 for the bias, if it is covered."""
        return True

    # ---- the gradient as a matrix ----

    def matrix_parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of a ``[blocks, g, a]`` matrix, one for each covered parameter."""
        parts = []
        if self.covers[0]:
            parts.append(matrix[..., : self.inputs].unflatten(-1, self.in_shape))
        if self.covers[1]:
            parts.append(matrix[..., -1])
        return parts

    def parameter_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return views, shaped like their matrix part, of tensors like the covered parameters."""
        views = iter(tensors)
        parts = []
        if self.covers[0]:
            parts.append(self.weight_view(next(views)))
        if self.covers[1]:
            parts.append(self.bias_view(next(views)))
        return parts

    def weight_view(self, tensor: Tensor) -> Tensor:
        """Return a view of a weight-shaped tensor as ``[blocks, outputs, *in_shape]``."""
        return tensor.unflatten(0, (self.blocks, self.outputs))

    @property
    def bias_rows(self) -> int:
        """The number of entries of the bias that are this layer's: some kinds share a bias."""
        return 0 if self.bias is None else self.bias.numel()

    def bias_view(self, tensor: Tensor) -> Tensor:
        """Return a view of a bias-shaped tensor as ``[blocks, outputs]``."""
        return tensor.unflatten(0, (self.blocks, self.outputs))

    def __repr__(self) -> str:
        a = f"{self.a_dim}{' diagonal' if self.diagonal_a else ''}"
        g = f"{self.g_dim}{' diagonal' if self.diagonal_g else ''}"
        a, g = (g, a) if self.turned else (a, g)
        count = f", for each of {self.blocks} parts of its outputs" if self.blocks > 1 else ""
        each = zip(("weight", "bias"), self.trained, self.covers_now(), strict=True)
        frozen = [name for name, trained, moves in each if trained and not moves]
        note = f" ({' and '.join(frozen)} frozen)" if frozen else ""
        return f"{self.name or type(self.module).__name__}: A {a}, G {g}{count}{note}"


def _overrides(kind: type[Layer], name: str) -> bool:
    return inspect.getattr_static(kind, name) is not inspect.getattr_static(Layer, name)


# By module class, or by the name of a class that only another library can import.
_KINDS: dict[type[nn.Module] | str, type[Layer]] = {}
K = TypeVar("K", bound=type[Layer])


def register_layer(*modules: type[nn.Module]) -> Callable[[K], K]:
    """Return a class decorator: its :class:`Layer` subclass handles these module classes.

    Module subclasses are handled too, as long as they keep the registered class's ``forward``.
    A later registration for the same class replaces the earlier one.
    """

    of_layers = [m for m in modules if isinstance(m, type) and issubclass(m, Layer)]
    if not modules or of_layers:
        raise TypeError("register_layer needs the module classes: @register_layer(ModuleClass)")
    for module in modules:
        if not (isinstance(module, type) and issubclass(module, nn.Module)):
            raise TypeError(
                f"register_layer needs module classes, not {module!r}: @register_layer(ModuleClass)"
            )

    def register(kind: K) -> K:
        if not (isinstance(kind, type) and issubclass(kind, Layer)):
            raise TypeError(f"register_layer takes a subclass of Layer, not {kind!r}")
        # A kind that overrides one of these needs no rows, makes layers of another class, or none.
        if not any(_overrides(kind, name) for name in ("moments", "layers_of", "unsupported")):
            ways = {"input_rows": ("input_rows", "input_moment"), "output_rows": ("output_rows",)}
            lacking = [n for n, way in ways.items() if not any(_overrides(kind, x) for x in way)]
            if lacking:
                raise TypeError(
                    f"{kind.__name__} lacks {' and '.join(lacking)}, which must return rows "
                    "[blocks, batch, positions, features]"
                )
        for module in modules:
            _KINDS[module] = kind
        return kind

    return register


def check_sizes(layer: Layer) -> None:
    """Refuse a layer whose kind has not said, or has said wrongly, how large it is."""
    kind = type(layer)
    title = f"{kind.__name__} of {layer.name!r}"
    needed = {"in_shape": "a_dim_of", "outputs": "g_dim_of"}  # attributes, and their readers
    for name, user in needed.items():
        if not hasattr(layer, name) and not _overrides(kind, user):
            raise invalid_because(title, f"it has no {name}; set it in __init__")
    plain = not any(_overrides(kind, name) for name in (*needed.values(), "weight_view"))
    if plain and layer.weight is not None:
        wanted = (layer.blocks * layer.outputs, *layer.in_shape)
        if tuple(layer.weight.shape) != wanted:
            why = (
                f"outputs and in_shape say {wanted}, the weight is {tuple(layer.weight.shape)}; "
                "set those that it has, or override weight_view"
            )
            raise invalid_because(title, why)


def kind_of(module: nn.Module) -> type[Layer] | None:
    """Return a module's registered kind, or ``None``; no kind covers an overridden forward."""
    for cls in type(module).__mro__:
        kind = _registered(cls)
        if kind is not None:  # weight standardization overrides _conv_forward
            names = [] if "forward" in vars(module) else ["forward", "_conv_forward"]
            same = [getattr(type(module), x, None) is getattr(cls, x, None) for x in names]
            return kind if same and all(same) else None
    return None


def inherited_kind(module: nn.Module) -> type[Layer] | None:
    """Return the kind of the class that a module inherits from, whatever its forward does."""
    return next(filter(None, map(_registered, type(module).__mro__)), None)


def _registered(cls: type) -> type[Layer] | None:
    return _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__name__}")
