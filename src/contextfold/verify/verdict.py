"""Steps -> a verdict: numbers, negative controls beside them, and one sentence that says what they mean."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from contextfold.files import plain
from contextfold.magnitudes import EDGES
from contextfold.notebook import card, short
from contextfold.verify.metrics import Comparison
from contextfold.verify.step import Step

__all__ = ["EXACT", "Verdict"]

EXACT = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest logit gap, as a fraction of the median unpatched gap, that still counts as exact in each dtype. Norms
compute in float32 in many families, which sets the first entry."""

CONTROL_FACTOR = 10.0
"""A negative control must miss by at least this many times the worst gap of the real patch."""

SCATTER_ALLOWANCE = 0.01
"""Fraction of tokens by which top-1 agreement may fall short of the model's agreement with itself."""


@dataclass(frozen=True)
class Verdict:
    """What a fold, or a suite of folds, proved. Gaps are in logits."""

    model: str
    dtype: torch.dtype
    rule: str
    fallback: str | None
    protocol: str
    """What the patched model saw, in words."""
    steps: tuple[Step, ...]
    receipt: Mapping[str, Any]

    def _gaps(self, way: str) -> list[float]:
        return [getattr(step, way).logit_gap for step in self.steps]

    def _matches(self, way: str) -> int:
        return sum(getattr(step, way).top1_match for step in self.steps)

    @property
    def worst_logit_gap(self) -> float:
        return max(self._gaps("written"))

    @property
    def unpatched_logit_gap(self) -> float:
        """Median over the tokens, without the patch."""
        return statistics.median(self._gaps("unpatched"))

    @property
    def controls(self) -> dict[str, dict[str, float]]:
        """Per control: tokens tried, top-1 matches, smallest and median gap."""
        names = dict.fromkeys(name for step in self.steps for name in step.controls)
        return {name: _control(step.controls[name] for step in self.steps if name in step.controls) for name in names}

    def reasons(self) -> list[str]:
        """Why the verdict is not `proven`; empty when it is."""
        found = []
        allowed = int(SCATTER_ALLOWANCE * len(self.steps))
        if self._matches("written") < self._matches("scatter") - allowed:
            found.append(
                f"top-1 agrees on {self._matches('written')} of {len(self.steps)} tokens, the model with itself on "
                f"{self._matches('scatter')}"
            )
        limit = EXACT[self.dtype] * self.unpatched_logit_gap
        if not self.worst_logit_gap <= limit:
            found.append(f"the worst logit gap {self.worst_logit_gap:.3g} exceeds {limit:.3g}")
        if not self.controls:
            found.append("no negative control could be built")
        for name, numbers in self.controls.items():
            if not numbers["smallest_logit_gap"] > CONTROL_FACTOR * self.worst_logit_gap:
                found.append(f"control {name} comes as close as {numbers['smallest_logit_gap']:.3g}")
        return found

    @property
    def proven(self) -> bool:
        return not self.reasons()

    def sentence(self) -> str:
        """The verdict in words."""
        gap, without = self.worst_logit_gap, self.unpatched_logit_gap
        numbers = (
            f"{self._matches('written')} of {len(self.steps)} tokens agree, worst logit gap {gap:.2g} "
            f"({gap / without:.1g} of the {without:.3g} without the patch)"
            if without
            else f"worst logit gap {gap:.2g}"
        )
        if self.proven:
            return f"Proven: {numbers}; every negative control misses by far."
        return f"Not proven: {numbers}; " + "; ".join(self.reasons()) + "."

    def _repr_html_(self) -> str:
        """The runs and the controls, for a notebook."""
        n = len(self.steps)
        ways = {"written": "patched: weights written", "action": "patched: beside the weights",
                "perturbed": "patched, input off by a rounding", "scatter": "the model with itself",
                "unpatched": "without the patch (control)"}  # fmt: skip
        rows = [
            (
                name,
                short(max(self._gaps(way))),
                short(statistics.median(self._gaps(way))),
                f"{self._matches(way)} / {n}",
            )
            for way, name in ways.items()
        ]
        rows += [
            (f"{name.replace('_', ' ')} (control)", "", short(c["median_logit_gap"]),
             f"{c['top1_matches']:.0f} / {c['tokens']:.0f}")
            for name, c in self.controls.items()
        ]  # fmt: skip
        title = f"{self.model}, {str(self.dtype).removeprefix('torch.')}, rule {self.rule}"
        return card(title, self.sentence(), ("run", "worst gap", "median gap", "same first token"), rows, self.proven)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        found: dict[str, object] = {
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rule": self.rule,
            "fallback": self.fallback,
            "protocol": self.protocol,
            "proven": self.proven,
            "verdict": self.sentence(),
            "tokens": len(self.steps),
            "top1_matches": self._matches("written"),
            "worst_logit_gap": self.worst_logit_gap,
            "median_logit_gap": statistics.median(self._gaps("written")),
            "worst_kl_nats": max(step.written.kl_nats for step in self.steps),
            "unpatched_logit_gap": self.unpatched_logit_gap,
            "smallest_unpatched_logit_gap": min(self._gaps("unpatched")),
            "unpatched_top1_matches": self._matches("unpatched"),
            "max_abs_dm": max(step.max_abs_dm for step in self.steps),
            "materialised": True,
            "action_top1_matches": self._matches("action"),
            "action_worst_logit_gap": max(self._gaps("action")),
            "perturbed_top1_matches": self._matches("perturbed"),
            "perturbed_worst_logit_gap": max(self._gaps("perturbed")),
            "scatter_top1_matches": self._matches("scatter"),
            "scatter_logit_gap": max(self._gaps("scatter")),
            "controls": self.controls,
            "mismatches": self.mismatches(),
            "layers": self.layers(),
            "u_edges": list(EDGES),
            "steps": [_step_row(index, step) for index, step in enumerate(self.steps)],
            "patch_bytes": max(step.patch_bytes for step in self.steps),
            "receipt": dict(self.receipt),
        }
        return plain(found)

    def mismatches(self) -> list[dict[str, float]]:
        """Every top-1 disagreement of the written patch, with the margin that it overcame."""
        return [
            {"token": i, "in_context": s.in_context, "patched": s.written.top1, "margin": s.written.margin}
            for i, s in enumerate(self.steps)
            if not s.written.top1_match
        ]

    def layers(self) -> list[dict[str, Any]]:
        """A row per layer, worst over the tokens."""
        return [_layer_row(reports) for reports in zip(*(step.layers for step in self.steps), strict=True)]


def _step_row(index: int, step: Step) -> dict[str, Any]:
    return {
        "index": index,
        "prompt": step.prompt,
        "in_context": step.in_context,
        "unpatched": step.unpatched.top1,
        "patched": step.written.top1,
        "in_context_margin": step.margin,
        "logit_gap": step.written.logit_gap,
        "kl_nats": step.written.kl_nats,
        "unpatched_logit_gap": step.unpatched.logit_gap,
        "unpatched_kl_nats": step.unpatched.kl_nats,
        "max_abs_dm": step.max_abs_dm,
        "weight_ratio": [layer.weight_ratio for layer in step.layers],
        "relative_error": [layer.relative_error for layer in step.layers],
    }


def _control(comparisons: Iterable[Comparison]) -> dict[str, float]:
    found = list(comparisons)
    gaps = [c.logit_gap for c in found]
    return {
        "tokens": len(found),
        "top1_matches": sum(c.top1_match for c in found),
        "smallest_logit_gap": min(gaps),
        "median_logit_gap": statistics.median(gaps),
    }


def _layer_row(reports: Sequence[Any]) -> dict[str, Any]:
    rows = [asdict(report) for report in reports]
    outcomes = Counter(report.outcome for report in reports)

    def worst(key: str, pick: Any = max) -> float | None:
        values = [row[key] for row in rows if row[key] == row[key]]
        return pick(values) if values else None

    return {
        "layer": reports[0].layer,
        "relative_error": worst("relative_error"),
        "absolute_error": worst("absolute_error"),
        "weight_ratio": worst("weight_ratio"),
        "max_abs_dm": worst("max_abs_dm"),
        "min_abs_u": worst("min_abs_u", min),
        "min_abs_m": worst("min_abs_m", min),
        "min_cos_z": worst("cos_z", min),
        "condition": worst("condition"),
        "outcomes": dict(outcomes),
        "u_counts": [sum(column) for column in zip(*(report.u_counts for report in reports), strict=True)],
    }
