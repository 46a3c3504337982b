"""A mixin that puts K-FAC inside the step of any torch.optim class."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import agree, arguments, bases, checkpoint
from .bases import gradients_of
from .errors import FORMER, check_callable, invalid, invalid_because
from .lamb import clipped_gradients
from .linalg import products
from .options import PER_GROUP, SCHEDULED, Options, refuse_lost_damping
from .preconditioner import Preconditioner


class KFACMixin(Optimizer):
    """K-FAC before the base class's step; ``with_kfac`` and the family are made with it."""

    _base: type[Optimizer]
    _step_supports_amp_scaling: bool
    _group_schedules: list[dict[str, Callable[[int], Any]]]

    def __init__(
        self,
        params: nn.Module | Iterable[Any] | None = None,
        *args: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the base class's arguments, the model in place of its parameters or beside them as
        ``model``, and K-FAC's options by keyword.
        """
        title = type(self).__name__
        arguments.refuse_zero_redundancy(title)
        known = inspect.signature(super().__init__).parameters
        theirs, ours = arguments.separate(title, known, kwargs)
        self._kfac_model, params = arguments.find_model(title, params, model)
        arguments.refuse_misplaced(title, known, args, theirs)
        self._kfac_process_group = ours.pop("process_group", None)
        self._kfac_options = Options(**ours)
        self._group_defaults = {name: getattr(self._kfac_options, name) for name in PER_GROUP}
        self._group_schedules = []
        given: Any = params
        super().__init__(given, *args, **theirs)
        self._start()

    def _start(self, known: Iterable[Tensor] = (), compare: bool = True) -> None:
        self._notices = arguments.Notices()
        # The rank that has the whole state since the last step, and the tensors that it received.
        self._consolidated: tuple[int, checkpoint.Entries] | None = None
        self._published = -1, 0  # compilations and entries, when K-FAC's part of these was made
        step_of_base = bases.step_of(self._base, self.defaults)
        for group in self.param_groups:
            if group.get("differentiable"):
                raise invalid_because(
                    "differentiable", "True; a K-FAC step can't be differentiated, leave it False"
                )
        arguments.missing_process_group(self._kfac_process_group)
        # A fused base would be called with scaled gradients and infinities: GradScaler must unscale
        # and skip instead.
        self._step_supports_amp_scaling = False
        if self._kfac_options.is_automatic:
            from .tools import automatic  # a plan is made for this option alone

            self._kfac_options = automatic.settled(self)
        self.preconditioner = Preconditioner(
            self._kfac_model,
            self._kfac_options,
            self.param_groups,
            self._group_schedules,
            step_of_base.length(),
            known,
            self._kfac_process_group,
            self._base.__name__ if compare else None,
        )
        self.base_part = step_of_base(self)
        directs = self.preconditioner.rule.makes_directions
        self._stepper = self.base_part if directs else bases.RawStep(self)

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
        # Some wrappers take over all attributes of an optimizer, which then ends.
        base.optimizer = self.base_part.optimizer = weakref.proxy(self)
        joined = distributed.is_available() and distributed.is_initialized()
        graphs = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if (joined and kfac.ranks.group is None) or graphs:
            arguments.refuse_step(kfac)
        # Some users call step() under autocast, which is for the model's passes.
        autocast = torch._C._is_any_autocast_enabled()
        with products.without_autocast(self.device.type) if autocast else nullcontext():
            if kfac.unsettled:
                self._settle_load()
            limits = base.limits and any(group["max_grad_norm"] for group in self.param_groups)
            with gradients_of(clipped_gradients(self.param_groups)) if limits else nullcontext():
                exchanged = kfac.step(self.param_groups, base)
        # Entries hold views, which follow the tensors: most steps need not look.
        if exchanged or self._published != (kfac.groups.compilations, len(self.state)):
            checkpoint.publish(kfac, self.state)
            self._published = kfac.groups.compilations, len(self.state)
            if kfac.groups.facts is not None:  # the step has made, or changed, entries
                kfac.groups.facts = base.facts(kfac.groups.plan)
            if exchanged and not all([x.has_average for x in kfac.registry.states.values()]):
                self._notices.look(kfac)
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

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the statistics gathered since the last step."""
        super().zero_grad(set_to_none)
        self.preconditioner.discard()

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse ``torch.distributed.algorithms.Join``, which asks its members for a hook."""
        raise RuntimeError(
            f"{type(self).__name__} does not work in Join: a rank without data would leave the "
            "other ranks waiting; give all ranks equally many batches, by a DistributedSampler or "
            "drop_last=True"
        )

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; a first group may be empty."""
        parameters = (p for group in self.param_groups for p in group["params"])
        device: torch.device = next(parameters).device
        return device

    # ---- parameter groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``damping`` and ``factor_decay`` may be numbers or callables."""
        schedules: dict[str, Callable[[int], Any]] = {}
        if not isinstance(param_group, dict):
            return super().add_param_group(param_group)  # which refuses it
        for name in sorted(arguments.OF_ALL.difference(self.defaults) & param_group.keys()):
            why = (
                f"{param_group[name]!r} in a parameter group; it is one for the whole optimizer, "
                "pass it as an argument"
            )
            raise invalid_because(name, why)
        if "use_muon" in param_group:
            why = f"{param_group['use_muon']!r} in a parameter group; {FORMER['use_muon']}"
            raise invalid_because("use_muon", why)
        for name, check in PER_GROUP.items():
            value = param_group.setdefault(name, self._group_defaults[name])
            if callable(value):
                check_callable(name, value, "step")
                schedules[name] = value
                # from a group that follows the schedule already, if any
                of_groups = zip(self.param_groups, self._group_schedules, strict=True)
                known = [group[name] for group, x in of_groups if x.get(name) is value]
                built = hasattr(self, "preconditioner")
                value = known[0] if known else value(self.preconditioner.steps if built else 0)
            param_group[name] = check(value)
        super().add_param_group(param_group)
        self._group_schedules.append(schedules)
        group = self.param_groups[-1]
        options = self._kfac_options
        if options.compute_method != "polar":  # which has no clip
            # α of the clip: fixed at construction, so that a schedule of lr has effect
            is_fixed = options.kl_clip_lr == "initial" and group.get("lr") is not None
            group.setdefault("kl_clip_lr", float(group["lr"]) if is_fixed else "current")
        if options.kl_clip is not None and group.get("kl_clip_lr") == 0:
            warnings.warn(
                "lr 0 at construction turns the KL clip off; build the optimizer with the peak lr "
                'and let a schedule start lower, or use kl_clip_lr="current"',
                stacklevel=5,
            )
        self._cover(group)

    def _cover(self, group: dict[str, Any]) -> None:
        """Match the model with a group that was added, or take the group back."""
        self._consolidated = None
        is_built = hasattr(self, "preconditioner")
        try:
            refuse_lost_damping(group)
            polar = self._kfac_options.compute_method == "polar"
            if polar and "lr" in group and group["lr"] is None and group.get("weight_decay"):
                why = (
                    f"None with weight_decay={group['weight_decay']!r}; covered weights decay by "
                    "lr * weight_decay: give lr a number, or set weight_decay=0"
                )
                raise invalid_because("lr", why)
            if is_built:
                self.preconditioner.rebuild(self.param_groups)
        except ValueError:
            self.param_groups.pop()
            self._group_schedules.pop()
            if is_built:
                self.preconditioner.rebuild(self.param_groups)
            raise

    def has_schedule(self, name: str) -> bool:
        """Return whether a hyperparameter was given as a callable of the step."""
        if name in PER_GROUP:
            return any(name in schedules for schedules in self._group_schedules)
        return name in SCHEDULED and callable(getattr(self._kfac_options, name))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and K-FAC's; no collective is called.

        On several ranks, K-FAC's state and the momenta are this rank's share, and a warning names
        the other ranks' shares, unless all ranks have called :meth:`consolidate_state_dict` since
        the last step. ``torch.distributed.checkpoint`` saves the shares of all ranks and needs no
        consolidation.
        """
        if self._consolidated is None:
            checkpoint.warn_of_share(self)
        # Run before the user's own hooks, so that they see the whole state.
        handle = self.register_state_dict_post_hook(_complete, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring K-FAC's state of all ranks to rank ``to`` of the process group; all ranks call.

        Until the next step, ``state_dict()`` on that rank is whole: it loads at any number of ranks
        and with any assignment.
        """
        ranks = self.preconditioner.ranks
        if not isinstance(to, int) or not 0 <= to < ranks.world:
            must = f"it must be a rank of the process group, 0 to {ranks.world - 1}"
            raise invalid("to", to, must)
        self._settle_load()
        momentum, momenta = self.base_part.momentum, self.momenta()
        entries = checkpoint.consolidate(self.preconditioner, to, momentum, momenta)
        self._consolidated = to, entries

    def momenta(self) -> dict[Tensor, Tensor]:
        """Return the momenta of the parameters that K-FAC steps; empty ones of other ranks."""
        kfac = self.preconditioner
        registry, (ready, mine) = kfac.registry, kfac.groups.stepped()
        # Each rank has its own part of a sharded momentum, as of the parameter.
        sharded = {p for layer in registry.sharded for p in layer.parameters}
        begun = {p for p in ready - sharded if checkpoint.STEP in self.state.get(p, {})}
        return self.base_part.momenta(begun, mine)

    def base_state_dict(self) -> dict[str, Any]:
        """Return a state that a plain optimizer of the base class loads, without K-FAC's part.

        Second moments, which K-FAC keeps as one number a block, are equal within a block. On
        several ranks, call :meth:`consolidate_state_dict` first, and this method on that rank.
        """
        kfac = self.preconditioner
        whole = self._consolidated is not None and self._consolidated[0] == kfac.ranks.rank
        if not kfac.status.alone and not whole:
            raise RuntimeError(
                "base_state_dict() needs the whole state: call consolidate_state_dict(to=rank) on "
                "all ranks first, and base_state_dict() on that rank"
            )
        return checkpoint.of_base(self, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of its base class alone.

        On several ranks, all must load a state. If one rank refuses its state, and goes on beside
        ranks that have loaded a state, all ranks raise the error in the next step.
        """
        load = checkpoint.Load(self)
        # Run after the user's own hooks, which may change the state, and for this call only.
        handle = self.register_load_state_dict_pre_hook(load.separate)
        self._loaded = load
        try:
            checkpoint.check_form(state_dict, keys=())  # hooks may still add the keys
            super().load_state_dict(state_dict)
        except Exception as error:
            self.preconditioner.unsettled = [error]  # told to other ranks in the next step
            raise
        finally:
            handle.remove()
            del self._loaded
        load.warn(self)

    def _settle_load(self) -> None:
        """Compare loaded states; momenta that only some ranks have begin anew on all."""
        key, state = self.base_part.momentum, self.state

        def momenta() -> set[Tensor]:  # asked for after a load alone
            return {p for p in state if isinstance(state[p], dict) and key in state[p]}

        uneven = self.preconditioner.settle_load(self.param_groups, momenta)
        if uneven is None:
            return
        if not self.base_part.second:  # other ranks may lack the state of a layer
            ready, _ = self.preconditioner.groups.stepped()
            self.base_part.stepped &= ready
        for p in [p for layer in uneven for p in layer.parameters]:
            self.base_part.release(state[p])
            self.base_part.stepped.discard(p)
        if uneven:
            names = checkpoint.abridged([repr(layer.name) for layer in uneven], between=", ")
            agree.warn(
                self.preconditioner.ranks,
                f"only some ranks have loaded the momenta of {names}, which begin anew on all "
                "ranks; call consolidate_state_dict() before a save, and load the same state on "
                "all ranks",
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._kfac_process_group is not None:
            raise TypeError(
                "an optimizer with process_group= can't be copied or pickled, since no process "
                "group can; save its state_dict()"
            )
        kept = ("_kfac_model", "_group_defaults", "_group_schedules")
        base = super().__getstate__()
        return {
            **base,
            "state": defaultdict(dict, checkpoint.compact(base["state"])),
            **{name: self.__dict__[name] for name in kept},
            "_kfac_options": self.preconditioner.hyperparameters.current_options(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_kfac_model" not in state:  # from load_state_dict
            checkpoint.set_base_state(self, state, super().__setstate__)
            if "preconditioner" in self.__dict__:
                load = self.__dict__.get("_loaded") or checkpoint.Load(self)
                load.anew = self._resume(load.entries)
            return
        state = dict(state)
        entries = checkpoint.take_entries(state["state"])
        super().__setstate__(state)
        self._kfac_process_group = None
        known = [p for group in self.param_groups for p in group["params"]]
        self._start(known, compare=False)  # one rank alone may make a copy
        self._resume(entries)

    def _resume(self, entries: checkpoint.Entries) -> list[str]:
        """Continue from loaded tensors."""
        self._consolidated = None
        # The base begins these anew, if it is to step them: a layer's factors may be missing.
        base = self.base_part
        base.stepped = {p for p, own in self.state.items() if bases.lacks_second(base, own)}
        restored = checkpoint.restore(self.preconditioner, entries)
        if not base.second:  # only gradient workers have these momenta
            ready, _ = self.preconditioner.groups.stepped()
            base.stepped |= ready
        loaded = {p for p, ours in entries.items() if ours}
        # The base begins these anew, by an entry that is absent.
        foreign = checkpoint.foreign_moments(self.preconditioner, entries)
        loaded.difference_update(p for layer in foreign for p in layer.parameters)
        checkpoint.publish(self.preconditioner, self.state, only=loaded)
        return restored


def _complete(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add tensors that came from other ranks; the other entries stay as they are."""
    assert isinstance(optimizer, KFACMixin)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gathered = {} if optimizer._consolidated is None else optimizer._consolidated[1]
    status = optimizer.preconditioner.status
    if not status.alone:  # each rank's share is saved, or sent, alone
        state_dict["state"] = checkpoint.compact(state_dict["state"])
    for index, p in enumerate(parameters):
        if entry := gathered.get(p):
            state_dict["state"][index] = {**state_dict["state"].get(index, {}), **entry}
