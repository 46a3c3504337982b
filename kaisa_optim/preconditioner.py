"""The order of one K-FAC step, and the answers to a user's questions about it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import gradients
from . import options as checks
from .capture import Capture
from .coverage import cover, unwrapped
from .layers import Layer
from .options import Options
from .second_order import SecondOrder
from .stacks import Layout, Pair, lay_out
from .statistics import Statistics

Group = dict[str, Any]

logger = logging.getLogger("kaisa_optim")


# Numbers that may be given as callables of the step, beside those of the parameter groups.
_SCHEDULED = ("kl_clip", "factor_update_steps", "inv_update_steps", "loss_terms")


class Preconditioner:
    """K-FAC for one model: ``optimizer.preconditioner``.

    The optimizer calls :meth:`step` with its parameter groups and gets the gradients that its base
    class is to see. Everything else here is for users: what is covered, what it costs, what the
    factors are, and the hyperparameters that hold for the whole optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        groups: list[Group],
        group_schedules: list[dict[str, Callable[[int], Any]]],
        known: Iterable[Tensor] = (),
    ) -> None:
        self.model = model
        self.options = options
        self.steps = 0
        self.layers: dict[str, Layer] = {}
        self.uncovered: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.statistics = Statistics(
            papers=options.papers,
            loss_reduction=options.loss_reduction,
            factor_dtype=options.factor_dtype,
        )
        self.second_order = SecondOrder(
            method=options.compute_method,
            split=options.damping_split,
            stored_product=options.compute_eigenvalue_outer_product,
            dtype=options.inv_dtype,
            max_failures=options.max_failures,
        )
        self.fed: set[Layer] = set()  # have a running average
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
        self.layout: Layout = lay_out([])
        self._placement: list[tuple[torch.device, torch.dtype]] = []
        self._capture: Capture | None = None
        self._named_without_statistics: set[Layer] = set()
        self._schedules: dict[str, Callable[[int], Any]] = {}
        self._group_schedules = group_schedules  # of damping and factor_decay, one dict a group
        for name in _SCHEDULED:
            value = getattr(options, name)
            if callable(value):
                self._schedules[name] = value
                value = value(0)
            setattr(self, name, value)
        self.grad_scaler = options.grad_scaler
        self._accepted = set(known)  # parameters that are, or were, the model's
        self.rebuild(groups)
        if not self.layers:
            self._detach()
            detail = "; ".join(f"{name}: {why}" for name, why in self.uncovered.items())
            raise ValueError(
                "Invalid model: it has no layer that K-FAC covers"
                + (f" ({detail})" if detail else "")
                + "; use the base optimizer, or register its layers with register_layer"
            )
        if self.uncovered:
            lines = "\n".join(f"  {name}: {why}" for name, why in self.uncovered.items())
            warnings.warn(
                f"the base optimizer updates these with their raw gradients:\n{lines}", stacklevel=4
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in checks.PER_GROUP:
            raise AttributeError(
                f"{name} = {value!r}: it belongs to the parameter groups; set "
                f'optimizer.param_groups[i]["{name}"]'
            )
        super().__setattr__(name, value)

    @property
    def parameters(self) -> Iterable[Tensor]:
        """All that the optimizer has of this model, covered or not."""
        return self._group_of.keys()

    # ---- hyperparameters of the whole optimizer ----

    @property
    def kl_clip(self) -> float | None:
        return self._kl_clip

    @kl_clip.setter
    def kl_clip(self, value: float | None) -> None:
        self._kl_clip = checks.check_kl_clip(value)

    @property
    def factor_update_steps(self) -> int:
        return self._factor_update_steps

    @factor_update_steps.setter
    def factor_update_steps(self, value: int) -> None:
        self._factor_update_steps = checks.check_interval("factor_update_steps", value)
        self._aim()

    @property
    def inv_update_steps(self) -> int:
        return self._inv_update_steps

    @inv_update_steps.setter
    def inv_update_steps(self, value: int) -> None:
        self._inv_update_steps = checks.check_interval("inv_update_steps", value)

    @property
    def loss_terms(self) -> str | float:
        """ "examples", "positions", or how many terms the losses of this step average."""
        return self.statistics.loss_terms

    @loss_terms.setter
    def loss_terms(self, value: str | float) -> None:
        value = checks.check_loss_terms(value)
        if self.options.papers and value != "examples":
            raise ValueError(
                f'Invalid loss_terms: {value!r} has no meaning under normalization="kaisa", which '
                'leaves K out; use normalization="fisher"'
            )
        self.statistics.loss_terms = value

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler, number or callable whose scale the captured output gradients carry."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, value: Any) -> None:
        self.statistics.loss_scale = _scale_reader(value)
        self._grad_scaler = value

    def current_options(self) -> Options:
        """The options with what has been set since construction."""
        plain = [name for name in _SCHEDULED if name not in self._schedules]
        values = {name: getattr(self, name) for name in (*plain, "grad_scaler")}
        return dataclasses.replace(self.options, **values)

    # ---- the step ----

    def step(self, groups: list[Group]) -> dict[Tensor, Tensor]:
        """One step: the preconditioned gradient of every covered parameter that has a gradient.

        Statistics gathered since the last step enter the running averages; layers whose turn it is
        are decomposed; gradients are preconditioned, stack by stack, and clipped together.
        """
        self._follow_schedules(groups)
        self._follow_layers()
        if self._without_capture(groups):
            return {}

        def hyperparameter(name: str) -> Callable[[Layer], float]:
            return lambda layer: self._shared(layer, groups, name)

        damping_of = hyperparameter("damping")
        self.fed.update(self.statistics.update(self.layout, hyperparameter("factor_decay")))
        due = self._due()
        if due:
            for layer in self.second_order.refresh(self.layout, due, damping_of):
                self.forget(layer)
                self._named_without_statistics.add(layer)
        stacks = []
        for pair in self.layout.pairs:
            members = self._members(pair)
            if members:
                raw = gradients.stack(pair, members)
                new = self.second_order.precondition(pair, raw, members, damping_of)
                stacks.append(gradients.Preconditioned(members, raw, new))
        if self.kl_clip is not None and stacks:
            gradients.clip(stacks, self.kl_clip, lambda p: self._alpha(p, groups))
        self._advance()
        return gradients.unstack(stacks, self._in_parts)

    def _follow_schedules(self, groups: list[Group]) -> None:
        if len(groups) != len(self._group_schedules):
            raise RuntimeError(
                f"Invalid param_groups: {len(groups)} groups, {len(self._group_schedules)} were "
                "added; use add_param_group, or build a new optimizer"
            )
        for group, schedules in zip(groups, self._group_schedules, strict=True):
            for name, check in checks.PER_GROUP.items():
                schedule = schedules.get(name)
                # Users and schedulers write here, too.
                group[name] = check(group[name] if schedule is None else schedule(self.steps))
        for name, schedule in self._schedules.items():
            setattr(self, name, schedule(self.steps))

    def _follow_layers(self) -> None:
        """Make room for layers that were moved, frozen or unfrozen since the last step."""
        changed = False
        for layer, gathered in self.statistics.gathered.items():
            if gathered.covers != layer.covers:
                logger.info("layer %r starts anew: it was frozen or unfrozen", layer.name)
                layer.covers = gathered.covers
                self.forget(layer)
                changed = True
        if changed or self._placement != self._place():
            self.lay_out()

    def _place(self) -> list[tuple[torch.device, torch.dtype]]:
        parameters = (layer.parameters[0] for layer in self.layout.factors)
        return [(p.device, p.dtype) for p in parameters]

    def _without_capture(self, groups: list[Group]) -> bool:
        """Refuse a step that should have statistics and has none; True for a step of nothing."""
        capture = self._capture
        assert capture is not None
        if not capture.gathering or capture.backwards or capture.was_paused:
            return False
        if all(p.grad is None for layer in self.layers.values() for p in layer.parameters):
            return False
        if all("lr" in group and float(group["lr"]) == 0 for group in groups):
            return True  # torch.distributed.checkpoint steps once to create the base's state
        raise RuntimeError(
            f"step {self.steps} is due for statistics, but no covered layer saw a backward pass. "
            "Gradients must come from .backward() through this very model, once per step. If it "
            "was compiled and called before the optimizer was built, build the optimizer first or "
            "call torch._dynamo.reset(); if the forward was meant to be left out, use "
            "optimizer.preconditioner.paused()"
        )

    def _due(self) -> list[Layer]:
        """Layers to refresh in this step: all at once, or each in its turn."""
        interval, at = self.inv_update_steps, self.steps % self.inv_update_steps
        layers = list(self.layers.values())
        due = []
        for i, layer in enumerate(layers):
            turn = i * interval // len(layers) if self.options.staggered else 0
            first = self.steps == 0 or layer not in self.second_order.ready
            if layer in self.fed and (first or at == turn):
                due.append(layer)
        return due

    def _members(self, pair: Pair) -> list[Layer]:
        """The layers of a pair that have both a gradient and second-order state."""
        with_gradient = [x for x in pair.layers if any(p.grad is not None for p in x.parameters)]
        for layer in with_gradient:
            if layer not in self.fed and layer not in self._named_without_statistics:
                self._named_without_statistics.add(layer)
                warnings.warn(
                    f"layer {layer.name!r} has a gradient but no statistics, so its raw gradient "
                    "is used; its weight may be in use outside of its module's forward",
                    stacklevel=2,
                )
        return [layer for layer in with_gradient if layer in self.second_order.ready]

    def _alpha(self, parameter: Tensor, groups: list[Group]) -> Any:
        group = groups[self._group_of[parameter]]
        alpha = group["kl_clip_lr"]
        return group.get("lr", 1.0) if alpha == "current" else alpha

    def _advance(self) -> None:
        self.steps += 1
        self.step_count.fill_(self.steps)
        assert self._capture is not None
        self._capture.missing.difference_update(self.fed)
        self._capture.reset()
        self._aim()

    def _aim(self) -> None:
        """Whether the next backward passes gather statistics of all layers."""
        capture = getattr(self, "_capture", None)
        if capture is None:
            return
        interval = self.factor_update_steps
        if "factor_update_steps" in self._schedules:
            value = self._schedules["factor_update_steps"](self.steps)
            interval = checks.check_interval("factor_update_steps", value)
        capture.gathering = self.steps % interval == 0

    def _shared(self, layer: Layer, groups: list[Group], name: str) -> float:
        """A group's value for a layer; its weight and bias must agree on it."""
        values = {groups[self._group_of[p]][name] for p in layer.parameters}
        if len(values) > 1:
            raise ValueError(
                f"Invalid {name}: layer {layer.name!r} has its weight and bias in parameter groups "
                f"with different values {sorted(values)}; give both groups the same {name}"
            )
        return values.pop()

    # ---- what is covered ----

    def rebuild(self, groups: list[Group]) -> None:
        """Match model and parameter groups anew; layers that stay as they were keep their state."""
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # A replaced module's parameters stay in their group, as they do in any optimizer.
        gone = self._accepted.difference(self.model.parameters())
        self._group_of = {p: i for p, i in group_of.items() if p not in gone}
        found = cover(
            unwrapped(self.model),
            self._group_of,
            skip_layers=tuple(self.options.skip_layers),
            max_factor_size=self.options.max_factor_size,
            papers_only=self.options.papers,
            warn=self._capture is None,
        )
        self._accepted.update(group_of)
        before, self.layers = self.layers, {}
        for name, layer in found.layers.items():
            old = before.get(name)
            same = old is not None and old.same_place(layer) and old.trained == layer.trained
            self.layers[name] = old if same and old is not None else layer
        for layer in before.values():
            if self.layers.get(layer.name) is not layer:
                self.forget(layer)
        self.uncovered, self.skipped = found.uncovered, found.skipped
        uses = Counter(p for x in self.layers.values() for p in (x.weight, x.bias))
        self._in_parts = {p for p, count in uses.items() if p is not None and count > 1}
        for layer in self.layers.values():
            for name in checks.PER_GROUP:
                if layer.parameters:
                    self._shared(layer, groups, name)
        for layer in self.statistics.gathered.keys() - set(self.layers.values()):
            self.statistics.drop(layer)
        self._detach()
        former = self._capture
        self._capture = Capture(
            unwrapped(self.model),
            list(self.layers.values()),
            self.statistics.add,
            self.statistics.drop,
            reduce=self.options.weight_sharing == "reduce",
        )
        self._capture.missing -= self.fed
        if former is not None:  # between a backward pass and its step
            self._capture.backwards, self._capture.was_paused = former.backwards, former.was_paused
        self._aim()
        self.lay_out()

    def _detach(self) -> None:
        if self._capture is not None:
            self._capture.detach()

    def forget(self, layer: Layer) -> None:
        """Drop what is known of a layer: it is estimated anew when it is next used."""
        self.fed.discard(layer)
        self.second_order.ready.discard(layer)
        if self._capture is not None:
            self._capture.missing.add(layer)

    def lay_out(self) -> None:
        old = self.layout
        self.layout = lay_out(x for x in self.layers.values() if any(x.covers))
        for stack in self.layout.stacks:
            self.statistics.allocate(stack)
        self.second_order.allocate(self.layout)
        for layer in self.fed & self.layout.factors.keys() & old.factors.keys():
            kept = dict(old.views(layer))
            for name, view in self.layout.views(layer):
                view.copy_(kept[name])
        self._placement = self._place()
        # One count for all layers' entries in the optimizer's state; views of the new stacks.
        self.step_count = torch.tensor(self.steps, device="cpu")
        self.published.clear()

    def resume(self, steps: int) -> None:
        """Go on from a loaded step count."""
        assert self._capture is not None
        self.steps = steps
        self.step_count = torch.tensor(steps, device="cpu")
        self._capture.missing.difference_update(self.fed)
        self._aim()

    def discard(self) -> None:
        """Forget the statistics gathered since the last step, as their gradients are dropped."""
        self.statistics.clear()

    # ---- questions ----

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes under this context leave no statistics."""
        assert self._capture is not None
        with self._capture.pause():
            yield

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Running averages A and G: ``[blocks, n, n]``, or ``[blocks, n]`` where diagonal."""
        layer = self.layers.get(name)
        if layer is None:
            raise KeyError(f"no covered layer {name!r}; there are {', '.join(self.layers)}")
        if layer not in self.fed:
            raise KeyError(f"layer {name!r} has no statistics yet")
        a, g = self.layout.factors[layer]
        return a["average"], g["average"]

    def memory_usage(self) -> dict[str, int]:
        """Bytes of K-FAC state by kind; sums of the running step apart, as "pending"."""
        kinds = {
            "average": "factors",
            "vectors": "eigenvectors",
            "values": "eigenvalues",
            "inverse": "inverses",
            "scale": "eigenvalue_products",
        }
        usage: dict[str, int] = {}
        for name, tensor in self.layout.tensors():
            kind = kinds.get(name, "counters")
            usage[kind] = usage.get(kind, 0) + tensor.numel() * tensor.element_size()
        usage["total"] = sum(usage.values())
        usage["pending"] = self.statistics.pending_bytes()
        return usage

    def __repr__(self) -> str:
        lines = [f"Preconditioner({self.options.compute_method}, {self.steps} steps taken)"]
        for title, entries in (
            ("covered", [repr(layer) for layer in self.layers.values()]),
            ("raw gradients", [f"{name}: {why}" for name, why in self.uncovered.items()]),
            ("skipped", [f"{name}: matches {why!r}" for name, why in self.skipped.items()]),
        ):
            if entries:
                lines.append(f"  {title}:")
                lines += [f"    {entry}" for entry in entries]
        return "\n".join(lines)


def _scale_reader(scaler: Any) -> Callable[[], Tensor | float] | None:
    """How to read a loss scale without waiting for the device."""
    if scaler is None:
        return None
    if callable(scaler):
        return scaler
    if isinstance(scaler, int | float | Tensor) and not isinstance(scaler, bool):
        if not isinstance(scaler, Tensor) and not scaler > 0:
            raise ValueError(f"Invalid grad_scaler: {scaler!r}; a scale must be above 0")
        return lambda: scaler
    if hasattr(scaler, "get_scale"):

        def read() -> Tensor | float:
            scale = getattr(scaler, "_scale", None)
            return scale if isinstance(scale, Tensor) else scaler.get_scale()

        return read
    raise ValueError(
        f"Invalid grad_scaler: {scaler!r}; it must be a torch.amp.GradScaler, a number or a "
        "callable"
    )
