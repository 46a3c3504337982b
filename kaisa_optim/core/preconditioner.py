"""The order of one K-FAC step, and the answers to a user's questions about it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..capture import fisher
from ..capture.hooks import Capture
from ..comm import agreement, sharding
from ..comm.ranks import BroadcastItem, RankGroup, Ranks
from ..curvature.refresh import Outcome, SecondOrder
from ..curvature.rules import adam as eigenbasis
from ..curvature.rules import ekfac as correction
from ..curvature.rules import muon as metric
from ..curvature.rules.ekfac import Gradients
from ..curvature.stacks import Layout, Pair, Shelf, alike, by_device, device_of, stack_key
from ..curvature.sums import Statistics, Tally
from ..layers import Layer
from ..layers.sampling import sample_of
from ..linalg.moments import mirrored
from ..plan import assignment as work
from ..plan.account import Account, Assigned, Work
from ..plan.assignment import Placement, Task
from ..plan.routes import chunks, in_turn, side_by_side
from . import gradients
from . import options as checks
from .coverage import Coverage, check_trained, cover, refuse_flattened, unwrapped
from .gradients import Members, Places, Preconditioned
from .options import Options

Group = dict[str, Any]
Apply = Callable[[Pair, Tensor, list[Layer]], Tensor]

logger = logging.getLogger("kaisa_optim")


# Numbers that may be given as callables of the step, beside those of the parameter groups.
_SCHEDULED = (
    "kl_clip",
    "factor_update_steps",
    "inv_update_steps",
    "loss_terms",
    "statistics_fraction",
)
_PATIENCE = 20  # steps
_GIVEN_UP = 10  # intervals between statistics
_WIDE = 4096  # columns beyond which eigenvectors take a core of a CPU a quarter of a minute or more
_SETTABLE = (*_SCHEDULED, "grad_scaler")
_FIXED = {"process_group"}.union(f.name for f in dataclasses.fields(Options)).difference(_SETTABLE)


class Preconditioner:
    """K-FAC for one model: ``optimizer.preconditioner``.

    The optimizer calls :meth:`step` with its parameter groups and gets the gradients that its base
    class is to see. Everything else here is for users: what is covered, what it costs, what the
    factors are, and the hyperparameters that hold for the whole optimizer.
    """

    _is_built = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        groups: list[Group],
        group_schedules: list[dict[str, Callable[[int], Any]]],
        known: Iterable[Tensor] = (),
        process_group: Any = None,
        identity: Mapping[str, Any] | None = None,
        compare: bool = True,
    ) -> None:
        """``identity`` is what else ranks must have alike; without ``compare``, they compare in the
        first step only, so that one rank may build alone."""
        self.model = model
        self.options = options
        self._identity = identity or {}
        self.ranks = Ranks(
            process_group,
            bucket_cap_mb=options.bucket_cap_mb,
            comm_dtype=options.comm_dtype,
            device=next((p.device for p in model.parameters()), None),
        )
        self.strategy = options.strategy
        if any(sharding.is_sharded(p) for p in model.parameters()):
            self.strategy = _for_shards(options, self.ranks.world)
        self.placements: dict[str, Placement] = {}
        self.sharded: dict[Layer, tuple[sharding.Shards | None, ...]] = {}  # weight's, bias's
        self.steps = 0
        self.layers: dict[str, Layer] = {}
        self.uncovered: dict[str, str] = {}
        self.left: dict[Tensor, str] = {}  # what it was told not to cover, and why
        self._choices: list[Any] = []  # what groups said of that
        self.skipped: dict[str, str] = {}
        self.statistics = Statistics(
            self.ranks,
            kaisa_scaling=options.kaisa_scaling,
            loss_reduction=options.loss_reduction,
            factor_dtype=options.factor_dtype,
        )
        self.second_order = SecondOrder(
            self.ranks,
            method=options.compute_method,
            split=options.damping_split,
            stored_product=options.compute_eigenvalue_outer_product,
            dtype=options.inv_dtype,
            max_failures=options.max_failures,
            moments=options.moments,
            nesterov=options.nesterov,
            orthogonal=options.orthogonal,
            tolerance=options.tolerance,
            truncation=options.truncation,
            correction=options.correction,
            lag=options.refresh_lag,
        )
        self.fed: set[Layer] = set()  # have a running average
        # Whose turn to gather has passed without a pass through them: for how many steps, and in
        # how many of these they had a gradient all the same.
        self.overdue: dict[Layer, int] = {}
        self._unseen: dict[Layer, int] = {}
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
        self.published_by: Any = None  # from what entries there followed
        self.shelf = Shelf()  # the factors that this rank keeps
        self.layout = Layout()  # the layers whose gradients this rank preconditions
        self._unsettled = False  # loaded, and the other ranks not yet asked
        self._refused: Exception | None = None  # what kept this rank from loading
        self._unproven = self.ranks.world > 1  # weights not yet compared
        self._silent = 0  # steps since a layer saw a backward pass, of those that gather
        self._turns_of: dict[tuple[str, int], dict[int, frozenset[Layer]]] = {}
        self._places: dict[Layer, Places] = {}
        self._members: dict[Layer, Members] = {}  # as they were last together, by their first
        # What was last sent of the layers of a device, by their first, and how it was divided.
        self._shipments: dict[Layer, tuple[list[Layer], list[tuple[int, Any]]]] = {}
        self._placement: list[tuple[torch.device, torch.dtype]] = []
        self._capture: Capture | None = None
        self._named_without_statistics: set[Layer] = set()
        self._named_misread = False
        self._schedules: dict[str, Callable[[int], Any]] = {}
        self._group_schedules = group_schedules  # of damping and factor_decay, one dict a group
        for name in _SCHEDULED:
            value = getattr(options, name)
            if callable(value):
                checks.check_callable(name, value, "step")
                self._schedules[name] = value
                value = value(0)
            setattr(self, name, value)
        self.grad_scaler = options.grad_scaler
        self._accepted = set(known)  # parameters that are, or were, the model's
        self._on_meta: dict[str, Tensor] = {}  # sizes can be asked of these, but no step be taken
        self._compares = compare
        self.rebuild(groups)
        self._compares = True
        self._is_built = True
        if not self.layers:
            self._detach()
            reasons = [f"{name}: {why}" for name, why in self.uncovered.items()]
            if self.skipped:
                patterns = ", ".join(map(repr, dict.fromkeys(self.skipped.values())))
                reasons.append(f"skip_layers {patterns} leaves out {len(self.skipped)} parameters")
            detail = "; ".join(reasons)
            raise ValueError(
                "Invalid model: it has no layer that K-FAC covers"
                + (f" ({detail})" if detail else "")
                + "; use the base optimizer, "
                + ("skip less, " if self.skipped else "")
                + "or register its layers with register_layer"
            )
        if self.uncovered:
            lines = "\n".join(f"  {name}: {why}" for name, why in self.uncovered.items())
            text = f"the base optimizer updates these with their raw gradients:\n{lines}"
            agreement.warn(self.ranks, text, stacklevel=4)
        text = self._of_wide_factors()
        if text:
            agreement.warn(self.ranks, text, stacklevel=4)
        if self.ranks.status_device:
            agreement.warn(
                self.ranks,
                f"the process group has no backend for the CPU, only for {self.ranks.status_device}, "
                "so that in most steps the host waits for that device to hear what ranks agree on; "
                "add gloo for the CPU where the group is made, as in "
                'init_process_group("cpu:gloo,cuda:nccl")',
                stacklevel=4,
            )

    def _of_wide_factors(self) -> str:
        """What to say of those whose eigenvectors hold up training on a CPU for long, if any do."""
        if self.options.compute_method != "eigen" or self.second_order.metric:
            return ""
        on_cpu = [x for x in self.layers.values() if x.weight is not None and x.weight.is_cpu]
        tasks = [_task(x) for x in on_cpu]  # frozen ones, too: they may be trained later
        sides = [(task.name, "A", task.a) for task in tasks if not task.diagonal_a]
        sides += [(task.name, "G", task.g) for task in tasks if not task.diagonal_g]
        wide = [f"  {name}: {side} has {n} columns" for name, side, n in sides if n > _WIDE]
        if not wide:
            return ""
        remedy = "for a diagonal factor in its place give a lower max_factor_size"
        if not self.second_order.moments:  # which have no use for inverses
            remedy += (
                '; compute_method="inverse", where your other options admit it, takes about a '
                "fifth of the time"
            )
        head = f"eigenvectors of factors wider than {_WIDE} hold a CPU up at each refresh:"
        return "\n".join([head, *wide, remedy])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in checks.PER_GROUP:
            raise AttributeError(
                f"{name} = {value!r}: it belongs to the parameter groups; set "
                f'optimizer.param_groups[i]["{name}"]'
            )
        if self._is_built and name in _FIXED:
            raise AttributeError(
                f"{name} = {value!r}: it can only be given at construction; build the optimizer "
                f"with {name}={value!r}"
            )
        # A misspelled one would have no effect. Names of its own appear while it is built.
        if self._is_built and not (name.startswith("_") or hasattr(self, name)):
            near = difflib.get_close_matches(name, _SETTABLE, 1)
            raise AttributeError(
                f"{name} = {value!r}: the preconditioner has no {name}"
                + (f"; did you mean {near[0]}?" if near else f"; {', '.join(_SETTABLE)} can be set")
            )
        super().__setattr__(name, value)

    @property
    def parameters(self) -> Iterable[Tensor]:
        """All that the optimizer has of this model, covered or not."""
        return self._group_of.keys()

    @property
    def active(self) -> list[Layer]:
        """The covered layers that are not wholly frozen."""
        return [layer for layer in self.layers.values() if any(layer.covers)]

    def covered_groups(self) -> set[int]:
        """Numbers of the parameter groups that have covered parameters."""
        return {self._group_of[p] for layer in self.active for p in layer.parameters}

    # ---- hyperparameters of the whole optimizer ----

    @property
    def kl_clip(self) -> float | None:
        return self._kl_clip

    @kl_clip.setter
    def kl_clip(self, value: float | None) -> None:
        value = checks.check_kl_clip(value)
        if self.options.grafting:
            checks.refuse_clip_of_grafted(value)
        self._kl_clip = value

    @property
    def _clip(self) -> float | None:
        """The clip's limit; directions that are made of moments have a length already."""
        return None if self.second_order.moments else self.kl_clip

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
    def statistics_fraction(self) -> float:
        """The part of the examples, or of few examples' positions, that factors are taken from."""
        return self._statistics_fraction

    @statistics_fraction.setter
    def statistics_fraction(self, value: float) -> None:
        self._statistics_fraction = checks.check_statistics_fraction(value)
        self._aim()

    @property
    def loss_terms(self) -> str | float:
        """ "examples", "positions", or how many terms the losses of this step average."""
        return self.statistics.loss_terms

    @loss_terms.setter
    def loss_terms(self, value: str | float) -> None:
        value = checks.check_loss_terms(value)
        if self.options.kaisa_scaling and value != "examples":
            raise ValueError(
                f'Invalid loss_terms: {value!r} has no meaning under normalization="kaisa", which '
                'leaves K out; use normalization="fisher"'
            )
        former = self.statistics.loss_terms
        numbers = not isinstance(value, str) and not isinstance(former, str)
        if self._capture is not None and self._capture.draws and value != former and not numbers:
            raise ValueError(
                f"Invalid loss_terms: {value!r} after sample_fisher, which drew for {former!r}; "
                "set it before, or give the optimizer a number as its argument"
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
        return self.options.having({name: getattr(self, name) for name in (*plain, "grad_scaler")})

    # ---- the true Fisher ----

    def sample_fisher(
        self,
        outputs: Tensor,
        kind: fisher.Kind,
        *,
        dim: int | None = None,
        weight: Tensor | None = None,
        exact: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Take G from labels drawn from the model's own distribution, and not from the data's.

        Call it between the forward pass and ``loss.backward()``, on all ranks, with the
        ``outputs`` that the loss is of. ``kind`` is the loss: "cross_entropy" of logits, "mse",
        "bce" of logits; or a callable that draws by itself and returns of ``outputs`` the loss,
        summed over the terms that K counts, or its gradient. In steps that gather statistics it
        costs one backward pass, in others nothing; no ``.grad`` changes.

        ``dim`` is that of the classes (as in torch's cross_entropy by default) or features.
        ``weight`` has a number for each loss, 0 for padding. ``exact`` takes the expectation in
        place of a draw, with one backward pass for each number of an example's outputs.
        ``generator`` draws; without one it is seeded by step and rank, whatever torch's seed is.
        """
        if self.options.kaisa_scaling:
            raise ValueError(
                'Invalid normalization: "kaisa" has no scale for the Fisher of drawn labels; use '
                'normalization="fisher"'
            )
        if self.second_order.correction == "examples":
            raise ValueError(
                'Invalid eigenvalue_correction: "examples" takes the gradients that train, not '
                'those of drawn labels; use "gradients", or leave out sample_fisher'
            )
        draws = fisher.Fisher(outputs, kind, dim, weight, exact, generator)
        capture = self._capture
        assert capture is not None
        if capture.due:
            draws.seed(self.steps, self.ranks.rank, capture.draws)
            try:
                draws.draw(capture, self.statistics)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise RuntimeError(
                    "sample_fisher came after loss.backward(), which freed the graph of outputs; "
                    "call it before, right after the forward pass"
                ) from error

    def misread(self) -> str:
        """Once: that K counts positions for examples, where it does and where that matters."""
        capture, options = self._capture, self.options
        assert capture is not None
        indifferent = options.kaisa_scaling or self.second_order.moments
        if indifferent or options.loss_reduction == "sum" or self.loss_terms != "examples":
            capture.misread = None
        if capture.misread is None or self._named_misread:
            return ""
        self._named_misread = True
        name, positions, examples = capture.misread
        return (
            f"layer {name!r} has batch_first=False and sees {examples} examples of {positions} "
            f"positions, but K goes by the first dimension of the model's input, {positions}; "
            "build it with batch_first=True and give the model examples first, or set loss_terms "
            "to the number of terms that the loss averages"
        )

    # ---- the step ----

    def step(self, groups: list[Group]) -> dict[Tensor, Tensor]:
        """One step: the preconditioned gradient of every covered parameter that has a gradient.

        Statistics gathered since the last step are added up over the ranks and enter the running
        averages where those are kept; layers whose turn it is are decomposed there, and their
        workers learn the result; gradients are preconditioned, handed out, and clipped together.
        """
        self._refuse_meta()
        self._follow_schedules(groups)
        self.settle_load(groups)
        self._follow_layers()
        tally = self._tally(groups)
        if tally is None:
            return self._nothing()

        def hyperparameter(name: str) -> Callable[[Layer], float]:
            # Each stack asks for its layers' values, and they stay for a step.
            return functools.cache(lambda layer: self._shared(layer, groups, name))

        damping_of, decay_of = hyperparameter("damping"), hyperparameter("factor_decay")
        renewed = self._take_in(tally, damping_of, decay_of)
        apply = self._apply(groups, damping_of, self._taken(tally, decay_of))
        if self.ranks.grid.columns == 1:
            stacks = self._preconditioned(apply)
        else:
            stacks = self._handed_out(apply)
        parts, terms = self._returned(apply)
        scale, limit = None, self._clip
        if limit is not None:
            terms.update(item for one in stacks for item in one.terms().items())
            if terms:
                scale = gradients.clip(terms, limit, lambda p: self._alpha(p, groups))
                for part in map(sharding.local, parts.values()):
                    part.mul_(scale.to(part.device, part.dtype))
        whole = gradients.unstack(stacks, self._in_parts, scale=scale)
        if self.second_order.moments:
            whole = self._directions(whole, stacks)
        whole |= parts
        if self.steps < self.options.warmup_steps:
            gradients.blend(whole, self.steps / self.options.warmup_steps)
        self.second_order.count(self.layout, renewed, damping_of)
        self._advance()
        return whole

    def _take_in(
        self,
        tally: Tally,
        damping_of: Callable[[Layer], float],
        decay_of: Callable[[Layer], float],
    ) -> list[Layer]:
        """Statistics into the running averages, and these into what gradients are multiplied by.

        Decompositions wait for all sums: an owner that began with the first would keep the others
        waiting for its terms of the next. Returns the layers with a new state.
        """
        renewed: list[Layer] = []
        self.fed.update(tally.counts)
        due, outcome, second_order = self._due(), Outcome(), self.second_order
        turn, number = self._turn(), self._turns_begun()
        with second_order.planned(self.shelf, self.layout, due, turn, number, self.steps) as (
            renewing,
            older,
        ):
            second_order.take_examples(self.layout, self.statistics, tally, decay_of)
            self.statistics.update(self.shelf, tally, self.owner, decay_of)
            second_order.refresh(self.shelf, self.layout, due, damping_of, outcome)
            second_order.start(self.shelf)
            if renewing:
                landed = second_order.land(self.shelf, self.steps, outcome)
                renewed = self._settle(renewing, outcome)
                second_order.enter(self.layout, landed)
                second_order.tracking.send(self.shelf)
                second_order.hand_out(self.layout, renewed, older, self.owner, damping_of)
        return renewed

    def _nothing(self) -> dict[Tensor, Tensor]:
        """A step that is none: the base must not begin moments that are K-FAC's."""
        covered = [p for x in self.active for p in x.parameters if p.grad is not None]
        return {p: torch.zeros_like(p) for p in covered} if self.second_order.moments else {}

    def _directions(
        self, whole: dict[Tensor, Tensor], stacks: list[Preconditioned]
    ) -> dict[Tensor, Tensor]:
        """Without parameters of which a part is no direction, but still a raw gradient."""
        done = {layer for one in stacks for layer in one.members.layers}
        raw = {p for layer in self.active if layer not in done for p in layer.parameters}
        return {p: direction for p, direction in whole.items() if p not in raw} if raw else whole

    def _refuse_meta(self) -> None:
        for name, p in self._on_meta.items():
            if p.is_meta:
                raise RuntimeError(
                    f"Invalid params: {name} was on the meta device when the optimizer was built, "
                    "which would never change what has taken its place; call to_empty, load or "
                    "initialize the weights, and build the optimizer then"
                )

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
        """Make room for layers that were moved, frozen or unfrozen since the last step.

        Ranks compare what is frozen whenever they exchange anything, and it takes effect then.
        """
        changed = False
        for layer in self.layers.values() if self.ranks.world == 1 or self._exchanges() else ():
            gathered = self.statistics.gathered.get(layer)
            covers = layer.covers_now() if gathered is None else gathered.covers
            if any(covers) and covers != layer.covers:
                logger.info("layer %r starts anew: it was frozen or unfrozen", layer.name)
                layer.covers = covers
                self.forget(layer)
                changed = True
        if changed or self._placement != self._place():
            self.lay_out()

    def _place(self) -> list[tuple[torch.device, torch.dtype]]:
        parameters = (layer.parameters[0] for layer in self.active)
        return [(p.device, p.dtype) for p in parameters]

    # ---- what all ranks must know alike ----

    def _exchanges(self) -> bool:
        """Whether there is something to agree on in this step.

        One rank alone looks at whatever was gathered; several must know it without asking.
        """
        capture = self._capture
        assert capture is not None
        asked = self.second_order.tracking.asked
        alone = self.ranks.world == 1 and (self.statistics.gathered or capture.draws)
        return bool(alone or capture.wanted or capture.missing or asked or self._due())

    def _tally(self, groups: list[Group]) -> Tally | None:
        """Agree with the other ranks on what there is in this step; ``None`` for a step of nothing.

        Every decision about collectives follows from this exchange, or from the step's number.
        """
        capture = self._capture
        assert capture is not None
        layers = list(self.layers.values())
        if not self._exchanges():
            return Tally(0.0, 0.0, {}, {})
        counts, own_terms = self.statistics.counts(layers), self.statistics.terms()
        gathered = self.statistics.gathered
        with_gradient = [any(p.grad is not None for p in x.parameters) for x in layers]
        common = agreement.checksum(self._common(groups))
        head = [
            capture.error is not None,
            capture.backwards > 0 or capture.was_paused,
            any(with_gradient),
            capture.draws > 0 or any(x.drawn for x in gathered.values()),
            any(x.own for x in gathered.values()),
            common,
            common**2,
            own_terms,
            self._lacks_halves(),
        ]
        notes = self.second_order.tracking.flags(self.shelf)
        numbers = [*head, *with_gradient, *notes]
        mine = [*numbers, *counts, *(count > 0 for count in counts)]
        word = self.ranks.sum_numbers(
            torch.tensor(mine, dtype=torch.float64, device="cpu"), f"agreeing on step {self.steps}"
        ).tolist()
        failed, captured, graded, drawn, trained, once, squared, terms, lacking, *flags = word[
            : len(numbers)
        ]
        # Anew in each exchange: the model may have been moved.
        self.second_order.halves = not lacking
        present, notes = flags[: len(layers)], flags[len(layers) :]
        if failed:
            error, capture.error = capture.error, None  # the next step may go well
            agreement.raise_together(self.ranks, error, "capturing")
        if not agreement.alike(self.ranks.world, once, squared):
            agreement.raise_difference(self.ranks, self._common(groups), "hyperparameters")
        if drawn and trained:
            draws, capture.draws = capture.draws, 0
            own = [layer.name for layer, x in gathered.items() if x.own]
            fisher.raise_half(self.ranks, draws, own)
        self._check_gradients(layers, with_gradient, present)
        self.second_order.tracking.hear(notes)
        if self._unproven:
            self._compare_weights()
        if captured:
            self._silent = 0
        elif capture.wanted - self.overdue.keys() and graded:
            # Once they have statistics, a step may have passed by the layers whose turn it was.
            self._silent += 1
            if capture.missing.issuperset(layers) or self._silent >= self._gathering_steps():
                if all("lr" in group and float(group["lr"]) == 0 for group in groups):
                    return None  # torch.distributed.checkpoint steps once, for the base's state
                self._raise_without_capture()
        sizes = [layer.sections for layer in layers]
        rest = iter(word[len(numbers) :])
        totals, givers = (
            {x: list(itertools.islice(rest, n)) for x, n in zip(layers, sizes, strict=True)}
            for _ in range(2)
        )
        seen = {layer: total for layer, total in totals.items() if any(total)}
        self._note_overdue(seen, dict(zip(layers, present, strict=True)))
        giving = {layer: givers[layer] for layer in seen}
        return Tally(own_terms, terms, seen, giving, drawn > 0)

    def _note_overdue(self, seen: Mapping[Layer, Any], present: Mapping[Layer, float]) -> None:
        """What is in use in some steps alone must not miss its turns for ever: it gathers next."""
        assert self._capture is not None
        for layer in seen:
            self.overdue.pop(layer, None)
            self._unseen.pop(layer, None)
        for layer in self._capture.wanted - seen.keys() & self.fed:
            self.overdue[layer] = self.overdue.get(layer, 0) + 1
            steps = self._unseen[layer] = self._unseen.get(layer, 0) + (present[layer] > 0)
            if steps == _PATIENCE and not self._capture.was_paused and present[layer]:
                agreement.warn(
                    self.ranks,
                    f"layer {layer.name!r} has had a gradient in {steps} steps that were to gather "
                    "its statistics, but no pass came through its module: older factors stay in "
                    "use; its weight may by now be in use outside of its module's forward, or its "
                    "gradient be kept at zero",
                    stacklevel=2,
                )

    def _common(self, groups: list[Group]) -> dict[str, Any]:
        """What must be alike on all ranks in a step."""
        plain = (int, float, str, tuple, type(None))  # a tensor would have to be waited for

        def by_cause(item: tuple[str, Any]) -> tuple[bool, str]:
            # Others follow from lr, and the first that differs is the one to be named.
            return item[0] != "lr", item[0]

        values: dict[str, Any] = {
            f"{name} of parameter group {i}": _comparable(value)
            for i, group in enumerate(groups)
            for name, value in sorted(group.items(), key=by_cause)
            if isinstance(value, plain)
        }
        names = (
            "steps",
            "kl_clip",
            "factor_update_steps",
            "inv_update_steps",
            "statistics_fraction",
        )
        values |= {name: getattr(self, name) for name in names}
        trained = {f"trained weight, bias of {x.name!r}": x.covers for x in self.layers.values()}
        return values | trained

    def _check_gradients(self, layers: list[Layer], mine: list[bool], present: list[float]) -> None:
        partly = [i for i, n in enumerate(present) if 0 < n < self.ranks.world]
        if partly:
            theirs = self.ranks.gather_objects(
                [mine[i] for i in partly], "looking for missing gradients"
            )
            without = [rank for rank, flags in enumerate(theirs) if not flags[0]]
            raise RuntimeError(
                f"layer {layers[partly[0]].name!r} has no gradient on ranks {without}, but has one "
                "on others, and weights would drift apart: average gradients over all ranks before "
                "step(), counting a missing one as zero, or use DistributedDataParallel with "
                "find_unused_parameters=True"
            )

    def _raise_without_capture(self) -> None:
        raise RuntimeError(
            f"step {self.steps} is due for statistics, but no covered layer saw a backward pass. "
            "Gradients must come from .backward() through this very model, once per step. If it, "
            "or another model of the same class, was compiled and called before the optimizer was "
            "built, build the optimizer first or call torch._dynamo.reset(), since code that was "
            "compiled without hooks is used again; a CUDA graph that holds the backward pass runs "
            "no hooks; if the forward was meant to be left out, use "
            "optimizer.preconditioner.paused()"
        )

    def _compare_weights(self) -> None:
        """In the first step: no wrapper may have made weights and gradients alike."""
        covered = {p for layer in self.active for p in layer.parameters}
        whole = {
            name: p
            for name, p in unwrapped(self.model).named_parameters()
            if p in covered and not sharding.is_sharded(p)
        }
        graded = {f"the gradient of {n!r}": p.grad for n, p in whole.items() if p.grad is not None}
        agreement.compare_tensors(
            self.ranks,
            {f"parameter {name!r}": p for name, p in whole.items()},
            "give all ranks the same weights, by DistributedDataParallel or by one seed",
        )
        agreement.compare_tensors(
            self.ranks,
            graded,
            "average gradients over all ranks before step(), or use DistributedDataParallel",
        )
        self._unproven = False

    def _settle(self, due: list[Layer], outcome: Outcome) -> list[Layer]:
        """Agree on what the owners made of the layers that were due; those with a state."""
        flags = [float(outcome.error is not None), *outcome.flags(due)]
        failed, *flags = self.ranks.sum_numbers(
            torch.tensor(flags, dtype=torch.float64, device="cpu"),
            f"decomposing factors in step {self.steps}",
        ).tolist()
        if failed:
            agreement.raise_together(self.ranks, outcome.error, "decomposing factors")
        outcome = Outcome.of_all(due, flags)
        for layer in outcome.empty:
            self.forget(layer)
            self._named_without_statistics.add(layer)
        return self.second_order.settle(due, outcome)

    def settle_load(self, groups: list[Group]) -> None:
        """After a load: ranks compare, and what some rank lacks is estimated anew by all."""
        if not self._unsettled:
            return
        self._settle_covers()
        common = self._common(groups) | self.options.described()
        agreement.compare(
            self.ranks, common, "loaded states", self._refused, "loading a state", told=True
        )
        self._refused = None
        layers = list(self.layers.values())
        known = self.fed, self.second_order.ready
        flags: list[float] = [x in some for some in known for x in layers]
        late = [self.overdue.get(x, 0) for x in layers]
        flags += [*late, *(n**2 for n in late)]
        counts = [self.second_order.failures.get(x, 0) for x in layers]
        mine = [self._lacks_halves(), *flags, *counts]
        numbers = torch.tensor(mine, dtype=torch.float64, device="cpu")
        lacking, *word = self.ranks.sum_numbers(numbers, "agreeing on a loaded state").tolist()
        self.second_order.halves = not lacking
        fed, ready, overdue, squares, failures = (
            word[i : i + len(layers)] for i in range(0, len(word), len(layers))
        )
        for i, layer in enumerate(layers):
            if not agreement.alike(self.ranks.world, overdue[i], squares[i]):
                self.overdue[layer] = 1
                self.statistics.drop(layer)  # some ranks have gathered it alone
                self._aim()
            if fed[i] < self.ranks.world:
                self.forget(layer)
                if fed[i]:  # ranks that had it did not gather, but K has their terms
                    self.statistics.drop(layer)
            elif ready[i] < self.ranks.world:
                self.second_order.ready.discard(layer)
            if failures[i]:
                self.second_order.failures[layer] = round(failures[i] / self.ranks.world)
        self._unsettled = False

    def _settle_covers(self) -> None:
        """Where states differ in what a layer covers, it starts anew, with what is not frozen."""
        layers = list(self.layers.values())
        mine = torch.tensor([x.covers for x in layers], dtype=torch.float64, device="cpu")
        sums = self.ranks.sum_numbers(mine.flatten(), "agreeing on what a loaded state covers")
        apart = ((sums != 0) & (sums != self.ranks.world)).view(-1, 2).any(1).tolist()
        for layer in itertools.compress(layers, apart):
            layer.covers = layer.covers_now()
            self.forget(layer)
        if any(apart):
            self.lay_out()

    # ---- parts of the step ----

    def owner(self, layer: Layer, side: str) -> int:
        """The rank that keeps and decomposes a factor."""
        placement = self.placements[layer.name]
        return placement.a if side == "a" else placement.g

    def _column(self, layer: Layer) -> int:
        return self.owner(layer, "g") % self.ranks.grid.columns

    def _due(self) -> list[Layer]:
        """Layers to refresh in this step: in their turn, or because they need it.

        And those for which what was begun in an earlier step comes into use.
        """
        stale = {layer for layer, _ in self.second_order.tracking.stale}
        landing = self.second_order.under_way.due(self.steps)
        due = self.fed.intersection(self._turn() | stale | landing)
        due |= self.fed - self.second_order.ready
        return sorted(due, key=lambda layer: layer.number)

    def _turn(self) -> frozenset[Layer]:
        """Whose turn it is to be refreshed: of all at first and early, else of some at a time."""
        if self.steps == 0 or self.steps in self.options.early:
            return frozenset(self.fed)
        interval = self.inv_update_steps
        return self._turns("refresh", interval).get(self.steps % interval, frozenset())

    def _turns_begun(self) -> int:
        """How often all have been due, early refreshes counted: from the step's number alone."""
        early = sum(step <= self.steps for step in self.options.early)
        return self.steps // self.inv_update_steps + early

    def _turns(self, kind: str, interval: int) -> dict[int, frozenset[Layer]]:
        """The layers whose turn it is in each step of an interval, for "gathering" or "refresh"."""
        key = kind, interval
        if key not in self._turns_of:
            account, staggered = self.account, self.options.turns
            gathering = kind == "gathering"
            turns_of = account.gathering_turns if gathering else account.refresh_turns
            self._turns_of[key] = {
                turn: frozenset(self.layers[name] for name in names)
                for turn, names in turns_of(interval, staggered).items()
            }
        return self._turns_of[key]

    def _taken(self, tally: Tally, decay_of: Callable[[Layer], float]) -> Gradients | None:
        """What this step's gradients add to the eigenvalues that they correct, if any."""
        if self.second_order.correction != "gradients":
            return None
        graded = [x for x in tally.counts if any(p.grad is not None for p in x.parameters)]
        return Gradients(tally.terms, {layer: decay_of(layer) for layer in graded})

    def _apply(
        self,
        groups: list[Group],
        damping_of: Callable[[Layer], float],
        taken: Gradients | None,
    ) -> Apply:
        """What turns gradients of one shape into what the base optimizer is to step with."""
        if not self.second_order.moments:
            return lambda pair, raw, members: self.second_order.precondition(
                pair, raw, members, damping_of, taken
            )
        # Of all layers, so that all ranks refuse what does not fit one of them.
        of_group = self._settings_of_groups(groups)
        if all(one == of_group[0] for one in of_group):
            settings_of = dict.fromkeys(self.active, of_group[0])
        else:
            settings_of = {layer: self._settings(groups, of_group, layer) for layer in self.active}

        def direction(pair: Pair, raw: Tensor, members: list[Layer]) -> Tensor:
            present = [any(p.grad is not None for p in layer.parameters) for layer in members]
            return self.second_order.direction(pair, raw, members, present, settings_of)

        return direction

    def _preconditioned(self, apply: Apply) -> list[Preconditioned]:
        """New gradients of all layers that have both a gradient and second-order state."""
        result = []
        for pair in self.layout.pairs:
            members = [layer for layer in self._with_gradient(pair) if self._is_whole(layer)]
            if members:
                result.append(self._precondition(self.together(members), apply))
        return result

    def together(self, layers: list[Layer]) -> Members:
        """These layers of one shape, and the places of their gradients."""
        found = self._members.get(layers[0])
        if found is None or found.layers != layers:
            for layer in layers:
                if layer not in self._places:
                    self._places[layer] = Places.of(layer)
            found = self._members[layers[0]] = Members(layers, self._places)
        return found

    def _precondition(
        self,
        members: Members,
        apply: Apply,
        gradient_of: gradients.GradientOf = gradients.own_gradient,
    ) -> Preconditioned:
        pair = self.layout.pair_of[members.layers[0]]
        raw = gradients.stack(members, gradient_of)
        new = apply(pair, raw, members.layers)
        if self.options.grafting:
            gradients.graft(members, raw, new)
        if self._clip is not None:
            return Preconditioned(members, new, gradients.products(members, raw, new))
        return Preconditioned(members, new, raw.new_zeros(len(members.layers), 2))

    def _handed_out(self, apply: Apply) -> list[Preconditioned]:
        """The same of all layers, each preconditioned by one of its workers for some ranks.

        What travels follows from what is ready, not from a rank's gradients: a missing one is zero.
        Columns send side by side, and none waits for what another has still to multiply.
        """
        for pair in self.layout.pairs:
            self._with_gradient(pair)
        wires: list[gradients.Wire] = []
        ready = [layer for layer in self.active if self._is_whole(layer)]
        for same in by_device(ready):
            members = self.ranks.grid.receivers_of(self.ranks.rank)
            by_column = [
                [self._shipment(members[column], shapes, wires, apply) for shapes in shipments]
                for column, shipments in self._shipped(same)
            ]
            device = stack_key(same[0], "g").device
            self.ranks.broadcast([RankGroup(members, in_turn(by_column))], device, "gradients")
        return [wire.unpack() for wire in wires]

    def _shipped(self, layers: list[Layer]) -> list[tuple[int, list[list[list[Layer]]]]]:
        """What makes up each shipment of a column's, of layers on one device; worked out once."""
        known = self._shipments.get(layers[0])
        if known is None or known[0] != layers:
            columns: dict[int, list[Layer]] = {}
            for layer in layers:
                columns.setdefault(self._column(layer), []).append(layer)
            comm_dtype = self.options.comm_dtype
            total = sum(gradients.wire_bytes([layer], comm_dtype) for layer in layers)
            limit = side_by_side(total, len(columns), self.ranks.bucket_bytes)
            divided = [
                (column, list(gradients.shipped_together(columns[column], comm_dtype, limit)))
                for column in sorted(columns)
            ]
            known = self._shipments[layers[0]] = layers, divided
        return known[1]

    def _shipment(
        self,
        root: int,
        shapes: list[list[Layer]],
        wires: list[gradients.Wire],
        apply: Apply,
    ) -> BroadcastItem:
        """What a root sends of the layers of its column, or room for it elsewhere."""
        own = root == self.ranks.rank

        @functools.cache  # asked for once before its turn, and once in it
        def made() -> list[Preconditioned]:
            each = map(self.together, shapes)
            return [self._precondition(x, apply) if own else gradients.awaited(x) for x in each]

        def tensors() -> list[Tensor]:
            new = [gradients.Wire(one, self.options.comm_dtype) for one in made()]
            wires.extend(new)
            return [tensor for wire in new for tensor in wire.tensors]

        size = sum(gradients.wire_bytes(one, self.options.comm_dtype) for one in shapes)
        return BroadcastItem(root, size, tensors, ahead=made if own else None)

    def _returned(self, apply: Apply) -> tuple[dict[Tensor, Tensor], dict[Layer, Tensor]]:
        """New gradients of sharded layers, each rank its shards, and what the clip needs of them.

        A layer's owner gathers its gradient, preconditions it, and returns to every rank its part.
        """
        new: dict[Tensor, Tensor] = {}
        terms: dict[Layer, Tensor] = {}
        layers = [layer for layer in self.sharded if layer in self.second_order.ready]
        # Each rank has but a part of what travels.
        limit = self.ranks.bucket_bytes * self.ranks.world
        for chunk in chunks(layers, _gradient_bytes, limit):
            whole = self._gather(chunk)
            preconditioned: dict[Tensor, Tensor] = {}
            for members in alike(x for x in chunk if self.owner(x, "g") == self.ranks.rank):
                one = self._precondition(self.together(members), apply, whole.get)
                preconditioned |= gradients.unstack([one], (), whole.get)
                terms.update(one.terms())
            self._return(chunk, preconditioned, new, terms)
        return {p: gradient for p, gradient in new.items() if p.grad is not None}, terms

    def _gather(self, layers: list[Layer]) -> dict[Tensor, Tensor]:
        """The whole gradients of the layers that this rank owns; a missing one is zero."""
        ranks = range(self.ranks.world)
        me = self.ranks.rank
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming: list[list[Tensor]] = [[] for _ in ranks]
        whole: dict[Tensor, Tensor] = {}
        for layer in layers:
            owner = self.owner(layer, "g")
            for p, shards in zip(layer.parameters, self._shards(layer), strict=True):
                if shards.sends(me, owner):
                    mine = sharding.local(p if p.grad is None else p.grad)
                    outgoing[owner].append(torch.zeros_like(mine) if p.grad is None else mine)
                if owner == me:
                    whole[p] = torch.empty(shards.shape, dtype=p.dtype, device=p.device)
                    for rank in ranks:
                        if shards.sends(rank, me):
                            incoming[rank].append(shards.part(whole[p], rank))
        self.ranks.all_to_all(outgoing, incoming, layers[0].parameters[0].device, "gradients")
        return whole

    def _return(
        self,
        layers: list[Layer],
        preconditioned: dict[Tensor, Tensor],
        new: dict[Tensor, Tensor],
        terms: dict[Layer, Tensor],
    ) -> None:
        """Give every rank its shards of the new gradients, and the layers' terms of the clip."""
        ranks = range(self.ranks.world)
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming: list[list[Tensor]] = [[] for _ in ranks]
        for layer in layers:
            owner = self.owner(layer, "g")
            for p, shards in zip(layer.parameters, self._shards(layer), strict=True):
                new[p] = torch.empty_like(p)
                incoming[owner].append(sharding.local(new[p]))
                if owner == self.ranks.rank:
                    for rank in ranks:
                        outgoing[rank].append(shards.part(preconditioned[p], rank))
            if owner == self.ranks.rank:
                for rank in ranks:
                    outgoing[rank].append(terms[layer])
            else:
                dtype = stack_key(layer, "g").dtype
                terms[layer] = torch.empty(2, dtype=dtype, device=layer.parameters[0].device)
            incoming[owner].append(terms[layer])
        self.ranks.all_to_all(outgoing, incoming, layers[0].parameters[0].device, "gradients")

    def _shards(self, layer: Layer) -> list[sharding.Shards]:
        both = zip(self.sharded[layer], layer.covers, strict=True)
        return [shards for shards, covered in both if covered and shards is not None]

    def _is_whole(self, layer: Layer) -> bool:
        """Whether this layer is ready, and its gradient not spread over the ranks."""
        return layer in self.second_order.ready and layer not in self.sharded

    def _with_gradient(self, pair: Pair) -> list[Layer]:
        """The layers of a pair that have a gradient; names those without statistics once."""
        with_gradient = [x for x in pair.layers if any(p.grad is not None for p in x.parameters)]
        for layer in with_gradient:
            if layer not in self.fed and layer not in self._named_without_statistics:
                self._named_without_statistics.add(layer)
                warnings.warn(
                    f"layer {layer.name!r} has a gradient but no statistics, so its raw gradient "
                    "is used; its weight may be in use outside of its module's forward, or the "
                    "forward pass was paused()",
                    stacklevel=2,
                )
        return with_gradient

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
        """Of which layers the next backward passes gather statistics."""
        capture = getattr(self, "_capture", None)
        if capture is None:
            return
        interval, fraction = self.factor_update_steps, self.statistics_fraction
        if "factor_update_steps" in self._schedules:
            value = self._schedules["factor_update_steps"](self.steps)
            interval = checks.check_interval("factor_update_steps", value)
        if "statistics_fraction" in self._schedules:
            value = self._schedules["statistics_fraction"](self.steps)
            fraction = checks.check_statistics_fraction(value)
        # A layer gathers once in an interval, and early: each time it takes the next rows.
        extra = sum(step <= self.steps for step in self.options.early)
        capture.sample = sample_of(fraction, self.steps // interval + extra)
        turn = self._turns("gathering", interval).get(self.steps % interval, frozenset())
        early = self.steps in self.options.early  # with the statistics of that very step
        # Not what has had no pass for long: it may never again, and ranks would ask for ever.
        overdue = {x for x in self.active if 0 < self.overdue.get(x, 0) < _GIVEN_UP * interval}
        capture.wanted = frozenset(self.active) if early else turn | overdue

    def _gathering_steps(self) -> int:
        """In how many steps of an interval some layers gather statistics."""
        return len(self._turns("gathering", self.factor_update_steps))

    def _shared(self, layer: Layer, groups: list[Group], name: str) -> float:
        """A group's value for a layer; its weight and bias must agree on it."""
        values = {groups[self._group_of[p]][name] for p in layer.parameters}
        if len(values) > 1:
            raise ValueError(
                f"Invalid {name}: layer {layer.name!r} has its weight and bias in parameter groups "
                f"with different values {sorted(values)}; give both groups the same {name}"
            )
        return values.pop()

    def _settings_of_groups(self, groups: list[Group]) -> list[Any]:
        if not self.second_order.metric:
            return [eigenbasis.settings(group) for group in groups]
        metric.refuse_changes(groups, self._choices)
        return [metric.settings(group) for group in groups]

    def _settings(self, groups: list[Group], of_group: list[Any], layer: Layer) -> Any:
        """How a layer's moments move; its weight and bias must agree on it."""
        numbers = sorted({self._group_of[p] for p in layer.parameters})
        found = [of_group[i] for i in numbers]
        if any(other != found[0] for other in found):
            names = ("betas", "eps", "bias_correction", "grad_averaging")
            first, last = groups[numbers[0]], groups[numbers[-1]]
            name = next(x for x in names if first.get(x) != last.get(x))
            raise ValueError(
                f"Invalid {name}: layer {layer.name!r} has its weight and bias in parameter groups "
                f"with different values {[first[name], last[name]]}; give both groups the same "
                f'{name}, or use moments="parameters"'
            )
        return found[0]

    # ---- what is covered ----

    def rebuild(self, groups: list[Group]) -> None:
        """Match model and parameter groups anew; layers that stay as they were keep their state."""
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # A replaced module's parameters stay in their group, as they do in any optimizer.
        gone = self._accepted.difference(self.model.parameters())
        self._group_of = {p: i for p, i in group_of.items() if p not in gone}
        if self.second_order.metric:
            self._choices = metric.choices(groups)
        named = unwrapped(self.model).named_parameters()
        self._on_meta.update({name: p for name, p in named if p in group_of and p.is_meta})
        found = self._covered_by_all(groups)
        self._accepted.update(group_of)
        before, self.layers = self.layers, {}
        for name, layer in found.layers.items():
            old = before.get(name)
            same = old is not None and old.same_place(layer) and old.trained == layer.trained
            self.layers[name] = old if same and old is not None else layer
            if layer in self.sharded:
                self.sharded[self.layers[name]] = self.sharded.pop(layer)
        for layer in before.values():
            if self.layers.get(layer.name) is not layer:
                self.forget(layer)
                self.placements.pop(layer.name)
        for number, layer in enumerate(self.layers.values()):
            layer.number = number
        self.uncovered, self.skipped = found.uncovered, found.skipped
        self.left = found.left
        uses = Counter(p for x in self.layers.values() for p in (x.weight, x.bias))
        self._in_parts = {p for p, count in uses.items() if p is not None and count > 1}
        for layer in self.statistics.gathered.keys() - set(self.layers.values()):
            self.statistics.drop(layer)
        self._place_layers()
        self._detach()
        former = self._capture
        self._capture = Capture(
            unwrapped(self.model),
            list(self.layers.values()),
            self.statistics.add,
            self.statistics.drop,
            reduce=self.options.weight_sharing == "reduce",
            precision=self.options.statistics_precision,
            # One rank that raised alone in its backward pass would leave the others waiting.
            keep_errors=self.ranks.world > 1,
        )
        self._capture.missing -= self.fed
        if former is not None:  # between a backward pass and its step
            self._capture.go_on(former)
        self.lay_out()
        self._aim()

    def _to_leave(self, groups: list[Group]) -> dict[Tensor, str]:
        """The parameters that K-FAC is not to cover, and why."""
        if not self.second_order.metric:
            return {}
        return metric.no_matrices({p: groups[i] for p, i in self._group_of.items()}, self.model)

    def _covered_by_all(self, groups: list[Group]) -> Coverage:
        """What is covered, found alike on all ranks; else every rank raises."""
        error: Exception | None = None
        found = Coverage()
        try:
            refuse_flattened(self.model)
            check_trained(unwrapped(self.model), self._group_of)
            of_group = self._settings_of_groups(groups) if self.second_order.moments else []
            left = self._to_leave(groups)
            found = cover(
                unwrapped(self.model),
                dict.fromkeys(p for p in self._group_of if p not in left),
                skip_layers=tuple(self.options.skip_layers),
                max_factor_size=self.options.max_factor_size,
                papers_only=self.options.kaisa_scaling,
                warn=functools.partial(agreement.warn, self.ranks)
                if self._capture is None
                else None,
                matrices_by_output=self.second_order.metric,
            )
            found.left = left
            if self.options.correction == "examples":
                world = self.ranks.world
                correction.check_workers(self.strategy.gradient_workers(world), world)
            for layer in found.layers.values():
                if self.options.correction == "examples":
                    correction.check(layer)
                for name in checks.PER_GROUP:
                    if layer.parameters:
                        self._shared(layer, groups, name)
                if self.second_order.moments and layer.parameters:
                    self._settings(groups, of_group, layer)
            self.sharded = self._find_shards(found.layers.values())
        except ValueError as problem:
            if self.ranks.world == 1:
                raise
            error = problem
        if self.ranks.world > 1 and not self._compares:
            if error is not None:
                raise error
        elif self.ranks.world > 1:
            described = self._common(groups) | self.options.described() | _described(found)
            sizes = {
                f"sizes in parameter group {i}": [p.numel() for p in group["params"]]
                for i, group in enumerate(groups)
            }
            # Else a step would be refused on those ranks alone, and the others wait for them.
            on_meta = {"parameters on the meta device": sorted(self._on_meta)}
            mine = {**self._identity, **described, **sizes, **on_meta}
            agreement.compare(self.ranks, mine, "models and options", error)
        return found

    def _lacks_halves(self) -> bool:
        return self.second_order.lacks_halves({device for device, _ in self._placement})

    def _find_shards(
        self, layers: Iterable[Layer]
    ) -> dict[Layer, tuple[sharding.Shards | None, ...]]:
        result = {}
        for layer in layers:
            spread = [
                sharding.shards_of(f"a parameter of {layer.name!r}", p, self.ranks.members())
                if p is not None and sharding.is_sharded(p)
                else None
                for p in (layer.weight, layer.bias)
            ]
            if any(spread):
                result[layer] = tuple(spread)
        return result

    def _place_layers(self) -> None:
        """Give new layers to ranks; those that are there stay where their factors are."""
        strategy, fraction = self.strategy, self.options.grad_worker_fraction
        grid = self.ranks.grid = work.make_grid(strategy, self.ranks.world, fraction)
        tasks = [_task(layer) for layer in self.layers.values()]
        there = [task for task in tasks if task.name in self.placements]
        load = work.loads(strategy, there, self.placements, grid.world)
        new = [task for task in tasks if task.name not in self.placements]
        self.placements.update(
            work.assign(strategy, new, grid, self.options.colocate_factors, load)
        )
        self.second_order.parted = any(p.a != p.g for p in self.placements.values())

    def _detach(self) -> None:
        if self._capture is not None:
            self._capture.detach()

    def forget(self, layer: Layer) -> None:
        """Drop what is known of a layer: it is estimated anew when it is next used."""
        self.fed.discard(layer)
        self.overdue.pop(layer, None)
        self._unseen.pop(layer, None)
        self.second_order.forget(layer)
        if self._capture is not None:
            self._capture.missing.add(layer)

    def lay_out(self) -> None:
        self._turns_of.clear()
        self._members.clear()
        self._shipments.clear()
        self._places.clear()
        kept = {layer: dict(self.views(layer)) for layer in self.fed}
        self.shelf = Shelf()
        for members in alike(self.active):
            for side in "ag":
                for layer in members:
                    if self.owner(layer, side) == self.ranks.rank:
                        self.shelf.put(layer, side)
        column = self.ranks.rank % self.ranks.grid.columns
        self.layout = Layout(layer for layer in self.active if self._column(layer) == column)
        self.statistics.allocate(self.shelf)
        self.second_order.allocate(self.shelf, self.layout)
        assert self._capture is not None
        if self.options.correction == "examples":
            # Not a method of this object's: hooks are to end with it, not with the next search for
            # circles.
            self._capture.basis_of = functools.partial(self.second_order.basis, self.layout)
        for layer in self.fed.intersection(self.active):
            for name, view in self.views(layer):
                if name in kept[layer]:
                    view.copy_(kept[layer][name])
        self._placement = self._place()
        # One count for all layers' entries in the optimizer's state; views of the new stacks.
        self.step_count = torch.tensor(self.steps, device="cpu")
        self.published.clear()
        self.published_by = None

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """All that this rank keeps of a layer, as views with stable names."""
        yield from self.shelf.views(layer)
        yield from self.layout.views(layer)

    def refuse(self, error: Exception) -> None:
        """A state can't be loaded: where only some ranks can't, all raise when they next meet."""
        if self.ranks.world > 1:
            self._unsettled, self._refused = True, error

    def resume(self, steps: int) -> None:
        """Go on from a loaded step count."""
        assert self._capture is not None
        self._refused = None
        self.steps = steps
        self.step_count = torch.tensor(steps, device="cpu")
        self._capture.missing.difference_update(self.fed)
        self.second_order.tracking.resume(self.layers.values())
        self.second_order.take_up(self.shelf)
        self._unsettled = self._unproven = self.ranks.world > 1
        self._aim()

    def discard(self) -> None:
        """Forget the statistics gathered since the last step, as their gradients are dropped."""
        if self._capture is not None:
            self._capture.break_off()
            self._capture.shared.clear()
            if self.statistics.gathered:  # else what was drawn still waits for its backward pass
                self._capture.draws = 0
        self.statistics.clear()

    # ---- questions ----

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes under this context leave no statistics."""
        assert self._capture is not None
        with self._capture.pause():
            yield

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Running averages A and G: ``[blocks, n, n]``, or ``[blocks, n]`` where diagonal.

        They are the state itself: to be asked for again after a step, and not to be changed.
        """
        layer = self.layers.get(name)
        if layer is None:
            raise KeyError(f"no covered layer {name!r}; there are {', '.join(self.layers)}")
        if layer not in self.fed:
            raise KeyError(f"layer {name!r} has no statistics yet")
        keys = [(layer, side) for side in "ag"]
        away = [
            f"{s.upper()} on rank {self.owner(x, s)}"
            for x, s in keys
            if (x, s) not in self.shelf.factors
        ]
        if away:
            raise KeyError(f"layer {name!r} has {' and '.join(away)}, not here")
        a, g = (_whole(self.shelf.factors[key]["average"]) for key in keys)
        return a, g

    def make_whole(self) -> None:
        """Both halves of the running averages that are here, of which a step keeps up one."""
        for stack in self.shelf.stacks.values():
            _whole(stack.tensors["average"])

    def memory_usage(self) -> dict[str, int]:
        """Bytes of K-FAC state by kind.

        Apart, as "pending": sums of the running step, and copies of factors under decomposition.
        """
        kinds = {
            "average": "factors",
            "vectors": "eigenvectors",
            "values": "eigenvalues",
            "inverse": "inverses",
            "root": "roots",
            "scale": "eigenvalue_products",
            "exp_avg": "moments",
            "exp_avg_sq": "moments",
            "momentum": "moments",
            "corrected": "corrected_eigenvalues",
        }
        usage: dict[str, int] = {}
        for name, tensor in (*self.shelf.tensors(), *self.layout.tensors()):
            kind = kinds.get(name, "counters")
            usage[kind] = usage.get(kind, 0) + tensor.numel() * tensor.element_size()
        usage["total"] = sum(usage.values())
        usage["pending"] = self.statistics.pending_bytes() + self.second_order.under_way.bytes()
        return usage

    def communication_volume(self) -> dict[str, float]:
        """Bytes of K-FAC that arrive at this rank in a step, by kind, as a mean.

        It is the mean over whole intervals (``factor_update_steps``, ``inv_update_steps``) as they
        are now, with every layer in use: "factors" on their way to the ranks that keep them,
        "second_order" results (of corrected eigenvalues, sums) to the gradient workers, "gradients"
        to all others, and the "status" that ranks exchange. It follows from shapes, without
        communication; on one process nothing arrives. With ``basis_tolerance`` it is the most that
        can arrive. Not in it are ``early_refreshes``, each about as much as the first step, what
        AdaptiveDamping exchanges, and the gradients' own all-reduce, as DistributedDataParallel's.
        """
        means = self.account.per_step(
            self.factor_update_steps, self.inv_update_steps, self.options.turns
        )
        return means[self.ranks.rank]

    @property
    def assignment(self) -> Assigned:
        """Who works for which layer: a mapping from names to ranks that prints as a table."""
        tasks = [_task(layer) for layer in self.layers.values()]
        return Assigned(self.strategy, self.ranks.grid, tasks, self.placements)

    @property
    def account(self) -> Account:
        """What every rank keeps and receives, as shapes and placements tell."""
        options, second_order = self.options, self.second_order
        sizes = {
            name: None if dtype is None else dtype.itemsize
            for name, dtype in (
                ("factor_bytes", options.factor_dtype),
                ("state_bytes", options.inv_dtype),
                ("wire_bytes", options.comm_dtype),
            )
        }
        return Account(
            [self._work(layer) for layer in self.layers.values()],
            self.ranks.grid,
            method=second_order.method,
            split=second_order.split,
            stored_product=second_order.stored_product,
            moments=second_order.metric or 2 * second_order.moments,
            noted=bool(second_order.tracking.specs(1)),
            tracked=any(second_order.tracking.covers(device_of(x)) for x in self.layers.values()),
            truncated=options.truncation > 0,
            correction=second_order.correction,
            scaled=options.comm_dtype == torch.float16,
            bucket_bytes=self.ranks.bucket_bytes,
            **sizes,
        )

    def _work(self, layer: Layer) -> Work:
        placement = self.placements[layer.name]
        if not any(layer.covers):
            return Work(_task(layer), placement, sections=layer.sections, frozen=True)
        a, g = stack_key(layer, "a"), stack_key(layer, "g")
        task = Task(layer.name, a.size, g.size, a.diagonal, g.diagonal, layer.blocks)
        sizes = [p.dtype.itemsize for p in layer.parameters]
        sharded = layer in self.sharded
        shards = tuple(zip(self._shards(layer), sizes, strict=True)) if sharded else ()
        return Work(task, placement, g.dtype.itemsize, g.device, layer.sections, False, shards)

    def __repr__(self) -> str:
        how = self.options.compute_method
        if self.second_order.metric:
            how = "roots of G, momentum in its metric"
        elif self.second_order.moments:
            how += ", moments in the eigenbasis"
        if self.options.truncation:
            how += f", truncation {self.options.truncation:g}"
        if self.second_order.nesterov:
            how += ", Nesterov's momentum"
        if self.second_order.orthogonal:
            how += ", orthogonal directions"
        intervals = f"statistics every {self.factor_update_steps}"
        if self.options.statistics_precision != "highest":
            intervals += f" in {self.options.statistics_precision} precision"
        intervals += f", refreshes every {self.inv_update_steps} steps"
        turns = self._turns("refresh", self.inv_update_steps).values()
        most = max(map(len, turns), default=0)
        some = f"up to {most} layer{'s' * (most > 1)} at a time"
        intervals += f", {some}" if len(turns) > 1 else ", all layers at once"
        if self.options.refresh_lag:
            intervals += f", in use {self.options.refresh_lag} steps later"
        lines = [f"Preconditioner({how}, {self.steps} steps taken)", f"  {intervals}"]
        named = unwrapped(self.model).named_parameters()
        for title, entries in (
            ("covered", [repr(layer) for layer in self.layers.values()]),
            ("raw gradients", [f"{name}: {why}" for name, why in self.uncovered.items()]),
            ("AdamW", [f"{name}: {self.left[p]}" for name, p in named if p in self.left]),
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
        checks.check_callable("grad_scaler", scaler)
        return lambda: _scale(scaler())
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


def _scale(value: Any) -> Tensor | float:
    if not work.is_real(value) and not isinstance(value, Tensor):
        raise ValueError(
            f"Invalid grad_scaler: {value!r} from its callable; a scale must be a number or a "
            "tensor"
        )
    scale: Tensor | float = value
    return scale


def _for_shards(options: Options, world: int) -> work.WorkAssignment:
    """Gradients that return to every rank as shards are worked on by one."""
    chosen = options.assignment, options.grad_worker_fraction
    if chosen != (None, None) and options.strategy.gradient_workers(world) > 1:
        raise ValueError(
            f"Invalid assignment: {options.strategy!r} for parameters sharded by fully_shard: one "
            'rank preconditions each of their gradients; use assignment="layer-wise" or leave it '
            "out"
        )
    return work.LayerWise()


def _task(layer: Layer) -> Task:
    """A layer's work; by what it trains, whether frozen at the moment or not."""
    a, g = layer.a_dim_of(layer.trained), layer.g_dim_of(layer.trained)
    return Task(layer.name, a, g, layer.has_diagonal_a(layer.trained), g > layer.wide, layer.blocks)


def _gradient_bytes(layer: Layer) -> int:
    return gradients.elements([layer]) * stack_key(layer, "g").dtype.itemsize


def _described(found: Coverage) -> dict[str, Any]:
    """What ranks compare of a model."""
    return {
        f"layer {layer.name!r}": f"{layer!r}, {layer.covers}, {layer.parameters[0].dtype}"
        if layer.parameters
        else repr(layer)
        for layer in found.layers.values()
    }


def _comparable(value: Any) -> Any:
    """As 1 and 1.0 are the same, and are not to print otherwise."""
    return float(value) if work.is_real(value) else value


def _whole(average: Tensor) -> Tensor:
    """With both its halves: that changes nothing that a user may have kept for a backward pass."""
    with _unsafe_preserve_version_counter(average):
        return mirrored(average)
