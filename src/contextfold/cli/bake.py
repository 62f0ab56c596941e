"""`contextfold bake`: a context becomes a patch for new questions, and its worth is measured on questions held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from contextfold.cli.common import (
    ContextOption,
    Dtype,
    DtypeOption,
    JsonOption,
    MaxMemoryOption,
    Model,
    bind_model,
    check_writable,
    err,
    load_model,
    out,
    show_or_json,
    spelled,
    steps,
    working,
    written_patch,
)
from contextfold.errors import InputError

ELSEWHERE_FROM = 40
"""Built-in questions before it may be anchors; on those behind it the effect elsewhere is measured."""

FEWER = (8, 4, 2)
"""Parts of the questions that a curve is drawn from."""

HELD_OUT = 4
"""One question in so many is held out when the user names none."""


def bake(
    model: Model,
    context: ContextOption,
    queries: Annotated[
        str | None, typer.Option(help="Questions to learn from, one per line, or @file. Without: built-in ones.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Questions to be judged by, or @file. Without: every fourth of --queries.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where to write the patch; a command that was stopped goes on there.")
    ] = None,
    estimator: Annotated[
        str, typer.Option(help="Where to edit: two-sites, output, attention, matrix, all.")
    ] = "two-sites",
    anchors: Annotated[int, typer.Option(help="Built-in questions on which nothing is to change, 0 to 40.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 32,
    answers: Annotated[
        int, typer.Option(help="Answers per question to learn from: the greedy one, then sampled ones.")
    ] = 2,
    penalty: Annotated[
        str, typer.Option(help="Of the ridge, relative; auto: questions that are left out decide.")
    ] = "0.01",
    tol: Annotated[float, typer.Option(help="Share of what is explained that may go for a lower rank.")] = 1e-3,
    controls: Annotated[bool, typer.Option(help="Also bake a shuffled and another context.")] = True,
    curve: Annotated[bool, typer.Option(help="Also bake from an eighth, a quarter and half of the questions.")] = False,
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    keep_answers: Annotated[
        Path | None, typer.Option(help="A folder for the answers: a later bake asks only what is new.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bake a context into a patch that answers new questions, judge it by questions it has never seen, write it."""
    from contextfold import bakeview, prompts
    from contextfold.bake import estimator as known
    from contextfold.spectra import spectra

    check_writable(out_file)
    known(estimator)
    if not 0 <= anchors <= ELSEWHERE_FROM:
        raise InputError(f"--anchors {anchors} is not between 0 and {ELSEWHERE_FROM}")
    if answers < 1:
        raise InputError(f"--answers {answers} leaves nothing to learn from; give at least 1")
    loaded = load_model(model, dtype, max_memory)
    job = _Job(loaded, bind_model(loaded), context, tokens, answers, as_json, keep_answers, controls, curve)
    learn, judge = job.split(queries, held_out)
    decode: Callable[[Any], str] = partial(loaded.tokenizer.decode, skip_special_tokens=True)
    plan = {"method": estimator, "lam0": read_penalty(penalty), "tol": tol}
    with working(out_file) as store:
        baked, verdict = job.run(learn, judge, anchors, plan, store, model)
        written = written_patch(baked.patch, out_file, verdict.holds)
    payload = {"context": prompts.read_argument(context), **verdict.to_json(), "spectra": spectra(baked.patch)}
    rows = spelled(payload["held_out"], decode)
    for row, question in zip(rows, judge, strict=True):
        row["texts"]["question"] = question  # as it was asked, without the template around it
    payload |= {"held_out": rows, "patch": None if written is None else str(written)}
    show_or_json(as_json, payload, lambda: bakeview.verdict_view(verdict), loaded)
    if not as_json and out_file is not None:
        size = f"Wrote {written} ({baked.patch.nbytes} bytes)."
        out.print(size if written else "No stand-in for the context, so nothing was written.")
    raise typer.Exit(0 if verdict.holds else 1)


def read_penalty(text: str) -> float | None:
    """A positive number, or None for `auto`."""
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--penalty {text!r} is neither a number nor auto") from None


@dataclass(frozen=True)
class _Job:
    """Loaded once, used for the patch and for its controls."""

    loaded: Any
    bound: Any
    context: str
    tokens: int
    per_question: int
    quiet: bool
    kept: Path | None
    """Where answers are kept."""
    controls: bool
    curve: bool

    def lay_out(self, asked: list[str]) -> Any:
        from contextfold import prompts
        from contextfold.questions import questions

        return questions(self.loaded.tokenizer, prompts.read_argument(self.context), asked)

    def split(self, queries: str | None, held_out: str | None) -> tuple[list[str], list[str]]:
        """Questions to learn from, and others to judge by."""
        from contextfold import prompts, suites
        from contextfold.questions import read_questions

        def read(value: str) -> list[str]:
            return read_questions(prompts.read_argument(value))

        learn = read(queries) if queries is not None else [*suites.QUESTIONS[:ELSEWHERE_FROM], *self.written()]
        if held_out is not None:
            judge = read(held_out)
            return [question for question in learn if question not in judge], judge
        if len(learn) < HELD_OUT:
            raise InputError(f"{len(learn)} questions are too few to hold some out; give {HELD_OUT}, or --held-out")
        return [q for i, q in enumerate(learn) if i % HELD_OUT], learn[::HELD_OUT]

    def written(self) -> list[str]:
        """Questions that the model writes when it has the context; what is no question is left out."""
        from contextfold import suites
        from contextfold.bake import answered
        from contextfold.questions import read_questions

        laid = self.lay_out([suites.WRITE_A_QUESTION])
        tails = list(laid.tails) * 16
        found = answered(self.bound, _frame(laid).full, tails, tokens=24, stop=laid.stop, temperature=1.0)
        texts = [self.loaded.tokenizer.decode(e.tail[e.answer :], skip_special_tokens=True) for e in found]
        asked = [text.strip().split("\n")[0] for text in texts]
        asked = [text for text in asked if text.endswith("?") and len(text) > 10]
        return read_questions("\n".join(asked)) if asked else []

    def run(
        self, learn: list[str], judge: list[str], anchors: int, plan: dict[str, Any], store: Path | None, name: str
    ) -> tuple[Any, Any]:  # fmt: skip
        from contextfold import suites
        from contextfold.verify import evaluate

        laid = self.lay_out([*learn, *judge])
        if not self.quiet:
            said = f"{laid.notice}\ngoes: {laid.removed!r}\nstays: {laid.example!r}"
            err.print(said, style="dim", highlight=False, markup=False)
        frame = _frame(laid)
        n = len(learn)
        ask = partial(self.answers, stop=laid.stop, work=self.kept or store)
        known = self.known(partial(ask, frame.full, laid.tails[:n]))
        judged = ask(frame.full, laid.tails[n:])
        general = self.lay_out(list(suites.QUESTIONS)).tails
        held = ask(frame.kept, general[:anchors], moves=False)
        other = ask(frame.kept, general[ELSEWHERE_FROM:], moves=False)
        baked = self.solve("baking", frame, (*known, *held), plan, store)
        with TemporaryDirectory(dir=None if store is None else store.parent, prefix=".controls.") as aside:
            windows = self.wrong(frame) if self.controls else {}
            wrong = {
                control: self.waiting(f"control {control}", replace(frame, context=ids), known, plan, Path(aside))
                for control, ids in windows.items()
            }
            fewer = self.fewer(frame, known, held, plan, Path(aside)) if self.curve else {}
            verdict = evaluate(
                self.bound, baked, frame, judged, controls=wrong, windows=windows,
                elsewhere={"general questions": other}, strengths=(0.5, 1.5), fewer=fewer, stop=laid.stop, name=name,
                method=plan["method"],
            )  # fmt: skip
        return baked, verdict

    def known(self, ask: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        """What is learnt from: the greedy answer to every question, and then sampled ones."""
        return tuple(e for k in range(self.per_question) for e in ask(seed=k if k else None))

    def answers(
        self, before: Any, tails: Any, stop: Any, work: Path | None, moves: bool = True, seed: int | None = None
    ) -> tuple[Any, ...]:
        """Answers to questions with `before` in front of them, of which those that `work` holds are not given again."""
        from contextfold.bake import answered

        if not tails:
            return ()
        with steps("answering" if moves else "answering without the context", len(tails)) as advance:

            def done(count: int) -> None:
                for _ in range(count):
                    advance(None)

            return answered(
                self.bound, before, list(tails), tokens=self.tokens, stop=stop, moves=moves,
                temperature=0.0 if seed is None else 1.0, seed=seed or 0, store=work, progress=done,
            )  # fmt: skip

    def solve(self, what: str, frame: Any, examples: Any, plan: dict[str, Any], store: Path | None = None) -> Any:
        from contextfold.bake import bake, places

        with steps(what, places(self.bound, plan["method"])) as advance:
            return bake(self.bound, frame, examples, store=store, progress=lambda *_: advance(None), **plan)

    def wrong(self, frame: Any) -> dict[str, Any]:
        """Token ids of contexts whose patches, of the same questions and answers, must not do what the real one does:
        the context shuffled, and another one."""
        from contextfold import prompts, suites
        from contextfold.verify.controls import wrong_contexts

        other = prompts.encode_text(self.loaded.tokenizer, suites.OTHER_CONTEXT)
        return wrong_contexts(frame.context, (), self.bound.vocabulary, other)

    def fewer(self, frame: Any, known: Any, held: Any, plan: dict[str, Any], aside: Path) -> dict[int, Any]:
        """Patches of the first questions alone."""
        whole = len(known) // self.per_question
        counts = sorted({max(whole // part, 1) for part in FEWER} - {whole})
        parts = {n: [example for i, example in enumerate(known) if i % whole < n] for n in counts}
        return {n: self.waiting(f"from {n} questions", frame, (*parts[n], *held), plan, aside) for n in counts}

    def waiting(self, name: str, frame: Any, examples: Any, plan: dict[str, Any], aside: Path) -> Any:
        """A patch in a file, and what reads it: no more than one of those that stand beside is held at once."""
        from contextfold import patchfile

        solved = self.solve(f"baking {name}", frame, examples, plan, aside / f"{name} solved")
        patchfile.save(solved.patch, aside / name)
        return partial(patchfile.load, aside / name)


def _frame(laid: Any) -> Any:
    from contextfold.bake import Frame

    return Frame(laid.kept, laid.context)
