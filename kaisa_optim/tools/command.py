"""The console script ``kaisa``; without its libraries, it says what to install."""

from __future__ import annotations

import importlib
import io
import sys


def main() -> None:
    """Run the command line; exit with 2 where the extra ``tools`` is not installed."""
    try:
        app = importlib.import_module("kaisa_optim.tools.app")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"kaisa needs {error.name}: pip install 'kaisa_optim[tools]'; plans need no extra from "
            "Python, see kaisa_optim.tools.plan",
            file=sys.stderr,
        )
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII one; names may have any letter
        sys.stdout.reconfigure(errors="backslashreplace")
    app.app()


if __name__ == "__main__":
    main()
