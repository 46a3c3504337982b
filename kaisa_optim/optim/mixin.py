"""The optimizer family: a mixin that puts K-FAC inside the step of any torch.optim class."""

from __future__ import annotations

import copyreg
import dataclasses
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import agreement
from ..core import checkpoint, reports
from ..core.options import (
    DAMPING,
    KL_CLIP,
    PER_GROUP,
    WITHOUT_IN_METRIC,
    Interval,
    Number,
    Options,
    check_callable,
    differs,
    meant,
    option_against_eigenbasis,
    unexpected,
)
from ..core.preconditioner import Preconditioner
from ..curvature.rules.muon import DAMPING as MUON_DAMPING
from ..linalg import precision
from ..plan.assignment import WorkAssignment
from . import moments as moments_of_base
from .lamb import LAMB
from .muon import Muon

if torch.distributed.is_available():
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook
else:
    Joinable = JoinHook = object  # type: ignore[assignment, misc]

# K-FAC needs one gradient a step, dense: these bases evaluate several, or take sparse ones.
_REFUSED = {
    "LBFGS": "it evaluates the closure several times a step and approximates the curvature itself",
    "SparseAdam": "it takes sparse gradients only",
}


Room = tuple[list[bool], list[Tensor]]  # which parameters have gradients; which the base passes by


class KFACMixin(Optimizer, Joinable):
    """K-FAC before the base class's step; :func:`with_kfac` and the family are made with it."""

    _base: type[Optimizer]
    _step_supports_amp_scaling: bool
    _group_schedules: list[dict[str, Callable[[int], Any]]]
    _damping_owners: weakref.WeakSet[Any]  # what writes it from step to step

    def __init__(
        self,
        params: nn.Module | Iterable[Any] | None = None,
        *args: Any,
        model: nn.Module | None = None,
        damping: Number | None = None,
        factor_decay: Number = 0.95,
        kl_clip: Number | None = KL_CLIP,
        kl_clip_lr: str | None = None,
        factor_update_steps: Interval = 10,
        inv_update_steps: Interval | None = None,
        compute_method: str = "eigen",
        damping_split: str | None = None,
        compute_eigenvalue_outer_product: bool = False,
        factor_dtype: torch.dtype | None = None,
        inv_dtype: torch.dtype | None = None,
        skip_layers: str | Sequence[str] = (),
        max_factor_size: float = 16384,
        weight_sharing: str = "expand",
        loss_terms: str | Number = "examples",
        loss_reduction: str = "mean",
        normalization: str = "fisher",
        grad_scaler: Any = None,
        staggered: bool | int | None = None,
        max_failures: int = 3,
        grad_worker_fraction: float | None = None,
        assignment: WorkAssignment | str | None = None,
        colocate_factors: bool | None = None,
        bucket_cap_mb: float = 25.0,
        comm_dtype: torch.dtype | None = None,
        process_group: Any = None,
        moments: str | None = None,
        nesterov: bool | None = None,
        orthogonal: bool | None = None,
        basis_tolerance: float | None = None,
        truncation: float = 0.0,
        statistics_fraction: Number = 1.0,
        statistics_precision: str = "highest",
        eigenvalue_correction: bool | str = False,
        grafting: bool = False,
        warmup_steps: int = 0,
        early_refreshes: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of the base class, the model in place of its parameters or beside them as
        ``model``, and by keyword those of K-FAC. Those marked (s) may be callables of the step. A
        class's signature tells which of them it has, with their defaults.

        Curvature:
            damping: γ, added to the curvature (s); also a parameter group's. KFACMuon's is a share
                of G's mean eigenvalue.
            factor_decay: β of the factors' running average (s); also a parameter group's.
            loss_terms: what the loss averages: "examples", "positions", or how many (s).
            loss_reduction: "mean", or "sum" for a loss that does not average.
            weight_sharing: "expand", a row for each position; or "reduce", one for each example.
            statistics_fraction: the part of the examples that statistics are taken from (s).
            statistics_precision: of their float32 products, "highest", "high" or "medium", as
                torch.set_float32_matmul_precision has it.
            eigenvalue_correction: EKFAC: True or "examples", or "gradients".
            normalization: "fisher", or "kaisa" for the papers' own scaling.
            grad_scaler: the GradScaler, number or callable by which losses are scaled.
            skip_layers: patterns, searched in qualified names and class names of modules.
            max_factor_size: a wider side gets a diagonal factor.

        When, and how:
            factor_update_steps: steps from statistics to statistics (s).
            inv_update_steps: steps in which every layer is refreshed once (s); None: 50, or 10
                with KFACMuon and where bases of moments in the eigenbasis are followed.
            staggered: whether layers take turns over both intervals; None: unless
                ``normalization`` is "kaisa". As many are refreshed at once as there are ranks,
                which decompose them side by side, or as a number says.
            early_refreshes: steps that gather and refresh everything besides; None: 5, 10, 25 and
                50 with moments in the eigenbasis, else none.
            compute_method: "eigen", or "inverse" by Cholesky.
            damping_split: γ of inverses: "pi", shared between A and G, or "full", on both; None:
                the former, unless ``normalization`` is "kaisa".
            compute_eigenvalue_outer_product: whether 1 / (v_G v_Aᵀ + γ) is stored at a refresh.
            basis_tolerance: the share outside of the diagonal up to which eigenvectors are
                followed, not found anew; None: 0.1 with moments in the eigenbasis, unless kept in
                half precision or ``normalization`` is "kaisa", else 0.
            truncation: the share of ``damping`` up to which curvature may be taken for none.
            factor_dtype, inv_dtype: what factors, and what follows from them, are kept in; None:
                float32, or float64 for float64 parameters.
            max_failures: decompositions of a layer that may fail in a row.

        Steps:
            kl_clip: κ, which limits the length of a step (s); None: no limit.
            kl_clip_lr: the α in it: "initial", the group's lr at construction, or "current"; None:
                the former, unless ``normalization`` is "kaisa".
            grafting: whether a layer's preconditioned gradient takes its raw gradient's length.
            warmup_steps: steps in which raw gradients give way to preconditioned ones.
            moments: of Adam and LAMB, "eigenbasis": the base works in K-FAC's eigenbasis; or
                "parameters": it sees preconditioned gradients. None: the former, with the two
                below, unless an option that it has no use for is given.
            nesterov, orthogonal: directions of those moments that look one gradient ahead; that
                have nearly equal singular values.

        Ranks:
            grad_worker_fraction: the share of the ranks that precondition a layer: less memory and
                more communication the smaller it is; None: all, or as ``assignment`` has it.
            assignment: "layer-wise", "opt", "hybrid" or a WorkAssignment.
            colocate_factors: whether both factors of a layer lie on one rank; None: as assigned.
            bucket_cap_mb: MiB that travel in one call; for each rank, of sharded gradients and of
                sums on the way to their owners.
            comm_dtype: what statistics and gradients travel in; None: as they are.
            process_group: the ranks that train this model; None: all.
        """
        title = type(self).__name__
        _refuse_unknown(title, kwargs, inspect.signature(super().__init__).parameters, self._base)
        if params is None:
            raise TypeError(f"{title}() needs the model first: {title}(model, ...)")
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError(
                    "Invalid model: the first argument is a module already; leave out model="
                )
            model, params = params, list(params.parameters())
            if not params:
                raise ValueError(
                    f"Invalid model: this {type(model).__name__} has no parameters; pass the "
                    "module that holds the layers to be trained"
                )
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"Invalid model: {_what(params, model)}; K-FAC hooks the model's layers: pass the "
                f"nn.Module first, as {title}(model, ...), or as model="
            )
        self._kfac_model = model
        asked: dict[str, Any] = {
            "kl_clip": kl_clip,
            "kl_clip_lr": kl_clip_lr,
            "factor_update_steps": factor_update_steps,
            "inv_update_steps": inv_update_steps,
            "compute_method": compute_method,
            "damping_split": damping_split,
            "compute_eigenvalue_outer_product": compute_eigenvalue_outer_product,
            "factor_dtype": factor_dtype,
            "inv_dtype": inv_dtype,
            "skip_layers": skip_layers,
            "max_factor_size": max_factor_size,
            "weight_sharing": weight_sharing,
            "loss_terms": loss_terms,
            "loss_reduction": loss_reduction,
            "normalization": normalization,
            "grad_scaler": grad_scaler,
            "staggered": staggered,
            "max_failures": max_failures,
            "grad_worker_fraction": grad_worker_fraction,
            "assignment": assignment,
            "colocate_factors": colocate_factors,
            "bucket_cap_mb": bucket_cap_mb,
            "comm_dtype": comm_dtype,
            "basis_tolerance": basis_tolerance,
            "truncation": truncation,
            "statistics_fraction": statistics_fraction,
            "statistics_precision": statistics_precision,
            "eigenvalue_correction": eigenvalue_correction,
            "grafting": grafting,
            "warmup_steps": warmup_steps,
            "early_refreshes": early_refreshes,
        }
        for name, value in zip(_OF_MOMENTS, (nesterov, orthogonal), strict=True):
            if value is not None:
                (kwargs if _is_the_bases(name, self._base) else asked)[name] = value
        groups: list[dict[str, Any]] = []
        if isinstance(params, Iterable) and not isinstance(params, Tensor):  # else the base refuses
            params = list(params)
            groups = [group for group in params if isinstance(group, dict)]
        if damping is None:
            damping = _own_parameters(self._base)["damping"].default
        given = {**asked, "damping": damping, "moments": moments}
        against = _against_the_eigenbasis(kwargs, given, groups)
        why = _why_not_in_the_eigenbasis(self._base, moments, against)
        opts_out = against if moments is None and self._base in moments_of_base.BASES else ""
        if self._base is Muon:
            _refuse_beside_the_metric(title, given)
            moments = "metric"
        elif moments == "metric":
            raise ValueError('Invalid moments: "metric" is KFACMuon\'s own; leave it out')
        elif moments is None:
            moments = "parameters" if why else "eigenbasis"
            if not why:  # by name it is Adam itself, in another basis
                asked = {**dict.fromkeys(_OF_MOMENTS, True), **asked}
        self._kfac_options = Options(**asked, moments=moments)
        for name in _OF_MOMENTS:
            if asked.get(name) and moments != "eigenbasis":
                raise ValueError(
                    f'Invalid {name}: True belongs to moments="eigenbasis", which {why}'
                )
        self._kfac_process_group = process_group
        self._consolidated: checkpoint.Entries | None = None
        self._warned_of_share = self._warned_of_settings = self._warned_of_order = False
        self._group_defaults: dict[str, Any] = {"damping": damping, "factor_decay": factor_decay}
        self._group_schedules = []
        super().__init__(params, *args, **kwargs)
        self._start()
        self._notice_misspelt(self.param_groups)
        if opts_out:  # one value of a search may do so where the others do not
            text = (
                f'{opts_out} leads to moments="parameters" in place of "eigenbasis", the default, '
                'where it has no meaning; name moments="parameters" if that is meant, or leave '
                "it out"
            )
            agreement.warn(self.preconditioner.ranks, text, _level_of_caller())

    def _start(self, known: Iterable[Tensor] = (), compare: bool = True) -> None:
        Joinable.__init__(self)
        self._damping_owners = weakref.WeakSet()
        self._has_joined = False
        # For what step entries were made room; None after a load, perhaps from the eigenbasis.
        self._room: Room | None = None
        self._former_join = getattr(self._kfac_model, "_join_config", None)
        for group in self.param_groups:
            if group.get("differentiable"):
                raise ValueError(
                    "Invalid differentiable: True; a K-FAC step can't be differentiated, leave it "
                    "False"
                )
        _notice_missing_process_group(self._kfac_process_group)
        # A fused base would be called with scaled gradients and infinities: GradScaler must unscale
        # and skip instead.
        self._step_supports_amp_scaling = False
        self.preconditioner = Preconditioner(
            self._kfac_model,
            self._kfac_options,
            self.param_groups,
            self._group_schedules,
            known,
            self._kfac_process_group,
            {"base optimizer": self._base.__name__},
            compare,
        )

    # ---- stepping ----

    @torch.compiler.disable  # it decides in Python, from step to step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Precondition the gradients and let the base class step with them.

        ``closure`` runs first, with gradients enabled. ``p.grad`` is afterwards what it was before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_late_process_group(self.preconditioner)
        _refuse_graph_capture()
        self._refuse_join_of_the_model_alone()
        # Some call step() under autocast, which is for the model's passes.
        with (
            precision.without_autocast(self.join_device.type),
            _gradients(self._joined_gradients()),
        ):
            if self._keeps_moments:
                self._step_with_moments()
            else:
                new = self.preconditioner.step(self.param_groups)
                self._make_room({})
                with _gradients(new):
                    self._base_step()
        checkpoint.publish(self.preconditioner, self.state)
        self._consolidated = None
        self._notice_settings()
        return loss

    def _step_with_moments(self) -> None:
        """The base steps only those parameters whose moments are its own."""
        with _gradients(moments_of_base.limited(self)):
            with _gradients(moments_of_base.taken_in(self)):
                directions = self.preconditioner.step(self.param_groups)
            self._make_room(directions)
            with _gradients(dict.fromkeys(directions)), moments_of_base.without_limit(self):
                self._base_step()
        moments_of_base.move(self, directions)

    def _make_room(self, stepped: Mapping[Tensor, Tensor]) -> None:
        """For the base's step, where that is not as the last one was."""
        graded = [p.grad is not None for group in self.param_groups for p in group["params"]]
        now = graded, list(stepped)
        if self._room is None or not _same(now, self._room):
            checkpoint.make_room(self.state, stepped)
        self._room = now

    def _notice_settings(self) -> None:
        """Say once what is set without the effect that one would expect."""
        ranks = self.preconditioner.ranks
        misread = "" if self._warned_of_order else reports.misread(self.preconditioner)
        if misread:
            self._warned_of_order = True
            agreement.warn(ranks, misread, _level_of_caller())
        if self._warned_of_settings:
            return
        found = self._unread()
        if not found and self._keeps_moments:
            found = self._unused()
        elif not found:
            found = self._unread_scale() or self._beyond_the_clip()
        if found:
            self._warned_of_settings = True
            agreement.warn(ranks, found, _level_of_caller())

    def _notice_misspelt(self, groups: Iterable[dict[str, Any]]) -> None:
        """Groups may carry keys of whomever; torch says nothing of them, whatever they were for."""
        ours = (*PER_GROUP, "kl_clip_lr")
        keys = dict.fromkeys(key for group in groups for key in group)
        unread = [key for key in keys if key not in (*ours, *self.defaults)]
        # Schedulers' max_momentum is as near as 0.8.
        near = {key: meant(str(key), ours, self.defaults, 0.85) for key in unread}
        said = [f"{key!r}: did you mean {name!r}?" for key, name in near.items() if name]
        if said:
            text = f"a parameter group has a key that nobody reads, {'; '.join(said)}"
            agreement.warn(self.preconditioner.ranks, text, _level_of_caller())

    def _unread(self) -> str:
        """Options of the whole optimizer that were put into a group since it was built."""
        found = [
            name for group in self.param_groups for name in sorted(self._of_all & group.keys())
        ]
        if not found:
            return ""
        return (
            f"a parameter group has {found[0]!r}, which nobody reads there; it is an option of the "
            "whole optimizer: pass it as an argument, or, of those that may change, set it as an "
            "attribute of optimizer.preconditioner"
        )

    def _unused(self) -> str:
        clip, dampings = self.preconditioner.kl_clip, {g["damping"] for g in self.param_groups}
        unread = [f"kl_clip {clip!r}"] * (clip not in (None, KL_CLIP))
        if self._base is Muon:
            return f"{unread[0]}: of no use to KFACMuon; leave it out" if unread else ""
        asked = [f"damping {value!r}" for value in sorted(dampings - {DAMPING})] + unread
        if not asked:
            return ""
        return (
            f'{" and ".join(asked)}: of no use to moments="eigenbasis"; leave it out, or build the '
            'optimizer with moments="parameters"'
        )

    def _unread_scale(self) -> str:
        """G would be too large by the scale squared, and steps too short to train."""
        if self.preconditioner.sums.loss_scale is not None:
            return ""
        for caller in _callers():
            if caller.f_globals.get("__name__") != torch.amp.GradScaler.__module__:
                # Locals that are asked for live on with their frame; of this one they would hold
                # it, and all that a step has made.
                continue
            scaler = caller.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                return (
                    "step() was called by a GradScaler that the optimizer does not know: factors "
                    "are made of scaled gradients, and weights will hardly move; pass "
                    "grad_scaler=scaler"
                )
        return ""

    def _beyond_the_clip(self) -> str:
        if self.preconditioner.kl_clip is None:
            return ""
        # A tensor may be on a GPU; a hundredth is no more than a schedule's rounding.
        beyond = [
            number
            for number, group in enumerate(self.param_groups)
            if isinstance(group["kl_clip_lr"], int | float)
            and isinstance(group.get("lr"), int | float)
            and 0 < 1.01 * group["kl_clip_lr"] < group["lr"]
        ]
        if beyond:
            covered = self.preconditioner.registry.covered_groups
            beyond = [number for number in beyond if number in covered]
        if not beyond:
            return ""
        group = self.param_groups[beyond[0]]
        lr, alpha = group["lr"], group["kl_clip_lr"]
        return (
            f"lr {lr:g} is above kl_clip_lr {alpha:g} in parameter group "
            f"{', '.join(map(str, beyond))}: the KL clip goes by the latter, which is the lr at "
            f"construction, so that clipped steps are {lr / alpha:.3g} times as long as kl_clip "
            'allows; build the optimizer with the peak lr, set param_groups[i]["kl_clip_lr"], or '
            'use kl_clip_lr="current"'
        )

    @property
    def _keeps_moments(self) -> bool:
        """Whether K-FAC keeps the moments of what it covers, and makes the steps' directions."""
        return self.preconditioner.options.moments != "parameters"

    def _base_step(self) -> None:
        step: Any = self._base.step
        # Building any plain base optimizer wraps the class's step with the hooks that have run
        # here already. Only that one layer goes: beneath may be others, such as no_grad.
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        step(self)

    # ---- ranks that run out of data ----

    def join_hook(self, **kwargs: Any) -> Any:
        """What a rank does that has joined: for ``Join([model, optimizer])``, the wrapper first.

        ``Join`` is torch.distributed.algorithms.Join. Such a rank takes gradients, lr and K-FAC's
        settings in every step from one that goes on; its schedulers stay where they were.
        """
        return _StepsOn(self)

    @property
    def join_device(self) -> torch.device:
        # A first group may be empty.
        parameters = (p for group in self.param_groups for p in group["params"])
        device: torch.device = next(parameters).device
        return device

    @property
    def join_process_group(self) -> Any:
        return self.preconditioner.ranks.group

    def _refuse_join_of_the_model_alone(self) -> None:
        """Its ranks without data would answer to the wrapper's collectives, and to none of ours."""
        if self.preconditioner.ranks.world == 1:
            return
        config: Any = getattr(self._kfac_model, "_join_config", None)
        # Torch leaves a wrapper's setting as its last Join made it.
        entered = config is not self._former_join and config.enable
        if entered and not self._join_config.enable:
            raise RuntimeError(
                "the model's join() knows nothing of K-FAC's exchange between ranks; use "
                "torch.distributed.algorithms.Join([model, optimizer]) in its place"
            )

    def _joined_gradients(self) -> dict[Tensor, Tensor]:
        """Inside Join: what ranks that have no more data take from one that has."""
        if self.preconditioner.ranks.world == 1 or not self._join_config.enable:
            return {}
        if not self._has_joined:
            Join.notify_join_context(self)
        parameters = [p for group in self.param_groups for p in group["params"]]
        kfac = self.preconditioner
        mine = _settings(self), [p.grad is not None for p in parameters]
        told = kfac.ranks.gather_objects(None if self._has_joined else mine, "joining")
        if all(told):
            return {}
        root = next(rank for rank, said in enumerate(told) if said)
        settings, graded = told[root]
        if self._has_joined:
            _adopt(self, settings)
        taken = [p for p, has in zip(parameters, graded, strict=True) if has]
        new = {p: p.grad if kfac.ranks.rank == root else torch.empty_like(p) for p in taken}
        kfac.ranks.broadcast_from(root, list(new.values()), "gradients")
        return new if self._has_joined else {}

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the statistics gathered since the last step."""
        super().zero_grad(set_to_none)
        self.preconditioner.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``damping`` and ``factor_decay`` may be numbers or callables."""
        schedules: dict[str, Callable[[int], Any]] = {}
        if not isinstance(param_group, dict):
            return super().add_param_group(param_group)  # which refuses it
        for name in sorted(self._of_all & param_group.keys()):
            raise ValueError(
                f"Invalid {name}: {param_group[name]!r} in a parameter group; it is one for the "
                "whole optimizer, pass it as an argument"
            )
        for name, check in PER_GROUP.items():
            value = param_group.setdefault(name, self._group_defaults[name])
            if callable(value):
                check_callable(name, value, "step")
                schedules[name] = value
                value = self._scheduled(name, value)
            param_group[name] = check(value)
        if self._kfac_options.moments == "eigenbasis":
            moments_of_base.check(self, param_group)
        super().add_param_group(param_group)
        self._group_schedules.append(schedules)
        group = self.param_groups[-1]
        group.setdefault("kl_clip_lr", _clip_lr(group, self._kfac_options.kl_clip_lr))
        clips = self._kfac_options.kl_clip is not None
        if clips and group["kl_clip_lr"] == 0 and self._kfac_options.moments == "parameters":
            warnings.warn(
                "lr 0 at construction leaves the KL clip off; build the optimizer with the peak lr "
                'and let a schedule start lower, or use kl_clip_lr="current"',
                stacklevel=5,
            )
        if hasattr(self, "preconditioner"):
            self._consolidated = None
            try:
                self.preconditioner.rebuild(self.param_groups)
            except ValueError:
                self.param_groups.pop()
                self._group_schedules.pop()
                self.preconditioner.rebuild(self.param_groups)
                raise
            self._notice_misspelt([group])

    def _scheduled(self, name: str, schedule: Callable[[int], Any]) -> Any:
        """What a new group begins with: as the groups that follow the same schedule, which have
        the value of the last step until the next."""
        for group, schedules in zip(self.param_groups, self._group_schedules, strict=True):
            if schedules.get(name) is schedule:
                return group[name]
        return schedule(self.preconditioner.steps if hasattr(self, "preconditioner") else 0)

    @property
    def _of_all(self) -> Set[str]:
        """Options that a group can't have of its own."""
        return _OF_ALL.difference(self.defaults)

    def has_schedule(self, name: str) -> bool:
        """Whether a hyperparameter was given as a callable of the step."""
        if name in PER_GROUP:
            return any(name in schedules for schedules in self._group_schedules)
        return callable(getattr(self._kfac_options, name))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state and K-FAC's, without any communication.

        On several ranks, K-FAC's is this rank's share, unless :meth:`consolidate_state_dict` has
        brought all of it here since the last step. ``torch.distributed.checkpoint`` saves the
        shares of all ranks and needs no consolidation.
        """
        alone = self.preconditioner.ranks.world == 1
        if not alone and self._consolidated is None and not self._warned_of_share:
            absent = checkpoint.absent(self.preconditioner)
            if absent:
                self._warned_of_share = True
                warnings.warn(
                    f"state_dict() holds rank {self.preconditioner.ranks.rank}'s share of K-FAC's "
                    "state; call consolidate_state_dict(to=rank) on all ranks first, or save all "
                    f"ranks' shares, as torch.distributed.checkpoint does. Absent are "
                    f"{checkpoint.abridged(absent)} and what follows from them",
                    stacklevel=2,
                )
        # Before the user's own hooks, which see the state whole.
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
            raise ValueError(
                f"Invalid to: {to!r}; it must be a rank of the process group, 0 to "
                f"{ranks.world - 1}"
            )
        if ranks.world > 1:
            self.preconditioner.settle_load(self.param_groups)
            entries = checkpoint.consolidate(self.preconditioner, to)
            self._consolidated = entries if ranks.rank == to else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of its base class alone.

        On several ranks all must load one. Where one refuses what it was given, and goes on beside
        others that have loaded theirs, all raise that in the next step.
        """
        fresh = False  # taken before any step, so that nothing is missing

        def separate(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal fresh
            checkpoint.check_form(loaded)
            if self._kfac_options.moments == "eigenbasis":
                for group in loaded["param_groups"]:
                    moments_of_base.check(self, group)
            loaded = loaded.copy()
            entries = checkpoint.take_out(self.preconditioner, loaded, self.param_groups)
            of_base = any("damping" not in group for group in loaded["param_groups"])
            fresh = not (of_base or loaded["state"] or any(entries.values()))
            self._loaded = entries
            # A base optimizer's groups lack K-FAC's keys: those stay as they are here.
            pairs = zip(loaded["param_groups"], self.param_groups, strict=False)
            keys = (*PER_GROUP, "kl_clip_lr")
            loaded["param_groups"] = [
                {**{key: here[key] for key in keys}, **saved, **self._of_its_own(saved, here)}
                for saved, here in pairs
            ] + loaded["param_groups"][len(self.param_groups) :]
            return loaded

        # After the user's own hooks, which may change the state, and for this call only.
        handle = self.register_load_state_dict_pre_hook(separate)
        try:
            checkpoint.check_form(state_dict, keys=())  # hooks may yet make one of it
            super().load_state_dict(state_dict)
        except Exception as error:
            self.__dict__.pop("_loaded", None)
            self.preconditioner.refuse(error)
            raise
        finally:
            handle.remove()
        missing, moments_anew = self.__dict__.pop("_restored")
        if moments_anew:
            names = ", ".join(map(repr, moments_anew))
            warnings.warn(
                f"the moments of {names} are missing in this state, or of another kind than this "
                "optimizer's, and begin at zero; for a run to go on, build it with the class and "
                "the moments= that the state was saved with, and on several ranks call "
                "consolidate_state_dict() before a save",
                stacklevel=2,
            )
        if missing and not fresh:
            ranks = self.preconditioner.ranks
            share = f", which rank {ranks.rank} keeps" if ranks.world > 1 else ""
            cause = " (was it saved without consolidate_state_dict()?)" if share else ""
            moments = ", and their moments begin at zero" if self._keeps_moments else ""
            warnings.warn(
                "the checkpoint holds no K-FAC factors of this kind for "
                f"{', '.join(map(repr, missing))}{share}{cause}; they are estimated anew, from the "
                f"next backward pass on{moments}",
                stacklevel=2,
            )

    def _of_its_own(self, saved: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        """What a group keeps in a load, whatever was saved."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        if self._kfac_process_group is not None:
            raise TypeError(
                "an optimizer with process_group= can't be copied or pickled, since no process "
                "group can; save its state_dict()"
            )
        kept = ("_kfac_model", "_group_defaults", "_group_schedules")
        return {
            **super().__getstate__(),
            **{name: self.__dict__[name] for name in kept},
            "_kfac_options": self.preconditioner.current_options(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_kfac_model" not in state:  # from load_state_dict
            self._take(state, super().__setstate__)
            if "preconditioner" in self.__dict__:
                self._restored = self._resume(self.__dict__.pop("_loaded", {}))
            return
        state = dict(state)
        entries = {
            p: {k: v for k, v in entry.items() if str(k).startswith(checkpoint.PREFIX)}
            for p, entry in state["state"].items()
            if isinstance(entry, dict)
        }
        # The base looks at the entries too: it must see its own only.
        for p, ours in entries.items():
            for key in ours:
                del state["state"][p][key]
            if ours and not state["state"][p]:
                del state["state"][p]
        super().__setstate__(state)
        self._kfac_process_group = None
        self._consolidated = None
        self._warned_of_share = self._warned_of_settings = self._warned_of_order = False
        known = [p for group in self.param_groups for p in group["params"]]
        self._start(known, compare=False)  # one rank alone may make a copy
        self._resume(entries)

    def _take(self, state: dict[str, Any], set_state: Callable[[dict[str, Any]], None]) -> None:
        """Let the base set a loaded state; none but what its own optimizers have, else a step would
        end in a KeyError. The base fills in what older states lack."""
        before = {name: self.__dict__[name] for name in state if name in self.__dict__}
        former = before.get("param_groups", [])
        failed: Exception | None = None
        try:
            set_state(state)
        except Exception as error:
            failed = error
        pairs = list(zip(self.param_groups, former, strict=False))
        read = dict(self.defaults)
        if "differentiable" not in inspect.signature(self._base.__init__).parameters:
            read.pop("differentiable", None)  # a load adds it to any optimizer's defaults
        names = [k for k in read if any(k in old and k not in new for new, old in pairs)]
        if failed is None and not names:
            return
        self.__dict__.update(before)
        if not names and not isinstance(failed, KeyError):
            assert failed is not None
            raise failed
        lacks = f"parameter groups lack {', '.join(names)}" if names else f"entries lack {failed}"
        raise ValueError(
            f"Invalid state_dict: its {lacks}, which {self._base.__name__} reads; it is of another "
            "optimizer, or of an older version: load it into one of that class, add what it lacks, "
            "or begin without its state"
        ) from failed

    def _resume(self, entries: checkpoint.Entries) -> checkpoint.Restored:
        """Continue from loaded tensors."""
        self._consolidated = None
        self._room = None
        restored = checkpoint.restore(self.preconditioner, entries)
        loaded = {p for p, ours in entries.items() if ours}
        checkpoint.publish(self.preconditioner, self.state, only=loaded)
        return restored


def _complete(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    assert isinstance(optimizer, KFACMixin)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gathered = optimizer._consolidated or {}
    checkpoint.complete(state_dict, parameters, gathered)


def _same(now: Room, before: Room) -> bool:
    """Tensors are compared by what they are."""
    alike = now[0] == before[0] and len(now[1]) == len(before[1])
    return alike and all(a is b for a, b in zip(now[1], before[1], strict=True))


def _level_of_caller() -> int:
    """For a warning of the function that asks: how far it is to code that is neither torch's, which
    wraps steps, nor ours."""
    return 1 + len(list(_callers(2)))


def _callers(depth: int = 1) -> Iterator[FrameType]:
    """From the function that asks on, as long as they are torch's or ours."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "torch",
        "kaisa_optim",
    ):
        yield frame
        frame = frame.f_back


@contextmanager
def _gradients(new: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Let the base see these gradients, and leave ``p.grad`` as the user's backward made it."""
    old = [(p, p.grad) for p in new]
    try:
        for p, gradient in new.items():
            p.grad = gradient
        yield
    finally:
        for p, own in old:
            p.grad = own


def _clip_lr(group: dict[str, Any], kind: str | None) -> float | str:
    """The α of the KL clip: fixed at construction, so that a schedule of lr keeps its effect."""
    return float(group["lr"]) if kind == "initial" and "lr" in group else "current"


class _StepsOn(JoinHook):
    """A rank without data still keeps factors, decomposes and preconditions: it takes every step.

    Its gradients and settings come from a rank that goes on, so that its weights stay alike.
    """

    def __init__(self, optimizer: KFACMixin) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._has_joined = True
        try:
            self.optimizer.step()
        finally:
            self.optimizer._has_joined = False


_SET = ("kl_clip", "factor_update_steps", "inv_update_steps", "statistics_fraction")


def _settings(optimizer: KFACMixin) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What schedulers may have changed on the ranks that go on."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return groups, {name: getattr(optimizer.preconditioner, name) for name in _SET}


def _adopt(optimizer: KFACMixin, settings: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings[0], strict=True):
        group.update(values)
    for name, value in settings[1].items():
        setattr(optimizer.preconditioner, name, value)


def _notice_missing_process_group(group: Any) -> None:
    """Under a launcher, a script that forgot its process group would train many models apart."""
    world = os.environ.get("WORLD_SIZE", "1")
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    if world not in ("", "1") and group is None and not initialized:
        warnings.warn(
            f"WORLD_SIZE is {world}, but there is no process group: this process trains alone; "
            "call torch.distributed.init_process_group() before building model and optimizer",
            stacklevel=4,
        )


def _refuse_late_process_group(kfac: Preconditioner) -> None:
    distributed = torch.distributed
    if kfac.ranks.group is None and distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise RuntimeError(
                f"Invalid process group: it came with {world} ranks after the optimizer, which "
                "would not exchange anything with them; build the optimizer after "
                "init_process_group()"
            )


def _refuse_graph_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a K-FAC step can't be captured in a CUDA graph: it decides on the host what is due; "
            "run the training step outside of graphs"
        )


# ---- the family ----

_FAMILY: dict[type[Optimizer], type[KFACMixin]] = {}


def _what(params: Any, model: Any) -> str:
    """What was given for a model, in few words."""
    listed = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
    if listed and model is None:
        return "no model was given, but parameters"
    given = model if listed or model is not None else params
    if isinstance(given, type):
        return f"the class {given.__name__}"
    text = repr(given)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(given).__name__}"


def _refuse_unknown(
    title: str, given: Iterable[str], theirs: Mapping[str, Any], base: type[Optimizer]
) -> None:
    """Refuse arguments that neither K-FAC has nor the base, unless that takes any."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in theirs.values()):
        return
    for name in given:
        if name not in theirs:
            raise unexpected(title, name, _named_by(base), theirs)


def _own_parameters(base: type[Optimizer] = Optimizer) -> dict[str, inspect.Parameter]:
    """K-FAC's, which are by keyword only."""
    parameters = dict(inspect.signature(KFACMixin.__init__).parameters)
    default = MUON_DAMPING if base is Muon else DAMPING
    parameters["damping"] = parameters["damping"].replace(default=default)
    return {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _refuse_beside_the_metric(title: str, given: dict[str, Any]) -> None:
    defaults = {name: p.default for name, p in _own_parameters().items()}
    for name in ("moments", *WITHOUT_IN_METRIC):
        value = given.get(name)
        if value is not None and differs(value, defaults[name]):
            raise ValueError(f"Invalid {name}: {value!r}; {title} has no use for it, leave it out")


_OF_MOMENTS = "nesterov", "orthogonal"  # names that a base may have, too
_OF_ALL = frozenset(field.name for field in dataclasses.fields(Options)) - {"kl_clip_lr"}


def _is_the_bases(name: str, base: type[Optimizer]) -> bool:
    """Whether an argument of this name is the base's own, or may be for all that it tells."""
    theirs = inspect.signature(base.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in theirs.values())
    return name in theirs or (takes_any and not issubclass(base, moments_of_base.BASES))


def _why_not_in_the_eigenbasis(base: type[Optimizer], moments: Any, against: str) -> str:
    """What keeps the moments out of it, as the end of a sentence, or nothing."""
    if not issubclass(base, moments_of_base.BASES):
        return "needs Adam, AdamW or LAMB as its base; leave it out"
    if moments is not None:
        return f"moments={moments!r} rules out; leave out one of the two"
    if (
        base not in moments_of_base.BASES
    ):  # it may have a step of its own, which would not be called
        return f"must be named over {base.__name__}, a subclass; name it, or leave this out"
    return f"{against} rules out; leave out one of the two" if against else ""


def _against_the_eigenbasis(theirs: dict[str, Any], ours: dict[str, Any], groups: list[Any]) -> str:
    """What is set that has no meaning there, if anything."""
    defaults = {name: p.default for name, p in _own_parameters().items()}
    return moments_of_base.argument_against(theirs) or option_against_eigenbasis(
        ours, defaults, groups
    )


def _named_by(base: type[Optimizer]) -> dict[str, inspect.Parameter]:
    """K-FAC's arguments in the signature of a class over this base."""
    own = _own_parameters(base)
    without = [name for name in _OF_MOMENTS if _is_the_bases(name, base)]
    without += ("moments", *WITHOUT_IN_METRIC) if base is Muon else ()
    return {name: parameter for name, parameter in own.items() if name not in without}


def _signature(base: type[Optimizer]) -> inspect.Signature:
    """The base's arguments as they are, then K-FAC's by keyword."""
    own = _named_by(base)
    theirs = inspect.signature(base.__init__).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    first = [p for p in theirs.values() if p.kind not in variadic]
    module_too = KFACMixin.__init__.__annotations__["params"]
    first[1:2] = [p.replace(annotation=module_too) for p in first[1:2]]  # none, of *args
    return inspect.Signature([*first, *own.values()])


def _sign(cls: type[KFACMixin]) -> type[KFACMixin]:
    parameters = list(_signature(cls._base).parameters.values())[1:]
    cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    _FAMILY[cls._base] = cls
    return cls


def with_kfac(base: type[Optimizer]) -> type[Any]:
    """A K-FAC class over any dense optimizer class: ``with_kfac(torch.optim.RAdam)(model, ...)``.

    Equal calls give the same class; ``with_kfac(torch.optim.SGD)`` is :class:`KFACSGD`.
    """
    if not (isinstance(base, type) and issubclass(base, Optimizer)):
        raise ValueError(f"Invalid base: {base!r}; it must be a subclass of torch.optim.Optimizer")
    if issubclass(base, KFACMixin):
        raise ValueError(f"Invalid base: {base.__name__} has K-FAC inside already; use it as it is")
    for name, reason in _REFUSED.items():
        if issubclass(base, getattr(torch.optim, name)):
            raise ValueError(f"Invalid base: {base.__name__} can't take K-FAC: {reason}")
    if issubclass(base, Muon) and base is not Muon:
        raise ValueError(
            f"Invalid base: a subclass of Muon, {base.__name__}, would lose the metric; subclass "
            "KFACMuon instead"
        )
    if base not in _FAMILY:
        members = {"_base": base, "__reduce__": _reduce, "__doc__": f"{base.__name__} with K-FAC."}
        _sign(type(f"KFAC{base.__name__}", (KFACMixin, base), members))
    return _FAMILY[base]


def _reduce(self: KFACMixin) -> Any:
    """A class made at run time is found again through its base."""
    cls = type(self)
    if _FAMILY.get(cls._base) is cls:
        return _blank, (cls._base,), self.__getstate__()
    return copyreg.__newobj__, (cls,), self.__getstate__()  # type: ignore[attr-defined]


def _blank(base: type[Optimizer]) -> KFACMixin:
    cls: type[KFACMixin] = with_kfac(base)
    return cls.__new__(cls)


@_sign
class KFACSGD(KFACMixin, torch.optim.SGD):
    """torch.optim.SGD with K-FAC inside: ``KFACSGD(model, lr=0.1, momentum=0.9, ...)``."""

    _base = torch.optim.SGD


@_sign
class KFACAdam(KFACMixin, torch.optim.Adam):
    """torch.optim.Adam with K-FAC inside: it works in the eigenbasis of K-FAC's factors.

    Its directions are orthogonal ones there, with Nesterov's momentum; Adam's own with
    ``moments="eigenbasis"``. With ``moments="parameters"`` it sees preconditioned gradients.
    """

    _base = torch.optim.Adam


@_sign
class KFACMuon(KFACMixin, Muon):
    """:class:`Muon` with K-FAC inside: what it makes orthogonal is so in the metric of G.

    Of a momentum M of a covered matrix or kernel it takes the step L polar(L M),
    L = (G / ḡ + λI)^-½, with ḡ G's mean eigenvalue and λ the ``damping``:
    ``KFACMuon([{"params": inner}, {"params": ends, "use_muon": False, "lr": 3e-3}], lr=0.02,
    model=model)``. Arguments are Muon's, then K-FAC's but for those that need bases.

    AdamW takes embeddings, norms, what has fewer than two dimensions, and groups with
    ``use_muon=False``; matrices that K-FAC does not cover take Muon's own step.
    """

    _base = Muon

    def _of_its_own(self, saved: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
        """Whose its parameters are, as what is covered follows from it; and, in place of another
        class's damping, which is no share of G's eigenvalues, its own."""
        kept = {"use_muon": here["use_muon"]}
        if saved.get("use_muon", here["use_muon"]) is not here["use_muon"]:
            warnings.warn(
                f"the checkpoint has use_muon={saved['use_muon']!r} for a parameter group that was "
                f"built with {here['use_muon']!r} here, which stays",
                stacklevel=4,
            )
        return kept if "ns_steps" in saved else {**kept, "damping": here["damping"]}

    def takes_muon(self, group: dict[str, Any], p: Tensor) -> bool:
        return super().takes_muon(group, p) and p not in self.preconditioner.registry.excluded


@_sign
class KFACLAMB(KFACMixin, LAMB):
    """LAMB with K-FAC inside: its inner moments live in the eigenbasis of K-FAC's factors.

    Inner directions are as :class:`KFACAdam`'s, also with ``moments="eigenbasis"``.
    With ``moments="parameters"`` it sees preconditioned gradients, its clipping included.
    """

    _base = LAMB
