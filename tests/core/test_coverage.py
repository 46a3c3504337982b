"""Which parameters K-FAC covers, what it tells of them, and kinds of a user's own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from kaisa_optim import KFACSGD, KFACAdam, Layer, register_layer
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import backward, descend, network, train, warnings_as
from tests.support.watch import Body, assert_close, exact, normal, seeded, solved, taken

SCALES = "only scales or shifts: the base optimizer steps it"


class Other(nn.Bilinear):
    """Has a weight that no kind knows."""

    def __init__(self) -> None:
        super().__init__(3, 3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)


def quiet(model: nn.Module, **options) -> KFACSGD:
    with warnings_as("error"):
        return exact(model, **options)


def noisy(model: nn.Module, **options) -> KFACSGD:
    with pytest.warns(UserWarning, match="raw gradients"):
        return exact(model, **options)


def loss_of(out: Tensor) -> Tensor:
    return (out - 0.3).square().sum() / len(out)


def stepped(net: nn.Module, opt: KFACSGD, x: Tensor) -> tuple[dict[str, Tensor], ...]:
    """Return raw gradients, and what a step took from the parameters."""
    opt.zero_grad()
    loss_of(net(x)).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    return gradients, taken(opt, net)


def sides(opt: KFACSGD) -> dict[str, tuple[int, int, int]]:
    """Blocks, width of A and width of G; negative where diagonal."""
    return {
        name: (
            layer.blocks,
            *(-n if diagonal else n for n, diagonal in map(layer.size_of, "ag")),
        )
        for name, layer in opt.preconditioner.layers.items()
    }


# ---- what is covered ----


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Renamed(nn.Linear):
    """Keeps the forward."""


def with_parameters_of_its_own() -> nn.Module:
    parts = {"positions": torch.zeros(4, 3), "shift": torch.zeros(1, 3), "head": nn.Linear(3, 2)}
    return Body(lambda m, x: m.head(x + m.positions + m.shift), **parts)


def sharing_a_weight() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


ENCODER = {
    "0.self_attn.in_proj": (3, 5, 4),
    "0.self_attn.out_proj": (1, 5, 4),
    "0.linear1": (1, 5, 6),
    "0.linear2": (1, 7, 4),
}
DECODER = {"0.multihead_attn.in_proj": (3, 5, 4), "0.multihead_attn.out_proj": (1, 5, 4)}
PROJECTIONS = {"0.q_proj": (1, 4, 4), "0.k_proj": (1, 3, 4), "0.v_proj": (1, 2, 4)}
NORMS = "0.norm1.weight 0.norm1.bias 0.norm2.weight 0.norm2.bias"
# Modules with the sides of their layers, and the names of parameters that scale or shift entries.
MODULES = {
    "attention of other widths": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, bias=False),
        PROJECTIONS | {"0.out_proj": (1, 4, 4)},
        "",
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 6), ENCODER, NORMS),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(4, 2, 6),
        ENCODER | DECODER,
        f"{NORMS} 0.norm3.weight 0.norm3.bias",
    ),
    # By the calls that its forward makes
    "subclasses": (
        lambda: nn.Sequential(Renamed(3, 2), Doubles(2, 2)),
        {"0.0": (1, 4, 2), "0.1": (1, 3, 2)},
        "",
    ),
    "parameters of its own": (
        with_parameters_of_its_own,
        {"0.positions": (1, 3, 4), "0.head": (1, 4, 2)},
        "0.shift",
    ),
    "shared": (sharing_a_weight, {"0.0": (1, 3, 3), "0.1": (1, 4, 3)}, "0.0.bias 0.2.bias"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_all_matrices_of_a_module_are_covered(kind):
    make, wanted, scaling = MODULES[kind]
    opt = quiet(nn.Sequential(make()))
    assert sides(opt) == wanted
    assert opt.preconditioner.uncovered == dict.fromkeys(scaling.split(), SCALES)
    covered = {p for layer in opt.preconditioner.layers.values() for p in layer.parameters}
    assert len(covered) + len(scaling.split()) == len(opt.param_groups[0]["params"])


EIGEN = {"compute_method": "eigen"}
ONE_SIDE = [{"max_factor_size": 4096}, {"normalization": "kaisa", **EIGEN}, EIGEN]
ONE_SIDE += [{"compute_method": "inverse"}]
WIDTHS = [
    # Narrow and small; 64 times as wide as the other side, or less
    *(((1, 512), {}, (2, 512)), ((512, 8), {}, (513, 8)), ((513, 9), {}, (514, 9))),
    *(((513, 8), {}, (-514, 8)), ((8, 514), {}, (9, -514)), ((4096, 65), {}, (4097, 65))),
    # A given width and the papers' methods look at one side alone.
    *(((4095, 16), options, (4096, 16)) for options in ONE_SIDE),
    *(((16, 4096), options, (17, 4096)) for options in ONE_SIDE),
    # The default admits 12,545, and refuses a vocabulary.
    *(((12_544, 200), EIGEN, (12_545, 200)), ((200, 30_522), EIGEN, (201, -30_522))),
    *(((16_383, 260), EIGEN, (16_384, 260)), ((16_384, 260), EIGEN, (-16_385, 260))),
    *(((4, 3), EIGEN | {"max_factor_size": n}, (5, 3)) for n in (5, float("inf"))),
    *(((4, 3), EIGEN | {"max_factor_size": n}, (-5, 3)) for n in (4, 3)),
    ((4, 3), EIGEN | {"max_factor_size": 2}, (-5, -3)),
]


@pytest.mark.parametrize(("shape", "options", "wanted"), WIDTHS)
def test_a_side_beyond_max_factor_size_or_64_times_the_other_is_diagonal(shape, options, wanted):
    with warnings_as("error"):
        opt = KFACSGD(nn.Linear(*shape, device="meta"), lr=0.1, **options)
    assert sides(opt) == {"": (1, *wanted)}


def test_the_features_of_a_table_keep_a_whole_factor():
    opt = KFACSGD(nn.Embedding(40_000, 600, device="meta"), lr=0.1)
    assert sides(opt) == {"": (1, -40_000, 600)}


@pytest.mark.parametrize("rank", [16, 64])
def test_an_adapter_costs_no_more_than_adams_moments(rank):
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4096, rank, bias=False), nn.Linear(rank, 4096, bias=False))
    with warnings_as("error"):
        opt = KFACSGD(net, lr=0.1)
    assert sides(opt) == {"0": (1, -4096, rank), "1": (1, rank, -4096)}
    moments = 2 * sum(p.numel() * 4 for p in net.parameters())
    assert opt.preconditioner.memory_usage()["total"] < moments


# ---- what is not, and who says so ----


def mixed() -> nn.Module:
    return Body(
        lambda m, x: m.out(m.norm(m.prelu(m.other(m.layer(x)))) * m.scale),
        layer=nn.Linear(3, 3),
        other=Other(),
        prelu=nn.PReLU(),
        scale=torch.tensor(1.5),
        norm=nn.LayerNorm(3, elementwise_affine=False),
        out=nn.Linear(3, 2),
    )


UNCOVERED = ["other.weight", "prelu.weight", "scale"]


def sharing_a_bias() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].bias = net[0].bias
    return net


def parametrized(wrap: Callable[[nn.Module], object]) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    wrap(net[0])
    return net


# Models, with what the names of the parameters that the base steps begin with.
LEFT = {
    "no kind": (mixed, ("other", "prelu", "scale"), {}),
    "skipped": (mixed, ("layer", "other", "prelu", "scale"), {"skip_layers": ["^layer$"]}),
    "a shared bias": (sharing_a_bias, "0.bias", {}),
    "weight_norm by hook": (lambda: parametrized(nn.utils.weight_norm), "0.", {}),
    "weight_norm": (lambda: parametrized(parametrizations.weight_norm), "0.", {}),
    "orthogonal": (lambda: parametrized(parametrizations.orthogonal), "0.", {}),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", LEFT)
def test_parameters_left_or_skipped_get_their_raw_gradient(case):
    make, raw, options = LEFT[case]
    net = seeded(make)
    opt = noisy(net, kl_clip=1e-8, **options)  # the clip is for covered layers
    report = opt.preconditioner.coverage()
    gradients, steps = stepped(net, opt, normal(5, 3))
    for name, gradient in gradients.items():
        assert name.startswith(raw) == (name in report.left | report.skipped)
        if name.startswith(raw):
            assert gradient.abs().max() > 1e-3
            assert_close(steps[name], gradient, 1e-12, name)
        else:
            assert steps[name].abs().max() < 0.1 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Embedding(5, 3, sparse=True), "Embedding: sparse gradients, or"),
        (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "Embedding: sparse gradients, or"),
        (lambda: nn.LSTM(3, 2), "no layer kind is registered for LSTM"),
        (lambda: nn.Bilinear(2, 2, 3), "no layer kind is registered for Bilinear"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "not real-valued"),
        (lambda: nn.GRUCell(3, 2), "no layer kind is registered for GRUCell: its calls"),
    ],
)
def test_reasons(make, reason):
    opt = noisy(nn.Sequential(nn.Linear(2, 2), make()))
    assert list(opt.preconditioner.layers) == ["0"]
    assert opt.preconditioner.uncovered
    assert all(why.startswith(reason) for why in opt.preconditioner.uncovered.values())


SCRIPTS = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, normal(6, 4)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_parts_in_torchscript_are_left_to_the_base(cls, whole, compiled):
    part = seeded(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) if whole else nn.Linear(4, 4)
    )
    net = nn.Sequential(compiled(part), nn.Linear(4, 2, bias=False).double())
    with pytest.warns(UserWarning, match="TorchScript runs its calls"):
        opt = cls(net, lr=0.1, weight_decay=0.0)
    left = opt.preconditioner.coverage().left | opt.preconditioner.coverage().skipped
    assert left.keys() == {f"0.{name}" for name, _ in part.named_parameters()}
    assert list(opt.preconditioner.layers) == ["1"]
    for i in range(3):
        gradients, steps = stepped(net, opt, normal(6, 4, seed=i))
        assert all(step.any() for step in steps.values())
        for name in left if cls is KFACSGD else ():
            assert_close(steps[name], 0.1 * gradients[name], 1e-10)
    opt.load_state_dict(opt.state_dict())
    said = "no layer that K-FAC covers .*TorchScript runs its calls"
    with pytest.raises(ValueError, match=said):
        cls(net[0], lr=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_function_in_a_watched_forward_is_a_use_that_nobody_knows():
    @torch.jit.script
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    scripted = Body(lambda m, x: product(x, m.w), w=torch.eye(4))
    net = nn.Sequential(scripted, nn.Linear(4, 40)).double()
    opt = exact(net)
    for i in range(6):
        gradients, steps = stepped(net, opt, normal(6, 4, seed=i))
        assert_close(steps["0.w"], gradients["0.w"], 1e-12)
    assert "Body uses it in a way" in opt.preconditioner.coverage().left["0.w"].reason


def test_weights_shared_with_a_module_of_another_kind_are_left_to_the_base():
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm((3, 3)), nn.Linear(3, 1))
    net[1].weight = net[0].weight
    opt = noisy(net)
    assert opt.preconditioner.uncovered["0.weight"] == "shared by 0.weight and 1.weight"


def test_a_bias_of_projections_of_which_one_is_not_covered():
    """No number of it may be stepped with that no layer has given."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True, kdim=4, vdim=4)
    attention.v_proj_weight = attention.k_proj_weight
    parts = {"attention": attention, "head": nn.Linear(6, 6)}
    model = Body(lambda m, x: m.head(m.attention(x, x[..., :4], x[..., :4])[0]), **parts)
    with pytest.warns(UserWarning, match="in_proj_bias: 18, the bias of a MultiheadAtt"):
        opt = KFACSGD(model, lr=0.1)
    assert opt.preconditioner.layers["attention.q_proj"].covers == (True, False)
    gradients, steps = stepped(model, opt, torch.randn(8, 3, 6))
    bias = "attention.in_proj_bias"
    torch.testing.assert_close(steps[bias], 0.1 * gradients[bias])


def test_papers_normalization_covers_what_the_papers_cover():
    net = nn.Sequential(
        nn.Linear(3, 2), nn.Conv2d(2, 2, 2), nn.Conv2d(2, 2, 2, groups=2), nn.Conv1d(2, 2, 2),
        nn.LayerNorm(2), nn.Embedding(4, 2),
    )  # fmt: skip
    opt = quiet(net, normalization="kaisa")
    assert list(opt.preconditioner.layers) == ["0", "1"]
    left = opt.preconditioner.uncovered
    assert {name[0] for name in left} == {"2", "3", "4", "5"}
    assert all("kaisa" in why or (name[0] == "4" and why == SCALES) for name, why in left.items())


ATTENTION = {"attention.in_proj", "attention.out_proj"}


@pytest.mark.parametrize(
    ("patterns", "skipped"),
    [
        (["^head"], {"head"}),
        ("^head", {"head"}),
        (["head"], {"head", *ATTENTION}),  # MultiheadAttention has it in its name
        (["^body$"], {"body.0", "body.1"}),  # with its children
        (["Conv1d$"], {"body.1"}),  # by class
        ([r"body\.\d", "MultiheadAttention"], {"body.0", "body.1", *ATTENTION}),
        (["^Linear"], {"body.0", "head"}),
    ],
)
def test_skip_layers(patterns, skipped):
    body = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1))
    parts = {"body": body, "attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(3, 2)}
    opt = quiet(nn.ModuleDict(parts), skip_layers=patterns)
    assert set(opt.preconditioner.layers) == {"body.0", "body.1", "head", *ATTENTION} - skipped
    assert not opt.preconditioner.uncovered  # the user knows
    assert opt.preconditioner.coverage().skipped


# ---- a kind of a user's own ----


class RowsOfCalls(Layer):
    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x[None, :, None]

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return grad[None, :, None]


def test_users_own_layer_kind():
    class Gated(nn.Module):
        """A linear map of the input's square, whose weight is stored the other way round."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x.square() @ self.weight + self.bias

    net = seeded(lambda: nn.Sequential(Gated(), nn.Tanh(), nn.Linear(4, 2)))
    assert sides(quiet(net))["0.weight"] == (1, 4, 3)  # by its shape

    @register_layer(Gated)
    class GatedLayer(RowsOfCalls):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.in_shape, self.outputs = (3,), 4

        def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
            return super().input_rows(x.square(), grad)

        def weight_view(self, tensor: Tensor) -> Tensor:
            return tensor.mT[None]

    opt, x = quiet(net), normal(6, 3)
    assert sides(opt)["0"] == (1, 4, 4)
    linear = Body(lambda m, x: m.inner(x.square()), inner=nn.Linear(3, 4))
    twin = nn.Sequential(linear, *copy.deepcopy(net[1:])).double()
    linear.inner.load_state_dict({"weight": net[0].weight.T, "bias": net[0].bias})
    (_, expected), (_, steps) = stepped(twin, quiet(twin), x), stepped(net, opt, x)
    assert_close(steps["0.weight"].T, expected["0.inner.weight"], 1e-8)
    assert_close(steps["0.bias"], expected["0.inner.bias"], 1e-8)


def test_users_kind_replaces_a_registered_one_and_claims_its_parts():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3))
            self.part = nn.Linear(2, 2)  # the kind answers for it, or nobody does

        def forward(self, x: Tensor) -> Tensor:
            return self.part(F.linear(x, self.weight))

    class Norm(nn.LayerNorm):
        """Has its parent's kind until it has one of its own."""

    @register_layer(Pair, Norm)
    class Refused(Layer):
        @classmethod
        def unsupported(cls, module: nn.Module) -> str | None:
            return "not today"

    opt = noisy(nn.Sequential(Pair(), Norm(2)))
    assert list(opt.preconditioner.layers) == ["0.part"]
    assert opt.preconditioner.uncovered == {
        "0.weight": "Pair: not today",
        "1.weight": "Norm: not today",
        "1.bias": "Norm: not today",
    }

    @register_layer(Pair)
    class Whole(RowsOfCalls):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name, module)
            self.in_shape, self.outputs = (3,), 2

    opt = noisy(nn.Sequential(Pair(), nn.Linear(2, 2)))
    assert list(opt.preconditioner.layers) == ["0", "1"]
    assert set(opt.preconditioner.uncovered) == {"0.part.weight", "0.part.bias"}


# ---- weights that several modules share: one layer takes the rows of all uses ----


class Tied(nn.Module):
    """A table that is the head's weight, too: by registration, or in the forward's code alone."""

    def __init__(self, *, bias: bool = False, registered: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 3)
        if registered:
            self.head = nn.Linear(3, 7, bias=bias)
            self.head.weight = self.words.weight
        self.registered = registered

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.words(x)).tanh()
        return self.head(hidden) if self.registered else F.linear(hidden, self.words.weight)


def tied_rows(net: nn.Module, x: Tensor) -> list[Tensor]:
    """One-hot rows and ∂L/∂s of the table, then inputs and ∂L/∂s of the head."""
    words = net.words(x).detach().requires_grad_()
    hidden = net.body(words).tanh()
    logits = net.head(hidden)
    logits.retain_grad()
    F.cross_entropy(logits.flatten(0, -2), x.roll(1, -1).flatten()).backward()
    one_hot = F.one_hot(x.flatten(), len(net.words.weight)).double()
    pairs = one_hot, words.grad.flatten(0, -2), hidden.detach().flatten(0, -2)
    return [*pairs, logits.grad.flatten(0, -2)]


def tied_step(net: nn.Module, x: Tensor, **options):
    opt = exact(net, loss_terms="positions", **options)
    F.cross_entropy(net(x).flatten(0, -2), x.roll(1, -1).flatten()).backward()
    gradient = net.words.weight.grad.clone()
    return opt, gradient, taken(opt, net)["words.weight"]


def test_a_tied_weight_adds_two_products_up_as_one():
    net = seeded(Tied)
    x = torch.tensor([[0, 3, 3, 1], [6, 1, 0, 2]])
    one_hot, words, hidden, logits = tied_rows(copy.deepcopy(net), x)
    n = x.numel()
    first = one_hot.T @ one_hot / n, n * words.T @ words
    second = (n * logits.T @ logits).diagonal().diag(), hidden.T @ hidden / n
    dense = sum(torch.kron(v, d) for v, d in (first, second))
    opt, gradient, step = tied_step(net, x)
    a, g = opt.preconditioner.factors("words")
    product = torch.kron(a[0].diag(), g[0])
    assert_close(product.trace(), dense.trace())
    # Nearer than either product alone, with its trace made whole.
    best = torch.linalg.norm(product - dense)
    for v, d in (first, second):
        alone = torch.kron(v, d)
        scaled = alone * dense.trace() / alone.trace()
        assert best < torch.linalg.norm(scaled - dense)
    assert best < 0.5 * torch.linalg.norm(dense)
    assert_close(step, solved(g, a[0].diag()[None], gradient[None])[0], 1e-8)


@pytest.mark.parametrize("trained", [False, True])
def test_one_use_alone_of_a_tied_weight_is_exact(trained):
    """The table's own rows have no gradient, or a zero, and the head is a linear layer."""
    net, plain = seeded(Tied), seeded(Tied)
    plain.head.weight = nn.Parameter(plain.words.weight.detach().clone())
    x = normal(6, 3)
    steps = []
    for one in (net, plain):
        opt = exact(one, max_factor_size=6)
        with torch.set_grad_enabled(trained):
            hidden = one.words(torch.arange(6))
        loss_of(one.head(0 * hidden + x)).backward()
        steps.append(taken(opt, one))
    assert_close(steps[0]["words.weight"], steps[1]["head.weight"], 1e-9)


def test_several_linear_layers_of_one_weight_are_one_with_all_their_rows():
    x, weight, steps = normal(6, 3), normal(3, 3, seed=2), []
    one = nn.Linear(3, 3, bias=False)
    for second in (nn.Linear(3, 3, bias=False), one):
        one.weight = second.weight = nn.Parameter(weight.clone())
        twice = Body(lambda m, x: m.second(m.first(x).tanh()), first=one, second=second)
        opt = exact(twice)
        loss_of(twice(x)).backward()
        steps.append(taken(opt, twice)["first.weight"])
        assert opt.preconditioner.coverage().share == 1
    assert_close(*steps, 1e-9)


def test_the_base_steps_the_bias_beside_a_tied_weight():
    net = seeded(lambda: Tied(bias=True))
    opt, _, _ = tied_step(net, torch.tensor([[0, 3, 3, 1]]))
    assert list(opt.preconditioner.layers) == ["words", "body"]
    assert opt.preconditioner.coverage().left == {"head.bias": (7, SCALES)}


# ---- parameters that were replaced ----


def shards_late() -> str:
    from torch.distributed.fsdp import fully_shard

    model = network()
    opt = KFACSGD(model, lr=0.1)
    fully_shard(model)
    backward(model, 0)
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    return str(caught.value)


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_a_model_that_is_sharded_after_its_optimizer_is_refused():
    for text in run(2, shards_late):
        assert "0.weight is a DTensor" in text and "after fully_shard" in text


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
def test_weights_that_moved_within_the_model_are_still_its_own():
    """Pruning and parametrizations keep the parameter under another name; a tied one has two."""
    model = network()
    model.append(nn.Linear(3, 6, dtype=torch.float64)).append(nn.Linear(6, 3, dtype=torch.float64))
    model[4].weight = model[2].weight
    opt = KFACSGD(model, lr=0.1, skip_layers="3")
    prune.identity(model[0], "weight")
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # is still that of model[4]
    train(model, opt, range(1))
    last = opt.param_groups[0]["params"].pop()  # on purpose: the base no longer steps this one
    own = model[0].weight_orig, model[4].weight, last
    before = [p.detach().clone() for p in own]
    train(model, opt, range(1, 2))
    assert [torch.equal(p, q) for p, q in zip(own, before, strict=True)] == [False, False, True]
    assert opt.preconditioner.steps == 2


def test_module_parametrized_after_construction():
    # The product of A and G no longer describes its gradient: it must not be used.
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    parametrizations.orthogonal(net[0])
    with pytest.warns(UserWarning) as caught:
        for _ in range(4):  # until the layer no longer counts as covered
            gradients, steps = stepped(net, opt, normal(6, 4))
    (text,) = [str(one.message) for one in caught]
    assert "original: 20" in text
    original = "0.parametrizations.weight.original"
    assert_close(steps[original], gradients[original], 1e-12)


# ---- what is told ----


def test_coverage_as_data_and_in_one_line(caplog):
    net = seeded(mixed)
    with caplog.at_level("INFO", logger="kaisa_optim"), pytest.warns(UserWarning) as caught:
        opt = exact(net, skip_layers=["^out$"])
    report = opt.preconditioner.coverage()
    assert (report.covered, report.total) == (12, 49) and report.share == 12 / 49
    assert list(report.left) == ["other.weight", "scale", "prelu.weight"]  # the largest first
    assert report.left["other.weight"].size == 27
    assert report.skipped.keys() == {"out.weight", "out.bias"}
    line = (
        "K-FAC covers 24.5 % of 49 parameters; the base optimizer updates the rest "
        "(other.weight, scale, prelu.weight ...): print(optimizer.preconditioner)"
    )
    assert str(report) == line and caplog.messages == [line]
    assert "K-FAC covers 24.5 % of 49 parameters\n" in repr(opt.preconditioner)
    (notice,) = caught
    text = str(notice.message)
    assert text.endswith("\nK-FAC covers 24.5 % of 49 parameters")
    assert all(f"\n  {name}: " in text for name in UNCOVERED)
    assert "other.weight: 27, no layer kind is registered for Other" in text
    # The line that built the optimizer.
    assert notice.filename == str(Path(__file__).parents[1] / "support" / "watch.py")
    whole = quiet(nn.Linear(3, 2)).preconditioner.coverage()
    assert str(whole) == "K-FAC covers 100 % of 8 parameters"


def test_repr_always_lists_what_is_not_covered():
    net = seeded(mixed)
    with warnings_as("ignore"):
        opt = exact(net, skip_layers=["^out$"])
        rounding = exact(net, statistics_precision="medium")
    text = repr(opt.preconditioner)
    before, covered, raw, skipped = re.split("covered:|raw gradients:|skipped:", text)
    assert "eigen" in before and "0 steps taken" in before
    assert "statistics every 10, refreshes every 50 steps, all layers at once\n" in before
    told = "every 10 in medium precision, refreshes every 50 steps, up to 1 layer at a time\n"
    assert f"statistics {told}" in repr(rounding.preconditioner)
    assert "layer: A 4, G 3" in covered and "out" not in covered
    assert all(f"{name}: " in raw for name in UNCOVERED)
    assert "out.weight: matches '^out$'" in skipped and "out.bias: matches '^out$'" in skipped


@pytest.mark.parametrize(
    ("staggered", "interval", "told"),
    [
        (False, 50, "all layers at once"),
        (True, 50, "up to 4 layers at a time"),  # three of the other shape cost more
        (True, 2, "up to 4 layers at a time"),
        (True, 1, "all layers at once"),
    ],
)
def test_repr_tells_how_many_layers_are_refreshed_at_once(staggered, interval, told):
    net = seeded(lambda: nn.Sequential(*(nn.Linear(2, n) for n in 4 * [2] + 3 * [3])))
    opt = quiet(net, staggered=staggered, inv_update_steps=interval)
    assert f"refreshes every {interval} steps, {told}\n" in repr(opt.preconditioner)


def test_repr_tells_parts_of_a_module_and_what_is_frozen():
    net = seeded(lambda: nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Linear(6, 2)))
    opt = quiet(net)
    text = repr(opt.preconditioner)
    assert "0: A 3, G 3, for each of 2 parts of its outputs\n" in text and "frozen" not in text
    net[1].weight.requires_grad_(False)
    assert "1: A 7, G 2 (weight frozen)" in repr(opt.preconditioner)
    assert opt.preconditioner.coverage().total == 12 + 6 + 2
    net[1].requires_grad_(False)
    assert "1: A 7, G 2 (weight and bias frozen)" in repr(opt.preconditioner)
    assert opt.preconditioner.coverage().total == 12 + 6


def test_a_forward_pass_before_the_optimizer_was_built_is_told():
    model = seeded(lambda: nn.Linear(3, 2))
    loss = model(torch.ones(4, 3, dtype=torch.float64)).sum()
    said = "this very model once a step, after building the optimizer"
    with pytest.raises(RuntimeError, match=said):
        descend(quiet(model), loss)


def test_a_parameter_is_covered_if_calls_of_all_its_layers_are_found():
    opt = quiet(seeded(lambda: nn.MultiheadAttention(4, 2, kdim=5, vdim=6)))
    kfac = opt.preconditioner
    assert kfac.coverage().share == 1
    one = kfac.registry.states["q_proj"]
    one.unseen = 1
    report = kfac.coverage()
    assert {name: left.size for name, left in report.left.items()} == {
        "q_proj_weight": 16,
        "in_proj_bias": 12,  # the layers of k and v have a part of it, too
    }
    assert (report.covered, report.total) == (64, 92)
    one.has_average = True
    assert kfac.coverage().share == 1


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda kfac: kfac.factors("nine"), KeyError, "no covered layer 'nine'; there are 0"),
        (lambda kfac: kfac.factors("0"), KeyError, "layer '0' has no statistics yet"),
        (
            lambda kfac: kfac.step(),
            TypeError,
            r"optimizer\.step\(\) calls preconditioner\.step\(\) itself; leave out the call",
        ),
    ],
)
def test_calls_that_have_no_answer(call, error, said):
    with pytest.raises(error, match=said):
        call(quiet(nn.Sequential(nn.Linear(3, 2))).preconditioner)
