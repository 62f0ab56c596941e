"""Commands that are disturbed while they run, and what is then left on the disk.

A trial lays an old artefact out, starts a command in a fork of a process that has imported everything and run nothing,
disturbs it at some moment, looks at what is there, and gives the same command again, undisturbed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT, OTHER = "abc def ghi ", "xyz uvw "
QUESTIONS = "what is p\nwhat is q\nwhat is r\nwhat is s\nwhat is t"
NOT_RESULTS = ("seconds", "solve_seconds", "peak_bytes")
"""Columns of a sweep that no two runs share."""

LONGEST = 120.0
"""Seconds after which a command is said to hang."""

DAY = 86_400.0


@dataclass(frozen=True)
class Work:
    """A command, and the artefact that it writes into the folder `place`."""

    name: str
    artefact: str
    arguments: Callable[[Path, Path, str], Sequence[object]]
    """From the folder of the inputs, the place, and the context."""
    old: bool = True
    """Whether there can be an older artefact under the same name."""


def _fold(home: Path, place: Path, context: str) -> Sequence[object]:
    asked = ("--context", context, "--query", "jkl mn", "--positions", "all", "--sites", "all")
    return ("fold", home / "model", *asked, "--out", place / "patch", "--json")


def _bake(home: Path, place: Path, context: str) -> Sequence[object]:
    asked = ("--queries", QUESTIONS, "--held-out", "what is p", "--tokens", 4, "--no-controls")
    return ("bake", home / "model", "--context", context, *asked, "--out", place / "patch", "--json")


def _export(target: str) -> Callable[[Path, Path, str], Sequence[object]]:
    def arguments(home: Path, place: Path, context: str) -> Sequence[object]:
        patch = home / ("other" if context == OTHER else "patch")
        return ("export", home / "model", patch, "--to", target, "--out", place / "folder", "--json")

    return arguments


def _sweep(home: Path, place: Path, context: str) -> Sequence[object]:
    jobs = home / ("other.yaml" if context == OTHER else "jobs.yaml")
    return ("sweep", jobs, "--out", place / "rows.parquet", "--json")


WORKS = (
    Work("convert", "contextfold/models", lambda home, place, _: ("inspect", home / "tiny.gguf", "--json"), old=False),
    Work("fold", "patch", _fold),
    Work("bake", "patch", _bake),
    Work("export peft", "folder", _export("peft")),
    Work("export checkpoint", "folder", _export("checkpoint")),
    Work("sweep", "rows.parquet", _sweep),
)


def environment(place: Path) -> dict[str, str]:
    """The cache of converted models is in the place, too."""
    return {"XDG_CACHE_HOME": str(place), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


# ---------------------------------------------------------------------------------------------- what is on the disk


def digest(path: Path) -> str | None:
    """Of all bytes of a file or a folder; of a table, of its rows without times. None where nothing is."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as parquet

        try:
            rows = parquet.read_table(path, use_threads=False).to_pylist()
        except (OSError, ValueError) as error:
            return f"unreadable: {error}"
        return _sha(repr([{k: v for k, v in row.items() if k not in NOT_RESULTS} for row in rows]).encode())
    if path.is_file():
        return _sha(path.read_bytes())
    names = sorted(each for each in path.rglob("*") if each.is_file() and not _hidden(each.relative_to(path)))
    content = [(str(each.relative_to(path)), _sha(each.read_bytes())) for each in names]
    return _sha(repr(content).encode()) if names else None


def leftovers(place: Path, artefact: str) -> list[str]:
    """What lies in the place besides the artefact, by the ends of the names."""
    others = (each for each in place.iterdir() if each.name != artefact.split("/")[0])
    hidden = (each for each in (place / artefact).glob(".*")) if artefact.endswith("models") else ()
    return sorted({"".join(Path(each.name).suffixes[-1:]) or each.name for each in (*others, *hidden)})


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------------------------ running a command


@dataclass
class Running:
    """A command on its way."""

    pid: int
    started: float
    code: int | None = None

    def over(self) -> bool:
        """Whether it has ended; asks the system once."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait_until(self, moment: float) -> None:
        """Until then, or its end."""
        while time.monotonic() < moment and not self.over():
            time.sleep(0.001)

    def wait(self, seconds: float = LONGEST) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None if it hangs, which ends it."""
        end = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -signal.SIGKILL
                return None
            time.sleep(0.002)
        return self.code


def forked(arguments: Sequence[object], log: Path, values: dict[str, str], first: Callable[[], None]) -> Running:
    """The command line in a fork of this process; `first` runs in it before. Says everything into `log`."""
    started = time.monotonic()
    pid = os.fork()
    if pid:
        return Running(pid, started)
    code = 1
    try:
        _into(log)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(values)
        sys.argv = ["contextfold", *map(str, arguments)]
        from contextfold.__main__ import main

        first()
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (what Python does with it, and then this process must not go on)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def started(arguments: Sequence[object], log: Path, values: dict[str, str], limit: int | None = None) -> Running:
    """The command as a user gives it, in a process of its own; `limit` in bytes of address space."""

    def first() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [sys.executable, "-m", "contextfold", *map(str, arguments)]
    with log.open("wb") as errors:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **values}, preexec_fn=first
        )
    process.returncode = 0  # waited for here, and not by it
    return Running(process.pid, begun)


def _into(log: Path) -> None:
    with log.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def said(log: Path) -> list[str]:
    """Lines of text that the command left on standard error, without bars and spinners."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("Writing ", "Loading "))]


# --------------------------------------------------------------------------------------------------------- the faults


@dataclass
class Stage:
    """Where a trial takes place."""

    work: Work
    place: Path
    log: Path
    again: Callable[[float], Running]
    """Starts the same command once more, its clock ahead by so many seconds."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    others: list[Running] = field(default_factory=list)


Fault = Callable[[Stage, Running, float], None]
"""Disturbs a running command; the number is a random one from 0 to 1."""


def kill(stage: Stage, running: Running, chance: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGKILL)


def interrupt(stage: Stage, running: Running, chance: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGINT)


def full(stage: Stage, running: Running, chance: float) -> None:
    """Something else fills the disk, all but up to 64 KiB."""
    ballast = stage.place / "ballast"
    stage.undo.append(lambda: ballast.unlink(missing_ok=True))
    block = b"\0" * 65536
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(block):
            pass
    with contextlib.suppress(OSError):
        os.truncate(ballast, max(0, ballast.stat().st_size - int(chance * len(block))))


def readonly(stage: Stage, running: Running, chance: float) -> None:
    """The file system turns read-only, as soon as no file is open for writing."""
    stage.undo.append(lambda: remount(stage.place, "rw"))
    while not running.over():
        if remount(stage.place, "ro"):
            return


def vanished(stage: Stage, running: Running, chance: float) -> None:
    """All that is kept beside the artefact goes: unfinished work, caches, hidden siblings."""
    if stage.work.name == "convert":
        shutil.rmtree(stage.place / "contextfold", ignore_errors=True)
    for each in list(stage.place.iterdir()):
        if each.is_dir() and (each.name.startswith(".") or each.name.endswith(".work")):
            shutil.rmtree(each, ignore_errors=True)


def clock(stage: Stage, running: Running, chance: float) -> None:
    """All files of the place are now from another time, and the same command starts on a machine two days ahead."""
    then = time.time() + (chance - 0.5) * 2000 * DAY
    for each in (stage.place, *stage.place.rglob("*")):
        with contextlib.suppress(OSError):
            os.utime(each, (then, then))
    stage.others.append(stage.again(2 * DAY))


def two(stage: Stage, running: Running, chance: float) -> None:
    """The same command once more, at the same time."""
    stage.others.append(stage.again(0.0))


FAULTS: dict[str, Fault] = {
    "kill -9": kill,
    "SIGINT": interrupt,
    "full disk": full,
    "read-only": readonly,
    "vanished": vanished,
    "wrong clock": clock,
    "two at once": two,
    "memory limit": lambda *_: None,  # set before the command begins
}

MOUNTED = ("full disk", "read-only")
"""Faults that need a file system of their own."""


def mounted(place: Path, size: str = "32m") -> bool:
    """A file system in memory, where the system lets one be made."""
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False, capture_output=True
    ).returncode == 0  # fmt: skip


def remount(place: Path, mode: str) -> bool:
    done = subprocess.run(["mount", "-o", f"remount,{mode}", str(place)], check=False, capture_output=True)
    return done.returncode == 0


def limited(share: float, growth: int) -> Callable[[], None]:
    """Address space up to what the process has now and that share of what the command takes besides."""

    def first() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + int(share * growth)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    return first


def ahead(seconds: float, after: float) -> Callable[[], None]:
    """A clock of the wall that is right at first and then jumps."""

    def first() -> None:
        real, begun = time.time, time.monotonic()
        time.time = lambda: real() + (seconds if time.monotonic() - begun > after else 0.0)

    return first


@contextlib.contextmanager
def laid(place: Path, mount: bool) -> Iterator[bool]:
    """An empty place, and whether it is a file system of its own, which it is if asked where the system allows it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    done = mount and mounted(place)
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(place)], check=True)
        shutil.rmtree(place, ignore_errors=True)


def prepare(home: Path) -> None:
    """The inputs of all commands; run it in a fork, since it works with models."""
    import torch

    import ggufs
    import tiny

    for name, model_type in (("model", "llama"), ("gemma", "gemma3_text")):
        tiny.letters().save_pretrained(home / name)
        tiny.build(model_type, torch.float32).save_pretrained(home / name)
    ggufs.write(home / "tiny.gguf")
    for name, context in (("jobs.yaml", CONTEXT), ("other.yaml", OTHER)):
        (home / name).write_text(
            f"models: [model]\ncontexts:\n  one: '{context}'\nfold:\n  queries: [' ijk', ' lm']\n"
            "bake:\n  estimators: [output]\n  queries: [what is p, what is q, what is r]\n"
            "  held_out: [what is s]\n  tokens: 2\n  controls: false\n"
        )
