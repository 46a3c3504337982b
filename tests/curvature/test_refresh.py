"""Second-order state: storage, precision, failures, and the schedule of refreshes."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
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

ALWAYS = {name: EVERY_STEP | options for name, options in ref.METHODS.items()}
ALWAYS["outer product"] = ALWAYS.pop("eigen-outer")
PAPERS = [*ALWAYS]
ALWAYS["polar"] = ANEW
each_solver = pytest.mark.parametrize("method", ["eigen", "inverse-pi", "polar"])
PLANTED = torch.linalg.LinAlgError("planted")


class Solvers:
    """Stand in for the decompositions; note what they are given, and fail at will."""

    def __init__(self, monkeypatch: Any) -> None:
        self.seen: list[Tensor] = []
        self.dampings: dict[int, Tensor] = {}  # the last ones, by the factors' size
        self.fails: Callable[[Tensor], bool] = lambda matrices: False
        self.error: Exception | None = PLANTED  # None: not finite
        for name in ("eigendecompose", "damped_inverse", "inverse_root"):
            monkeypatch.setattr(
                products, name, functools.partial(self.solve, getattr(products, name))
            )

    def solve(self, solver: Any, matrices: Tensor, *damping: Tensor, **how: Any) -> Any:
        self.seen.append(matrices.clone())
        self.dampings[matrices.shape[-1]] = damping[0] if damping else torch.zeros(())
        result = solver(matrices, *damping, **how)
        if self.fails(matrices):
            if self.error is not None:
                raise self.error
            last = result[-1] if isinstance(result, tuple) else result
            last.fill_(math.nan if last.is_floating_point() else False)
        return result

    def fail(self, *sizes: int) -> None:
        """Fail from now on for factors of these sizes alone."""
        self.fails = lambda matrices: matrices.shape[-1] in sizes


@pytest.fixture
def solvers(monkeypatch):
    return Solvers(monkeypatch)


def built(method: str, **options: Any) -> tuple[nn.Module, Any]:
    model = network(dtype=torch.float32)
    return model, KFACSGD(model, **{"lr": 0.1, "damping": 0.1, **ALWAYS[method], **options})


def state_of(opt: Any, name: str, sides: str = "ag") -> list[Tensor]:
    """Copies of second-order tensors of a layer, those of A first."""
    return [t.clone() for side in sides for t in groups.state(opt, name, side).values()]


@contextlib.contextmanager
def told(text: str) -> Iterator[None]:
    """Expect one warning with this text, or none without a text."""
    if not text:
        with warnings_as("error"):
            yield
        return
    with pytest.warns(UserWarning, match=re.escape(text)) as record:
        yield
    assert len(record) == 1


class Parts(nn.Module):
    """Layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)).double()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
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


def distance(moved: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    flat = [torch.cat([t.double().flatten() for t in x.values()]) for x in (moved, reference)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("method", ALWAYS)
@pytest.mark.parametrize(
    ("of", "dtype"), [*(("inv", x) for x in SIZES), *(("factor", x) for x in list(SIZES)[:2])]
)
def test_storage(of, dtype, method, solvers):
    """Of state and of factors: solvers see float32 or float64, whatever is stored."""
    opt, moved = one_step(method, **{f"{of}_dtype": dtype})
    plain, reference = one_step(method)
    assert {x.dtype for x in solvers.seen} <= {torch.float32, torch.float64}
    assert distance(moved, reference) < TOLERANCE[dtype]
    if of == "factor":
        assert opt.preconditioner.memory_usage()["factors"] == (25 + 36 + 49 + 9) * SIZES[dtype]
        for name, pair in factors(opt).items():
            assert all(x.dtype == dtype for x in pair)
            near = tuple(x.float() for x in pair)
            assert_near(near, factors(plain)[name], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", SIZES)
def test_arithmetic_is_float32_or_the_parameters_float64(dtype, solvers):
    opt, moved = one_step("eigen", dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in solvers.seen} == {wide}
    assert {f.dtype for pair in factors(opt).values() for f in pair} == {wide}
    assert all(x.isfinite().all() and x.any() and x.dtype == dtype for x in moved.values())


@pytest.mark.parametrize(
    ("dtype", "of"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("method", PAPERS)
def test_gradients_are_multiplied_in_bfloat16_where_that_is_stored(method, dtype, of, monkeypatch):
    """On devices with instructions for it; else, and in float16, matrices are only stored.

    Gradients of float64 are not rounded.
    """
    moved = []
    for has in (False, True):
        monkeypatch.setattr(products, "_multiplies_brain_floats", lambda device, has=has: has)
        moved.append(one_step(method, of, inv_dtype=dtype)[1])
    rounded = distance(moved[1], moved[0])
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
    supported = mock.Mock(return_value=has)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert products._multiplies_brain_floats(torch.device("cuda", 1)) == has
    supported.assert_called_once_with(including_emulation=False)
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
    [ref.METHODS["eigen"] | {"inv_dtype": torch.bfloat16}, {"inv_dtype": torch.bfloat16}, {}],
    ids=["eigen", "stored in half", "polar"],
)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_multiply_in_bfloat16_only_together(options, before, after):
    """Else the weights of one whose device has no instructions for it would drift apart."""
    assert run(2, drifted, options, before, after) == [0.0, 0.0]


def test_factors_are_decomposed_in_batches_of_a_bounded_size(solvers):
    """On CPUs of at most 2²⁰ numbers; each state is of its own factor."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(5)))
    opt = KFACSGD(model, lr=0.0, damping=0.01, **ALWAYS["inverse-full"])
    descend(opt, model(torch.randn(32, 600)).square().sum(1).mean())
    assert [len(matrices) for matrices in solvers.seen] == [2] * 5
    for name, pair in factors(opt).items():
        for side, factor in zip("ag", pair, strict=True):
            product = groups.state(opt, name, side)["inverse"] @ (factor + 0.01 * torch.eye(600))
            assert_near(product, torch.eye(600)[None], 1e-3, 1e-3)


# ---- decompositions that fail ----


def of_cusolver(status: str, call: str) -> RuntimeError:
    return RuntimeError(f"cusolver error: CUSOLVER_STATUS_{status}, when calling `{call}( ... )`")


OF_CUSOLVER = of_cusolver("EXECUTION_FAILED", "cusolverDnSsyevd")


@each_solver
@pytest.mark.parametrize(
    ("error", "doubles"),
    [(PLANTED, True), (None, True), (OF_CUSOLVER, True), (PLANTED, False)],
    ids=["raises", "nan", "cusolver", "a device without float64"],
)
def test_the_refresh_after_a_failure_is_in_float64_with_more_damping(
    method, solvers, error, doubles, request
):
    """No sooner; one layer's failure leaves the others alone, also if they have one shape."""
    if not doubles:
        products.WITHOUT_DOUBLES.add("cpu")
        request.addfinalizer(lambda: products.WITHOUT_DOUBLES.remove("cpu"))
    model, opt = built(method)
    train(model, opt, [0])
    solvers.error = error
    solvers.fail(7)
    train(model, opt, [1])
    solvers.fail()
    once = {"polar": 0.1**2, "inverse-pi": 0.1, "eigen": 0.0}[
        method
    ]  # damping of A times that of G
    single, again = torch.float32, torch.float64 if doubles else torch.float32
    for i, (dtype, multiple) in enumerate([(again, 3), (single, 1)], 2):
        solvers.seen.clear()
        with told("layer '2' failed, 1 in a row; the state before it" if i == 2 else ""):
            train(model, opt, [i])
        attempts = {matrices.shape[-1]: matrices.dtype for matrices in solvers.seen}
        assert attempts == {5: single, 6: single, 7: dtype, 3: dtype}
        assert len(solvers.seen) == 4
        damping = solvers.dampings
        assert float(damping[5] * damping[6]) == pytest.approx(once)
        assert float(damping[7] * damping[3]) == pytest.approx(once * multiple**2)


@each_solver
@pytest.mark.parametrize("error", [PLANTED, None], ids=["raises", "nan"])
@pytest.mark.parametrize(
    ("steps", "most"), [("xxxxxxxx", math.inf), (".xx..xxx.", 2)], ids=["no end", "max_failures"]
)
def test_older_state_stays_and_only_failures_in_a_row_raise(method, solvers, error, steps, most):
    """Refreshes fail in the steps marked by x; each next step hears of it. By default none ends."""
    model, opt = built(method, **({} if most == math.inf else {"max_failures": most}))
    solvers.error, count = error, 0
    for i, mark in enumerate(steps):
        solvers.fail(*((7, 3) if mark == "x" else ()))
        before, older = values(model), state_of(opt, "2")
        text, ends = f"layer '2' failed, {count} in a row" if count else "", count > most
        failure = pytest.raises(RuntimeError, match=re.escape(f"{text} (max_failures={most})"))
        with failure if ends else told(text):
            train(model, opt, [i])
        assert all(x.isfinite().all() for p in model.parameters() for x in (p, p.grad))
        if ends:
            assert_same(values(model), before)
        elif mark == "x" and i > 0:
            assert_same(state_of(opt, "2"), older)
        count = count + 1 if mark == "x" else 0
    assert ends == (most == 2)


BROKEN = [(kind, widest, "not finite") for kind in ALWAYS for widest in (16384, 2)]
BROKEN += [(kind, 16384, "indefinite") for kind in ("inverse-pi", "inverse-full", "polar")]


@pytest.mark.parametrize("side", ["a", "g"])
@pytest.mark.parametrize(("kind", "widest", "average"), BROKEN)
def test_a_state_that_fails_is_the_older_one_of_its_layer_alone(kind, side, widest, average):
    """Layers of its shape, which are decomposed together, have new states.

    Nothing is planted: half-precision storage can make a factor indefinite.
    """
    models = Parts(), Parts()
    opt, fresh = (KFACSGD(x, lr=0.0, max_factor_size=widest, **ALWAYS[kind]) for x in models)
    train(models[0], opt, [0])
    train(models[1], fresh, [0])
    older = {name: state_of(opt, name) for name in NAMES}
    kept, broken = state_of(opt, "parts.1", side), groups.averages(opt)["parts.1", side]
    if average == "indefinite":
        broken.diagonal(0, 1, 2).sub_(10)
    else:
        broken.fill_(math.nan)
    train(models[0], opt, [1])
    train(models[1], fresh, [1])
    assert_same(state_of(opt, "parts.1", side), kept)
    for name in NAMES - {"parts.1"}:
        assert_near(state_of(opt, name), state_of(fresh, name), 1e-9, 1e-12)
        assert not any(map(torch.equal, state_of(opt, name), older[name]))
    with told("layer 'parts.1' failed, 1 in a row"):
        train(models[0], opt, [2])


def test_a_stored_product_follows_the_factor_that_did_not_fail(solvers):
    model, opt = built("outer product")
    train(model, opt, [0])
    solvers.fail(7)
    train(model, opt, [1])
    a, g = (groups.state(opt, "2", side)["values"] for side in "ag")
    scale = opt.preconditioner.groups.of[opt.preconditioner.layers["2"]].tensors["scale"]
    torch.testing.assert_close(scale, 1 / (g[:, :, None] * a[:, None, :] + 0.1))


@each_solver
def test_a_failure_is_told_though_a_layer_is_frozen_in_between(method, solvers):
    """The layout is another one by then, and the flags stay."""
    model, opt = built(method)
    train(model, opt, [0])
    solvers.fail(7)
    train(model, opt, [1])
    solvers.fail()
    model[0].weight.requires_grad_(False)
    with told("layer '2' failed, 1 in a row"):
        train(model, opt, [2])


OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    of_cusolver("ALLOC_FAILED", "cusolverDnSsyevd"),
    of_cusolver("INTERNAL_ERROR", "cusolverDnCreate"),
]


@each_solver
@pytest.mark.parametrize("error", OTHERS, ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_errors_that_are_no_failures_of_a_solver_are_raised(method, solvers, error, before):
    """At once, or in an attempt after one that failed."""
    model, opt = built(method)
    solvers.fails = mock.Mock(side_effect=[PLANTED] * before + [error])
    backward(model, 0)
    with pytest.raises(RuntimeError) as raised:
        opt.step()
    assert raised.value is error


# ---- statistics that are not finite ----


def is_identity(state: Tensor) -> bool:
    n = state.shape[-1]
    return torch.equal(state[0], torch.eye(n) if state.dim() == 3 else torch.ones(n))


@pytest.mark.filterwarnings("ignore:statistics that were not finite", "ignore:the refresh of")
@pytest.mark.parametrize("kind", ALWAYS)
def test_a_layer_without_finite_statistics_begins_anew(kind):
    """Refreshed in each step, and once more before the next sums: zeros have no root.

    Afterwards its roots are those of a fresh run.
    """
    how = {"lr": 0.0, "damping": 1e-3, "factor_update_steps": 5}
    (model, opt), (other, fresh) = built(kind, **how), built(kind, **how)
    backward(model, 0, lambda loss: loss * math.nan)
    for p in model.parameters():
        p.grad.zero_()
    opt.step()
    train(model, opt, [0])
    assert all(map(is_identity, state_of(opt, "0", "g")))  # A's sums were finite
    train(model, opt, [0] * 6)
    train(other, fresh, [0] * 8)
    states = opt.preconditioner.registry.states.values()
    assert all(state.has_average and state.has_state and not state.failures for state in states)
    for name in ("0", "2") if "inverse" in kind or kind == "polar" else ():  # vectors have no sign
        assert_near(state_of(opt, name), state_of(fresh, name), rtol=1e-4, atol=1e-5)
    assert not is_identity(state_of(opt, "0")[-1])


# ---- when layers are refreshed ----


@each_solver
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
    how = {"factor_update_steps": gathering, "inv_update_steps": interval, "staggered": staggered}
    with early():
        opt = KFACSGD(model, lr=0.01, **{**ALWAYS[method], **how})
    for step in range(3 * interval):
        before = {name: state_of(opt, name) for name in NAMES}
        train(model, opt, [step])
        written = {x for x in NAMES if not all(map(torch.equal, state_of(opt, x), before[x]))}
        due = [step % interval == place for place in (0, staggered * (gathering // 2))]
        expected = (NAMES - cheaper if due[0] else set()) | (cheaper if due[1] else set())
        assert written == (expected if step else NAMES)


@pytest.mark.parametrize(
    ("options", "refreshed"),
    [
        ({}, (5, 10, 20, 30, 40)),
        (ref.METHODS["eigen"], (5, 10, 20, 30, 40)),
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
        now = [state_of(opt, name)[-1] for name in ("0", "2")]
        if before is not None and not any(map(torch.equal, now, before)):
            together.append(i)
        before = now
    assert tuple(together) == refreshed
