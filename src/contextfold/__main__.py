"""Where a command begins: as little as can be, before an interrupt is answered in a line."""

from __future__ import annotations

import sys

__all__ = ["main"]

INTERRUPTED = 130


def main() -> None:
    """`contextfold`, and `python -m contextfold`, as `torchrun -m` starts it."""
    try:
        from contextfold.cli import main as run

        run()
    except KeyboardInterrupt:  # while modules were imported, or an error was told
        sys.stderr.write("interrupted; the model and all files are as they were\n")
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
