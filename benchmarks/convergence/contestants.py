"""Who trains: each optimizer with the settings among which it is tuned.

None decays weights but LAMB and KFACLAMB, whose trust ratios belong to weight decay, and the two
that say so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.muon import Muon, hidden_and_rest
from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam
from kaisa_optim.linalg.products import multiplies_in_half

FEW = 1 << 18  # numbers of all matrices, up to which ours is the faster Muon on CPUs

Config = dict[str, Any]
Space = dict[str, Callable[[float], Any]]  # of a place in a range, 0 to 1, what is there


@dataclass(frozen=True)
class Contestant:
    """Builds optimizers; ``space`` has the ranges of the settings that are searched."""

    name: str
    build: Callable[[nn.Module, Config, dict[str, Any]], list[Optimizer]]
    space: Space
    needs: str | None = None  # what may be absent: a package, or "torch.optim.…"
    tuned: str | None = None  # the one that this is with no other settings than learning rates
    adams: bool = True  # whether steps are no longer for larger gradients, as Adam's are not

    def draw(self, seed: str, trials: int, ends: bool = False, pace: float = 1) -> list[Config]:
        """Settings of so many trials, for each setting one in each of as many parts of its range.

        What two contestants have falls on the same places of its ranges: otherwise the luckier
        draws would win. With ``ends``, all have the same range of rates for what Muon does not
        take. ``pace`` multiplies rates of Adam's kind.
        """
        space = {**self.space, **_ENDS} if ends else self.space
        places = {name: _spread(f"{seed} {name}", trials) for name in space}
        configs = [{name: of(places[name][i]) for name, of in space.items()} for i in range(trials)]
        if pace != 1 and self.adams:
            for config in configs:
                for rate in config.keys() & {"lr", "lr_rest"}:
                    config[rate] = float(f"{pace * config[rate]:.2g}")
        return configs

    @property
    def absent(self) -> bool:
        if self.needs is None:
            return False
        if self.needs.startswith("torch.optim."):
            return not hasattr(torch.optim, self.needs.removeprefix("torch.optim."))
        try:
            __import__(self.needs)
        except ImportError:
            return True
        return False


def _spread(seed: str, count: int) -> list[float]:
    """One number in each of ``count`` equal parts of [0, 1), in any order."""
    generator = random.Random(seed)
    places = [(i + generator.random()) / count for i in range(count)]
    generator.shuffle(places)
    return places


def between(low: float, high: float) -> Callable[[float], float]:
    """Evenly on the scale of logarithms, to two digits."""
    return lambda place: float(f"{low * (high / low) ** place:.2g}")


def one_of(*values: Any) -> Callable[[float], Any]:
    return lambda place: values[int(place * len(values))]


def _params(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """All parameters, in one group; in two where some have a rate of their own."""
    if "lr_rest" not in config:
        return [{"params": list(model.parameters())}]
    hidden, rest = hidden_and_rest(model)
    return [{"params": hidden}, {"params": rest, "lr": config["lr_rest"]}]


def _sgd(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    options: Config = {"lr": config["lr"], "momentum": config["momentum"], "nesterov": True}
    options["weight_decay"] = config.get("weight_decay", 0.0)
    return [torch.optim.SGD(_params(model, config), **options)]


def _adamw(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    options: Config = {"lr": config["lr"], "betas": _betas(config), "weight_decay": 0.0}
    return [torch.optim.AdamW(_params(model, config), **options)]


def _lamb(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    options: Config = {"lr": config["lr"], "betas": _betas(config), "weight_decay": 0.0}
    return [LAMB(_with_trust_ratios(_params(model, config)), **options)]


def _with_trust_ratios(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of matrices and kernels, by LAMB's own weight decay: what is not decayed has no such ratio,
    as biases and norms of those who train BERT."""
    found = []
    for group in groups:
        vectors = [p for p in group["params"] if p.dim() < 2]
        wide = [p for p in group["params"] if p.dim() >= 2]
        found += [{**group, "params": wide, "weight_decay": 0.01}, {**group, "params": vectors}]
    return [group for group in found if group["params"]]


def _betas(config: Config) -> tuple[float, float]:
    return config["beta1"], config["beta2"]


def _muon(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    """For matrices and kernels inside of the network; AdamW for the rest, as its users do."""
    hidden, rest = hidden_and_rest(model)
    settings = {"lr": config["lr"], "momentum": config["momentum"], "weight_decay": 0.0}
    optimizers = [_as_matrices(_fastest_muon(hidden), hidden, **settings)]
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=config["lr_rest"], weight_decay=0.0))
    return optimizers


def _fastest_muon(matrices: list[Tensor]) -> type[Optimizer]:
    """Return torch's Muon, or the same steps in float32 where torch's is slower: for few numbers,
    and on CPUs without bfloat16 units, where torch's takes some twenty times as long."""
    device = matrices[0].device
    few = sum(p.numel() for p in matrices) < FEW
    if device.type == "cpu" and (few or not multiplies_in_half(torch.float32, device)):
        return Muon
    return torch.optim.Muon


def _as_matrices(kind: type[Optimizer], weights: list[Tensor], **options: Any) -> Optimizer:
    """Of that kind, for matrices and for kernels, whose first side counts their rows."""
    if all(w.dim() == 2 for w in weights):
        return kind(weights, **options)
    matrices = [nn.Parameter(w.detach().view(len(w), -1)) for w in weights]
    optimizer = kind(matrices, **options)

    def lend(*_: Any) -> None:
        for matrix, weight in zip(matrices, weights, strict=True):
            if weight.grad is not None:
                matrix.grad, weight.grad = weight.grad.flatten(1), None

    optimizer.register_step_pre_hook(lend)
    return optimizer


def _soap(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    options = {"precondition_frequency": config["frequency"], "weight_decay": 0.0}
    return [SOAP(_params(model, config), lr=config["lr"], betas=_betas(config), **options)]


def _shampoo(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
    """With lengths and a momentum of Adam's kind, as Distributed Shampoo is trained with."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    options = {
        "graft_type": LayerWiseGrafting.RMSPROP,
        "moving_average_for_momentum": True,
        "preconditioning_compute_steps": config["frequency"],
    }
    params = _params(model, config)
    return [ScalableShampoo(params, lr=config["lr"], betas=_betas(config), **options)]


def _ours(cls: type[Any], **fixed: Any) -> Any:
    def build(model: nn.Module, config: Config, kfac: dict[str, Any]) -> list[Optimizer]:
        options = {"weight_decay": 0.0, **fixed, **config}
        if "beta1" in options:
            options["betas"] = options.pop("beta1"), options.pop("beta2")
        every, often = options.pop("every", None), options.pop("often", None)
        options.pop("lr_rest", None)
        if every is not None:
            options |= {"factor_update_steps": every, "inv_update_steps": 10 * every}
        if often is not None:
            options |= {"factor_update_steps": often, "inv_update_steps": often}
        groups = _params(model, config)
        if cls is KFACLAMB:
            groups = _with_trust_ratios(groups)
        if "compute_method" in fixed:  # the papers' methods have to know what the loss averages
            options |= kfac
        return [cls(groups, model=model, **options)]

    return build


def _defaults(tuned: str, cls: type[Any], lr: Callable[[float], float], **fixed: Any) -> Contestant:
    """With nothing but learning rates to search for. Momentum is ``fixed`` where the base's own
    default is 0, which nobody trains with."""
    space = {"lr": lr}
    adams = cls is not KFACSGD
    return Contestant(f"{tuned}, defaults", _ours(cls, **fixed), space, tuned=tuned, adams=adams)


_ADAM = {
    "lr": between(3e-4, 3e-2),
    "beta1": one_of(0.9, 0.95),
    "beta2": one_of(0.95, 0.99, 0.999),
}
_DECAYED = {"lr": between(1e-3, 1), "momentum": one_of(0.9), "weight_decay": one_of(5e-4)}
_FAR = {"lr": between(1e-3, 1e-1)}  # for those whose best rates are above Adam's
_ENDS = {"lr_rest": between(3e-3, 5e-2)}
_MUON = {**_FAR, "lr_rest": between(3e-4, 3e-2), "momentum": one_of(0.9, 0.95)}
_STATISTICS = {"often": one_of(5, 10), "statistics_fraction": one_of(0.25, 1.0)}
_DIRECTIONS = {**_ADAM, **_FAR, **_STATISTICS}
_OFTEN = {"frequency": one_of(5, 10, 20)}  # steps between bases or roots
_PLAIN = {
    "damping": between(3e-3, 1e-1),
    "kl_clip": between(1e-5, 1e-2),
    "every": one_of(1, 2, 5),
}

CONTESTANTS = {
    one.name: one
    for one in (
        Contestant(
            "SGD",
            _sgd,
            {"lr": between(1e-3, 1), "momentum": one_of(0.9, 0.95, 0.99)},
            adams=False,
        ),
        Contestant("SGD, decay", _sgd, _DECAYED, adams=False),
        Contestant(
            "KFACSGD, decay",
            _ours(KFACSGD),
            {**_DECAYED, "weight_decay": one_of(5e-5)},
            adams=False,
        ),
        Contestant("AdamW", _adamw, _ADAM),
        Contestant("LAMB", _lamb, {**_ADAM, **_FAR}),
        Contestant("Muon", _muon, _MUON, "torch.optim.Muon"),
        Contestant("SOAP", _soap, {**_ADAM, **_FAR, **_OFTEN}, "pytorch_optimizer"),
        Contestant("Shampoo", _shampoo, {**_ADAM, **_OFTEN}, "pytorch_optimizer"),
        Contestant(
            "KFACSGD",
            _ours(KFACSGD),
            {"lr": between(1e-3, 1), "momentum": one_of(0.9, 0.95, 0.99), **_STATISTICS},
            adams=False,
        ),
        Contestant(
            "KFACSGD, eigen",
            _ours(KFACSGD, compute_method="eigen"),
            {"lr": between(1e-3, 1), "momentum": one_of(0.9, 0.95, 0.99), **_PLAIN},
            adams=False,
        ),
        Contestant("KFACAdam", _ours(KFACAdam), _DIRECTIONS),
        Contestant("KFACLAMB", _ours(KFACLAMB), _DIRECTIONS),
        _defaults("KFACSGD", KFACSGD, between(1e-3, 1), momentum=0.9),
        _defaults(
            "KFACSGD, eigen", KFACSGD, between(1e-3, 1), momentum=0.9, compute_method="eigen"
        ),
        _defaults("KFACAdam", KFACAdam, _FAR["lr"]),
        _defaults("KFACLAMB", KFACLAMB, _FAR["lr"]),
    )
}
