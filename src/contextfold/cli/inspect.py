"""`contextfold inspect`: where the letters live, or what a patch file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contextfold.cli.common import Dtype, DtypeOption, JsonOption, bind_model, load_model, show_or_json, waiting
from contextfold.errors import InputError


def inspect(
    target: Annotated[str, typer.Argument(help="A model, or a patch file.")],
    dtype: DtypeOption = Dtype.float32,
    discovered: Annotated[
        bool,
        typer.Option(
            "--discover", help="Find the anatomy without its record, compare the two, and print a record to paste."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where the letters live in a model, proven on every block; or what a patch file holds."""
    from contextfold import inspection, patchfile, show

    path = Path(target)
    if path.suffix == ".safetensors":
        if discovered:
            raise InputError(f"--discover looks into a model, and {target} is a patch file; give a model")
        patch = patchfile.load(path)
        show_or_json(as_json, inspection.patch_json(patch), lambda: show.patch_table(patch))
        return
    if discovered:
        _discover(target, dtype, as_json)
        return
    bound = bind_model(load_model(target, dtype))
    show_or_json(as_json, inspection.anatomy_json(bound), lambda: show.anatomy_table(bound))


def _discover(target: str, dtype: Dtype, as_json: bool) -> None:
    from contextfold import inspection, show
    from contextfold.anatomy import bind
    from contextfold.anatomy.discover import discover, recorded

    model = load_model(target, dtype).model
    with waiting("discovering the anatomy"):
        found = bind(model, discover(model))
        record = recorded(model, found.model_type)
    show_or_json(as_json, inspection.discovery_json(found, record), lambda: show.discovery_view(found, record))
