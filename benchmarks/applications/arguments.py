"""The command line of an application, with every K-FAC option under its own name."""

from __future__ import annotations

import argparse
import ast
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.muon import Muon
from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from kaisa_optim.optimizer import KFACMixin
from kaisa_optim.options import OPTIONS

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "LAMB": LAMB,
    "Muon": Muon,
    "KFACSGD": KFACSGD,
    "KFACAdam": KFACAdam,
    "KFACAdamW": with_kfac(torch.optim.AdamW),
    "KFACLAMB": KFACLAMB,
}
BASE = {
    "lr": "the peak learning rate",
    "momentum": "of SGD and Muon",
    "nesterov": "of SGD",
    "betas": "of Adam and LAMB, such as '(0.9, 0.999)'",
    "eps": "of Adam and LAMB",
    "weight_decay": "as the optimizer's own argument",
    "max_grad_norm": "of LAMB",
}
# The papers' methods get the scaler from the script; a command line can't name objects.
KFAC = {name: option for name, option in OPTIONS.items() if name != "process_group"}
KFAC.pop("grad_scaler")

# Settings by the optimizer that they are for: "all", "KFAC" for each K-FAC class, or a name.
Defaults = Mapping[str, Mapping[str, Any]]


def kaisa(damping: float, every: int, refreshed: int) -> dict[str, Any]:
    """Return the settings of the papers' own code, of factors and of second order by interval."""
    return {
        **{"compute_method": "eigen", "normalization": "kaisa", "kl_clip": 0.001},
        **{"damping": damping, "factor_update_steps": every, "inv_update_steps": refreshed},
    }


def value(text: str) -> Any:
    """Return a dtype of torch by its name, a Python literal, or the text."""
    if isinstance(getattr(torch, text, None), torch.dtype):
        return getattr(torch, text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def has_kfac(name: str) -> bool:
    return issubclass(OPTIMIZERS[name], KFACMixin)


def parse(
    about: str | None,
    arguments: Sequence[str] | None,
    defaults: Defaults,
    presets: Mapping[str, Defaults],
    smoke: Defaults,
    extend: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Return the settings: the command line's, else the smoke test's, the preset's, the defaults.

    All three tell settings by optimizer. ``extend`` adds arguments of the
    application.
    """
    parser = _parser(about, presets)
    extend(parser)
    chosen, _ = parser.parse_known_args(arguments)
    for part in (defaults, presets.get(chosen.preset, {}), smoke if chosen.smoke else {}):
        for name in ("all", "KFAC", chosen.optimizer):
            if name != "KFAC" or has_kfac(chosen.optimizer):
                parser.set_defaults(**part.get(name, {}))
    options = parser.parse_args(arguments)
    taken = inspect.signature(OPTIMIZERS[options.optimizer]).parameters
    options.settings = {n: v for n, v in vars(options).items() if n in BASE or n in KFAC}
    for name in options.settings:
        if name not in taken:
            hint = f"{name} is an option of K-FAC" if name in KFAC else f"it takes no {name}"
            parser.error(f"--{name} does not go with --optimizer {options.optimizer}: {hint}")
    options.command = _told(sys.argv[1:] if arguments is None else arguments)
    return options


def _told(arguments: Sequence[str]) -> str:
    """Return the arguments as a result tells them: the folders of this machine are left out."""
    told: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == "--data":
            told.append("FOLDER")
        elif before in ("--weights", "--vocab", "--pretrained"):
            told.append("/".join(Path(argument).parts[-2:]))  # a run's folder is its name
        elif before != "--out" and argument not in ("--out", "--quiet"):
            told.append(argument)
    return shlex.join(told)


def _parser(about: str | None, presets: Mapping[str, Defaults]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", choices=list(OPTIMIZERS), default="SGD")
    add("--preset", choices=list(presets), help="settings that were published")
    add("--smoke", action="store_true", help="generated data, a small network, a few steps")
    add("--data", type=Path, help="folder with the data set")
    add("--out", type=Path, default=Path("runs"), help="folder for checkpoint, curve and logs")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, help="training steps; without it, as many as --epochs has")
    add("--epochs", type=float, default=1.0)
    add("--stop", type=int, help="end this call after that step; a later call goes on")
    add("--batch", type=int, default=32, help="examples of one rank in one backward pass")
    add("--accumulate", type=int, default=1, help="backward passes in a step")
    add("--amp", choices=("no", "bf16", "fp16"), default="no", help="precision of autocast")
    add("--clip", type=float, help="largest norm of the gradient")
    add("--seed", type=int, default=0)
    add("--every", type=int, default=100, help="steps between evaluations")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--quiet", action="store_true", help="no progress bar")
    base = parser.add_argument_group("the optimizer")
    for name, text in BASE.items():
        base.add_argument(f"--{name}", type=value, default=argparse.SUPPRESS, help=text)
    kfac = parser.add_argument_group("K-FAC")
    for name, option in KFAC.items():
        if name not in BASE:
            text = option.help.replace("%", "%%")
            kfac.add_argument(f"--{name}", type=value, default=argparse.SUPPRESS, help=text)
    return parser


def with_ends(model: nn.Module, blocks: nn.Module, options: argparse.Namespace) -> Any:
    """Return two groups: the matrices of ``blocks``, and the rest with a rate of its own.

    Embeddings, the last layer, norms and biases want another rate than the matrices between them.
    Muon steps this rest as AdamW does.
    """
    if options.ends_lr is None:
        return None
    inner = [p for p in blocks.parameters() if p.ndim == 2]
    taken = set(map(id, inner))
    ends: dict[str, Any] = {"params": [p for p in model.parameters() if id(p) not in taken]}
    ends["lr"] = options.ends_lr
    if options.optimizer == "Muon":
        ends["use_muon"] = False
    return [{"params": inner}, ends]


def by_papers(options: argparse.Namespace) -> bool:
    """Return whether one of the papers' methods preconditions."""
    return str(options.settings.get("compute_method", "polar")) != "polar"


def tell_terms(options: argparse.Namespace, terms: str | int) -> None:
    """Tell the papers' methods what the loss averages; their own scaling leaves that out."""
    if by_papers(options) and options.settings.get("normalization") != "kaisa":
        options.settings.setdefault("loss_terms", terms)


def build(
    options: argparse.Namespace, model: nn.Module, groups: Any = None, scaler: Any = None
) -> Optimizer:
    """Return the optimizer that the command line names, over ``groups`` or all parameters.

    ``scaler`` scales the losses, if one does: the papers' methods have to know it.
    """
    made: Callable[..., Optimizer] = OPTIMIZERS[options.optimizer]
    settings = dict(options.settings)
    if scaler is not None and by_papers(options):
        settings["grad_scaler"] = scaler
    if not has_kfac(options.optimizer):
        return made(model.parameters() if groups is None else groups, **settings)
    if groups is None:
        return made(model, **settings)
    return made(groups, model=model, **settings)
