"""A patched model in lm-evaluation-harness: its tasks, its scores, our weights.

The harness is imported where it is needed, since it brings many packages (extra `eval`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from contextfold.anatomy import Bound
from contextfold.errors import InputError
from contextfold.patch import Patch
from contextfold.runtime import applied

__all__ = ["evaluating"]


@contextmanager
def evaluating(
    model: Bound | nn.Module, tokenizer: Any, patch: Patch | None = None, *, batch_size: int = 1, **settings: Any
) -> Iterator[Any]:
    """An `lm_eval` model that runs with `patch` for as long as the `with` lasts; without a patch, the model as it is.

        with evaluating(bound, tokenizer, patch) as lm:
            lm_eval.simple_evaluate(model=lm, tasks=["keeper"], task_manager=TaskManager(include_path="tasks"))

    The patch acts beside the weights, so a quantised or adapted model will do, and nothing of it changes. It replaces a
    context that stood before the prompt, so the prompts of a task have to begin with the tokens that the patch keeps
    (`Frame.kept` of a bake, the first token of a fold).

    Arguments:
        tokenizer: the model's, as transformers has it.
        batch_size: prompts that run together; memory grows with it.
        settings: what else `lm_eval.models.huggingface.HFLM` takes, e.g. `max_length`.

    Raises `InputError` when lm-eval is not installed, and `PatchMismatch` for a patch of another model.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise InputError(
            "evaluating needs the package lm-eval, which is not installed; run: pip install 'contextfold[eval]'"
        ) from error
    with ExitStack() as stack:
        plain = model.model if isinstance(model, Bound) else model
        patched = plain if patch is None else stack.enter_context(applied(model, patch))
        yield HFLM(pretrained=patched, tokenizer=tokenizer, backend="causal", batch_size=batch_size, **settings)
