"""LAMB against its written equations, tensor by tensor in float64, and its choice of kernels."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kaisa_optim.lamb as lamb_module
from kaisa_optim import LAMB
from tests.support.training import assert_same

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "adam_w_mode": True,
    "grad_averaging": True,
    "max_grad_norm": 1.0,
    "use_nvlamb": False,
    "maximize": False,
}
Grads = list[list[Any]]  # of the parameters of each group
SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (), (2, 1, 3), (2, 2)]


def moved(
    g: Tensor, p: Tensor, m: Tensor, v: Tensor, lr: float, b1: float, b2: float, eps: float,
    step: int, correction: bool, decay: float, averaging: bool, mode: bool, clip: Any, nvlamb: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the new parameter and moments, and the update, by the written equations."""
    g = g / clip
    if not mode:
        g = g + decay * p
    m = b1 * m + ((1 - b1) if averaging else 1.0) * g
    v = b2 * v + (1 - b2) * g * g
    c1, c2 = (1 - b1**step, 1 - b2**step) if correction else (1.0, 1.0)
    u = (m / c1) / ((v / c2).sqrt() + eps)
    if mode:
        u = u + decay * p
    ratio = 1.0
    if (nvlamb or decay != 0) and p.norm() > 0 and u.norm() > 0:
        ratio = float(p.norm() / u.norm())
    return p - lr * ratio * u, m, v, u


class Reference:
    """The equations in float64, one tensor after another; state is rounded between steps."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = [{**DEFAULTS, **g, "step": 0, "rows": []} for g in groups]
        for group in self.groups:  # a row is a parameter with its moments
            for p in group["params"]:
                value = p.detach().double().clone()
                group["rows"].append([value, torch.zeros_like(value), torch.zeros_like(value)])

    def step(self, grads: Grads) -> None:
        flat = [g.double().flatten() for each in grads for g in each if g is not None]
        norm = float(torch.cat(flat).norm()) if flat else 0.0
        for o, group_grads in zip(self.groups, grads, strict=True):
            o["step"] += any(g is not None for g in group_grads)
            limit = o["max_grad_norm"]
            clip = norm / limit if limit is not None and limit > 0 and norm > limit else 1.0
            settings = float(o["lr"]), *o["betas"], o["eps"], o["step"], o["bias_correction"]
            more = o["weight_decay"], o["grad_averaging"], o["adam_w_mode"], clip, o["use_nvlamb"]
            for row, raw in zip(o["rows"], group_grads, strict=True):
                if raw is not None:
                    g = raw.double() * (-1 if o["maximize"] else 1)
                    new = moved(g, *row, *settings, *more)
                    row[:] = [tensor.to(raw.dtype).double() for tensor in new[:3]]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [nn.Parameter(value.to(dtype)) for value in values]


def grads_of(opt: torch.optim.Optimizer) -> Grads:
    groups = [group["params"] for group in opt.param_groups]
    return [[None if p.grad is None else p.grad.clone() for p in params] for params in groups]


def random_step(opt: torch.optim.Optimizer, seed: int) -> Grads:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    grads = grads_of(opt)
    opt.step()
    return grads


def compare(opt: LAMB, ref: Reference, tolerance: float = 1e-12) -> None:
    for group, expected in zip(opt.param_groups, ref.groups, strict=True):
        assert group.get("step", 0) == expected["step"]
        for p, row in zip(group["params"], expected["rows"], strict=True):
            tensors = [p, *opt.state.get(p, {}).values()]  # in the order of a row
            for tensor, wanted in zip(tensors, row, strict=False):
                assert tensor.dtype == p.dtype
                actual = tensor.detach().double()
                torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def run_both(params: list[Any], steps: int = 3, tolerance: float = 1e-12, **options: Any) -> Any:
    opt, ref = LAMB(params, **options), Reference([{"params": params, **options}])
    for step in range(steps):
        ref.step(random_step(opt, step))
        compare(opt, ref, tolerance)
    return opt, ref


def test_defaults_are_those_of_apex() -> None:
    names = (
        "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging "
        "set_grad_none max_grad_norm use_nvlamb"
    )
    signature = inspect.signature(LAMB)
    positional = [n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == names.split()
    opt, _ = run_both(parameters(SHAPES))
    assert {key: opt.defaults[key] for key in DEFAULTS} == DEFAULTS


FLAGS = ("adam_w_mode", "grad_averaging", "use_nvlamb", "bias_correction", "maximize")
numbers = st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3))
choices: dict[str, Any] = {
    "lr": st.sampled_from([0.0, 1e-3, 0.5, torch.tensor(0.5), torch.tensor([0.25])]),
    "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    "eps": st.sampled_from([1e-6, 1e-2]),
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "max_grad_norm": st.sampled_from([None, -2.0, 0.0, 0.5, 50.0]),
    **dict.fromkeys(FLAGS, st.booleans()),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Grads]]:
    def tensor(shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        values = draw(st.lists(numbers, min_size=n, max_size=n))
        return torch.tensor(values, dtype=torch.float64).reshape(shape)

    groups, steps = [], draw(st.integers(1, 3))
    grads: list[Grads] = [[] for _ in range(steps)]
    for _ in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(st.sampled_from([(), (1,), (0,), (2, 3), (4,)]), max_size=3))
        params = [nn.Parameter(tensor(shape)) for shape in shapes]
        groups.append({"params": params, **draw(st.fixed_dictionaries(choices))})
        for of_step in grads:
            of_step.append([tensor(s) if draw(st.booleans()) else None for s in shapes])
    return groups, grads


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(problems())
def test_any_groups_follow_the_equations(problem: Any) -> None:
    """Gradients are left alone, and what never had one has no state and is not counted."""
    groups, steps = problem
    opt, ref = LAMB([dict(g) for g in groups]), Reference(groups)
    stepped = set()
    for grads in steps:
        for group, group_grads in zip(opt.param_groups, grads, strict=True):
            for p, g in zip(group["params"], group_grads, strict=True):
                p.grad = None if g is None else g.clone()
                stepped |= set() if g is None else {p}
        opt.step()
        assert opt.state.keys() == stepped
        assert_same(grads_of(opt), grads)
        ref.step(grads)
        compare(opt, ref, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    # What float32 arithmetic leaves is far below one rounding of the stored value.
    for steps, roundings in ((1, 1.01), (4, 4)):
        tolerance = max(1e-6, roundings * torch.finfo(dtype).eps)
        run_both(parameters(SHAPES, dtype), steps, tolerance, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_calculated_in_float32(dtype: torch.dtype) -> None:
    # The squares (1e-9) vanish in float16, eps too; so would the sum of the gradients' squares.
    for value, limit in ((1e-3, None), (300.0, 1.0)):
        p = nn.Parameter(torch.zeros(70000, dtype=dtype))
        p.grad = torch.full_like(p, value)
        LAMB([p], lr=1.0, max_grad_norm=limit, weight_decay=0.0).step()
        g = float(p.grad[0]) if limit is None else 1 / math.sqrt(70000)
        expected = torch.full((70000,), -g / (g + 1e-6)).double()
        torch.testing.assert_close(p.detach().double(), expected, rtol=4e-3, atol=0)


def test_half_precision_moments_are_rounded_once_from_float32() -> None:
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    opt = LAMB([p], max_grad_norm=None, betas=(0.9, 0.9), weight_decay=0.0)
    expected = torch.zeros(1)
    for value in (1.0, 0.3, -0.7, 0.2):
        p.grad = torch.full_like(p, value)
        expected = (0.9 * expected + (1 - 0.9) * p.grad.float()).bfloat16().float()
        opt.step()
        assert torch.equal(opt.state[p]["exp_avg"].float(), expected)


def of_mixed_dtypes(tolerances: float, **options: Any) -> None:
    """Step once, as the reference; the clip norm of float64 gradients is float64."""
    dtypes = [torch.float64, torch.bfloat16, torch.float32, torch.float16, torch.float32]
    params = [parameters([s], d)[0] for s, d in zip(SHAPES, dtypes, strict=True)]
    opt, ref = LAMB(params, **options), Reference([{"params": params, **options}])
    ref.step(random_step(opt, 0))
    for p, (expected, *_) in zip(params, ref.groups[0]["rows"], strict=True):
        least = 1e-6 if p.dtype == torch.float64 else 0.0
        tolerance = max(least, tolerances, 2 * torch.finfo(p.dtype).eps)
        torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=0)


def test_mixed_dtypes_in_one_group() -> None:
    of_mixed_dtypes(0.0, lr=0.01, weight_decay=0.1, adam_w_mode=False)


def test_layouts() -> None:
    first, second, third = parameters([(2, 3, 2, 2), (4, 3), (6,)])
    laid_out = first.detach().to(memory_format=torch.channels_last), second.detach().t()
    params = [*map(nn.Parameter, laid_out), third]
    opt, ref = run_both(params, lr=0.05, weight_decay=0.1)
    assert opt.state[params[0]]["exp_avg"].stride() == params[0].stride()
    third.grad = torch.full((1,), 0.3, dtype=torch.float64).expand(6)
    ref.step(grads_of(opt))
    opt.step()
    compare(opt, ref)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_infinities_and_nans_reach_the_parameters(bad: float) -> None:
    params = parameters([(3,), (2,)])
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].grad.fill_(bad)
    LAMB(params).step()
    assert params[0].isnan().all()


def trained(steps: int, **options: Any) -> tuple[LAMB, list[Any]]:
    params = parameters(SHAPES, torch.float32)
    params[0] = parameters([SHAPES[0]], torch.bfloat16)[0]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]
    opt = LAMB(groups, lr=0.1, **options)
    for step in range(steps):
        random_step(opt, step)
    return opt, params


def test_resumes_bit_for_bit() -> None:
    through, expected = trained(6)
    opt, params = trained(3)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    fresh, copied = trained(0, eps=1.0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(copied, params, strict=True):
        p.data.copy_(q)
    for other in (fresh, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        for step in range(3, 6):
            random_step(other, step)
        assert_same([p for g in other.param_groups for p in g["params"]], expected)
        assert_same(other.state_dict()["state"], through.state_dict()["state"])


def test_loads_a_checkpoint_with_apex_keys() -> None:
    opt, _ = trained(2, adam_w_mode=False)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        for key in ("adam_w_mode", "use_nvlamb", "maximize"):
            del group[key]
    other, _ = trained(0, adam_w_mode=False, use_nvlamb=True)
    other.load_state_dict(saved)
    assert all(not g["adam_w_mode"] and g["use_nvlamb"] for g in other.param_groups)
    assert all(g["step"] == 2 and not g["maximize"] for g in other.param_groups)


def test_a_closure_is_called_with_gradients() -> None:
    (p,) = parameters([(3,)])
    opt = LAMB([p], lr=0.1)

    def closure() -> Any:
        opt.zero_grad()
        loss = p.square().sum()
        torch.autograd.backward(loss)
        return loss

    expected = p.detach().square().sum()
    assert torch.equal(opt.step(closure), expected) and p.grad is not None


# Dynamo imports torch's own modules, and one of them warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_compiled_step() -> None:
    compiled, eager = (LAMB(parameters(SHAPES[:1]), lr=0.1) for _ in range(2))
    compiled.step = torch.compile(compiled.step, backend="eager")  # type: ignore[method-assign]
    for opt in (compiled, eager):
        for seed in range(2):
            random_step(opt, seed)
    assert_same(compiled.param_groups, eager.param_groups)
    assert compiled.param_groups[0]["step"] == 2


@pytest.mark.parametrize(("dtype", "weight_decay"), [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_nothing_is_read_by_the_host(dtype: torch.dtype, weight_decay: float) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host raises."""
    params = [nn.Parameter(torch.ones(2, 3, device="meta", dtype=dtype)) for _ in range(3)]
    opt = LAMB(params, weight_decay=weight_decay, maximize=True)
    for lr in (0.1, torch.ones(1), torch.ones(1, device="meta")):
        opt.param_groups[0]["lr"] = lr
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    with pytest.raises(RuntimeError):
        params[0].sum().item()


def test_several_devices_in_one_group() -> None:
    params: list[Any] = [nn.Parameter(torch.ones(2, device=d)) for d in ("cpu", "meta", "cpu")]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = LAMB(params, lr=torch.tensor(0.5), max_grad_norm=None)  # meta has no norm to give away
    opt.step()
    assert torch.equal(params[0], params[2]) and not torch.equal(params[0], torch.ones(2))
    assert opt.state[params[1]]["exp_avg"].device.type == "meta"
    norm = lamb_module.global_norm([params[1].grad, params[0].grad.double()])
    assert norm.device.type == "meta" and norm.dtype == torch.float64 and norm.shape == ()


BAD_OPTIONS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "Invalid learning rate: -1", {"lr": -1}),
    (ValueError, "Invalid learning rate: nan", {"lr": math.nan}),
    (ValueError, "Tensor lr must be 1-element", {"lr": torch.ones(2)}),
    (ValueError, "Invalid epsilon value: -0.1", {"eps": -0.1}),
    (ValueError, "Invalid beta parameter at index 0: 1.0", {"betas": (1.0, 0.9)}),
    (ValueError, "Invalid beta parameter at index 1: -0.1", {"betas": (0.9, -0.1)}),
    (ValueError, "Invalid betas", {"betas": (0.9, 0.9, 0.9)}),
    (ValueError, "Invalid betas", {"betas": (torch.tensor(0.9), torch.tensor(0.9))}),
    (ValueError, "Invalid weight_decay value: -0.1", {"weight_decay": -0.1}),
    (ValueError, "Invalid max_grad_norm value: nan", {"max_grad_norm": math.nan}),
    (ValueError, "Invalid backend: 'cuda'", {"backend": "cuda"}),
    (NotImplementedError, "amsgrad", {"amsgrad": True}),
    (NotImplementedError, r"zero_grad\(set_to_none=False\)", {"set_grad_none": False}),
]


@pytest.mark.parametrize(("error", "message", "options"), BAD_OPTIONS)
def test_bad_options(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        LAMB(parameters(SHAPES), **options)
    opt = LAMB(parameters(SHAPES))
    if options.keys() <= opt.defaults.keys():
        with pytest.raises(error, match=message):
            opt.add_param_group({"params": parameters([(2,)]), **options})
    with pytest.raises(TypeError):
        opt.add_param_group(parameters(SHAPES))  # type: ignore[arg-type]
    assert len(opt.param_groups) == 1


def test_refused_gradients_leave_no_trace() -> None:
    dense, embedding = parameters([(3,)])[0], nn.Embedding(4, 2, sparse=True)
    opt = LAMB([dense, embedding.weight])
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1])).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        opt.step()
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    other = LAMB([dense, number])
    with pytest.raises(RuntimeError, match="complex parameters"):
        other.step()
    assert torch.equal(dense, before)
    for optimizer in (opt, other):
        assert not optimizer.state and "step" not in optimizer.param_groups[0]


def test_capture_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = LAMB(parameters(SHAPES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        opt.step()


# The kernel's own side: a stand-in for amp_C that follows apex's source on CPU tensors. What it
# cannot show is that a real build accepts the same call.


class FakeAmp(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("amp_C")
        self.calls: list[tuple[Any, ...]] = []

    def multi_tensor_lamb(self, *args: Any) -> None:
        self.calls.append((*args[:2], [list(ts) for ts in args[2]], *args[3:]))
        chunk, noop, lists, lr, b1, b2, eps, step, correction, _, averaging, mode = args[:12]
        norm, limit, nvlamb = args[12:]
        assert chunk == 65536 and noop.dtype == torch.int32 and noop.tolist() == [0]
        assert norm.dtype == torch.float32 and norm.shape == (1,)
        assert [type(x) for x in (step, correction, averaging, mode)] == [int] * 4
        assert type(nvlamb) is bool and all(type(x) is float for x in (lr, b1, b2, eps, limit))
        clip = norm / limit if norm > limit else torch.ones(1)
        options = *args[3:12], clip.reshape(()), nvlamb
        for g, p, m, v in zip(*lists, strict=True):
            new = moved(*(t.detach().float() for t in (g, p, m, v)), *options)
            for tensor, value in zip((p.data, m, v, g), new, strict=True):
                tensor.copy_(value)  # autograd does not see it


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> FakeAmp:
    module = FakeAmp()
    monkeypatch.setitem(sys.modules, "amp_C", module)
    return module


@pytest.fixture
def cpu_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb_module, "_APEX_DEVICE", "cpu")


def test_apex_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes the import raise ImportError; another package of that name lacks the function.
    for module in (None, types.ModuleType("amp_C")):
        monkeypatch.setitem(sys.modules, "amp_C", module)
        said = 'from its source.*APEX_CUDA_EXT=1.*public index.*backend="torch"'
        with pytest.raises(RuntimeError, match=said):
            LAMB(parameters(SHAPES), backend="apex")
        random_step(LAMB(parameters(SHAPES)), 0)


def test_apex_is_left_out_where_tensors_do_not_suit_or_torch_is_asked(
    amp: FakeAmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (None, "torch"):  # the parameters are on the CPU
        random_step(LAMB(parameters(SHAPES), backend=backend), 0)
    with pytest.raises(RuntimeError, match='backend="apex" cannot step parameters on cpu'):
        random_step(LAMB(parameters(SHAPES), backend="apex"), 0)
    monkeypatch.setattr(lamb_module, "_APEX_DEVICE", "cpu")
    random_step(LAMB(parameters(SHAPES, torch.float32), backend="torch"), 0)
    assert not amp.calls


@pytest.mark.usefixtures("cpu_suits", "amp")
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("averaging", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("limit", [1.0, None])
def test_backends_agree_and_share_their_state(
    mode: bool, averaging: bool, decay: float, limit: float | None
) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": decay, "max_grad_norm": limit}
    options |= {"adam_w_mode": mode, "grad_averaging": averaging}
    second = {"lr": torch.tensor(0.05, dtype=torch.float64), "max_grad_norm": -1}
    second |= {"maximize": True, "bias_correction": False, "use_nvlamb": True}
    opts = []
    for backend in ("torch", "apex"):
        params = parameters(SHAPES, torch.float32)
        groups = [{"params": params[:2]}, {"params": params[2:], **second}]
        opts.append(LAMB(groups, backend=backend, **options))
    for step in range(4):
        for opt in opts:
            assert_same(random_step(opt, step), grads_of(opt))
        if step == 1:  # go on from each other's checkpoint
            states = [copy.deepcopy(opt.state_dict()) for opt in opts]
            for opt, state in zip(opts, states[::-1], strict=True):
                opt.load_state_dict(state)
    assert [opt.backend for opt in opts] == ["torch", "apex"]
    for one, two in zip(*(opt.param_groups for opt in opts), strict=True):
        for p, q in zip(one["params"], two["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(dict(opts[0].state[p]), dict(opts[1].state[q]))


@pytest.mark.usefixtures("cpu_suits")
def test_buckets_choose_for_themselves(amp: FakeAmp) -> None:
    of_mixed_dtypes(1e-6)
    taken = {p.dtype: len(call[2][1]) for call in amp.calls for p in call[2][1]}
    assert taken == {torch.float32: 2, torch.float16: 1}


@pytest.mark.usefixtures("cpu_suits", "amp")
def test_autograd_notices_the_kernel() -> None:
    (p,) = parameters([(2,)], torch.float32)
    opt = LAMB([p], backend="apex")
    loss = p.square().sum()
    torch.autograd.backward(loss, retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_pickles_with_its_backend(amp: FakeAmp, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {b: pickle.dumps(LAMB(parameters(SHAPES), backend=b)) for b in (None, "torch", "apex")}
    for backend, data in saved.items():
        opt = pickle.loads(data)
        assert opt.backend == backend and (opt._kernel is None) == (backend == "torch")
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert pickle.loads(saved[None])._kernel is None
    with pytest.raises(RuntimeError, match="from its source"):
        pickle.loads(saved["apex"])


@pytest.fixture
def meta_suits(amp: FakeAmp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb_module, "_APEX_DEVICE", "meta")
    monkeypatch.setattr(amp, "multi_tensor_lamb", lambda *args: None)


class Marked(Tensor):
    pass


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **options)


def step_by_apex(p: Tensor, lr: Any = 0.1, **others: Tensor) -> None:
    """Step with tensors that are laid out as the parameter, or with others."""
    same = {name: torch.empty_like(p) for name in ("grad", "exp_avg", "exp_avg_sq")}
    opt = LAMB([p], backend="apex")
    opt.param_groups[0]["lr"] = lr
    p.grad, *moments = ({**same, **others}).values()
    opt.state[p] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    opt.step()


@pytest.mark.usefixtures("meta_suits")
def test_what_suits_apex() -> None:
    step_by_apex(meta(2**31 - 1))
    step_by_apex(meta(2, dtype=torch.float16))
    step_by_apex(meta(2, 3, 4, 5).to(memory_format=torch.channels_last))
    step_by_apex(meta(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d))
    step_by_apex(nn.Parameter(meta(2)))
    # A device has a number; the next objection is the dtype.
    numbered: Any = types.SimpleNamespace(device=torch.device("meta:3"), dtype=torch.int32)
    answer = lamb_module._apex_objection(0.1, [numbered], [], [], [])
    assert answer == "torch.int32 parameters"


@pytest.mark.usefixtures("meta_suits")
@pytest.mark.parametrize(
    ("said", "p", "others"),
    [
        ("parameters on cpu", torch.ones(2), {}),
        ("tensor subclasses", meta(2).as_subclass(Marked), {}),
        ("2147483648 elements", meta(2**31), {}),
        ("0 elements", meta(0), {}),
        ("float64", meta(2, dtype=torch.float64), {}),
        ("bfloat16", meta(2, dtype=torch.bfloat16), {}),
        ("not contiguous", meta(2, 3).t(), {}),
        ("not contiguous", meta(4, 4)[::2], {}),
        ("Tensor lr on meta", meta(2), {"lr": meta(1)}),
        *(
            ("other strides", meta(2, 3), {name: meta(3, 2).t()})
            for name in ("grad", "exp_avg", "exp_avg_sq")
        ),
    ],
)
def test_what_does_not_suit_apex(said: str, p: Tensor, others: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f'backend="apex" cannot step .*{said}'):
        step_by_apex(p, **others)
