"""The end of a campaign: its file, and an exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from contextfold.files import write_json
from contextfold.versions import versions

__all__ = ["finish"]


def finish(out: Path, begun: float, rows: Sequence[Mapping[str, Any]], **facts: Any) -> NoReturn:
    """Write `out`: `facts`, and the rows with how many are `wrong`. `begun`: `time.monotonic()` at the start."""
    wrong = sum(bool(row["wrong"]) for row in rows)
    payload = {
        "command": " ".join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - begun),
        "versions": versions(),
        **facts,
        "wrong": wrong,
        "rows": list(rows),
    }
    write_json(out, payload)
    raise SystemExit(1 if wrong else 0)
