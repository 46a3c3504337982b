"""Second-order state: storage, precision, failures, and the schedule of refreshes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.curvature import refresh
from kaisa_optim.linalg import products
from tests.support import groups
from tests.support import reference as ref
from tests.support.ranks import run
from tests.support.training import (
    ANEW,
    EVERY_STEP,
    assert_near,
    assert_same,
    backward,
    descend,
    difference,
    early,
    factors,
    network,
    train,
    values,
    warnings_as,
)

# Methods with their names in the reference.
REFERENCES = {"eigen": "eigen", "outer product": "eigen-outer"}
REFERENCES |= {"inverse": "inverse-pi", "full inverse": "inverse-full"}
METHODS: dict[str, dict[str, Any]] = {x: ref.METHODS[name] for x, name in REFERENCES.items()}
ALWAYS = {name: EVERY_STEP | options for name, options in METHODS.items()}
ALWAYS["polar"] = ANEW
SOLVERS: dict[str, tuple[Any, str]] = {
    "eigen": (products, "eigendecompose"),
    "inverse": (products, "damped_inverse"),
    "polar": (products, "inverse_root"),
}
LinAlgError = torch.linalg.LinAlgError


def expected(opt: Any, name: str, method: str, damping: float) -> Tensor:
    """The preconditioned matrix gradient of a linear layer, from its running averages."""
    layer = opt.preconditioner.layers[name]
    a, g = (factor.double() for factor in opt.preconditioner.factors(name))
    gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).double()
    return ref.precondition(a, g, gradient[None], damping, REFERENCES[method])[0]


def moved_matrix(before: dict[str, Tensor], model: nn.Module, name: str) -> Tensor:
    change = difference(before, model)
    return torch.cat([change[f"{name}.weight"], change[f"{name}.bias"][:, None]], 1)


class Parts(nn.Module):
    """Layers of equal shapes, of which a batch may use some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)).double()
        self.used = range(5)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = torch.tanh(self.parts[i](x))
        return x[:, :3]


NAMES = {f"parts.{i}" for i in range(5)}

# ---- storage ----

SIZES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 5e-2, torch.bfloat16: 0.3}


def one_step(
    method: str, of: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    model = network(dtype=of)
    opt = KFACSGD(model, lr=1.0, damping=0.1, **ALWAYS[method], **options)
    before = values(model)
    train(model, opt, [0])
    return opt, difference(before, model)


def norm_of_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    flat = [torch.cat([t.double().flatten() for t in each.values()]) for each in (one, two)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("method", ALWAYS)
@pytest.mark.parametrize(
    ("of", "dtype"), [*(("inv", x) for x in SIZES), *(("factor", x) for x in list(SIZES)[:2])]
)
def test_storage(of, dtype, method, monkeypatch):
    """Of state and of factors: solvers see float32 or float64, whatever is stored."""
    seen = spy_on_decompositions(monkeypatch)
    opt, moved = one_step(method, **{f"{of}_dtype": dtype})
    plain, reference = one_step(method)
    assert set(seen) <= {torch.float32, torch.float64}
    assert norm_of_difference(moved, reference) < TOLERANCE[dtype]
    if of == "factor":
        assert opt.preconditioner.memory_usage()["factors"] == (25 + 36 + 49 + 9) * SIZES[dtype]
        for name, pair in factors(opt).items():
            assert all(x.dtype == dtype for x in pair)
            near = tuple(x.float() for x in pair)
            assert_near(near, factors(plain)[name], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "of"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_multiplied_in_bfloat16_where_that_is_stored(method, dtype, of, monkeypatch):
    """On devices with instructions for it; else, and in float16, matrices are only stored.

    Gradients of float64 are not rounded.
    """
    moved = []
    for has in (False, True):
        monkeypatch.setattr(products, "_multiplies_brain_floats", lambda device, has=has: has)
        moved.append(one_step(method, of, inv_dtype=dtype)[1])
    rounded = norm_of_difference(moved[1], moved[0])
    in_half = (dtype, of) == (torch.bfloat16, torch.float32)
    assert 1e-4 < rounded < 0.02 if in_half else rounded == 0


def test_cpus_multiply_in_bfloat16_where_they_say_so():
    products._multiplies_brain_floats.cache_clear()
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    has = "avx512_bf16" in flags and torch.backends.mkldnn.is_available()
    cpu = torch.device("cpu")
    assert products.multiplies_in_half(torch.float32, cpu) == has
    assert not products.multiplies_in_half(torch.float64, cpu)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products.multiplies_in_half(torch.float32, cpu)


@pytest.mark.parametrize("has", [True, False])
def test_gpus_multiply_in_bfloat16_where_they_need_not_emulate_it(has, monkeypatch):
    products._multiplies_brain_floats.cache_clear()
    asked = []

    def supported(*, including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return has

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert products._multiplies_brain_floats(torch.device("cuda", 1)) == has
    assert asked == [False]
    products._multiplies_brain_floats.cache_clear()


def drifted(options: dict[str, Any], before: int, after: int) -> float:
    """How far this rank's weights are from rank 0's.

    So many of the ranks can multiply in bfloat16 at first, and so many after the model was moved.
    """
    model = network(dtype=torch.float32)
    intervals = {"factor_update_steps": 4, "inv_update_steps": 4, "staggered": False}
    with early():
        opt = KFACSGD(model, lr=0.1, assignment="opt", **intervals, **options)
    for able, steps in ((before, range(2)), (after, range(2, 4)), (after, range(4, 7))):
        has = mock.patch.object(
            products, "_multiplies_brain_floats", lambda device, able=able: dist.get_rank() < able
        )
        with has:
            train(model, opt, steps)  # all ranks have the same batches
        # Between two exchanges it stays as it was; a move asks for no exchange of its own.
        agreed = before if steps.stop <= 4 else after
        assert opt.preconditioner.rule.half_products == (agreed == dist.get_world_size())
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).norm())


@pytest.mark.parametrize(
    "options",
    [METHODS["eigen"] | {"inv_dtype": torch.bfloat16}, {"inv_dtype": torch.bfloat16}, {}],
    ids=["eigen", "stored in half", "polar"],
)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_multiply_in_bfloat16_only_together(options, before, after):
    """Else the weights of one whose device has no instructions for it would drift apart."""
    assert run(2, drifted, options, before, after) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["eigen", "inverse", "polar"])
def test_a_step_under_autocast_is_the_step_without_it(kind, dtype):
    """Some call it there; torch's own steps are elementwise, and so have nothing to cast."""
    found = []
    for under in (False, True):
        model = network(dtype=torch.float32)
        opt = KFACSGD(model, lr=0.1, damping=1e-4, **ALWAYS[kind])
        for i in range(4):
            opt.zero_grad()
            backward(model, i)
            with torch.autocast("cpu", dtype, enabled=under):
                opt.step()
        found.append(values(model))
    assert_same(found[0], found[1])


def test_factors_are_decomposed_in_batches_of_a_bounded_size(monkeypatch):
    def trained() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).double()
        opt = KFACSGD(model, lr=0.01, **EVERY_STEP)
        for x in torch.randn(4, 32, 6, dtype=torch.float64):
            descend(opt, model(x).pow(2).sum())
        return values(model)

    whole, batches = trained(), []
    real = refresh.attempt
    monkeypatch.setattr(refresh, "_AT_ONCE_ON_CPUS", 2 * 6 * 7)

    def counted(m: Tensor, *rest: Any, **options: Any) -> Any:
        batches.append(len(m))
        return real(m, *rest, **options)

    monkeypatch.setattr(refresh, "attempt", counted)
    assert_near(trained(), whole, rtol=1e-10, atol=1e-12)
    assert len(batches) > 2 and max(batches) < 5


def spy_on_decompositions(monkeypatch: Any) -> list[torch.dtype]:
    seen: list[torch.dtype] = []

    def spied(function: Any) -> Any:
        def call(matrices: Tensor, *rest: Any, **how: Any) -> Any:
            seen.append(matrices.dtype)
            return function(matrices, *rest, **how)

        return call

    for module, name in SOLVERS.values():
        monkeypatch.setattr(module, name, spied(getattr(module, name)))
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_arithmetic_is_float32_or_the_parameters_float64(dtype, monkeypatch):
    seen = spy_on_decompositions(monkeypatch)
    model = network(dtype=dtype)
    opt = KFACSGD(model, lr=0.01, **EVERY_STEP)
    train(model, opt, range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert set(seen) == {wide}
    assert {f.dtype for pair in factors(opt).values() for f in pair} == {wide}
    assert all(p.isfinite().all() and p.dtype == dtype for p in model.parameters())


# ---- decompositions that fail ----


@contextlib.contextmanager
def told(text: str) -> Iterator[None]:
    """Expect one warning with this text."""
    with pytest.warns(UserWarning, match=re.escape(text)) as record:
        yield
    assert len(record) == 1


def size_of(matrices: Tensor) -> int:
    return matrices.shape[-1]


class Planted:
    """Stands in for a decomposition and fails at will."""

    def __init__(self, monkeypatch: Any, method: str):
        module, name = SOLVERS[method]
        self.real = getattr(module, name)
        self.seen: list[Tensor] = []
        self.dampings: list[Any] = []
        self.fails: Any = lambda matrices: False
        self.raises: bool | Exception = True
        monkeypatch.setattr(module, name, self)

    def __call__(self, matrices: Tensor, *rest: Any, **how: Any) -> Any:
        self.seen.append(matrices.clone())
        self.dampings += rest[:1]
        result = self.real(matrices, *rest, **how)
        if not self.fails(matrices):
            return result
        if self.raises:
            raise LinAlgError("planted") if self.raises is True else self.raises
        if self.real.__name__ == "inverse_root":
            result[0][:] = torch.nan
            return result
        parts = result if isinstance(result, tuple) else (result,)
        parts[-1][:] = torch.nan
        return result


@pytest.fixture(params=["eigen", "inverse", "polar"])
def method(request):
    return request.param


@pytest.fixture
def planted(monkeypatch, method):
    return Planted(monkeypatch, method)


def built(method: str, **options: Any) -> tuple[nn.Module, Any]:
    model = network(dtype=torch.float32)
    return model, KFACSGD(model, **{"lr": 0.1, "damping": 0.1, **ALWAYS[method], **options})


def of_cusolver(status: str, call: str) -> RuntimeError:
    return RuntimeError(f"cusolver error: CUSOLVER_STATUS_{status}, when calling `{call}( ... )`")


OF_CUSOLVER = of_cusolver("EXECUTION_FAILED", "cusolverDnSsyevd")


@pytest.mark.parametrize("raises", [True, False, OF_CUSOLVER], ids=["raises", "nan", "cusolver"])
def test_the_refresh_after_a_failure_is_in_float64_with_more_damping(method, planted, raises):
    """No sooner; one layer's failure leaves the others alone, also if they have one shape."""
    model, opt = built(method)
    train(model, opt, [0])
    planted.fails, planted.raises = (lambda matrices: size_of(matrices) == 7), raises
    train(model, opt, [1])
    planted.fails = lambda matrices: False
    for i, (dtype, share) in enumerate([(torch.float64, 3), (torch.float32, 1)], 2):
        planted.seen, planted.dampings = [], []
        said = told("layer '2' failed, 1 in a row; the state before it")
        with said if i == 2 else warnings_as("error"):
            train(model, opt, [i])
        attempts = {size_of(m): m.dtype for m in planted.seen}
        assert attempts == {5: torch.float32, 6: torch.float32, 7: dtype, 3: dtype}
        assert len(planted.seen) == 4
        if method == "polar":
            dampings = [0.1 * share if size_of(m) in (7, 3) else 0.1 for m in planted.seen]
            assert [float(x) for x in planted.dampings] == pytest.approx(dampings)


@pytest.mark.filterwarnings("ignore:the refresh of layer")
def test_a_device_without_float64_is_refreshed_in_float32_after_a_failure(
    method, planted, monkeypatch
):
    monkeypatch.setattr(refresh, "WITHOUT_DOUBLES", {"cpu"})
    model, opt = built(method)
    train(model, opt, [0])
    planted.fails = lambda matrices: size_of(matrices) == 7
    train(model, opt, [1])
    planted.fails, planted.seen = (lambda matrices: False), []
    train(model, opt, [2])
    assert {m.dtype for m in planted.seen} == {torch.float32}


def test_training_never_ends_for_a_root_that_fails(method, planted):
    model, opt = built(method)
    planted.fails = lambda matrices: size_of(matrices) == 7
    train(model, opt, [0])
    for i in range(1, 8):
        with told(f"layer '2' failed, {i} in a row"):
            train(model, opt, [i])
    assert all(p.isfinite().all() for p in model.parameters())


def state_of(opt: Any, name: str) -> list[Tensor]:
    """Second-order tensors of a layer, those of A first."""
    pair = [groups.state(opt, name, side) for side in "ag"]
    return [x[k] for x in pair for k in ("values", "vectors", "inverse", "root") if k in x]


@pytest.mark.parametrize("raises", [True, False])
def test_older_state_stays_and_only_failures_in_a_row_raise(method, planted, raises):
    model, opt = built(method, max_failures=2)
    planted.raises = raises
    train(model, opt, [0])
    kept = [t.clone() for t in state_of(opt, "2")]
    planted.fails = lambda matrices: size_of(matrices) in (7, 3)

    def failing(i: int, count: int) -> None:
        """A step in which the refresh fails once more, after it heard of ``count`` failures."""
        with told(f"layer '2' failed, {count} in a row") if count else warnings_as("error"):
            train(model, opt, [i])
        assert_same(state_of(opt, "2"), kept)

    failing(1, 0)
    failing(2, 1)
    planted.fails = lambda matrices: False
    with told("layer '2' failed, 2 in a row"):
        train(model, opt, [3])
    train(model, opt, [4])  # a recovery starts the count anew
    assert not any(state.failures for state in opt.preconditioner.registry.states.values())
    kept = [t.clone() for t in state_of(opt, "2")]
    planted.fails = lambda matrices: size_of(matrices) in (7, 3)
    for i in range(3):
        failing(5 + i, i)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"layer '2' failed, 3 in a row \(max_failures=2\)"):
        train(model, opt, [8])
    assert_same(values(model), before)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ALWAYS)
@pytest.mark.parametrize("side", ["a", "g"])
@pytest.mark.parametrize("widest", [16384, 2])
def test_a_state_that_fails_is_the_older_one_of_its_layer_alone(kind, side, widest):
    """Layers of its shape, which are decomposed together, have new states."""
    models = Parts(), Parts()
    opts = [KFACSGD(x, lr=0.0, max_factor_size=widest, **ALWAYS[kind]) for x in models]
    train(models[0], opts[0], [0])
    train(models[1], opts[1], [0])
    older = {name: [t.clone() for t in state_of(opts[0], name)] for name in NAMES}
    kept = {key: t.clone() for key, t in groups.state(opts[0], "parts.1", side).items()}
    groups.averages(opts[0])["parts.1", side].fill_(math.nan)
    train(models[0], opts[0], [1])
    train(models[1], opts[1], [1])
    assert_same(groups.state(opts[0], "parts.1", side), kept)
    for name in NAMES - {"parts.1"}:
        assert_near(state_of(opts[0], name), state_of(opts[1], name), 1e-9, 1e-12)
        assert not any(map(torch.equal, state_of(opts[0], name), older[name]))


@pytest.mark.parametrize("kind", METHODS)
def test_layers_of_one_shape_have_their_own_dampings(kind):
    model, dampings = Parts(), (0.1, 0.02, 0.5, 0.3, 0.05)
    parts = zip(model.parts, dampings, strict=True)
    params = [{"params": part.parameters(), "damping": damping} for part, damping in parts]
    opt = KFACSGD(params, lr=1.0, model=model, **ALWAYS[kind])
    before = values(model)
    train(model, opt, [0])
    for i, damping in enumerate(dampings):
        wanted = expected(opt, f"parts.{i}", kind, damping)
        assert_near(moved_matrix(before, model, f"parts.{i}"), wanted)


def test_a_first_state_that_fails_is_the_identity(method, planted):
    model, opt = built(method)
    planted.fails = lambda matrices: size_of(matrices) == 7
    before = values(model)
    train(model, opt, [0])
    count = len(state_of(opt, "2")) // 2
    a, g = state_of(opt, "2")[:count], state_of(opt, "2")[count:]
    for ours, other in zip(a, g, strict=True):
        one = torch.eye(7)[None] if ours.dim() == 3 else torch.ones(1, 7)
        assert torch.equal(ours, one) and (other - other.new_ones(()).expand_as(other)).any()
    moved = moved_matrix(before, model, "2")
    assert moved.isfinite().all() and moved.any()
    assert [x.name for x in opt.preconditioner.registry.with_state] == ["0", "2"]
    planted.fails = lambda matrices: False
    before = values(model)
    with told("layer '2' failed, 1 in a row; the state before it, at first the identity"):
        train(model, opt, [1])
    moved = moved_matrix(before, model, "2")
    if method == "polar":
        assert moved.any() and not torch.equal(state_of(opt, "2")[0], torch.eye(7)[None])
    else:
        damping = 0.1 * (3**2 if method == "inverse" else 1)  # three times that of A and of G
        wanted = 0.1 * expected(opt, "2", method, damping)
        assert_near(moved.double(), wanted, rtol=1e-3, atol=1e-5)


def test_an_inverse_of_an_indefinite_average_is_told():
    """Cholesky's own verdict, with nothing planted: half-precision storage can break a factor."""
    model = network()
    opt = KFACSGD(model, lr=0.1, damping=1e-4, **ALWAYS["inverse"])
    train(model, opt, [0])
    kept = [t.clone() for t in state_of(opt, "0")]
    groups.averages(opt)["0", "a"].sub_(10 * torch.eye(5).double())
    train(model, opt, [1])
    assert_same(state_of(opt, "0")[:1], kept[:1])
    with told("layer '0' failed, 1 in a row"):
        train(model, opt, [2])


def test_a_stored_product_follows_the_factor_that_did_not_fail(monkeypatch):
    model, planted = network(), Planted(monkeypatch, "eigen")
    opt = KFACSGD(model, lr=0.1, damping=0.1, **ALWAYS["outer product"])
    train(model, opt, [0])
    planted.fails = lambda matrices: size_of(matrices) == 7
    train(model, opt, [1])
    a, g = (groups.state(opt, "2", side)["values"] for side in "ag")
    found = opt.preconditioner.groups.of[opt.preconditioner.layers["2"]].tensors["scale"]
    torch.testing.assert_close(found, 1 / (g[:, :, None] * a[:, None, :] + 0.1))


# ---- statistics that are not finite ----


@pytest.mark.filterwarnings("ignore:statistics that were not finite", "ignore:the refresh of")
@pytest.mark.parametrize("kind", ALWAYS)
def test_a_layer_without_finite_statistics_begins_anew(kind):
    """Refreshed in each step, and once more before the next sums: zeros have no root.

    Afterwards its roots are those of a fresh run.
    """
    intervals = {"factor_update_steps": 5, "inv_update_steps": 1}
    models = [network(dtype=torch.float32) for _ in range(2)]
    how = {**ALWAYS[kind], **intervals, "lr": 0.0, "damping": 1e-3}
    opt, fresh = (KFACSGD(model, **how) for model in models)
    backward(models[0], 0, lambda loss: loss * math.nan)
    for p in models[0].parameters():
        p.grad.zero_()
    opt.step()
    train(models[0], opt, [0])
    for x in state_of(opt, "0")[len(state_of(opt, "0")) // 2 :]:  # of G; A's sums were finite
        assert torch.equal(x[0], torch.eye(6) if x.dim() == 3 else torch.ones(6))
    train(models[0], opt, [0] * 6)
    train(models[1], fresh, [0] * 8)
    states = opt.preconditioner.registry.states.values()
    assert all(state.has_average and state.has_state and not state.failures for state in states)
    for name in () if "eigen" in REFERENCES.get(kind, "") else ("0", "2"):  # vectors have no sign
        assert_near(state_of(opt, name), state_of(fresh, name), rtol=1e-4, atol=1e-5)
    assert not torch.equal(state_of(opt, "0")[-1][0], torch.eye(6))


def test_a_failure_is_told_though_a_layer_is_frozen_in_between(method, planted):
    """The layout is another one by then, and the flags stay."""
    model, opt = built(method)
    train(model, opt, [0])
    planted.fails = lambda matrices: size_of(matrices) == 7
    train(model, opt, [1])
    planted.fails = lambda matrices: False
    model[0].weight.requires_grad_(False)
    with told("layer '2' failed, 1 in a row"):
        train(model, opt, [2])


# ---- when layers are refreshed ----


def refreshes(
    model: nn.Module, steps: int, inv_update_steps: Any, **options: Any
) -> list[set[str]]:
    """The layers that each step refreshed: those whose second-order state was written."""
    options = {"factor_update_steps": 1, "inv_update_steps": inv_update_steps, **options}
    with early():
        opt = KFACSGD(model, lr=0.01, **options)
    seen = []

    def written() -> dict[str, list[Tensor]]:
        return {x: [t.clone() for t in state_of(opt, x)] for x in opt.preconditioner.layers}

    for i in range(steps):
        before = written()
        train(model, opt, [i])
        after = written()
        seen.append({x for x in after if not all(map(torch.equal, after[x], before[x]))})
    return seen


@pytest.mark.parametrize("method", ["eigen", "inverse", "polar"])
@pytest.mark.parametrize(
    ("gathering", "interval", "staggered"),
    [*((1, 1, True), (1, 5, True), (2, 4, True), (5, 5, True), (3, 7, True)), (1, 3, False)],
)
def test_each_shape_is_refreshed_in_one_of_two_steps_of_an_interval(
    gathering, interval, staggered, method
):
    """Unstaggered, all of them are in the first of these."""
    model, cheaper = Parts(), {"parts.0", "parts.1"}
    for part in model.parts[:2]:
        part.bias = None
    options = {"compute_method": method, "factor_update_steps": gathering, "staggered": staggered}
    seen = refreshes(model, 3 * interval, interval, **options)
    assert seen[0] == NAMES
    for step, names in enumerate(seen[1:], 1):
        due = [step % interval == place for place in (0, staggered * (gathering // 2))]
        assert names == (NAMES - cheaper if due[0] else set()) | (cheaper if due[1] else set())


@pytest.mark.parametrize(
    ("options", "refreshed"),
    [
        ({}, (5, 10, 20, 30, 40)),
        (METHODS["eigen"], (5, 10, 20, 30, 40)),
        ({"inv_update_steps": 20}, (5, 10, 20, 30, 40)),
        ({"inv_update_steps": 4}, ()),
    ],
)
def test_bases_and_roots_are_found_anew_early(options, refreshed):
    """By default, and all of them together; in other steps none or one of the two."""
    model = network()
    opt = KFACAdam(model, lr=0.01, **options)
    before, together = None, []
    for i in range(60):
        train(model, opt, [i])
        now = [state_of(opt, name)[-1].clone() for name in ("0", "2")]
        if before is not None and not any(map(torch.equal, now, before)):
            together.append(i)
        before = now
    assert tuple(together) == refreshed


# ---- what is raised ----


OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    of_cusolver("ALLOC_FAILED", "cusolverDnSsyevd"),
    of_cusolver("INTERNAL_ERROR", "cusolverDnCreate"),
]


@pytest.mark.parametrize("error", OTHERS, ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_errors_that_are_no_failures_of_a_solver_are_raised(planted, error, before, method):
    """At once, or in an attempt after one that failed."""
    model, opt = built(method)
    errors = iter([LinAlgError("planted")] * before + [error])

    def fails(matrices: Tensor) -> bool:
        raise next(errors)

    planted.fails = fails
    backward(model, 0)
    with pytest.raises(RuntimeError) as found:
        opt.step()
    assert found.value is error
