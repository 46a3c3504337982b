"""The command line: ``kaisa plan`` and its like, by typer and rich."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from .. import optimizer
from ..optimizer import KFACMixin
from . import calibration, factories, hardware, pictures
from .planner import Plan, plan
from .prices import STAGES
from .profile import profile
from .simulation import WAIT, simulate
from .texts import milliseconds

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Plans for K-FAC on many ranks.")
T = TypeVar("T")

NOTHING_FITS, WRONG, FAILED = 1, 2, 3  # exit codes
_WIDE = 100  # columns of a terminal that shows a whole plan
_DETAILS = ("gather", "refresh")  # columns that a narrow one leaves out
_SLOW = 2.0  # seconds, after which a bar shows how it goes
_KFAC = {"KFACAdam", "KFACSGD", "KFACLAMB"}

Ranks = Annotated[int, typer.Option(min=1, help="How many ranks.")]
Device = Annotated[str, typer.Option(help="A hardware profile: its name, or a TOML file.")]
Target = Annotated[str, typer.Argument(help="package.module:factory")]
Args = Annotated[list[str], typer.Option("--arg", help="name=value for the factory; repeat it.")]
Given = Annotated[
    list[str], typer.Option("--option", help="name=value for the optimizer; repeat it.")
]


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Print an error about an argument or a file as one line, and exit with 2; others with 3."""
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, TypeError, OSError) as error:
        screen(stderr=True).print(Text("error:", "red"), str(error), soft_wrap=True)
        raise typer.Exit(WRONG) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(FAILED) from None


def screen(**options: Any) -> Console:
    """Return a console that prints texts as they are: a regular expression is no markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def watched(items: Sequence[T]) -> Iterator[T]:
    """Yield items; show a bar on the terminal if they take longer than two seconds."""
    console, begun = screen(stderr=True), time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("pricing", total=len(items), visible=False)
        for item in items:
            yield item
            bar.update(task, advance=1, visible=time.monotonic() - begun > _SLOW)


def optimizer_of(name: str) -> type[KFACMixin]:
    """Return one of the family's classes, or K-FAC over a class of torch.optim."""
    import torch

    if name in _KFAC:
        kind: type[KFACMixin] = getattr(optimizer, name)
        return kind
    base = getattr(torch.optim, name.removeprefix("KFAC"), None)
    if base is None:
        names = ", ".join(sorted(_KFAC))
        raise ValueError(f"no optimizer {name!r}; choose from {names}, or a class of torch.optim")
    return optimizer.with_kfac(base)


def table(planned: Plan, width: int) -> Table:
    """Return a plan's table with the best row marked; narrow ones leave out some columns."""
    cells = planned.cells()
    if width < _WIDE:
        columns = [i for i, title in enumerate(cells[0]) if title not in _DETAILS]
        cells = [itemgetter(*columns)(row) for row in cells]
    head, *rows = cells
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0, "pad_edge": False}
    shown = Table(*head, title=planned.head, title_justify="left", title_style="", **look)
    for i, column in enumerate(shown.columns):
        column.justify, column.no_wrap = "right" if i else "left", True
    for row in rows:
        style = {"best": "bold green", "no": "dim"}.get(row[-1], "")
        shown.add_row(*row, style=style)
    if width < _WIDE:
        shown.caption = f"{_WIDE} columns or --json also show {', '.join(_DETAILS)}"
    return shown


@app.command("plan")
@faults()
def plan_command(
    factory: Target,
    ranks: Ranks,
    memory: Annotated[str, typer.Option(help='Of a rank: "80GB"; by default all it has.')] = "",
    device: Device = "h100",
    optimizer: Annotated[str, typer.Option(help="KFACAdam, KFACSGD, ...")] = "KFACAdam",
    arg: Args = [],  # noqa: B006 (typer copies it)
    option: Given = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against traffic here.")] = None,
) -> None:
    """Price every strategy for a model; exit with 1 if nothing fits.

    The factory returns a model, or a model and one rank's input; it runs on the meta device.
    """
    with contextlib.redirect_stdout(sys.stderr):  # a factory may print
        model, batch = factories.built(factory, arg)
        kind, options = optimizer_of(optimizer), factories.values(option)
        wanted: dict[str, Any] = {"optimizer": kind, "batch": batch, "device": device, **options}
        planned = plan(model, ranks, memory or None, **wanted)
    if plot is not None:
        pictures.draw_plan(planned, plot)
    if as_json:
        print(planned.to_json())
    else:
        console = screen()
        if not console.is_terminal:  # a file or a pipe has room
            console = screen(width=_WIDE)
        console.print(table(planned, console.width))
        console.print(planned.reason)
        for text in planned.assumptions:
            console.print(f"- {text}", style="dim")
    if planned.best is None:
        raise typer.Exit(NOTHING_FITS)


@app.command("simulate")
@faults()
def simulate_command(
    factory: Target,
    ranks: Ranks,
    device: Device = "h100",
    optimizer: Annotated[str, typer.Option(help="KFACAdam, KFACSGD, ...")] = "KFACAdam",
    arg: Args = [],  # noqa: B006
    option: Given = [],  # noqa: B006
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the best.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the best's timeline here.")] = None,
) -> None:
    """Simulate one interval of steps on every rank; options may name the strategy.

    The table has the mean milliseconds of a step by stage. Traces and pictures have 64 ranks.
    """
    with contextlib.redirect_stdout(sys.stderr):  # a factory may print
        model, batch = factories.built(factory, arg)
        kind, options = optimizer_of(optimizer), factories.values(option)
        wanted: dict[str, Any] = {"optimizer": kind, "batch": batch, "device": device, **options}
        planned = plan(model, ranks, **wanted)
        priced = sorted(planned.priced, key=lambda x: x.step)
        world = planned.world
        # A simulation takes longer than a plan: of many, take the fastest and both ends.
        ends = {x.candidate.title for x in (priced[0], planned.priced[0], planned.priced[-1])}
        chosen = [x.candidate for x in priced if x.candidate.title in ends]
        case, machine = planned.case, planned.hardware
        done = {x.title: simulate(case, x, world, machine) for x in watched(chosen)}
    shown = Table("stage, mean ms a step", *done, box=box.SIMPLE_HEAD)
    for stage in (*STAGES, WAIT):
        cells = [milliseconds(x.busy.get(stage, 0.0)) for x in done.values()]
        shown.add_row(stage, *cells)
    shown.add_row("step", *(milliseconds(x.mean) for x in done.values()), style="bold")
    screen().print(shown)
    best = done[priced[0].candidate.title]
    if trace is not None:
        trace.write_text(best.trace())
    if plot is not None:
        pictures.draw_timeline(best, plot)


@app.command("profile")
@faults()
def profile_command(
    factory: Target,
    optimizer: Annotated[str, typer.Option(help="KFACAdam, KFACSGD, ...")] = "KFACAdam",
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    steps: Annotated[int | None, typer.Option(min=1, help="By default one interval.")] = None,
    arg: Args = [],  # noqa: B006
    option: Given = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Train a model for one interval of steps here, and print the time of each stage.

    The factory returns a model and its input; numbers are drawn. The loss is the output's square.
    """
    with contextlib.redirect_stdout(sys.stderr):  # a factory may print
        model, batch = factories.built(factory, arg)
        if batch is None:
            raise ValueError(
                f"{factory} returns a model alone; return a model and one rank's input"
            )
        kind, options = optimizer_of(optimizer), factories.values(option)
        settings: dict[str, Any] = {"optimizer": kind, "device": device, "steps": steps}
        profiled = profile(model, batch, **settings, **options)
    if as_json:
        print(profiled.to_json())
        return
    head, *rows = profiled.cells()
    shown = Table(*head, title=f"{profiled.optimizer} on {profiled.device}", box=box.SIMPLE_HEAD)
    for row in rows:
        shown.add_row(*row)
    screen().print(shown)


@app.command()
@faults()
def calibrate(
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("mine.toml"),
    ranks: Ranks = 2,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    check: Annotated[
        Path | None, typer.Option(help="Print this profile's times beside measured ones.")
    ] = None,
) -> None:
    """Measure this machine in under two minutes, and write a hardware profile."""
    known = None if check is None else hardware.load(check)
    measured = calibration.measure(device, ranks, watched)
    if known is None:
        out.write_text(hardware.text(measured, calibration.COMMENT))
        print(f"profile: {out}")
        return
    shown = Table("operation", "size", "profile ms", "measured ms", "error")
    for row in calibration.compare(known, measured):
        shown.add_row(*row)
    screen().print(shown)


@app.command()
def profiles() -> None:
    """List the hardware profiles of this package, with their sources."""
    for path in sorted(hardware.PROFILES.glob("*.toml")):
        known = hardware.load(path.stem)
        print(json.dumps({"name": known.name, "title": known.title, "sources": known.sources}))
