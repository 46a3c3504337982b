"""The tap on an output: what may follow it, what it keeps, and what it leaves alone."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from kaisa_optim import Layer, register_layer
from kaisa_optim.capture.forward_pass import top_hooks
from tests.capture.test_capture import assert_same, clean_run, convnet, fit, loss_of, mlp
from tests.support.watch import (
    Watch,
    assert_close,
    assert_factors,
    exact,
    factors_of,
    normal,
    rows_of,
    seeded,
)


class Attends(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


KINDS = {
    "linear": (lambda: nn.Linear(4, 4), normal(3, 4)),
    "linear, sequences": (lambda: nn.Linear(4, 4), normal(3, 2, 4)),
    "linear, sequences, no bias": (lambda: nn.Linear(4, 4, bias=False), normal(3, 2, 4)),
    "linear, unbatched": (lambda: nn.Linear(4, 4), normal(4)),
    "convolution": (lambda: nn.Conv2d(2, 2, 2), normal(3, 2, 3, 3)),
    "convolution, unbatched": (lambda: nn.Conv2d(2, 2, 2), normal(2, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 2), normal(3, 2, 3)),
    "transposed, unbatched": (lambda: nn.ConvTranspose1d(2, 2, 2), normal(2, 3)),
    "embedding": (lambda: nn.Embedding(5, 4), torch.tensor([[1, 2], [0, 4]])),
    "attention": (Attends, normal(3, 5, 4)),
    "attention, batch first": (lambda: Attends(batch_first=True), normal(3, 5, 4)),
    "attention, unbatched": (Attends, normal(5, 4)),
}


@pytest.mark.parametrize(("make", "x"), KINDS.values(), ids=list(KINDS))
def test_in_place_activations_after_every_kind(make, x):
    def in_place(out: Tensor) -> Tensor:
        out += 0.5
        return out.relu_()

    runs = []
    for follow in (in_place, lambda out: torch.relu(out + 0.5)):
        net = seeded(make)
        opt = exact(net)
        loss_of(follow(net(x))).backward()
        opt.step()
        runs.append((net, opt))
    assert_same(*runs, list(runs[0][1].preconditioner.layers))


def nodes_of(out: Tensor) -> Counter[str]:
    """Return how many nodes of each kind an output's graph has."""
    nodes, queue = set(), [out.grad_fn]
    while queue:
        node = queue.pop()
        nodes.add(node)
        queue += [x for x, _ in node.next_functions if x is not None and x not in nodes]
    return Counter(type(node).__name__ for node in nodes)


@pytest.mark.skipif(top_hooks is None, reason="torch 2.6 can't walk past such functions")
@pytest.mark.parametrize("kind", ["linear, sequences", "attention", "attention, unbatched"])
def test_no_copies_of_gradients_where_the_output_is_a_view(kind):
    # Of a view that is changed in place autograd copies the gradient, whole and in part.
    make, x = KINDS[kind]
    net = seeded(make)
    opt = exact(net)
    seen = nodes_of(net(x))
    assert "TapBackward" in seen and "CopySlices" not in seen
    assert opt.preconditioner.layers


@pytest.mark.parametrize("first", [True, False])
def test_users_forward_hook_that_changes_the_output(first):
    # Its output is not the layer's s, whichever was registered first.
    x = normal(6, 4)
    net = mlp()

    def tripled(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return 3 * output

    twin = copy.deepcopy(net)
    watch = Watch(twin, "0")
    twin[0].register_forward_hook(tripled)
    fit(x)(twin)
    if first:
        net[0].register_forward_hook(tripled)
    opt = exact(net)
    if not first:
        net[0].register_forward_hook(tripled)
    fit(x)(net)
    assert_close(net[0].weight.grad, twin[0].weight.grad)
    opt.step()
    assert_factors(opt, "0", factors_of(*rows_of(twin[0], watch.trained("0")), 6.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_and_exporting_a_model_in_training():
    x = normal(6, 4)
    net = mlp()
    opt = exact(net)
    traced = torch.jit.trace(net, (x,))
    assert_close(traced(2 * x), net(2 * x))
    if torch.__version__ >= (2, 7):  # 2.6 stops at any hook that its tracer does not know
        exported = torch.export.export(net, (x,)).module()
        assert_close(exported(x), net(x))
    fit(x)(net)
    opt.step()
    assert_same((net, opt), clean_run(x))


def test_saved_tensors_kept_elsewhere():
    x = normal(6, 4)
    net = mlp()
    opt = exact(net)
    with torch.autograd.graph.save_on_cpu():
        out = net(x)
    with torch.autograd.set_detect_anomaly(True):
        loss_of(out).backward()
    opt.step()
    assert_same((net, opt), clean_run(x))


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that a forward pass keeps for the backward."""
    storages: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = net(x)
    del out
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)


@pytest.mark.parametrize("kind", ["linear", "convolution", "attention"])
def test_capture_keeps_no_extra_memory(kind):
    make, shape = {
        "linear": (mlp, (6, 4)),
        "convolution": (convnet, (6, 2, 3, 3)),
        "attention": (
            lambda: seeded(
                # With batch_first torch copies the input once more on its way into the attention.
                lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
            ),
            (3, 5, 4),
        ),
    }[kind]
    net = make()
    x = normal(*shape)
    plain = saved_bytes(net, x)
    opt = exact(net)
    assert saved_bytes(net, x) == plain > 0
    fit(x)(net)
    opt.step()
    assert saved_bytes(net, x) == plain  # nor when statistics are not due


def test_forward_mode_differentiation_leaves_its_passes_out():
    net, other = mlp(), mlp()
    opt, clean = exact(net), exact(other)
    x, direction = normal(6, 4), normal(6, 4, seed=1)
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(net(forward_ad.make_dual(x, direction))).tangent
        fit(x)(net)  # which has no tangents
    plain = torch.func.jvp(other, (x,), (direction,))[1]
    fit(x)(other)
    assert_close(slope, plain)
    opt.step()
    clean.step()
    assert_same((net, opt), (other, clean), ["0", "2"])


@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_inputs_whose_rows_are_not_read_are_refused_by_name(kind):
    net = mlp()
    opt = exact(net)
    x = normal(6, 4)
    if kind == "sparse":
        x = x.to_sparse()
        what = "it is of layout torch.sparse_coo"
    else:
        x = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        what = "it is a nested tensor"
    with pytest.raises(
        TypeError, match=rf"Invalid input of layer '0': {what}, .*skip_layers=\['0'"
    ):
        net(x)
    if kind == "nested":
        return
    # Where nothing is to be read of them, they pass.
    with opt.preconditioner.paused():
        net(x)
    net[0].weight.requires_grad_(False)
    fit(x)(net)
    opt.step()


def test_a_kind_of_ones_own_may_read_sparse_inputs():
    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    @register_layer(Sparse)
    class SparseLayer(Layer):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.in_shape, self.outputs = (4,), 3

        def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
            return x.to_dense()[None, :, None]

        def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
            return grad[None, :, None]

    x = normal(6, 4)
    net, other = seeded(lambda: Sparse(4, 3)), seeded(lambda: Sparse(4, 3))
    opt, clean = exact(net), exact(other)
    fit(x.to_sparse())(net)
    fit(x)(other)
    opt.step()
    clean.step()
    assert_same((net, opt), (other, clean), [""])
