"""The optimizer family: a mixin that puts K-FAC inside the step of any torch.optim class."""

from __future__ import annotations

import inspect
import os
import textwrap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import agree, bases, checkpoint, options, reports
from .errors import FORMER, check_callable, invalid, invalid_because, is_real, unexpected
from .lamb import LAMB, clipped_gradients
from .linalg import products
from .options import GROUP_KEYS, OPTIONS, PER_GROUP, SECTIONS, Options, refuse_lost_damping
from .plan.schedule import PATIENCE
from .preconditioner import Preconditioner

ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"  # torch's module of ZeRO 1
_SPREADS = 'assignment="layer-wise" spreads the moments of Adam, AdamW and LAMB over ranks'
# Keys that a parameter group can't have of its own, and why.
_OF_ALL = "it is one for the whole optimizer, pass it as an argument"
_NO_KEYS = dict.fromkeys(OPTIONS.keys() - {*GROUP_KEYS, "process_group"}, _OF_ALL)
_NO_KEYS["use_muon"] = FORMER["use_muon"]


class KFACMixin(Optimizer):
    """K-FAC before the base class's step; ``with_kfac`` and the family are made with it."""

    _base: type[Optimizer]
    _loaded: checkpoint.Load  # during a call of load_state_dict

    def __init__(
        self,
        params: nn.Module | Iterable[Any] | None = None,
        *args: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the base's arguments, the model as parameters or as ``model``, and options."""
        title = type(self).__name__
        # A layer would miss its bias, and ranks would wait for layers that others do not have.
        if any(caller.f_globals.get("__name__") == ZERO_REDUNDANCY for caller in agree.callers()):
            why = f"ZeroRedundancyOptimizer gives each rank a part of the parameters, and {title} "
            why += f"needs all; build {title} alone, where {_SPREADS} as ZeRO 1 does"
            raise invalid_because("optimizer_class", why)
        if params is None:
            raise TypeError(f"{title}() needs the model first: {title}(model, ...)")
        parameters: Any = params
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                why = "the first argument is a module already; leave out model="
                raise invalid_because("model", why)
            model, parameters = params, params.parameters()
        if not isinstance(model, nn.Module):
            wrong = params if model is None else model
            why = f"an object of type {type(wrong).__name__}; K-FAC hooks the model's layers: pass "
            why += f"the nn.Module first, as {title}(model, ...), or as model="
            raise invalid_because("model", why)
        # The next class may stand before the base, and **kwargs may take more than they show.
        known = inspect.signature(super().__init__).parameters
        of_base = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        if not any(p.kind is Parameter.VAR_KEYWORD for p in known.values()):
            for name in [name for name in of_base if name not in known]:
                raise unexpected(title, name, OPTIONS, known)
        rate = args[0] if args and [*known][1:2] == ["lr"] else kwargs.get("lr")
        if not (rate is None or is_real(rate) or isinstance(rate, Tensor)):
            must = "it must be a number or a tensor; parameters come first, and the model as model="
            raise invalid("lr", rate, must)
        self._kfac_model = model
        self._kfac_options = Options(**{n: v for n, v in kwargs.items() if n in OPTIONS})
        self._group_schedules: list[options.Schedules] = []
        # This adds all groups: with a preconditioner, ranks would compare models that lack groups.
        super().__init__(parameters, *args, **of_base)
        self._start()

    def _start(self, known: Iterable[Tensor] = (), compare: bool = True) -> None:
        # Layers without calls, and who trained, at the last look at coverage; None: it has warned.
        self._looked: tuple[list[str], list[bool]] | None = ([], [])
        # The rank that has the whole state since the last step, and the tensors that it received.
        self._consolidated: tuple[int, checkpoint.Entries] | None = None
        self._published = -1, 0  # compilations and entries, when K-FAC's part of these was made
        # Before any of the user's own hooks, so that they see the whole state.
        self.register_state_dict_post_hook(KFACMixin._complete)  # type: ignore[arg-type]
        step_of_base = bases.step_of(self._base, self.defaults)
        if any(group.get("differentiable") for group in self.param_groups):
            why = "True; a K-FAC step can't be differentiated, leave it False"
            raise invalid_because("differentiable", why)
        # A fused base would get scaled gradients and infinities: GradScaler must unscale and skip.
        self._step_supports_amp_scaling = False
        if self._kfac_options.grad_worker_fraction == options.AUTO:
            from .tools import automatic  # a plan is made for this option alone

            self._kfac_options = automatic.settled(self)
        self.preconditioner = kfac = Preconditioner(
            self._kfac_model,
            self._kfac_options,
            self.param_groups,
            self._group_schedules,
            step_of_base.length(),
            known,
            self._base.__name__ if compare else None,
        )
        self.base_part = step_of_base(self)
        self._stepper = self.base_part if kfac.rule.makes_directions else bases.RawStep(self)
        world, distributed = os.environ.get("WORLD_SIZE", "1"), torch.distributed
        joined = distributed.is_available() and distributed.is_initialized()
        if world not in ("", "1") and not joined:
            text = f"WORLD_SIZE is {world}, but there is no process group: this process trains "
            text += "alone; call torch.distributed.init_process_group() before building model and "
            text += "optimizer"
            agree.warn(kfac.ranks, text)

    # ---- stepping ----

    @torch.compiler.disable  # it decides in Python, from step to step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step covered parameters along K-FAC's directions, and let the base step the others.

        With the papers' methods, the base steps all parameters with preconditioned gradients.
        ``closure`` runs first, with gradients enabled. The step leaves ``p.grad`` unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kfac, base, distributed = self.preconditioner, self._stepper, torch.distributed
        # Some wrappers take over all attributes of an optimizer, which then ends. A strong
        # reference would make a circle that keeps the model's tensors.
        base.optimizer = self.base_part.optimizer = weakref.proxy(self)
        joined = distributed.is_available() and distributed.is_initialized()
        if joined and kfac.ranks.group is None and distributed.get_world_size() > 1:
            why = f"Invalid process group: its {distributed.get_world_size()} ranks joined after "
            why += "the optimizer was built, so the optimizer would exchange nothing; build the "
            why += "optimizer after init_process_group()"
            raise RuntimeError(why)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            why = "a K-FAC step can't be captured in a CUDA graph: the host decides in each step "
            why += "which layers are due; run the training step outside of graphs"
            raise RuntimeError(why)
        # Some users call step() under autocast, which is for the model's passes.
        autocast = torch._C._is_any_autocast_enabled()
        with products.without_autocast(self.device.type) if autocast else nullcontext():
            if kfac.unsettled:
                self._settle_load()
            limits = base.limits and any(group["max_grad_norm"] for group in self.param_groups)
            gradients = clipped_gradients(self.param_groups) if limits else None
            with nullcontext() if gradients is None else bases.gradients_of(gradients):
                exchanged = kfac.step(self.param_groups, base)
        # Entries hold views, which follow the tensors: most steps need not look.
        if exchanged or self._published != (kfac.groups.compilations, len(self.state)):
            checkpoint.publish(kfac, self.state)
            self._published = kfac.groups.compilations, len(self.state)
            # The step has made or changed entries: without this, each step would compile anew.
            if kfac.groups.facts is not None:
                kfac.groups.facts = base.facts(kfac.groups.plan)
            if exchanged and not all([x.has_average for x in kfac.registry.states.values()]):
                self._warn_of_coverage()
        self._consolidated = None
        return loss

    def base_step(self) -> None:
        """Take the base's own step; on several ranks, an error waits for the next exchange."""
        step: Any = self._base.step
        # Building any plain base optimizer wraps the class's step with the hooks that have run
        # here already. Remove only that wrapper: others beneath it, such as no_grad, must stay.
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        try:
            step(self)
        except Exception as error:
            self.preconditioner.status.note_failure(error, "the base optimizer's step")

    def _warn_of_coverage(self) -> None:
        registry = self.preconditioner.registry
        # The search for calls of a layer has ended: it counted as covered at construction.
        states = registry.states.items()
        uncalled = [n for n, x in states if x.unseen >= PATIENCE and not x.has_average]
        look = uncalled, [p.requires_grad for p in registry.group_of]
        if self._looked is not None and uncalled and look != self._looked:
            text = reports.poor_coverage(self.preconditioner.coverage())
            self._looked = None if text else look
            if text:
                agree.warn(self.preconditioner.ranks, text)

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the statistics gathered since the last step."""
        super().zero_grad(set_to_none)
        # Sums without their gradients would make averages of passes that no step has used.
        self.preconditioner.discard()

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse ``torch.distributed.algorithms.Join``, which asks its members for a hook."""
        why = f"{type(self).__name__} does not work in Join: a rank without data would leave the "
        why += "other ranks waiting; give all ranks equally many batches, by a DistributedSampler "
        why += "or drop_last=True"
        raise RuntimeError(why)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; a first group may be empty."""
        first: Tensor = next(p for group in self.param_groups for p in group["params"])
        return first.device

    # ---- parameter groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``damping`` and ``factor_decay`` may be numbers or callables."""
        if not isinstance(param_group, dict):
            return super().add_param_group(param_group)  # which refuses it
        for name in sorted(_NO_KEYS.keys() & param_group.keys() - self.defaults.keys()):
            why = f"{param_group[name]!r} in a parameter group; {_NO_KEYS[name]}"
            raise invalid_because(name, why)
        settings, is_built = self._kfac_options, hasattr(self, "preconditioner")
        schedules: options.Schedules = {}
        for name in PER_GROUP:
            value = param_group.setdefault(name, getattr(settings, name))
            if callable(value):
                check_callable(name, value, "step")
                schedules[name] = value
                # As the other groups, of the last step: a layer may have its bias in another group.
                value = value(max(0, self.preconditioner.steps - 1) if is_built else 0)
            param_group[name] = options.check(name, value)
        super().add_param_group(param_group)
        self._group_schedules.append(schedules)
        group = self.param_groups[-1]
        if not settings.is_polar:  # which has no clip
            # α of the clip: fixed at construction, so that a schedule of lr has effect
            is_fixed = settings.kl_clip_lr == "initial" and group.get("lr") is not None
            group.setdefault("kl_clip_lr", float(group["lr"]) if is_fixed else "current")
        self._consolidated = None
        try:
            refuse_lost_damping(group)
            decay, has_no_rate = group.get("weight_decay"), group.get("lr", 0.0) is None
            if settings.is_polar and has_no_rate and decay:
                why = f"None with weight_decay={decay!r}; covered weights decay by lr * "
                why += "weight_decay: give lr a number, or set weight_decay=0"
                raise invalid_because("lr", why)
            if is_built:
                self.preconditioner.rebuild(self.param_groups)
        except ValueError:
            # A refused group must leave no trace: later steps, copies and saves walk all groups.
            self.param_groups.pop()
            self._group_schedules.pop()
            if is_built:
                self.preconditioner.rebuild(self.param_groups)
            raise

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and K-FAC's; no collective is called.

        On several ranks, K-FAC's state and the momenta are this rank's share, and a warning names
        what it lacks, unless all ranks have called :meth:`consolidate_state_dict` since the last
        step. ``torch.distributed.checkpoint`` saves the shares of all ranks.
        """
        if self._consolidated is None:
            checkpoint.warn_of_share(self)
        return super().state_dict()

    def _complete(self, state_dict: dict[str, Any]) -> None:
        # A rank's share is saved alone: a view, once pickled, would take its whole stack along.
        if not self.preconditioner.status.alone:
            state_dict["state"] = checkpoint.compact(state_dict["state"])
        if self._consolidated is None:
            return
        # Entries are the live dictionaries: a merge in place would hand the base others' state.
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(parameters):
            if entry := self._consolidated[1].get(p):
                state_dict["state"][index] = {**state_dict["state"].get(index, {}), **entry}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring K-FAC's state of all ranks to rank ``to`` of the process group; all ranks call.

        Until the next step, ``state_dict()`` on that rank is whole: it loads at any number of ranks
        and with any assignment.
        """
        ranks = self.preconditioner.ranks
        if not isinstance(to, int) or not 0 <= to < ranks.world:
            must = f"it must be a rank of the process group, 0 to {ranks.world - 1}"
            raise invalid("to", to, must)
        # First, since all ranks must know the layers whose momenta they are to send.
        self._settle_load()
        momentum, momenta = self.base_part.momentum, self.momenta()
        self._consolidated = to, checkpoint.consolidate(self.preconditioner, to, momentum, momenta)

    def momenta(self) -> dict[Tensor, Tensor]:
        """Return the momenta of the parameters that K-FAC steps; empty ones of other ranks."""
        kfac, base, momenta = self.preconditioner, self.base_part, dict[Tensor, Tensor]()
        stepped, stored = kfac.groups.stepped()
        # Each rank has its own part of a sharded momentum, as of the parameter.
        sharded = {p for layer in kfac.registry.sharded for p in layer.trainable}
        for group in self.param_groups:
            for p in [p for p in group["params"] if p in stepped and p not in sharded]:
                entry = self.state.get(p, {})
                # All ranks must answer alike, so nothing here may follow from what this rank keeps.
                if checkpoint.STEP not in entry or not base.keeps(group, [entry]):
                    continue
                zeros = torch.zeros(p.shape if p in stored else 0, dtype=p.dtype, device=p.device)
                momenta[p] = entry.get(base.momentum, zeros) if p in stored else zeros
        return momenta

    def base_state_dict(self) -> dict[str, Any]:
        """Return a state that a plain optimizer of the base class loads, without K-FAC's part.

        Second moments, which K-FAC keeps as one number a block, are equal within a block. On
        several ranks, call :meth:`consolidate_state_dict` first, and this method on that rank.
        """
        kfac = self.preconditioner
        whole = self._consolidated is not None and self._consolidated[0] == kfac.ranks.rank
        if not kfac.status.alone and not whole:
            why = "base_state_dict() needs the whole state: call consolidate_state_dict(to=rank) "
            raise RuntimeError(why + "on all ranks first, and base_state_dict() on that rank")
        return checkpoint.of_base(self, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of its base class alone.

        On several ranks, all must load a state. If one rank refuses its state, and goes on beside
        ranks that have loaded a state, all ranks raise the error in the next step.
        """
        # Run after the user's own hooks, which may change the state, and for this call only.
        handle = self.register_load_state_dict_pre_hook(checkpoint.separate)
        try:
            checkpoint.check_form(state_dict, keys=())  # hooks may still add the keys
            super().load_state_dict(state_dict)
            load = self._loaded
        except Exception as error:
            self.preconditioner.unsettled = [error]  # told to other ranks in the next step
            raise
        finally:
            handle.remove()
            self.__dict__.pop("_loaded", None)
        load.warn(self)

    def _settle_load(self) -> None:
        """Compare what ranks have loaded; layers that only some ranks have begin anew on all."""
        base, state = self.base_part, self.state
        entries = [(p, entry) for p, entry in state.items() if isinstance(entry, dict)]
        momenta = {p for p, entry in entries if base.momentum in entry}
        anew = self.preconditioner.settle_load(self.param_groups, momenta)
        for p in [p for layer in anew for p in layer.parameters]:
            # On all ranks: a momentum that stayed on some would drive the weights apart.
            if p in state:
                base.release(state[p])
            base.stepped.discard(p)
        if anew:
            names = checkpoint.abridged([repr(layer.name) for layer in anew], between=", ")
            text = f"ranks have loaded different parts of the state of {names}, which begin anew "
            text += "on all ranks; call consolidate_state_dict() before a save, and load the same "
            text += "state on all ranks"
            agree.warn(self.preconditioner.ranks, text)

    # ---- copies ----

    def __reduce__(self) -> Any:
        # A class made at run time can't be imported by its name: its base finds it again.
        cls = type(self)
        made = cls._base if _FAMILY.get(cls._base) is cls else cls
        return _blank, (made,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        if self._kfac_options.process_group is not None:
            why = "an optimizer with process_group= can't be copied or pickled, since no process "
            raise TypeError(why + "group can; save its state_dict()")
        base, settings = super().__getstate__(), self.preconditioner.hyperparameters
        return {
            **base,
            "state": defaultdict(dict, checkpoint.compact(base["state"])),
            "_kfac_model": self._kfac_model,
            "_kfac_options": self._kfac_options.having(settings.values | settings.schedules),
            "_group_schedules": self._group_schedules,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_kfac_model" not in state:  # from load_state_dict
            checkpoint.set_base_state(self, state, super().__setstate__)
            self._resume(self.__dict__.get("_loaded") or checkpoint.Load(self.preconditioner, {}))
            return
        state = dict(state)
        entries = checkpoint.take_entries(state["state"])
        super().__setstate__(state)
        known = [p for group in self.param_groups for p in group["params"]]
        # One rank alone may make a copy: a comparison would wait for the others without end.
        self._start(known, compare=False)
        self._resume(checkpoint.Load(self.preconditioner, entries))

    def _resume(self, load: checkpoint.Load) -> None:
        self._consolidated = None
        # The base begins entries anew that K-FAC left without second moments, if it is to step
        # their parameters: a layer's factors may be missing. Some bases keep other values there.
        base = self.base_part
        entries = [(p, x) for p, x in self.state.items() if base.second and isinstance(x, dict)]
        base.stepped = {p for p, entry in entries if entry and base.second not in entry}
        load.restore()
        if not base.second:  # only gradient workers have these momenta
            base.stepped |= self.preconditioner.groups.stepped()[0]
        loaded = {p for p, entry in load.entries.items() if entry}
        # The base begins these anew, by an entry that is absent.
        loaded.difference_update(p for layer in load.foreign for p in layer.trainable)
        checkpoint.publish(self.preconditioner, self.state, only=loaded)


# ---- the family ----

# K-FAC needs one gradient a step, dense, and makes it orthogonal itself.
_REFUSED = {
    "LBFGS": "it evaluates the closure several times a step and approximates the curvature itself",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "steps of KFACAdam are orthogonalized already; use KFACAdam",
    "ZeroRedundancyOptimizer": "it would lose K-FAC's state in saves; give the class that it "
    f"wraps: {_SPREADS}",
}

_FAMILY: dict[type[Optimizer], type[KFACMixin]] = {}


def _sign(cls: type[KFACMixin]) -> type[KFACMixin]:
    parameters = inspect.signature(cls._base.__init__).parameters.values()
    variadic, keyword = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD), Parameter.KEYWORD_ONLY
    _, *first = [p for p in parameters if p.kind not in variadic]  # without self
    annotation = "nn.Module | Iterable[Any] | None"
    first[:1] = [p.replace(annotation=annotation) for p in first[:1]]  # a base of *args has none
    first.append(Parameter("model", keyword, default=None, annotation="nn.Module | None"))
    lines = ["K-FAC's options; those marked (s) may be callables of the step."]
    for section, declared in SECTIONS.items():
        lines += ["", f"{section}:"]
        for x in declared:
            first.append(Parameter(x.name, keyword, default=x.default, annotation=x.annotation))
            text = f"{x.name}: {x.help}{' (s)' if x.schedulable else ''}"
            lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent=" " * 8)
    cls.__signature__ = inspect.Signature(first)  # type: ignore[attr-defined]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", *lines])
    _FAMILY[cls._base] = cls  # one class a base: copies find theirs by it
    return cls


def with_kfac(base: type[Optimizer]) -> type[Any]:
    """Return a K-FAC class over any dense optimizer class: ``with_kfac(torch.optim.RAdam)``.

    Equal calls give the same class; ``with_kfac(torch.optim.SGD)`` is :class:`KFACSGD`.
    """
    if not (isinstance(base, type) and issubclass(base, Optimizer)):
        raise invalid("base", base, "it must be a class, a subclass of torch.optim.Optimizer")
    if issubclass(base, KFACMixin):
        raise invalid_because("base", f"{base.__name__} has K-FAC inside already; use it as it is")
    # By names: torch 2.8 has no Muon, and its module of ZeRO may not be there to be imported.
    for kind in base.__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("torch."):
            why = f"{base.__name__} can't take K-FAC: {_REFUSED[kind.__name__]}"
            raise invalid_because("base", why)
    if base not in _FAMILY:
        members = {"_base": base, "__doc__": f"{base.__name__} with K-FAC."}
        _sign(type(f"KFAC{base.__name__}", (KFACMixin, base), members))
    return _FAMILY[base]


def _blank(base: type[Optimizer]) -> KFACMixin:
    cls: type[KFACMixin] = base if issubclass(base, KFACMixin) else with_kfac(base)
    return cls.__new__(cls)


@_sign
class KFACSGD(KFACMixin, torch.optim.SGD):
    """torch.optim.SGD with K-FAC inside: ``KFACSGD(model, lr=0.1, momentum=0.9, ...)``.

    Each layer steps along K-FAC's direction until the loss has fallen, to first order, as by SGD.
    """

    _base = torch.optim.SGD


@_sign
class KFACAdam(KFACMixin, torch.optim.Adam):
    """torch.optim.Adam with K-FAC inside: ``KFACAdam(model, lr=1e-3, ...)``.

    Each layer steps along K-FAC's direction until the loss has fallen, to first order, as by Adam.
    """

    _base = torch.optim.Adam


@_sign
class KFACLAMB(KFACMixin, LAMB):
    """LAMB with K-FAC inside: ``KFACLAMB(model, lr=1e-3, ...)``.

    K-FAC's directions are as long as :class:`KFACAdam`'s; LAMB clips gradients, adds its weight
    decay and multiplies by its trust ratio.
    """

    _base = LAMB
