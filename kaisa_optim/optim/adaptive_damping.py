"""Damping that follows how well K-FAC's quadratic model foresees the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import is_real, is_whole
from ..comm.sharding import is_sharded
from ..core.options import check
from ..curvature.rules.base import EigenbasisRule
from ..errors import invalid, invalid_because
from ..linalg import precision
from .mixin import KFACMixin
from .scheduler import check_optimizer, claim_damping

_GOOD, _POOR = 0.75, 0.25


class AdaptiveDamping:
    """Lowers the damping where the quadratic model foresees the loss well, and else raises it.

    This is the Levenberg–Marquardt rule of Martens & Grosse (2015, section 6.5). In every
    ``interval``-th step, δ is the change of the parameters by the optimizer, and

        ρ = (loss after - loss before) / (∇ᵀδ + ½ δᵀFδ),

    with both losses on the step's own batch. For ρ > 3/4 the damping of every parameter group is
    multiplied by ``decay ** interval``; ``decay`` is the factor for one step. For ρ < 1/4, or a
    loss that is not finite, the damping is divided by ``decay ** interval``. ``minimum`` and
    ``maximum`` bound the damping. If the model foresees no decrease, as where momentum leads
    uphill, the damping stays. ::

        adaptive = AdaptiveDamping(optimizer)
        for x, y in batches:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            adaptive.step(loss, lambda: criterion(model(x), y))

    δ is measured, so that momentum, weight decay, the clip, grafting and any base optimizer count.
    F is G ⊗ A of each covered layer, as last decomposed, and zero for other parameters. If
    gradients are clipped before the step, the model foresees too little. A deciding step copies the
    parameters, and runs one more forward pass.

    All ranks call :meth:`step`, each with its own loss. In a deciding step, ranks exchange three
    numbers, and all write the same damping.
    """

    def __init__(
        self,
        optimizer: KFACMixin,
        *,
        decay: float = 0.95,
        interval: int = 5,
        minimum: float = 1e-4,
        maximum: float = 10.0,
    ) -> None:
        check_optimizer(optimizer)
        _check_options(optimizer)
        if not (isinstance(decay, int | float) and 0 < decay < 1):
            raise invalid("decay", decay, "it must be in (0, 1), such as 0.95")
        self.minimum, self.maximum = _bound("minimum", minimum), _bound("maximum", maximum)
        if self.minimum > self.maximum:
            raise invalid_because(
                "minimum", f"{minimum!r} is above maximum={maximum!r}; exchange them"
            )
        self.decay = decay
        if not is_whole(interval) or interval < 1:
            raise invalid("interval", interval, "it must be a whole number of steps, at least 1")
        self.interval = int(interval)
        self.optimizer = optimizer
        self.ratio: float | None = None  # ρ of the last decision; NaN if no decrease was foreseen
        self._before: tuple[int, dict[Tensor, Tensor]] | None = None
        self._foreseen: Tensor | None = None  # this rank's share of the foreseen change
        self._stepped = False  # whether the optimizer has stepped since the last call of step
        self._former_join = optimizer._join_config  # torch keeps the setting of the last Join
        self._attach()

    def _attach(self) -> None:
        claim_damping(self.optimizer, self)
        self._handles = [
            self.optimizer.register_step_pre_hook(self._starts),
            self.optimizer.register_step_post_hook(self._ends),
        ]

    def remove(self) -> None:
        """Take this object off the optimizer, whose damping stays; :meth:`step` does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizer._damping_owners.discard(self)
        self._before = self._foreseen = None

    def step(self, loss: Tensor | float, closure: Callable[[], Tensor | float]) -> None:
        """Adapt the damping, if this step decides; call it after each ``optimizer.step()``.

        ``loss`` is the unscaled loss of the step's gradient. ``closure`` returns the loss of the
        same batch anew; a deciding step calls it without gradients. Both should draw the same
        dropout, or none. A batch norm in training counts that pass, too.
        """
        stepped, self._stepped = self._stepped, False
        if self._foreseen is None:
            # A GradScaler skips steps, and does not tell which.
            scaled = self.optimizer.preconditioner.grad_scaler is not None
            if self._handles and not (stepped or scaled):
                raise RuntimeError(
                    "AdaptiveDamping.step() comes after optimizer.step(), once for each; there was "
                    "none since the last call"
                )
            return
        foreseen, self._foreseen = self._foreseen, None
        ranks = self.optimizer.preconditioner.ranks
        join = self.optimizer._join_config
        if ranks.world > 1 and join.enable and join is not self._former_join:
            raise RuntimeError(
                "AdaptiveDamping can't be used inside Join: ranks that are out of data have no "
                "loss to tell; leave it out, or give all ranks equally many batches. After a Join "
                "that has ended, build it anew"
            )
        with torch.no_grad():
            after = _loss("closure", closure(), "it must return")
            own = [_loss("loss", loss, "it must be"), after, float(foreseen)]
        numbers = torch.tensor(own, dtype=torch.float64, device="cpu")
        before, after, foreseen_by_all = ranks.sum_numbers(numbers, "adapting the damping").tolist()
        self._adapt((after - before) / ranks.world, foreseen_by_all)

    def _adapt(self, change: float, foreseen: float) -> None:
        if not foreseen < 0:
            self.ratio = math.nan
            return
        self.ratio = change / foreseen
        if self.ratio > _GOOD:
            factor = self.decay**self.interval
        elif not self.ratio >= _POOR:
            factor = self.decay**-self.interval
        else:
            return
        for group in self.optimizer.param_groups:
            damping = group["damping"]
            # A bound stops a damping that moves towards it, but moves no damping back.
            low, high = min(damping, self.minimum), max(damping, self.maximum)
            group["damping"] = min(max(damping * factor, low), high)

    # ---- what the model foresees ----

    @torch.no_grad()
    def _starts(self, optimizer: KFACMixin, args: Any, kwargs: Any) -> None:
        self._before = self._foreseen = None
        self._stepped = True
        steps = optimizer.preconditioner.steps
        if (steps + 1) % self.interval == 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            minus = torch._foreach_neg(parameters)
            self._before = steps, dict(zip(parameters, minus, strict=True))

    @torch.no_grad()
    def _ends(self, optimizer: KFACMixin, args: Any, kwargs: Any) -> None:
        if self._before is None:
            return
        (steps, change), self._before = self._before, None
        if optimizer.preconditioner.steps > steps:  # else there was nothing in this step
            torch._foreach_add_(list(change.values()), list(change))
            self._foreseen = self._model(change)

    def _model(self, change: Mapping[Tensor, Tensor]) -> Tensor:
        """Return this rank's share of ∇ᵀδ + ½ δᵀFδ, on the device.

        The first rank adds all slopes; the owner of a layer's G adds its curvature.
        """
        kfac = self.optimizer.preconditioner
        rank, registry, rule = kfac.ranks.rank, kfac.registry, kfac.rule
        assert isinstance(rule, EigenbasisRule)
        ready = registry.with_state
        terms = []
        if rank == 0:
            moved = [(p.grad, x) for p, x in change.items() if p.grad is not None]
            terms += [(_wide(gradient) * _wide(x)).sum() for gradient, x in moved]
        device = self.optimizer.join_device.type
        with precision.full_precision(), precision.without_autocast(device):
            for group in kfac.applied.groups:
                members = [x for x in group.layers if x in ready and registry.owner(x, "g") == rank]
                if members:
                    stacked = kfac.gradients.stack_of(members).collect(change.get)
                    terms.append(rule.curvature(group, stacked, members) / 2)
        return sum((x.to(terms[0].device) for x in terms), torch.zeros(()))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the dampings, one for each group, and the last ratio."""
        damping = [group["damping"] for group in self.optimizer.param_groups]
        return {"damping": damping, "ratio": self.ratio}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; the optimizer's groups take the saved dampings."""
        if not self._handles:
            raise RuntimeError(
                "this AdaptiveDamping was taken off by remove(); build a new one to load into"
            )
        groups, saved = self.optimizer.param_groups, state_dict["damping"]
        if len(saved) != len(groups):
            why = (
                f"it has dampings of {len(saved)} parameter groups, the optimizer has "
                f"{len(groups)}; build it with the same groups"
            )
            raise invalid_because("state_dict", why)
        for group, damping in zip(groups, saved, strict=True):
            group["damping"] = check("damping", damping)
        self.ratio = state_dict["ratio"]

    def __getstate__(self) -> dict[str, Any]:
        # A copied optimizer has none of the hooks: the copy of this object attaches its own.
        return {**self.__dict__, "_handles": len(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _handles=[])
        if state["_handles"]:
            self._attach()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _loss(name: str, value: Any, must: str) -> float:
    if is_real(value) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    must += " the loss of the step's batch, a number or a tensor of one element"
    raise invalid(name, value, must)


def _bound(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise invalid(name, value, "it must be a number above 0")
    return float(value)


def _check_options(optimizer: KFACMixin) -> None:
    """Refuse optimizers whose next step ignores the damping, or whose F is not the loss's."""
    options = optimizer.preconditioner.options
    wrong, why = "", ""
    if optimizer.has_schedule("damping"):
        wrong, why = "a callable damping", "it would be overwritten: give the optimizer a number"
    elif options.compute_method == "metric":
        wrong, why = "KFACMuon", "its damping is a share of G's eigenvalues: leave it out"
    elif options.compute_method != "eigen" or options.compute_eigenvalue_outer_product:
        wrong = "stored inverses or eigenvalue products"
        why = 'they keep the damping of their refresh: take compute_method="eigen" alone'
    elif options.kaisa_scaling:
        wrong, why = 'normalization="kaisa"', "its factors are not on the scale of the loss"
    elif any(group.get("maximize") for group in optimizer.param_groups):
        wrong, why = "maximize=True", "negate the loss instead"
    elif any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        wrong = "parameters sharded by fully_shard"
        why = "no rank has a whole change: use DistributedDataParallel, or a schedule"
    if wrong:
        raise invalid_because("optimizer", f"AdaptiveDamping can't work with {wrong}; {why}")
