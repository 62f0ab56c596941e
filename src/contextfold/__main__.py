"""Where a command begins: as little as can be, before an interrupt or a lack of memory is answered in a line."""

from __future__ import annotations

import sys

__all__ = ["main"]

FAILED, INTERRUPTED = 2, 130


def main() -> None:
    """`contextfold`, and `python -m contextfold`, as `torchrun -m` starts it."""
    try:
        from contextfold.cli import main as run

        run()
    except KeyboardInterrupt:  # while modules were imported, or an error was told
        sys.stderr.write("interrupted; the model and all files are as they were\n")
        raise SystemExit(INTERRUPTED) from None
    except MemoryError:  # the same
        sys.stderr.write("error: there is not enough memory to begin; close other programs\n")
        raise SystemExit(FAILED) from None


if __name__ == "__main__":
    main()
