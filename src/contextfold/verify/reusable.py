"""The proof for a reusable patch: questions that it has never seen, controls, and what it does where it should not act.

Nothing here is exact, and nothing is claimed to be. What is measured is how much of the context's effect comes back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound
from contextfold.bake import Baked, Example, Frame, answered
from contextfold.errors import InputError
from contextfold.files import plain
from contextfold.notebook import card, short
from contextfold.patch import Patch
from contextfold.runtime import Run, materialised, run
from contextfold.verify.controls import RANDOM, random_like
from contextfold.verify.receipt import receipt_of

__all__ = ["Effect", "Recovery", "ReusableVerdict", "Scorer", "Spoken", "answer_logits", "compare_answers", "evaluate"]

CONTROL_LIMIT = 0.2
"""Share of the effect that a control may bring back before it makes the patch's own share worthless."""

USEFUL = 0.8
"""Share of the effect from which a patch is called a stand-in for its context."""

RESAMPLES = 2000
SHOWN = 4
"""Questions that the model is also made to answer without context and without patch, for the eye."""

TOGETHER = 8
"""Questions whose logits are held at once; a vocabulary is wide."""

Condition = Callable[[], AbstractContextManager[object]]

Made = Patch | Callable[[], Patch]
"""A patch, or what makes one whenever it is wanted, so that not all of them are held at once."""

Answer = tuple[float, int, int]
"""Of one answer: KL in nats, tokens at which the first choices agree, tokens."""


@dataclass(frozen=True)
class Effect:
    """How far a model is from another on the answers to some questions."""

    kl_nats: tuple[float, ...]
    """Per question, the mean KL(reference ‖ this) over the tokens of its answer, in nats."""
    top1: float
    """Share of answer tokens at which both prefer the same token."""

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Effect:
        """From what was compared, answer by answer."""
        same, count = (sum(answer[k] for answer in answers) for k in (1, 2))
        return cls(tuple(kl for kl, _, _ in answers), same / count)

    @property
    def mean(self) -> float:
        return statistics.mean(self.kl_nats)


@dataclass(frozen=True)
class Recovery:
    """How much of the context's effect a patch brings back: `1 − KL patched / KL unpatched`."""

    share: float
    low: float
    high: float
    """95 % interval, by drawing the questions again."""
    patched: Effect

    @classmethod
    def of(cls, patched: Effect, unpatched: Effect) -> Recovery:
        p, u = (torch.tensor(e.kl_nats, dtype=torch.float64) for e in (patched, unpatched))
        draws = torch.randint(len(p), (RESAMPLES, len(p)), generator=torch.Generator().manual_seed(0))
        shares = 1 - p[draws].mean(1) / u[draws].mean(1)
        low, high = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return cls(1 - patched.mean / unpatched.mean, low, high, patched)

    def to_json(self) -> dict[str, Any]:
        return {
            "kl_recovered": self.share,
            "interval": [self.low, self.high],
            "kl_patched": self.patched.mean,
            "top1": self.patched.top1,
        }


@dataclass(frozen=True)
class Spoken:
    """One held-out question and what each model, left alone, answers; token ids."""

    question: tuple[int, ...]
    in_context: tuple[int, ...]
    patched: tuple[int, ...]
    unpatched: tuple[int, ...] | None
    """None where nobody asked."""


Scorer = Callable[[Spoken, Sequence[int]], float]
"""Worth of an answer, given as token ids, to a question; in the scorer's own unit, more is better."""


@dataclass(frozen=True)
class ReusableVerdict:
    """What a baked patch does on questions that it was not made from. Divergences in nats per answer token."""

    model: str
    dtype: torch.dtype
    method: str
    unpatched: Effect
    patched: Recovery
    controls: Mapping[str, Recovery]
    windows: Mapping[str, Recovery]
    """By control, what the wrong context itself brings back when it is kept in the window."""
    spoken: tuple[Spoken, ...]
    """Every held-out question, in their order."""
    elsewhere: Mapping[str, tuple[Effect, Effect]]
    """On text that the context has no business with, against the bare model: with the patch, and with the context."""
    strengths: Mapping[float, float]
    """Factor of the patch -> share recovered."""
    fewer: Mapping[int, Recovery]
    """Number of questions -> what a patch made from so many of them recovers."""
    scores: Mapping[str, float]
    """By the user's own scorer, means over the questions of `in_context`, `patched`, `unpatched`; empty without one."""
    baked: Baked | None
    receipt: Mapping[str, Any]
    remarks: tuple[str, ...] = field(default=())

    @property
    def same_answers(self) -> float:
        """Share of questions that the patched model, left alone, answers word for word as the in-context one."""
        return statistics.mean(answer.patched == answer.in_context for answer in self.spoken)

    def reasons(self) -> list[str]:
        """Why the patch is no stand-in for the context; empty when it is one."""
        found = []
        if not self.patched.share >= USEFUL:
            found.append(f"it recovers less than {USEFUL:.0%}")
        found += [
            f"control {name} recovers {control.share:.0%}"
            for name, control in self.controls.items()
            if not control.share < self.limit(name)
        ]
        return found

    def limit(self, control: str) -> float:
        """What a control must stay below: `CONTROL_LIMIT`, or what its context itself may bring back in the window,
        since words in another order, or of a like task, do something of the same; and what the patch may be worth."""
        window = self.windows.get(control)
        return CONTROL_LIMIT if window is None else min(max(CONTROL_LIMIT, window.high), self.patched.low)

    @property
    def holds(self) -> bool:
        return not self.reasons()

    def sentence(self) -> str:
        """The verdict in words."""
        p = self.patched
        text = (
            f"{p.share:.1%} of the context's effect ({p.low:.1%} to {p.high:.1%}) on {len(p.patched.kl_nats)} "
            f"questions that it has never seen: {self.unpatched.mean:.3g} -> {p.patched.mean:.3g} nats per token, "
            f"top-1 {self.unpatched.top1:.0%} -> {p.patched.top1:.0%}"
        )
        if self.controls:
            best = max(self.controls.items(), key=lambda item: item[1].share)
            text += f"; the best control, {best[0]}, recovers {max(best[1].share, 0):.0%}"
            if best[0] in self.windows:
                text += f" (its context in the window: {max(self.windows[best[0]].share, 0):.0%})"
        moved = "".join(
            f". On {name} it moves the model by {patch.mean:.2g} nats per token (the context: {context.mean:.2g})"
            for name, (patch, context) in self.elsewhere.items()
        )
        lead = "A stand-in for the context" if self.holds else "No stand-in for the context"
        why = "" if self.holds else " (" + "; ".join(self.reasons()) + ")"
        return f"{lead}{why}: {text}{moved}."

    def _repr_html_(self) -> str:
        """What comes back, beside the controls, for a notebook."""
        rows = [("without the context", "0.0%", "", short(self.unpatched.mean), f"{self.unpatched.top1:.0%}")]
        runs = {"patched": self.patched, **{f"{n.replace('_', ' ')} (control)": c for n, c in self.controls.items()}}
        rows += [
            (name, f"{r.share:.1%}", f"{r.low:.1%} to {r.high:.1%}", short(r.patched.mean), f"{r.patched.top1:.0%}")
            for name, r in runs.items()
        ]
        title = f"{self.model}, {str(self.dtype).removeprefix('torch.')}, estimator {self.method}"
        return card(
            title, self.sentence(), ("run", "recovered", "95 %", "KL, nats", "same first token"), rows, self.holds
        )

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        u = self.unpatched.mean
        found: dict[str, object] = {
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "estimator": self.method,
            "holds": self.holds,
            "verdict": self.sentence(),
            "questions": len(self.unpatched.kl_nats),
            "kl_unpatched": u,
            "unpatched_top1": self.unpatched.top1,
            **self.patched.to_json(),
            "same_answers": self.same_answers,
            "scores": dict(self.scores),
            "controls": {
                name: control.to_json() | {"in_window": self.windows[name].to_json() if name in self.windows else None}
                for name, control in self.controls.items()
            },
            "elsewhere": {
                name: {"kl_patched": patch.mean, "kl_context": context.mean, "kl_ratio": patch.mean / u}
                for name, (patch, context) in self.elsewhere.items()
            },
            "strengths": {f"{factor:g}": share for factor, share in self.strengths.items()},
            "fewer": {str(count): recovery.to_json() for count, recovery in self.fewer.items()},
            "sites": [vars(site) for site in self.baked.sites] if self.baked else [],
            "calibration_tokens": self.baked.tokens if self.baked else None,
            "held_out": self._question_rows(),
            "remarks": list(self.remarks),
            "receipt": dict(self.receipt),
        }
        return plain(found)

    def _question_rows(self) -> list[dict[str, Any]]:
        rows = zip(self.spoken, self.unpatched.kl_nats, self.patched.patched.kl_nats, strict=True)
        return [
            {
                "kl_unpatched": without,
                "kl_patched": patched,
                "question": list(spoken.question),
                "in_context": list(spoken.in_context),
                "patched": list(spoken.patched),
                "unpatched": None if spoken.unpatched is None else list(spoken.unpatched),
            }
            for spoken, without, patched in rows
        ]


@torch.no_grad()
def evaluate(
    bound: Bound,
    patch: Patch | Baked,
    frame: Frame,
    held_out: Sequence[Example],
    *,
    controls: Mapping[str, Made] | None = None,
    windows: Mapping[str, Tensor] | None = None,
    elsewhere: Mapping[str, Sequence[Example]] | None = None,
    strengths: Sequence[float] = (),
    fewer: Mapping[int, Made] | None = None,
    stop: Sequence[int] = (),
    scorer: Scorer | None = None,
    name: str = "",
    method: str = "",
) -> ReusableVerdict:
    """Put a baked patch to the test, written into the weights, under the unmodified forward.

    `held_out` are questions with the in-context model's answers, none of which the patch was made from. `controls`
    are patches that must not do what this one does, or what reads them when they are wanted; a random one of equal norm
    is always among them. `windows` are the token ids of those controls' contexts, which are tried in the window too: a
    patch may bring back what its own context does. `elsewhere` names examples with the *bare* model's answers. `fewer`
    are patches that were made from a smaller number of questions. `stop` ends an answer when the patched model is left
    alone. `scorer` says what an answer is worth; it is asked about those of the model with the context, patched, and
    bare.

    Raises `InputError` without held-out questions, or when the context does nothing on them.
    """
    if not held_out:
        raise InputError("there are no held-out questions; what a patch does on those it was made from proves nothing")
    baked = patch if isinstance(patch, Baked) else None
    edits = patch.patch if isinstance(patch, Baked) else patch
    conditions: dict[str, Condition] = {"": nullcontext, "patch": _writer(bound, edits)}
    others: dict[str, Made] = {**(controls or {}), RANDOM: partial(random_like, edits)}
    conditions |= {f"control {n}": _writer(bound, p) for n, p in others.items()}
    conditions |= {f"times {f}": _writer(bound, partial(edits.__mul__, f)) for f in strengths}
    conditions |= {f"from {n}": _writer(bound, p) for n, p in (fewer or {}).items()}
    asked = {n: (frame.kept, c) for n, c in conditions.items()}
    asked |= {f"window {n}": (Frame(frame.kept, ids).full, nullcontext) for n, ids in (windows or {}).items()}
    effects = _effects(bound, frame.full, asked, held_out)
    unpatched = effects[""]
    if not unpatched.mean > 0:
        raise InputError("the context changes nothing on the held-out questions; is it the one that answered them?")
    cases = {"patch": (frame.kept, conditions["patch"]), "context": (frame.full, conditions[""])}
    beside = {n: _effects(bound, frame.kept, cases, examples) for n, examples in (elsewhere or {}).items()}
    spoken = _spoken(bound, edits, frame, held_out, stop, SHOWN if scorer is None else len(held_out))
    return ReusableVerdict(
        model=name or bound.model_type,
        dtype=bound.dtype,
        method=method,
        unpatched=unpatched,
        patched=Recovery.of(effects["patch"], unpatched),
        controls={n: Recovery.of(effects[f"control {n}"], unpatched) for n in others},
        windows={n: Recovery.of(effects[f"window {n}"], unpatched) for n in windows or {}},
        spoken=spoken,
        elsewhere={n: (moved["patch"], moved["context"]) for n, moved in beside.items()},
        strengths={f: 1 - effects[f"times {f}"].mean / unpatched.mean for f in strengths},
        fewer={n: Recovery.of(effects[f"from {n}"], unpatched) for n in sorted(fewer or {})},
        scores={} if scorer is None else _scores(scorer, spoken),
        baked=baked,
        receipt=receipt_of(bound),
    )


def _writer(bound: Bound, patch: Made) -> Condition:
    return lambda: materialised(bound, patch if isinstance(patch, Patch) else patch())


def _effects(
    bound: Bound, reference: Tensor, cases: Mapping[str, tuple[Tensor, Condition]], examples: Sequence[Example]
) -> dict[str, Effect]:
    """By case, the model under a condition with its tokens in front, against the bare one with `reference` in front."""
    found: dict[str, list[Answer]] = {name: [] for name in cases}
    for part in _parts(examples):
        wanted = [answer_logits(bound.model, reference, e) for e in part]
        for name, (before, condition) in cases.items():
            with condition():
                given = (answer_logits(bound.model, before, e) for e in part)
                found[name] += [compare_answers(p, q) for p, q in zip(wanted, given, strict=True)]
    return {name: Effect.of(rows) for name, rows in found.items()}


def _parts(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    return (examples[start : start + TOGETHER] for start in range(0, len(examples), TOGETHER))


def answer_logits(model: nn.Module, before: Tensor, example: Example) -> Tensor:
    """`(a, V)`: what the model with `before` in front says at each token of the answer, before it is given."""
    ids = torch.cat([before, example.tail])
    n = example.tail.numel() - example.answer
    return run(model, Run(ids, torch.arange(ids.numel())), last=n + 1)[:-1]


def compare_answers(wanted: Tensor, given: Tensor) -> Answer:
    """Logits `(a, V)` both: mean KL(wanted ‖ given) in nats, how many first choices agree, and of how many."""
    p, q = torch.log_softmax(wanted.double(), -1), torch.log_softmax(given.double(), -1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return max(float(kl), 0.0), int((p.argmax(-1) == q.argmax(-1)).sum()), p.shape[0]


def _scores(scorer: Scorer, spoken: Sequence[Spoken]) -> dict[str, float]:
    """Means over the questions, by who answered."""
    said = {name: [(s, getattr(s, name)) for s in spoken] for name in ("in_context", "patched", "unpatched")}
    return {name: statistics.mean(scorer(s, answer) for s, answer in answers) for name, answers in said.items()}


def _spoken(
    bound: Bound, patch: Patch, frame: Frame, examples: Sequence[Example], stop: Sequence[int], bare_too: int
) -> tuple[Spoken, ...]:
    """What the patched model answers when it is left alone, beside what the in-context model did; the bare one too,
    to the first `bare_too` questions."""
    tokens = max(e.tail.numel() - e.answer for e in examples)
    asked = [e.question for e in examples]
    with materialised(bound, patch):
        own = answered(bound, frame.kept, asked, tokens=tokens, stop=stop)
    bare = answered(bound, frame.kept, asked[:bare_too], tokens=tokens, stop=stop)

    def ids(example: Example) -> tuple[int, ...]:
        return tuple(example.tail[example.answer :].tolist())

    without = [*map(ids, bare), *([None] * (len(examples) - len(bare)))]
    return tuple(
        Spoken(tuple(e.question.tolist()), ids(e), ids(patched), said)
        for e, patched, said in zip(examples, own, without, strict=True)
    )
