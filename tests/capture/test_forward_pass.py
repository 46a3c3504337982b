"""Which forward pass a backward belongs to, and so what K is: one number for all layers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kaisa_optim import KFACSGD
from tests.capture.test_capture import CHECKPOINTS, under
from tests.support.ranks import fresh


class Net(nn.Module):
    """Two layers, each behind a checkpoint or not."""

    def __init__(self, kind: str = "plain"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.kind = kind

    def forward(self, x):
        for part in (self.first, self.last):
            x = under(CHECKPOINTS[self.kind], part, x)
        return x


def rows(n: int) -> torch.Tensor:
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return x.requires_grad_()  # a reentrant checkpoint needs one


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum(1).mean()


def flat(opt, prefix: str = "") -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([f.flatten() for f in opt.preconditioner.factors(prefix + name)])
        for name in ("first", "last")
    }


def factors(net: nn.Module, train) -> dict[str, torch.Tensor]:
    opt = KFACSGD(net, lr=0.1)
    train(net)
    opt.step()
    return flat(opt)


def assert_equal(actual, expected):
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=0)


def a_forward_in_between(net):
    loss = loss_of(net(rows(8)))
    net(rows(24))  # evaluated, never trained
    loss.backward()


def two_forwards(net):
    losses = [loss_of(net(rows(n))) for n in (8, 24)]
    (sum(losses) / 2).backward()


def first_of_two(net):
    losses = [loss_of(net(rows(n))) for n in (8, 24)]
    losses[0].backward()


# Two forwards under a reentrant checkpoint and without the model are one to us: nothing marks where
# one ends. The guide says so. There, of a forward that is trained alone, the other one counts, too.
UNMARKED = [("reentrant", two_forwards), ("reentrant", first_of_two)]


@pytest.mark.parametrize("around", [False, True], ids=["the model", "a part of it"])
@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("train", [a_forward_in_between, two_forwards, first_of_two])
def test_each_backward_pass_counts_for_its_own_forward(train, kind, around):
    """Also under checkpoints, and as trainers do that call a part of the model."""
    if around and (kind, train) in UNMARKED:
        pytest.skip("nothing marks where a forward ends")
    inner = Net(kind)
    opt = KFACSGD(nn.ModuleDict({"net": inner}) if around else inner, lr=0.1)
    train(inner)
    opt.step()
    assert_equal(flat(opt, "net." if around else ""), factors(Net(), train))


class Routed(nn.Module):
    """Sends each row to one of two experts; the first expert may stay idle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(3, 4).double() for _ in range(2)])
        self.last = nn.Linear(4, 2).double()

    def forward(self, x):
        goes = x[:, 0] > self.threshold
        parts = [expert(x[goes == i]) for i, expert in enumerate(self.experts)]
        return self.last(torch.cat(parts).tanh())


@pytest.mark.parametrize("method", ["polar", "eigen"])
@pytest.mark.parametrize("threshold", [-100.0, 0.0], ids=["idle", "in part"])
def test_k_is_the_inner_models_batch_though_its_first_layer_sees_less(threshold, method):
    inner, plain = Routed(), Routed()
    inner.threshold = plain.threshold = threshold
    around = nn.ModuleDict({"net": inner})
    opts = [KFACSGD(net, lr=0.1, compute_method=method) for net in (around, plain)]
    for net, opt in zip((inner, plain), opts, strict=True):
        loss_of(net(rows(8))).backward()
        opt.step()
    for name in ("experts.1", "last"):
        found, expected = opts[0].preconditioner.factors(f"net.{name}"), opts[1].preconditioner
        for side, wanted in zip(found, expected.factors(name), strict=True):
            assert wanted.any()
            torch.testing.assert_close(side, wanted, rtol=1e-12, atol=0)


def test_a_group_added_between_backward_and_step_drops_nothing():
    net = Net()
    net.extra = nn.Linear(2, 2).double()
    opt = KFACSGD([*net.first.parameters(), *net.last.parameters()], lr=0.1, model=net)
    loss_of(net(rows(8))).backward()
    opt.add_param_group({"params": net.extra.parameters()})
    opt.step()

    def alone(net):
        loss_of(net(rows(8))).backward()

    assert_equal(flat(opt), factors(Net(), alone))


def _late_group(file: str) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    net = Net()
    opt = KFACSGD(net, lr=0.1)
    before = net.first.weight.detach().clone()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    loss_of(net(rows(8))).backward()
    with pytest.raises(RuntimeError, match="2 ranks joined after the optimizer was built"):
        opt.step()
    assert torch.equal(net.first.weight, before)
    dist.barrier()  # a rank that ends takes the connection down while the other still connects


def test_a_process_group_that_comes_after_the_optimizer_is_refused(tmp_path):
    fresh(2, _late_group, str(tmp_path / "store"))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_damping_written_into_a_group_is_checked(value):
    net = Net()
    opt = KFACSGD(net, lr=0.1)
    loss_of(net(rows(8))).backward()
    opt.param_groups[0]["damping"] = value
    with pytest.raises(ValueError, match=f"Invalid damping: {value}; it must be a number above 0"):
        opt.step()


@pytest.mark.parametrize("added", [False, True])
def test_a_group_taken_away_or_added_by_hand_is_named(added):
    net = Net()
    opt = KFACSGD([{"params": m.parameters()} for m in (net.first, net.last)], lr=0.1, model=net)
    if added:
        opt.param_groups.append({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})
    else:
        del opt.param_groups[1]
    count = len(opt.param_groups)
    loss_of(net(rows(8))).backward()
    with pytest.raises(RuntimeError, match=rf"Invalid param_groups: {count} groups, 2 were added;"):
        opt.step()


@pytest.mark.parametrize(
    "changed", [{"normalization": "kaisa"}, {"weight_sharing": "reduce"}, {"loss_reduction": "sum"}]
)
def test_factors_of_another_convention_are_not_taken_over(changed):
    net = Net()
    opt = KFACSGD(net, lr=0.1, compute_method="eigen")
    loss_of(net(rows(8))).backward()
    opt.step()
    other = KFACSGD(Net(), lr=0.1, compute_method="eigen", **changed)
    with pytest.warns(UserWarning, match="no K-FAC factors of this kind for 'first', 'last'"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(KeyError, match="no statistics yet"):
        other.preconditioner.factors("first")


class Standardized(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight / weight.norm(), bias)


def test_a_module_that_runs_otherwise_than_its_class_is_not_covered():
    changed = nn.Linear(2, 2)
    changed.forward = lambda x: x @ changed.weight
    net = nn.Sequential(Standardized(1, 2, 3), nn.Flatten(), changed, nn.Linear(2, 2))
    opt = KFACSGD(net, lr=0.1)
    for _ in range(2):
        net(torch.randn(3, 1, 3, 3)).square().sum().backward()
        opt.step()
    uses = "uses it in a way that no kind of layer knows"
    assert opt.preconditioner.uncovered == {
        "0.weight": f"Standardized {uses}",
        "0.bias": f"Standardized {uses}",
        "2.weight": f"Linear {uses}",
        "2.bias": f"Linear {uses}",
    }


def test_a_group_added_after_a_compiled_model_was_called_is_captured():
    net = Net()
    compiled = torch.compile(net, backend="eager")
    opt = KFACSGD(net.first.parameters(), lr=0.1, model=compiled, factor_update_steps=1)
    loss_of(compiled(rows(8))).backward()
    opt.step()
    opt.add_param_group({"params": net.last.parameters()})
    opt.zero_grad()
    with torch.no_grad():
        seen = net.first(rows(8))
    loss_of(compiled(rows(8))).backward()
    opt.step()
    a = opt.preconditioner.factors("last")[0][0]
    seen = torch.cat([seen, torch.ones(8, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(a, seen.T @ seen / 8)
