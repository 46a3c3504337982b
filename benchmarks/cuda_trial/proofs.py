"""The tests that have a device: results, exactness, ranks, reruns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .parts import Settings

# With what else pytest is told: the former make their tensors where they need them.
TESTS = {
    "tests/integrations/test_cuda.py": [],
    "tests/curvature/test_exactness.py": ["--device", "{}"],
}
_NOTHING = 5  # pytest's code where no test was there to run
_WHAT_FAILED = re.compile(r"^(FAILED|ERROR|E  )")
_SAID = re.compile(r"\d+ (passed|failed|skipped|deselected)")


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    failed = []
    for tests, more in TESTS.items():
        found = _pytest(tests, [word.format(settings.device) for word in more], settings.rehearse)
        failed += [tests] if found["code"] not in (0, _NOTHING) else []
        yield {"tests": tests} | found
    if failed:
        raise RuntimeError(f"tests failed: {', '.join(failed)}")


def _pytest(tests: str, more: list[str], rehearse: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    count = min(8, os.cpu_count() or 1)
    command += ["-k", "first_value_is_exact"] if rehearse else ["-n", str(count)]
    # Asked for by cuBLAS, where all is to be the same in each run.
    there = os.environ | {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*command, *more, tests], env=there, text=True, capture_output=True, check=False
    )
    lines = done.stdout.splitlines()
    said = [line for line in lines if _SAID.search(line)]
    told = [line for line in lines if _WHAT_FAILED.match(line)]
    return {"said": said[-1] if said else "nothing", "code": done.returncode, "failures": told}
