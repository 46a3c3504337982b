"""Planted faults: wrong behaviours, each with the tests that are to catch it.

``python -m tests.faults [--only TEXT] [--out FILE]`` plants one fault after the other in a copy of
the tracked files, and runs its tests there. A fault is caught if one of them fails, or hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT = 300.0  # seconds for the tests of one fault; ranks that wait for each other take no longer
HANG, MISSED = "time limit", "missed"


class Fault(NamedTuple):
    """A wrong behaviour, and the edit that brings it about."""

    behaviour: str
    file: str  # in the package
    old: str  # occurs once in the file
    new: str
    tests: str  # pytest's arguments; files are in tests/


# fmt: off
FAULTS = (
    # ---- linalg ----
    Fault("the damping of a root is no share of the mean eigenvalue", "linalg/products.py",
          "damped = exact / (scale[:, None] if diagonal else scale[:, None, None])",
          "damped = exact.clone()", "linalg/test_products.py"),
    Fault("the root of an indefinite factor counts as good", "linalg/products.py",
          "= values[:, 0] >", "= values[:, -1] >", "linalg/test_products.py"),
    Fault("float32 finds roots of any condition", "linalg/products.py",
          "<= _ROUGH * damping", "<= float('inf') * damping", "linalg/test_products.py"),
    Fault("a damped inverse leaves the damping out", "linalg/products.py", "add_(damping[:, None])",
          "add_(0 * damping[:, None])", "curvature/test_rules.py -k dense_factors"),
    Fault("a block's direction depends on the other blocks' size", "linalg/products.py",
          "vector_norm(wide, dim=(1, 2), keepdim=True)",
          "vector_norm(wide, dim=(0, 1, 2), keepdim=True)",
          "linalg/test_products.py curvature/test_rules.py"),
    # ---- layers ----
    Fault("reduce adds inputs up over positions", "layers/base.py", "a = a.mean(2, dtype=dtype)",
          "a = a.sum(2, dtype=dtype)", "curvature/test_exactness.py -k reduce_is_exact"),
    Fault("A of a layer with a frozen weight counts no rows", "layers/base.py",
          "moment_g.new_full(shape, rows)", "moment_g.new_full(shape, 1)",
          "capture/test_capture.py -k frozen_from_the_start"),
    Fault("a module whose class overrides forward is covered as its parent", "layers/base.py",
          "return kind, not same or", "return kind, same and",
          "capture/test_hooks.py -k runs_otherwise"),
    Fault("a side of just the largest width is diagonal", "layers/base.py",
          "return size, size > self.wide", "return size, size >= self.wide",
          "layers/test_layers.py core/test_coverage.py -k max_factor_size"),
    Fault("an input that was written into shares the former input's moment", "layers/base.py",
          "said = key, part, *asked.values(), dtype, x._version",
          "said = key, part, *asked.values(), dtype", "layers/test_layers.py -k written_into"),
    Fault("channels of a grouped convolution go to the groups in turn", "layers/conv.py",
          "grad.unflatten(1, (self.blocks, self.outputs)).permute(1, 2, 0, 3)",
          "grad.unflatten(1, (self.outputs, self.blocks)).permute(2, 1, 0, 3)",
          "layers/test_layers.py"),
    Fault("rows of key and value go to the blocks of query and key", "layers/attention.py",
          "start = int(first) // layer.outputs", "start = 0", "layers/test_layers.py"),
    Fault("projections that share a bias all read the query's part", "layers/attention.py",
          "tensor[self.at : end]", "tensor[: end - self.at]", "layers/test_layers.py"),
    Fault("a product with some rows of a weight counts for its first rows", "layers/kinds.py",
          "pad(rows, (self.first, behind))", "pad(rows, (0, self.first + behind))",
          "layers/test_uses.py"),
    Fault("statistics of a part of the examples do not stand for all", "layers/base.py",
          "total.mul_(self.whole / self.taken)", "total", "layers/test_sampling.py"),
    # ---- capture ----
    Fault("a derivative beside training counts", "capture/hooks.py",
          "if drawing is None and not passes.accumulates_into(call.anchor):", "if False:",
          "capture/test_capture.py -k derivatives"),
    Fault("a backward that starts without a gradient keeps the former sums", "capture/hooks.py",
          "if begins and self._begun.get(layer) != task:", "if False:",
          "capture/test_capture.py -k drops_passes"),
    Fault("a paused pass gathers", "capture/hooks.py",
          "paused = bool(self._passes.paused if again is None else again.paused)", "paused = False",
          "capture/test_capture.py -k 'parts_of_passes and paused'"),
    Fault("a checkpoint recomputes with other taps than its forward had", "capture/hooks.py",
          "leaves = task == LEAVE and not checkpointed", "leaves = task == LEAVE",
          "capture/test_capture.py -k forward_decides"),
    Fault("drawn gradients count in each pass through their graph", "capture/hooks.py",
          "call.moments = None  # a second", "pass  # a second",
          "capture/test_fisher.py -k 'other_passes and second'"),
    Fault("targets of a squared error are drawn too narrowly", "capture/fisher.py",
          "normal_(0, math.sqrt(2)", "normal_(0, 1", "capture/test_fisher.py -k scale_is_that"),
    Fault("K of a batch is one", "capture/passes.py",
          "self.examples = tensor.shape[0] if tensor.dim() else 1", "self.examples = 1",
          "capture/test_capture.py -k by_positions"),
    Fault("a gradient from other sources than rows is not told", "capture/witness.py",
          "elif max(shares) > OTHER:", "elif max(shares) > 1:",
          "capture/test_witness.py -k penalty"),
    Fault("a call counts twice", "capture/hooks.py",
          "return Tap.apply(output, held,", "output = Tap.apply(output, held, call, probe, False)\n"
          "            return Tap.apply(output, held,", "capture/test_programs.py"),
    Fault("uses that were found are not watched", "capture/hooks.py",
          'self._noted[layer, next(running_calls())["self"]] = None', "pass",
          "capture/test_programs.py"),
    Fault("a view that no_grad made is a use", "layers/watch.py",
          "return node is not None and (node is base.grad_fn or", "return True or (",
          "capture/test_uses.py -k no_grad_made"),
    Fault("a table that a matrix is tied to has a whole factor of its rows", "model.py",
          "next((layer for layer in users if layer.diagonal_input), users[0])",
          "users[-1]", "core/test_coverage.py -k tied_weight"),
    # ---- curvature ----
    Fault("G is not divided by its rows", "preconditioner.py",
          "square / total.terms if total.terms else 0.0", "square",
          "curvature/test_exactness.py -k deep_linear"),
    Fault("A is divided by the rows of one rank", "curvature/averages.py",
          "1 / max(1, number) for number in", "1 / max(1, number) for number in sums.count or",
          "core/test_distribution.py -k ragged"),
    Fault("ranks' gradients are weighed by K and not by its square", "preconditioner.py",
          "report.terms**2", "report.terms", "core/test_distribution.py -k ragged"),
    Fault("only the rows of the last micro-batch are counted", "curvature/averages.py",
          "[x + new for x, new in", "[new for x, new in",
          "curvature/test_exactness.py -k micro_batches"),
    Fault("G is divided by the loss scale and not by its square", "curvature/averages.py",
          "g.div_(scale).div_(scale)", "g.div_(scale)",
          "capture/test_capture.py -k grad_scaler_option"),
    Fault("the papers' convolutions are divided by the positions once", "curvature/averages.py",
          "moments.positions**2 if layer", "moments.positions if layer",
          "curvature/test_kaisa_equations.py -k six_steps"),
    Fault("a running average has no bias correction", "curvature/averages.py",
          "step = gain / grown", "step = gain / torch.ones_like(grown)",
          "curvature/test_exactness.py -k first_value"),
    Fault("the loss scale stays in the average of G", "curvature/averages.py",
          "if scale_free:", "if False:", "curvature/test_averages.py"),
    Fault("the average of an expert without rows fades", "curvature/averages.py",
          "taken = finite & sent(torch.tensor(flags, device=\"cpu\"), like.device)", "pass",
          "layers/test_uses.py"),
    Fault("second moments fade in steps without a gradient", "curvature/lengths.py",
          "moved = torch.where(present, moved, older)", "pass",
          "core/test_plan.py -k keeps_all_bits"),
    Fault("second moments that begin late count as after one step", "curvature/lengths.py",
          "moved = torch.where(older > 0, moved, share.measured * adam.all2)", "pass",
          "curvature/test_lengths.py optim/test_bases.py"),
    Fault("a direction across the momentum is as long as it likes", "curvature/lengths.py",
          "(share.norms * _LEAST_COSINE)", "(share.norms * 0)", "curvature/test_lengths.py"),
    Fault("SGD's fall has the weight's rate for biases, too", "curvature/lengths.py",
          "weighed = _in_last(momenta, shares.sqrt())", "pass", "curvature/test_lengths.py"),
    Fault("the inner roots are left out of a direction", "curvature/rules.py",
          "white = products.between(left, gradients, right.mT if a.dim() == 3 else right)",
          "white = gradients.clone()", "curvature/test_rules.py -k dense_factors"),
    Fault("inner roots are rounded", "curvature/rules.py",
          "left, right = g.to(gradients.dtype), a.to(gradients.dtype)",
          "left, right = (x.bfloat16() if group.in_half else x for x in (g, a))",
          "curvature/test_rules.py -k bfloat16_products"),
    Fault("a failed decomposition overwrites the older state", "curvature/refresh.py",
          "new = torch.where(is_good, new, torch.cat(states))", "pass",
          "curvature/test_refresh.py -k older"),
    # ---- comm ----
    Fault("of an odd number of ranks one is not added", "comm/ranks.py",
          "rows[:half] += rows[count - half : count]", "rows[:half] += rows[half : 2 * half]",
          "core/test_distribution.py -k come_later"),
    Fault("bytes that a rank keeps count as received", "comm/ranks.py",
          "(sum(sizes_in) - sizes_in[self.rank]) * item", "sum(sizes_in) * item",
          "plan/test_account.py -k test_ranks"),
    Fault("tensors of several ranks change places when they are collected", "comm/ranks.py",
          "incoming[x.source].append(", "incoming[x.source].insert(0, ",
          "core/test_rank_checkpoints.py -k other_ranks_go_on"),
    Fault("ranks that differ are not told so", "agree.py",
          "return world * int(squares) == int(total) ** 2", "return True",
          "comm/test_status.py -k differs_is_named"),
    Fault("weights that differ in their high bits alone count as equal", "agree.py",
          "(total ^ total >> 20 ^ total >> 40) & _BITS", "total & _BITS",
          "core/test_failures.py -k 'otherwise and bits'"),
    Fault("two copies of a shard are both sent", "plan/facts.py",
          "self.replicas[source] == self.replicas[to] and bool", "bool",
          "comm/test_sharding.py -k 'one_process and four'"),
    # ---- plan ----
    Fault("layers are balanced in the model's order", "plan/assignment.py",
          "for i in sorted(range(len(costs)), key=lambda i: -costs[i]):",
          "for i in range(len(costs)):", "plan/test_assignment.py"),
    Fault("a factor that failed is not decomposed with more care", "curvature/refresh.py",
          "if again:", "if False:", "curvature/test_refresh.py"),
    Fault("the wide side of an adapter has a whole factor", "plan/facts.py",
          "return min(WIDEST, max(_SMALL, _NARROW * min(inputs, outputs) - 1))", "return WIDEST",
          "core/test_coverage.py -k adapter"),
    Fault("the extra step of late layers does not move on", "plan/schedule.py",
          "place == (1 + turn) % gathering", "place == 1 % gathering",
          "core/test_distribution.py -k at_last"),
    Fault("ranks exchange numbers in each step", "plan/schedule.py",
          "return due, refreshed, min(coming)", "return due or frozenset(), refreshed, step + 1",
          "core/test_distribution.py -k exchange_nothing"),
    Fault("a late layer is refreshed in its slot alone", "preconditioner.py",
          "if name in refreshed or not x.has_state", "if name in refreshed",
          "core/test_distribution.py -k comes_late"),
    # ---- core ----
    Fault("a rank that lacks a gradient is not named", "exchange.py",
          "if not 0 < len(without) < self._ranks.world:", "if True:",
          "core/test_failures.py -k 'otherwise and gradient'"),
    Fault("gradients are compared in steps that gather alone", "exchange.py",
          "if not self.graded or self.graded[-1][1] != graded:", "if not self.graded:",
          "core/test_distribution.py -k one_rank_lacks"),
    Fault("a layer has an average on the ranks alone that saw it", "exchange.py",
          ".has_average = True", ".has_average = layer in capture._sums.of_layer",
          "core/test_distribution.py -k expert"),
    Fault("all layers gather in each step", "preconditioner.py",
          "self.capture.arm(gathers if number == self.steps else None, ",
          "self.capture.arm(registry.layers.values(), ",
          "core/test_distribution.py -k exchange_nothing"),
    Fault("ranks that begin with other weights go on", "exchange.py",
          "if not self.alone and not self.proven:", "if False:",
          "core/test_failures.py -k 'otherwise and bits'"),
    Fault("all ranks draw the same labels", "reports.py", "seed = self.steps, self.ranks.rank, ",
          "seed = self.steps, 0, ", "capture/test_fisher.py -k 'two_ranks or follow_from'"),
    Fault("a skipped module's children are covered", "model.py",
          "skips.update((child, pattern) for child in module.modules())",
          "skips[module] = pattern", "core/test_coverage.py -k skip_layers"),
    Fault("the clip lengthens short steps", "compiled.py", ".sqrt_().clamp_(max=1)",
          ".sqrt_()", "curvature/test_exactness.py -k clip_bounds"),
    Fault("a parameter without a gradient is stepped", "bases.py",
          "moved = places if present is None else [i for i in places if present[i]]",
          "moved = places", "core/test_plan.py -k keeps_all_bits"),
    Fault("a schedule of a group stays at its first value", "options.py",
          "if schedule is None else schedule(step))", "if schedule is None else schedule(0))",
          "core/test_options.py -k callable_in_a_group"),
    Fault("a load begins to count steps anew", "checkpoint.py",
          "kfac.resume(max(steps, default=0))", "kfac.resume(0)",
          "optim/test_checkpoint.py -k every_point"),
    Fault("factors of another convention are taken over", "checkpoint.py",
          "same = flags.convention == _convention(kfac)", "same = True",
          "capture/test_hooks.py -k another_convention"),
    Fault("consolidation leaves out other ranks' momenta", "checkpoint.py",
          "if sources[p] != to:", "if False:", "core/test_rank_checkpoints.py -k another_number"),
    Fault("a load on one rank alone goes on", "preconditioner.py",
          "self.status.exchange(self.capture, report, self.steps, loads=True)", "report",
          "comm/test_status.py -k load_on_one_rank"),
    # ---- optim ----
    Fault("a scaler calls the step with scaled gradients", "optimizer.py",
          "self._step_supports_amp_scaling = False", "self._step_supports_amp_scaling = True",
          "optim/test_mixin.py -k skipped_step"),
    Fault("hooks fire twice once a plain base was built", "optimizer.py",
          'if getattr(step, "hooked", False):', "if False:", "optim/test_mixin.py -k step_hooks"),
    Fault("zero_grad keeps what has gathered", "optimizer.py", "self.preconditioner.discard()",
          "pass", "optim/test_mixin.py -k zero_grad_drops"),
    Fault("a step leaves other gradients behind", "bases.py",
          "        for p, gradient in former:\n            p.grad = gradient\n", "        pass\n",
          "optim/test_mixin.py -k grad_is_left"),
    Fault("directions follow Adam's momentum without its look ahead", "bases.py",
          "return torch._foreach_lerp(gradients, momenta, beta)", "return momenta",
          "curvature/test_rules.py -k bases_own"),
    Fault("maximize descends", "bases.py", "        if up:\n", "        if False:\n",
          "optim/test_bases.py -k maximizing"),
    Fault("second moments of a plain checkpoint are lost", "bases.py",
          "stack.former = stack.stacked(parts_here(former))", "pass",
          "optim/test_bases.py -k moments_and_counts"),
    Fault("the trust ratio of a weight of zero is zero", "lamb.py",
          "torch.where((p_norm != 0) & (u_norm != 0), p_norm / u_norm, 1.0)", "p_norm / u_norm",
          "optim/test_lamb.py"),
    # ---- tools ----
    Fault("the command line exits with 0 where nothing fits", "tools/app.py",
          "if planned.best is None:", "if False:", "tools/test_app.py"),
    Fault("a backward pass costs as much as a forward pass", "tools/passes.py", "_BACKWARD = 2 ",
          "_BACKWARD = 1 ", "tools/test_planner.py -k operations"),
)
# fmt: on


def run_tests(tree: Path, arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest in a tree; return its exit status, and the ids of the tests that failed."""
    options = ["-q", "-p", "no:cacheprovider", "-rfE", "--hypothesis-profile=faults"]
    with (tree / "pytest.txt").open("w+") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=said,
            stderr=said,
            start_new_session=True,  # ranks that tests have started end with it
        )
        try:
            status = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return 1, [HANG]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        said.seek(0)
        return status, re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said.read(), re.M)


def outcome(tree: Path, fault: Fault) -> str:
    """Plant one fault; return the test that caught it, or why there is none."""
    path = tree / "kaisa_optim" / fault.file
    text = path.read_text() if path.exists() else ""
    if text.count(fault.old) != 1:
        return f"ERROR: {fault.file} has {fault.old!r} {text.count(fault.old)} times, not once"
    tests = [f"tests/{x}" if x.endswith(".py") else x for x in shlex.split(fault.tests)]
    path.write_text(text.replace(fault.old, fault.new))
    try:
        status, failed = run_tests(tree, ["-x", *tests])
    finally:
        path.write_text(text)
    if status == 0:
        return MISSED
    return failed[0] if status == 1 and failed else f"ERROR: pytest ended with {status}"


def main() -> int:
    """Plant the faults, print a table, keep the results; return 1 unless all are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="text in the file's name or in the behaviour")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "faults.json")
    asked = parser.parse_args()
    chosen = [x for x in FAULTS if asked.only in f"{x.file}: {x.behaviour}"]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        for fault in chosen:
            begun = time.monotonic()
            found[fault.behaviour] = outcome(tree, fault)
            seconds = f"{time.monotonic() - begun:5.0f} s"
            print(seconds, f"{fault.file}: {fault.behaviour}", found[fault.behaviour], sep="  ")
        # A test that fails without a fault catches nothing.
        caught = sorted({x for x in found.values() if x.startswith("tests/")})
        _, broken = run_tests(tree, caught) if caught else (0, [])
    for behaviour, test in found.items():
        if test in broken:
            found[behaviour] = f"ERROR: {test} fails without the fault"
            print(f"{behaviour}: {found[behaviour]}")
    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    results = {x.behaviour: (kept | found).get(x.behaviour, "not run") for x in FAULTS}
    asked.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    wrong = [x for x in found.values() if x == MISSED or x.startswith("ERROR")]
    print(f"{len(found) - len(wrong)} of {len(found)} faults are caught")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
