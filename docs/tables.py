"""The tables and plots of docs, made from the raw numbers in benchmarks/results.

    python -m docs.tables

Nothing is measured: bytes follow from the models' shapes, options from the package, all else was
kept by the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import published, traffic
from benchmarks.convergence.rates import Kept as Rated
from benchmarks.convergence.rates import best, means
from benchmarks.convergence.tasks import TASKS
from benchmarks.nanogpt import STEPS as ALL_STEPS
from benchmarks.papers_account import Papers
from docs import api
from docs.messages import Source
from docs.remedies import REMEDIES
from kaisa_optim.options import OPTIONS
from kaisa_optim.plan.assignment import Hybrid, Task

ROOT = Path(__file__).parent.parent
RESULTS, PAGES = ROOT / "benchmarks/results", ROOT / "docs/results"
REFERENCE = ROOT / "docs/reference"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"


class Contest(NamedTuple):
    """A task of the convergence benchmark, and the optimizer whose last loss is the target."""

    title: str
    file: str
    baseline: str


CONTESTS = (
    Contest("masked BERT", "masked", "AdamW"),
    Contest("character GPT", "characters", "AdamW"),
    Contest("ResNet-8, batch 256", "resnet8-256", "AdamW"),
    Contest("ResNet-8, batch 1,024", "resnet8-1024", "AdamW"),
    Contest("U-Net on nuclei", "unet-8", "SGD"),
    Contest("digits autoencoder, batch 256", "digits-256", "AdamW"),
    Contest("digits autoencoder, full batch", "digits-full", "AdamW"),
    Contest("Fashion-MNIST autoencoder, batch 256", "fashion-256", "AdamW"),
    Contest("Fashion-MNIST autoencoder, batch 8,192", "fashion-8192", "AdamW"),
)
RATED = {
    "characters": "character GPT",
    "resnet8-256": "ResNet-8, batch 256",
    "resnet8-1024": "ResNet-8, batch 1,024",
    "unet-8": "U-Net on nuclei",
    "digits-256": "digits autoencoder",
    "fashion-256": "Fashion-MNIST autoencoder, 256",
    "fashion-8192": "Fashion-MNIST autoencoder, 8,192",
    "digits-full": "digits autoencoder, full batch",
}
BY_SGD = ("resnet8-256", "unet-8", "digits-256")
RATES = {  # of each picture, what its panels show: base, ours and task
    "rates": [("AdamW", "KFACAdam", task) for task in RATED],
    "rates_others": [("SGD", "KFACSGD", task) for task in BY_SGD],
}
CONTESTANTS = {
    "KFACAdam": "KFACAdam, defaults",
    "KFACSGD": "KFACSGD, defaults",
    "SOAP": "SOAP",
    "Muon": "Muon",
}
AVERAGED = "KFACAdam", "SOAP", "Muon"
MISSED = (1.0, 1.0)  # shares that count where the baseline's loss is not reached
NANOGPT, AT_SECONDS = "nanogpt", "loss at AdamW's seconds"
MASKED = {
    "LAMB": "LAMB",
    "KFACLAMB": "KFACLAMB, defaults",
    "AdamW": "AdamW",
    **{name: CONTESTANTS[name] for name in ("KFACAdam", "SOAP", "Muon")},
}
MACHINES = {"EPYC, AVX-512": "", "EPYC, AVX2": "_avx2", "Xeon, AVX-512": "_intel"}
STEPS = {
    "eigenvectors": "KFACSGD",
    "inverses": "KFACSGD, inverse",
    "kfac-pytorch": "kfac-pytorch",
}
PEER = "kfac-pytorch"


# What a user does when a message comes, and the modules that it comes from.
SECTIONS = {
    "Building an optimizer": (
        "__init__", "optimizer", "lamb", "model",
    ),
    "Options": ("options", "errors"),
    "Steps": (
        "reports", "preconditioner", "exchange", "compiled",
        "bases", "capture/hooks", "capture/passes",
        "curvature", "linalg",
    ),
    "The true Fisher": ("capture/fisher",),
    "Ranks": ("comm", "agree"),
    "Assignment": ("plan/assignment",),
    "Plans": ("tools",),
    "Checkpoints": ("checkpoint",),
    "Schedules": ("scheduler",),
    "Your own layer kind": ("layers",),
}  # fmt: skip
ANY_OPTION = "Invalid …: …"


def kept(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


CHOICES = {  # what stands in the place of each optimizer, and the rates to try
    "AdamW": ("with_kfac(torch.optim.AdamW)(model, lr=...)", "⅓, 1, 3 and 10 times yours"),
    "Adam, no decay": ("KFACAdam(model, lr=...)", "⅓, 1, 3 and 10 times yours"),
    "SGD": ("KFACSGD(model, lr=..., momentum=0.9)", "⅓, 1, 3 and 10 times yours"),
    "LAMB": ("KFACLAMB(model, lr=...)", "⅓, 1 and 3 times yours"),
    "Muon": ("KFACAdam(model, lr=...)", "⅓, 1, 3 and 10 times AdamW's"),
    "another": ("with_kfac(it)(model, lr=...)", "⅓, 1 and 3 times yours"),
}


def choices() -> str:
    """Return which optimizer takes the place of which, and at which rate."""
    rows = [[base, f"`{call}`", rates] for base, (call, rates) in CHOICES.items()]
    return traffic.table(["you have", "take", "rates to try"], rows).replace("--:", ":--")


# ---- convergence ----


def reached(
    contest: Contest, optimizer: str, missed: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Return the shares of the baseline's steps and seconds; ``missed`` where not reached, None
    where not measured."""
    for row in kept(f"convergence_{contest.file}")["to the baseline's loss"]:
        if (row["baseline"], row["optimizer"]) == (contest.baseline, optimizer):
            found = row["of_its_steps"] and (row["of_its_steps"], row["of_its_seconds"])
            return found or missed
    return None


def of_nanogpt(base_name: str, optimizer: str) -> tuple[float, float] | None:
    """Return the shares of the baseline's steps and seconds to nanoGPT's loss, as ``reached``.

    The best rows count. A baseline that misses the loss counts with its whole run.
    """
    costs: dict[str, list[tuple[bool, float, float]]] = {}
    for row in kept(NANOGPT)["rows"] if (RESULTS / f"{NANOGPT}.json").exists() else ():
        cost = True, row["steps"], row["steps"] * row["ms per step"] / 1e3
        if "steps to the target" in row:
            cost = False, row["steps to the target"], row["seconds to the target"]
        costs.setdefault(row["optimizer"], []).append(cost)
    if not {base_name, optimizer} <= costs.keys():
        return None
    (_, *base), (missed, *own) = min(costs[base_name]), min(costs[optimizer])
    return MISSED if missed else (own[0] / base[0], own[1] / base[1])


def shares() -> str:
    rows = []
    names = [name for name, x in CONTESTANTS.items() if any(reached(y, x) for y in CONTESTS)]
    for contest in CONTESTS:
        found = [reached(contest, CONTESTANTS[name]) for name in names]
        cells = [f"{x[0]:.2f} / {x[1]:.2f}" if x else "" for x in found]
        rows.append([f"{contest.title}, {contest.baseline}", *cells])
    return traffic.table(["task, baseline", *names], rows)


def mean_shares() -> list[tuple[str, int, int, float, float]]:
    """Return names, numbers of tasks in which all were measured and of missed ones, and means."""
    tasks = [[reached(x, CONTESTANTS[name], MISSED) for name in AVERAGED] for x in CONTESTS]
    tasks.append([of_nanogpt("AdamW", name) for name in AVERAGED])
    columns = zip(*(task for task in tasks if None not in task), strict=True)
    means_of = []
    for name, found in zip(AVERAGED, columns, strict=False):  # no columns without a common task
        steps, seconds = (statistics.geometric_mean(x) for x in zip(*found, strict=True))
        means_of.append((name, len(found), found.count(MISSED), steps, seconds))
    return means_of


def averages() -> str:
    """Return geometric means of the shares, over tasks in which all were measured."""
    rows = []
    for name, tasks, missed, *parts in mean_shares():
        cells = [str(tasks), str(missed), *(f"{part:.2f}" for part in parts)]
        rows.append([name, *cells])
    return traffic.table(["optimizer", "tasks", "missed", "steps", "seconds"], rows)


def nanogpt_rows() -> list[dict[str, Any]]:
    """Return the rows of nanoGPT's recipe, the lowest last loss first."""
    return sorted(kept(NANOGPT)["rows"], key=lambda row: row["losses"][-1])


def nanogpt() -> str:
    """Return losses on nanoGPT's recipe at equal steps and seconds, and the way to its loss."""
    rows = []
    for x in nanogpt_rows():
        longer = f", {x['steps']:,} steps" if x["steps"] != ALL_STEPS else ""
        cells = [f"{x['optimizer']}, {x['lr']:g}{longer}", *(f"{y:.3f}" for y in x["losses"])]
        cells += [f"{x[AT_SECONDS]:.3f}", f"{x['of a step']:.2f}"]
        met = [x.get(f"{name} to the target") for name in ("steps", "seconds")]
        rows.append([*cells, *("" if y is None else f"{y:,.0f}" for y in met)])
    head = ["optimizer, rate", "loss at ¼", "½", "¾", "the end", "after AdamW's seconds"]
    return traffic.table([*head, "a step's time ÷ AdamW's", "steps to 1.88", "seconds"], rows)


def widths() -> dict[str, dict[int, dict[float, float]]]:
    """Return, by optimizer, width and rate, the last losses of nanoGPT's recipe."""
    of: dict[str, dict[int, dict[float, float]]] = {}
    for row in kept(f"{NANOGPT}_widths")["rows"]:
        losses = {float(lr): loss for lr, loss in row["losses"].items()}
        of.setdefault(row["optimizer"], {})[row["width"]] = losses
    return of


def best_rates() -> str:
    """Return the best rate of each optimizer at each width."""
    of = widths()
    rows = [[name, *(f"{best(x):g}" for x in found.values())] for name, found in of.items()]
    return traffic.table(["width", *map(str, of["AdamW"])], rows)


def best_of_nanogpt() -> dict[str, dict[str, Any]]:
    """Return the best row of each optimizer, of equally many steps."""
    of: dict[str, dict[str, Any]] = {}
    for row in nanogpt_rows():
        if row["steps"] == ALL_STEPS:
            of.setdefault(row["optimizer"], row)
    return of


def first() -> str:
    """Return what the first page claims, in numbers."""
    steps = {x: y.get("steps to the target", math.nan) for x, y in best_of_nanogpt().items()}
    own, soap, muon, adamw = (f"{steps[x]:,.0f}" for x in ("KFACAdam", "SOAP", "Muon", "AdamW"))
    of = {name: (tasks, x, y) for name, tasks, _, x, y in mean_shares()}
    tasks, share, seconds = of["KFACAdam"]
    rows = {row["optimizer"]: row for row in kept("cifar")["rows"]}
    fields = ("of SGD's steps", "of SGD's seconds")
    ours, muons = ([f"{rows[x][y]:.2f}" for y in fields] for x in ("KFACSGD", "Muon"))
    return (
        f"On nanoGPT's recipe for CPUs, `KFACAdam` comes to the published loss in {own} steps; "
        f"Muon takes {muon}, SOAP {soap} and AdamW {adamw}. On CIFAR-10, `KFACSGD` brings "
        f"ResNet-20 to 90 % in {ours[0]} of SGD's steps and {ours[1]} of its seconds (Muon "
        f"{muons[0]} and {muons[1]}). "
        f"To the targets of {tasks} tasks, `KFACAdam` needs {share:.2f} of the baseline's steps "
        f"and {seconds:.2f} of its seconds (SOAP {of['SOAP'][1]:.2f} and {of['SOAP'][2]:.2f}, "
        f"Muon {of['Muon'][1]:.2f} and {of['Muon'][2]:.2f}; geometric means)."
    )


def cifar() -> str:
    """Return each optimizer's length, steps and seconds to 90 % of CIFAR-10's test images."""
    rows = []
    for x in kept("cifar")["rows"]:
        ends = " and ".join(f"{100 * y:.1f}" for y in x["accuracies"])
        name = x["optimizer"].replace("KFACAdamW", "with_kfac(AdamW)")
        cells = [f"{name}, {x['lr']:g}", str(x["epochs"]), ends]
        for field in ("steps", "seconds"):
            share = x[f"of SGD's {field}"]
            cells += [f"{x[field]:,.0f}" if x[field] else "", f"{share:.2f}" if share else ""]
        rows.append([*cells, f"{x['ms per step']:.0f}"])
    head = ["optimizer, rate", "epochs", "% at the end, two seeds", "steps to 90 %", "÷ SGD's"]
    return traffic.table([*head, "seconds", "÷ SGD's", "ms a step"], rows)


def losses() -> str:
    rows, seen = [], set()
    for contest in CONTESTS:
        if contest.file in seen:
            continue
        seen.add(contest.file)
        last = {row["optimizer"]: row for row in kept(f"convergence_{contest.file}")["final"]}
        found = [last.get(name) for name in [*CONTESTANTS.values(), contest.baseline]]
        least = min(row["loss"] for row in found if row)
        cells = []
        for row in found:
            digits = "#.4g" if row and row["loss"] >= 1 else "#.3g"
            text = format(row["loss"], digits) if row else ""
            cells.append(f"**{text}**" if row and row["loss"] == least else text)
        rows.append([contest.title, *cells])
    return traffic.table(["task", *CONTESTANTS, "the baseline"], rows)


def findings() -> str:
    """Return what the tables of convergence say, in sentences."""
    ours, others = CONTESTANTS["KFACAdam"], ("SOAP", "Muon")
    lower, margins = [], []
    for file, title in {contest.file: contest.title for contest in CONTESTS}.items():
        last = {row["optimizer"]: row["loss"] for row in kept(f"convergence_{file}")["final"]}
        loss, other = min((last[name], name) for name in others if name in last)
        margins.append((last[ours] / loss - 1, title, other))
        lower.append(last[ours] <= loss)
    above = [
        f" {name} is {100 * x / (1 + x):.0f} % lower on {title}."
        for x, title, name in margins
        if x > 0
    ]
    found = [(contest, reached(contest, ours), reached(contest, "Muon")) for contest in CONTESTS]
    pairs = [(contest, own, muon) for contest, own, muon in found if own and muon]
    faster = [contest for contest, own, muon in pairs if own[1] <= muon[1]]
    slower = [f"{c.title} ({c.baseline})" for c, *_ in pairs if c not in faster]
    steps, seconds = ([own[i] for _, own, _ in found if own] for i in (0, 1))
    base, kfac = curve("resnet8-256", "SGD"), curve("resnet8-256", "KFACSGD")
    decayed = [curve("resnet8-256", f"{name}, decay")[0.1] for name in ("KFACSGD", "SGD")]
    return "\n".join(
        [
            f"- KFACAdam ends below the better of SOAP and Muon on {sum(lower)} of {len(lower)} "
            f"tasks, by up to {-100 * min(margins)[0]:.0f} %.{''.join(above)}",
            f"- KFACAdam reaches the baseline's loss in {min(steps):.2f} to {max(steps):.2f} of "
            f"its steps and {min(seconds):.2f} to {max(seconds):.2f} of its seconds.",
            f"- KFACAdam takes no more seconds than Muon on {len(faster)} of {len(pairs)} rows. "
            f"Muon is faster on {'; '.join(slower)}.",
            f"- At SGD's best rate, 0.1, on ResNet-8, KFACSGD ends at {kfac[0.1]:.2f} and SGD at "
            f"{base[0.1]:.2f}; with a weight decay of 5e-4, at {decayed[0]:.2f} and "
            f"{decayed[1]:.2f}.",
        ]
    )


def curve(task: str, optimizer: str) -> dict[float, float]:
    """Return the mean loss at the end of each learning rate; infinite where a run diverged."""
    return means(Rated.here(RESULTS, TASKS[task]).curves()[optimizer])


def rates() -> str:
    return rates_of("KFACAdam", "AdamW", tuple(RATED))


def rates_of_sgd() -> str:
    return rates_of("KFACSGD", "SGD", BY_SGD)


def rates_of(kfac: str, base_name: str, tasks: Sequence[str]) -> str:
    """Return the last losses of both at each rate; bold is what the base does not reach."""
    rows = []
    columns = sorted({lr for task in tasks for lr in curve(task, base_name)})
    for task in tasks:
        title, base, ours = RATED[task], curve(task, base_name), curve(task, kfac)
        cells = []
        for lr in columns:
            pair = ours.get(lr), base.get(lr)
            texts = ["" if x is None else "diverges" if x == math.inf else f"{x:.3g}" for x in pair]
            if None not in pair and ours[lr] <= base[lr]:
                texts[0] = f"**{texts[0]}**"
            cells.append(" / ".join(texts) if any(texts) else "")
        rows.append([title, *cells])
    return traffic.table(["task", *(f"{lr:g}" for lr in columns)], rows)


def masked() -> str:
    """Return the last losses on masked characters at each rate, and shares of AdamW's run."""
    found = {name: curve("masked", name) for name in MASKED}
    columns = sorted({lr for losses in found.values() for lr in losses})
    contest = next(contest for contest in CONTESTS if contest.file == "masked")
    rows = []
    for name, losses in found.items():
        cells = [f"{losses[lr]:.3f}" if lr in losses else "" for lr in columns]
        parts = reached(contest, MASKED[name])
        rows.append([name, *cells, f"{parts[0]:.2f} / {parts[1]:.2f}" if parts else ""])
    head = ["optimizer", *(f"{lr:g}" for lr in columns), "to AdamW's loss"]
    return traffic.table(head, rows)


# ---- time of a step ----


def ratio(network: str, machine: str, interval: str, name: str) -> float | None:
    found = kept(f"step_time_steps_cpu_{network}{MACHINES[machine]}")["results"]
    key = next(x for x in found if x.endswith(f" {interval}"))
    return next((row["ratio"] for row in found[key] if row["name"] == name), None)


def step_times() -> str:
    rows = []
    for network, title in (("resnet32", "ResNet-32"), ("transformer", "transformer")):
        for machine in MACHINES:
            cells = []
            for name in STEPS.values():
                pair = [ratio(network, machine, x, name) for x in ("10/100", "1/10")]
                cells.append(", ".join(f"{x:.2f}" for x in pair if x))
            rows.append([f"{title}, {machine}", *cells])
    return traffic.table(["network, machine", *STEPS], rows)


def beside() -> str:
    """Return how the papers' methods compare with the papers' own code."""
    shares = []
    for network in ("resnet32", "transformer"):
        for machine in MACHINES:
            pair = [ratio(network, machine, "10/100", STEPS[x]) for x in ("eigenvectors", PEER)]
            shares.append((pair[0] or math.nan) / (pair[1] or math.nan))
    parts = [ours / papers for ours, papers in [fullest(x, "layer-wise") for x in traffic.MODELS]]
    return (
        "Beside kfac-pytorch 0.4.2, with "
        "[its method](docs/guides/from_kfac_pytorch.md#why-damping-must-be-chosen-anew): after 20 "
        "steps, weights differ by at most 1e-5 of their change. With eigenvectors, a step takes "
        f"[{min(shares):.2f} to {max(shares):.2f} of its time](docs/results/step_time.md) on CPUs, "
        "with refreshes every 100 steps. "
        f"By default, the fullest of 64 ranks keeps [{min(parts):.2f} to {max(parts):.2f} of the "
        "papers' state](docs/results/memory_traffic.md), by model."
    )


def fullest(model: str, strategy: str) -> tuple[float, float]:
    """Return what the fullest of 64 ranks keeps, here and in the papers' scheme."""
    found = traffic.plan(model, strategy, 64)
    return traffic.largest(found.memory()), traffic.largest(Papers(found).memory())


def of_64_ranks() -> str:
    rows = []
    for model in traffic.MODELS:
        for name in traffic.STRATEGIES:
            found = traffic.schemes(model, name, 64, traffic.GATHERED, traffic.REFRESHED)
            sent = [traffic.mean(found[x]) for x in ("ours", "packed", "papers")]
            keeps = fullest(model, name)
            rows.append([f"{model}, {name}", *map(traffic.mb, [*sent, *keeps])])
    head = ["model, assignment", "traffic, MB a step", "papers, packed", "papers"]
    return traffic.table([*head, "memory of the fullest rank, MB", "papers"], rows)


def gpt2() -> list[Task]:
    tasks = [traffic.embedding("words", 50257, 768), traffic.embedding("places", 1024, 768)]
    for i in range(12):
        shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
        tasks += [traffic.linear(f"{i}.{k}", *shape) for k, shape in enumerate(shapes)]
    return tasks


def llama_7b() -> list[Task]:
    tasks = [traffic.embedding("words", 32000, 4096), traffic.linear("head", 4096, 32000, False)]
    for i in range(32):
        shapes = [*[(4096, 4096)] * 4, *[(4096, 11008)] * 2, (11008, 4096)]
        tasks += [traffic.linear(f"{i}.{k}", *shape, False) for k, shape in enumerate(shapes)]
    return tasks


MODELS: dict[str, Callable[[], list[Task]]] = {
    **{"ResNet-50": traffic.resnet50, "BERT-Large, untied": traffic.bert_large},
    **{"GPT-2": gpt2, "Llama-7B": llama_7b},
}


def fullest_with_momenta(tasks: list[Task], workers: int, world: int) -> float:
    """Return the bytes of K-FAC's state and of momenta on the fullest rank."""
    account = traffic.account(tasks, Hybrid(workers / world), world)
    momenta = [0] * account.grid.columns
    for layer in account.layers:
        momenta[layer.placement.g % account.grid.columns] += layer.gradient * layer.itemsize
    kept = (rank["total"] for rank in account.memory())
    return max(size + momenta[i % account.grid.columns] for i, size in enumerate(kept))


def calculator() -> str:
    """Return weights, Adam's state, and K-FAC's with its momentum, on the fullest rank, in GB."""
    rows = []
    for title, make in MODELS.items():
        weights = 4 * traffic.parameters(make())
        sizes: list[float] = [weights, 2 * weights]
        for world in (8, 64):
            for workers in (world, world // 4, 1):
                sizes.append(fullest_with_momenta(make(), workers, world))
        rows.append([title, *(f"{size / 1e9:#.3g}" for size in sizes)])
    head = ["model, GB", "weights", "Adam's state"]
    head += [f"{world} ranks: {name}" for world in (8, 64) for name in ("1", "1/4", f"1/{world}")]
    return traffic.table(head, rows)


def memory() -> str:
    """Return what K-FAC and its momentum take on the fullest rank, at the default, in GB."""
    rows = []
    for title, make in MODELS.items():
        weights = 4 * traffic.parameters(make())
        sizes = [weights, 2 * weights, *(fullest_with_momenta(make(), 1, n) for n in (1, 8, 64))]
        rows.append([title, *(f"{size / 1e9:#.3g}" for size in sizes)])
    head = ["GB", "weights", "Adam's state", "ours, 1 rank", "8 ranks", "64 ranks"]
    return traffic.table(head, rows)


def predicted() -> str:
    """Milliseconds of steps on CPU ranks, measured and predicted."""
    rows = [
        [
            f"{row['model']}, {row['fraction']}",
            f"{row['measured ms']:.0f}",
            f"{row['predicted ms']:.0f}",
            f"{100 * row['error']:+.0f} %",
        ]
        for row in kept("predicted_cpu")["rows"]
    ]
    return traffic.table(["model, fraction", "measured", "predicted", "error"], rows)


def options() -> str:
    """Return the table of all options in docs/reference/options.md."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in OPTIONS.items():
        default = f'"{option.default}"' if isinstance(option.default, str) else option.default
        meaning = option.help.replace("|", "\\|")
        if option.guide:
            meaning += f" [More](../guides/{option.guide})"
        rows.append(f"| `{name}`{' (s)' if option.schedulable else ''} | {default} | {meaning} |")
    return "\n".join(rows)


# ---- errors and warnings ----


def remedy(text: str) -> tuple[str, str]:
    """Return what a message says is wrong, and what to do."""
    for part, what in REMEDIES.items():
        if part in text:
            return text, what
    wrong, _, what = text.rpartition("; ")
    if not wrong:
        raise LookupError(f"docs/remedies.py has nothing on: {text}")
    end = "" if what[-1] in ".?…" else "."
    is_code = re.search(r"[._(=]", what.split()[0].rstrip(".,:;"))
    return wrong, (what[0] if is_code else what[0].upper()) + what[1:] + end


def messages() -> str:
    """Return the tables of all messages, by what a user does when they come."""
    found, seen, text = Source().messages, set[str](), list[str]()
    for title, modules in SECTIONS.items():
        rows = []
        for message in found:
            if message.module.startswith(modules) and message.text not in seen:
                seen.add(message.text)
                wrong, what = remedy(message.text)
                if wrong.startswith(ANY_OPTION):
                    continue  # the message itself says what is valid
                kind = message.kind if message.kind != "warning" else "**warning**"
                rows.append([f"{kind}: {_plain(wrong)}", _plain(what)])
        text.append(f"## {title}\n\n{traffic.table(['message and cause', 'what to do'], rows)}")
    return "\n\n".join(text).replace("| --: |", "| :-- |")


def _plain(text: str) -> str:
    """Return a text with the signs that Markdown and HTML would take for theirs escaped."""
    return re.sub(r"([\\`*|<>\[\]]|\b_(?!\w)|(?<!\w)_)", r"\\\1", text)


def conflicts() -> str:
    rows = []
    for name, option in OPTIONS.items():
        if option.conflict is not None:
            other, value, reason = option.conflict
            rows.append([f"`{name}`", f"`{other}` {value!r}", _plain(reason)])
    table = traffic.table(["option", "with", "cause"], rows)
    return table.replace("--:", ":--")


# ---- pages ----


TABLES = {
    ROOT / "README.md": {
        "first": first,
        "choices": choices,
        "nanogpt": nanogpt,
        "cifar": cifar,
        "averages": averages,
        "beside": beside,
        "memory": memory,
    },
    PAGES / "convergence.md": {
        "nanogpt": nanogpt,
        "widths": best_rates,
        "cifar": cifar,
        "shares": shares,
        "averages": averages,
        "losses": losses,
        "rates": rates,
        "rates of SGD": rates_of_sgd,
        "masked": masked,
        "findings": findings,
    },
    ROOT / "docs/guides/optimizer.md": {"choices": choices},
    ROOT / "docs/guides/memory.md": {"calculator": calculator},
    PAGES / "step_time.md": {"steps": step_times},
    REFERENCE / "plans.md": {"predicted": predicted},
    PAGES / "published.md": {"published": published.report},
    PAGES / "memory_traffic.md": {"bytes": of_64_ranks},
    REFERENCE / "options.md": {"options": options},
    REFERENCE / "errors.md": {"messages": messages, "conflicts": conflicts},
}


def rewritten(page: str, name: str, table: str) -> str:
    """Return the page with another table between its markers."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page and what it should be."""
    for path, tables in TABLES.items():
        page = path.read_text()
        for name, make in tables.items():
            page = rewritten(page, name, make())
        yield path, page
    yield REFERENCE / "api.md", api.page()
    yield ROOT / "docs/index.md", home((ROOT / "README.md").read_text())


def home(readme: str) -> str:
    """Return the README as the site's first page: links into docs stay, others become text."""
    inside = readme.replace("](docs/", "](")
    return re.sub(r"\[([^\]]+)\]\((?:benchmarks|examples|CHANGELOG)[^)]*\)", r"\1", inside)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        prog="python -m docs.tables", description="Write the tables, pages and plots of docs."
    ).parse_args(arguments)
    for path, page in pages():
        path.write_text(page)
    (PAGES / "traffic.csv").write_text(traffic.as_csv())
    from docs import pictures

    pictures.draw_all()


if __name__ == "__main__":
    main()
