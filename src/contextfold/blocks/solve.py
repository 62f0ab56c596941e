"""Exact patches for described blocks: plan by the calculus, solve by the rules, prove by running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version

import torch
from torch import Tensor, nn

from contextfold.anatomy import first_output, first_tensor, weights_digest
from contextfold.blocks.describe import UserBlock
from contextfold.blocks.trace import Trace, matrix, trace
from contextfold.calculus import Affine, Bias, Demand, Given, Kind, Normalise, Scale, Step, Way
from contextfold.errors import InputError, NotControllable, PatchMismatch, ProbeFailed
from contextfold.lowrank import LowRank
from contextfold.outcomes import Finding, Outcome
from contextfold.overlays import Overlay, Written, lending
from contextfold.patch import BiasEdit, Edit, Header, MatrixEdit, Patch, ScaleEdit, Site
from contextfold.rules import (
    Choice,
    InputWeight,
    OutputBias,
    OutputScale,
    OutputWeight,
    PostNormBias,
    choose,
    refit_scale,
)

__all__ = ["BlockReport", "FoldedBlocks", "fold_blocks", "patched"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error per dtype within which a block must give what its description says."""

ACTION = Callable[[], object]


@dataclass(frozen=True)
class BlockReport:
    """How one described block was met."""

    name: str
    rules: tuple[str, ...]
    relative_error: float
    """`‖y − y_C‖ / ‖y_C‖` of the block as it ran with the edits written."""
    unpatched_error: float
    """The same with the lower blocks patched and this one not."""
    condition: float
    findings: tuple[Finding, ...]


@dataclass(frozen=True, eq=False)
class FoldedBlocks:
    """A patch for described blocks and a report on each."""

    patch: Patch
    blocks: tuple[BlockReport, ...]


@torch.no_grad()
def fold_blocks(
    model: nn.Module,
    blocks: Sequence[UserBlock],
    with_context: ACTION,
    without: ACTION,
    *,
    last: int = 1,
    rules: Sequence[str] = (),
) -> FoldedBlocks:
    """A patch that makes each block give, without the context, what it gave with it, at the last positions.

    Arguments:
        model: the module that owns the blocks, or the one block itself.
        blocks: in the order in which they run; each is solved under the edits of those before it.
        with_context, without: run the model once, on one sequence, with the context and without it. Called
            several times; must give the same every time.
        last: how many of the last positions the patch must meet at once.
        rules: rules asked for by name; the calculus chooses what is left open.

    The model is unchanged. Raises `NoWay` when the calculus says no, `NotControllable` when the data do, and
    `ProbeFailed` when a block does not give what its description says.
    """
    if last < 1:
        raise InputError(f"last must be at least 1, met {last}")
    names = _names(model, blocks)
    choices = [choose(block.expression, last, rules) for block in blocks]
    wanted = [_record(block, with_context, last) for block in blocks]
    folds = [
        _Fold(block, name, index, choice, measured)
        for index, (block, name, choice, measured) in enumerate(zip(blocks, names, choices, wanted, strict=True))
    ]
    fingerprint = weights_digest(model)
    overlay = Written(model, [site for fold in folds for site in fold.sites()])
    with overlay:
        for fold in folds:
            fold.solve(_record(fold.block, without, last), overlay)
            fold.prove(_record(fold.block, without, last))
    return FoldedBlocks(
        Patch(_header(model, fingerprint, choices, last), overlay.edits), tuple(fold.report() for fold in folds)
    )


@contextmanager
def patched(model: nn.Module, patch: Patch) -> Iterator[nn.Module]:
    """The model with `patch` written into its weights; on exit the originals are back, bit for bit.

    Raises `PatchMismatch` when the patch was made for other weights.
    """
    if weights_digest(model) != patch.header.fingerprint:
        raise PatchMismatch("the patch was made for other weights; fold again on this model")
    with lending(Written, model, patch.edits):
        yield model


def _names(model: nn.Module, blocks: Sequence[UserBlock]) -> list[str]:
    if not blocks:
        raise InputError("no block was described, so there is nothing to fold")
    known = {module: name for name, module in model.named_modules()}
    missing = [type(b.block).__name__ for b in blocks if b.block not in known]
    if missing:
        raise InputError(f"{missing[0]} is not part of {type(model).__name__}")
    return [known[block.block] for block in blocks]


def _header(model: nn.Module, fingerprint: str, choices: Sequence[Choice], last: int) -> Header:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    rows = tuple(range(-last, 0))
    return Header(
        kind="blocks", model_type=type(model).__name__, fingerprint=fingerprint, positions=rows, exact_at=rows,
        tokens_digest="", context_digest="", model_dtype=dtype, factor_dtype="float64", attention="",
        materialised=True, plan=tuple(dict.fromkeys(name for choice in choices for name in choice.names)),
        versions={name: version(name) for name in ("contextfold", "torch")},
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Measured:
    """Given values and output of a block at the last positions, `(n, ·)` each."""

    values: Mapping[Given, Tensor]
    y: Tensor


def _record(block: UserBlock, run: ACTION, last: int) -> _Measured:
    seen: dict[Given | str, Tensor] = {}

    def keep(key: Given | str, value: Tensor) -> None:
        if value.dim() not in (2, 3) or (value.dim() == 3 and value.shape[0] != 1) or value.shape[-2] < last:
            raise InputError(f"expected (1, n, ·) or (n, ·) with n >= {last}, met {tuple(value.shape)}")
        seen[key] = value.reshape(-1, value.shape[-1])[-last:].detach().clone()

    with ExitStack() as stack:
        for given in block.given:
            module = block.block.get_submodule(given.module)
            if given.after:
                handle = module.register_forward_hook(lambda _m, _a, out, key=given: keep(key, first_output(out)))
            else:
                handle = module.register_forward_pre_hook(
                    lambda _m, args, kwargs, key=given: keep(key, first_tensor(args, kwargs)), with_kwargs=True
                )
            stack.callback(handle.remove)
        after = block.block.register_forward_hook(lambda _m, _a, out: keep("y", first_output(out)))
        stack.callback(after.remove)
        run()
    missing = [given.name for given in block.given if given not in seen] + (["y"] if "y" not in seen else [])
    if missing:
        raise InputError(f"{', '.join(missing)} was not seen: the run does not call the module that the block names")
    return _Measured({given: seen[given] for given in block.given}, seen["y"])


@dataclass(eq=False)
class _Fold:
    """Solves one block, way by way; every step is traced anew under the edits written so far."""

    block: UserBlock
    name: str
    index: int
    choice: Choice
    wanted: _Measured
    findings: list[Finding] = field(default_factory=list)
    condition: float = 1.0
    unpatched: float = float("nan")
    error: float = float("nan")

    def sites(self) -> list[Site]:
        ways = [way for way in (self.choice.plan.inner, self.choice.plan.outer) if way is not None]
        return [self.site(step) for way in ways for step in way.steps]

    def site(self, step: Step) -> Site:
        address = step.stage.address
        assert address is not None
        module = ".".join(part for part in (self.name, address[0]) if part)
        transposed = isinstance(step.stage, Affine) and step.stage.transposed
        return Site(self.index, module, address[1], transposed)

    def solve(self, measured: _Measured, overlay: Overlay) -> None:
        self.measured, self.overlay = measured, overlay
        self.in_context = trace(self.block.block, self.block.expression, self.wanted.values)
        self._same("with the context", self.wanted.y, self.in_context.left[()])
        self._same("without the context", measured.y, self.now().left[()])
        self.unpatched = _distance(measured.y, self.wanted.y)
        plan = self.choice.plan
        if plan.inner is not None:
            self._inner(plan.inner, optional=plan.outer is not None)
        if plan.outer is not None:
            self._carry_out(plan.outer)

    def now(self) -> Trace:
        return trace(self.block.block, self.block.expression, self.measured.values)

    def _same(self, when: str, met: Tensor, rebuilt: Tensor) -> None:
        error, limit = _distance(rebuilt, met), TOLERANCE.get(met.dtype, 0.0)
        if not error <= limit:
            raise ProbeFailed(
                f"block {self.name or 'itself'}, {when}: the description gives another output than the block, "
                f"relative error {error:.2g}, limit {limit:.2g}; compare it with the block's forward"
            )

    def _inner(self, way: Way, optional: bool) -> None:
        try:
            self._carry_out(way)
        except NotControllable as error:
            if not optional or error.findings[0].outcome is not Outcome.ZERO_SOURCE:
                raise
            # Nothing can be read off a zero vector; the outer way alone is exact too, if what it reads allows it.
            self.findings.append(Finding(Outcome.INNER_SKIPPED, self.name, "norm of the source", 0.0, 0.0))

    def _carry_out(self, way: Way) -> None:
        if way.kind in (Kind.WEIGHT_AND_SCALE, Kind.BIAS_AND_SCALE):
            self._through_norm(*way.steps)
            return
        for step in way.steps:
            now = self.now()
            if step.demand is Demand.MATCH:
                self._put(step, now, self.in_context.left[step.path])
            else:
                self._put(step, now, now.wanted(step.anchor, step.path, self.wanted.y, self.in_context))

    def _put(self, step: Step, now: Trace, target: Tensor) -> None:
        """Edit one stage so that it gives `target (n, ·)` on what enters it now."""
        entered, left = now.entered[step.path], now.left[step.path]
        edit: Edit
        match step.stage:
            case Affine() as stage:
                edit = MatrixEdit(self._matrix(step, stage, entered, left, target))
            case Bias():
                edit = BiasEdit(OutputBias().solve(self.name, left, target).delta)
            case Scale(offset=offset):
                m = self._scale(step)
                edit = ScaleEdit(m, OutputScale().solve(self.name, entered, target, m).scale, offset)
            case _:
                raise InputError(f"{type(step.stage).__name__} cannot be edited in a block of your own")
        self.overlay.put(self.site(step), edit)

    def _matrix(self, step: Step, stage: Affine, entered: Tensor, left: Tensor, target: Tensor) -> LowRank:
        if step.demand is Demand.MATCH:
            steering = InputWeight().solve(self.name, entered, self.in_context.entered[step.path])
            self._note(steering.condition, steering.findings)
            return steering.delta(matrix(self.block.block, stage))
        solution = OutputWeight().solve(self.name, entered, left, target)
        self._note(solution.condition, solution.findings)
        return solution.delta

    def _through_norm(self, first: Step, second: Step) -> None:
        """Section 4 of the equation sheet: aim at a direction before the norm, then set the scale behind it."""
        now = self.now()
        g = now.wanted(second.anchor, second.path, self.wanted.y, self.in_context)
        if g.shape[0] > 1:
            raise InputError("through a norm, one position at a time is solved here; pass last=1")
        *chain, behind = second.path
        below = next(i for i in reversed(range(behind)) if self._normalises((*chain, i)))
        stage = self.block.expression.at((*chain, below))
        assert isinstance(stage, Normalise)
        assert self.choice.reference is not None
        p = now.entered[*chain, below]
        aim = PostNormBias(self.choice.reference).solve(self.name, p, g, self._scale(second), stage.eps)
        self.findings += aim.findings
        if bool((aim.delta != 0).any()):
            child = first.path[: len(chain) + 1]
            target = now.back(tuple(chain), below - 1, child[-1], p + aim.delta)
            self._put(first, now, now.traced_back(child, first.path, target))
        u = self.now().left[*chain, below][0]
        dtype = self.measured.y.dtype
        scale = refit_scale(aim.scale, u, g[0], torch.finfo(dtype).eps) if bool((aim.delta != 0).any()) else aim.scale
        assert isinstance(second.stage, Scale)
        self.overlay.put(self.site(second), ScaleEdit(self._scale(second), scale, second.stage.offset))

    def _normalises(self, path: tuple[int, ...]) -> bool:
        return isinstance(self.block.expression.at(path), Normalise)

    def _scale(self, step: Step) -> Tensor:
        assert isinstance(step.stage, Scale)
        stored = self.block.block.get_submodule(step.stage.module).get_parameter(step.stage.parameter)
        return stored.data.double() + step.stage.offset

    def _note(self, condition: float, findings: Sequence[Finding]) -> None:
        self.condition = max(self.condition, condition)
        self.findings += findings

    def prove(self, measured: _Measured) -> None:
        """The block as it runs now, edits written. A given value that moved was not given."""
        self.error = _distance(measured.y, self.wanted.y)
        moved = [
            given.name
            for given, value in measured.values.items()
            if _distance(value, self.measured.values[given]) > TOLERANCE.get(value.dtype, 0.0)
        ]
        if moved:
            raise ProbeFailed(f"block {self.name or 'itself'}: {', '.join(moved)} changed when the block was edited")

    def report(self) -> BlockReport:
        return BlockReport(
            self.name, self.choice.names, self.error, self.unpatched, self.condition, tuple(self.findings)
        )


def _distance(met: Tensor, wanted: Tensor) -> float:
    """`‖met − wanted‖ / ‖wanted‖` in float64."""
    size = wanted.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((met.double() - wanted.double()).norm() / size)
