"""What every model type has to show, measured once here and used by the tests and by the census."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from contextfold.anatomy import Block, Bound, DenseBlock, Family, bind
from contextfold.errors import NotControllable
from contextfold.fold import Folded, fold_token
from contextfold.runtime import Decoder, Run, applied, materialised, run, takes_positions

torch.set_num_threads(1)  # the models are tiny: more threads wait for each other

CONTEXT, QUERY = 9, 6
"""Tokens; together more than the zoo's sliding windows of 8."""

UNPATCHED = 1e-2
"""Least relative gap without a patch: below it, exactness would say nothing."""

EXACT = 1e-10
"""Of the unpatched gap, in float64 throughout."""

FLOAT32_INSIDE = 1e-6
"""The same where some operation of the forward computes in float32 whatever the model's dtype."""

ROUNDINGS = {torch.float32: 3.0, torch.bfloat16: 2.0}
"""In narrower dtypes, of what rounding does to the model's own in-context logits.

The run with the context, the run without it and the written weights are rounded once each. In bfloat16 the last of
these is made up for: edits are solved in float32, on the layers below as they were rounded.
"""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


NO_CACHE = {
    "cpmant": "its learned prompt is added again to every cached call",
    "recurrent_gemma": "its output holds no cache",
    "xlstm": "its cached state has another shape than its kernels take at these sizes",
}
"""Types whose unpatched model cannot continue from its own cache, at least at these sizes."""


@dataclass(frozen=True)
class Measured:
    """Gaps of one model type in one dtype, each as a fraction of the unpatched one."""

    anatomy: str
    family: str
    rules: tuple[str, ...]
    unpatched: float
    """Relative, `‖without − with‖ / ‖with‖` of the logits."""
    gaps: dict[str, float]
    """By way of applying: `written`, `action`, `batch`, and `cached` where the model has a cache."""
    rounding: float
    """Relative gap of the model's own in-context logits to those of the same weights in float64."""
    limit: float
    """Of `gaps`."""
    remarks: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max(self.gaps.values())


def tokens(model: nn.Module, count: int, seed: int) -> Tensor:
    size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, size - 10, (count,), generator=generator)


def gap(met: Tensor, wanted: Tensor) -> float:
    return float((met.double() - wanted.double()).norm() / wanted.double().norm())


WIDE = {"xglm": torch.float64}
"""Types that make a constant of the model's dtype in the default dtype, which overflows if that is narrower."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype for the duration of a `with`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure(model_type: str, dtype: torch.dtype = torch.float64, attention: str = "eager", seed: int = 3) -> Measured:
    """Fold a tiny model and compare: weights written, low-rank action, in a batch of two, and through the cache."""
    wide = WIDE.get(model_type, torch.float32) if dtype == torch.float64 else torch.float32
    model = zoo.build(model_type, dtype, attention)
    with default_dtype(wide):
        return measure_model(model, seed=seed)


def measure_model(model: nn.Module, family: Family | None = None, seed: int = 3) -> Measured:
    """The same for a given model, by the registered record or by `family`."""
    before = [p.clone() for p in model.parameters()]
    bound = bind(model, family)
    written, action = _folds(bound, seed)
    reduced, wanted = written.split.reduced, written.in_context
    unpatched = gap(run(model, reduced)[0], wanted)
    gaps = {}
    with materialised(bound, written.patch):
        gaps["written"] = gap(run(model, reduced)[0], wanted)
        gaps["batch"] = gap(_in_batch(model, reduced.ids, reduced.positions), wanted)
        cached = _through_cache(model, reduced.ids, reduced.positions)
        if cached is not None:
            gaps["cached"] = gap(cached, wanted)
    with applied(bound, action.patch):
        gaps["action"] = gap(run(model, reduced)[0], wanted)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "weights were not restored"
    rounding = own_rounding(model, written.split.full, wanted)
    if bound.dtype in ROUNDINGS:
        limit = ROUNDINGS[bound.dtype] * rounding / unpatched
    else:
        limit = FLOAT32_INSIDE if computes_in_float32(model, reduced.ids) else EXACT
    remarks = sorted({f.outcome.label for layer in written.layers for f in layer.findings})
    return Measured(
        anatomy(bound), bound.family.name, written.patch.header.plan, unpatched,
        {name: value / unpatched for name, value in gaps.items()}, rounding, limit, tuple(remarks),
    )  # fmt: skip


def own_rounding(model: nn.Module, full: Run, logits: Tensor) -> float:
    """How far rounding alone moves the in-context logits: the same weights, computed with in float64."""
    if logits.dtype == torch.float64:
        return 0.0
    with default_dtype(WIDE.get(model.config.model_type, torch.get_default_dtype())):
        return gap(logits, run(copy.deepcopy(model).double(), full)[0])


def _folds(bound: Bound, seed: int) -> tuple[Folded, Folded]:
    """A token that skips every expert cannot be steered, which is refused by name; then another one is taken."""
    for attempt in range(seed, seed + 5):
        context, query = tokens(bound.model, CONTEXT, attempt), tokens(bound.model, QUERY, attempt + 100)
        try:
            return fold_token(bound, context, query), fold_token(bound, context, query, written=False)
        except NotControllable:
            if bound.model_type != "zaya":
                raise
    raise AssertionError("no token could be steered")


def _in_batch(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    other = tokens(model, ids.numel(), 77)
    batch = torch.stack([ids, other])
    arguments: dict[str, Any] = {}
    if takes_positions(model):
        arguments["position_ids"] = positions.expand(2, -1)
    output = model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False, **arguments)
    return output.logits[0, -1]


def _through_cache(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor | None:
    """All but the last token, then the last; None when the model has no cache by that name."""
    if "cache" not in inspect.signature(model.forward).parameters or model.config.model_type in NO_CACHE:
        return None
    decoder = Decoder(model)
    decoder.extend(ids[:-1], positions[:-1])
    return decoder.extend(ids[-1:], positions[-1:])


class _Dtypes(TorchDispatchMode):
    """Which dtypes the operations of a forward give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.seen.add(out.dtype)
        return out


def computes_in_float32(model: nn.Module, ids: Tensor) -> bool:
    with _Dtypes() as dtypes:
        model(input_ids=ids[None], use_cache=False)
    return torch.float32 in dtypes.seen


def anatomy(bound: Bound) -> str:
    """Letters of the census over all blocks, `M` for a mixer that only its output map corrects."""
    return "+".join(sorted({_letter(block) for block in bound.blocks}))


def _letter(block: Block) -> str:
    if isinstance(block, DenseBlock) and not block.input_maps:
        return "M"
    if block.norm_outer is not None:
        return "E"
    if block.norm_post is not None:
        return "D" if block.norm_pre is None else "B"
    return "C" if any(reading.module is block.layer for reading in block.residual) else "A"


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
