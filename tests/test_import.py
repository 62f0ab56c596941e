"""What an import costs: no warning, and none of the libraries that take seconds; each in a fresh process."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import contextfold

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "safetensors.torch",
    "huggingface_hub",
    "scipy",
    "peft",
    "matplotlib",
    "pyarrow",
    "ray",
)
"""Packages whose import is felt, or that only some commands need."""

LOADED = f"""
import sys
print([name for name in {HEAVY} if name in sys.modules])
"""


def fresh(code: str, *arguments: str) -> list[str]:
    """The lines that the code prints, every warning an error."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_package_imports_none_of_them_and_warns_of_nothing() -> None:
    assert fresh("import contextfold; dir(contextfold); contextfold.__version__" + LOADED) == ["[]"]


def test_the_oracle_sees_an_import() -> None:
    assert fresh("import numpy" + LOADED) == ["['numpy']"]


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_command_line_says_what_it_is_without_them(argument: str) -> None:
    lines = fresh(
        "from contextfold.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
        + LOADED,
        argument,
    )
    assert lines[-1] == "[]"
    if argument == "--version":
        assert lines[:-1] == [f"contextfold {version('contextfold')}"]


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    assert sorted(contextfold.__all__) == sorted(set(contextfold.__all__))
    assert set(contextfold.__all__) == set(contextfold._HOME)
    for name in contextfold.__all__:
        assert getattr(contextfold, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        contextfold.magic  # noqa: B018


def test_the_version_is_written_in_one_way() -> None:
    assert contextfold.__version__ == version("contextfold")


def test_what_a_module_says_it_has_is_there():
    names = ["contextfold", *(m.name for m in pkgutil.walk_packages(contextfold.__path__, "contextfold."))]
    lacking = [
        f"{name}.{each}"
        for name in names
        if not name.endswith("__main__")
        for module in (importlib.import_module(name),)
        for each in getattr(module, "__all__", ())
        if not hasattr(module, each)
    ]
    assert len(names) > 100
    assert lacking == []
