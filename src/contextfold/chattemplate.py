"""A chat template of somebody else, made to show what it does with a system message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from contextfold.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplate", "beyond", "common", "gap"]

_PROBE = "contextfold-probe"
"""A system message that no template and no user contains; shows where a template puts the system message."""

_CLOCK = """\
{%- macro strftime_now(format) -%}
{%- set ns = namespace(text=format) -%}
{%- for directive, text in contextfold_clock.items() -%}
{%- set ns.text = ns.text | replace(directive, text) -%}
{%- endfor -%}
{{ ns.text }}
{%- endmacro %}
"""
"""Put in front of a template, it stops the clock: the macro hides the function of transformers that reads it.

A function of ours cannot be handed over, since transformers lets plain data through only. The newline at the end
belongs to the last tag and is not rendered; with it, the template begins on a line of its own as it always does.
"""

_DIRECTIVES = "aAbBcdHIjmMpSUwWxXyY"
"""The letters that a date format may hold behind a percent sign."""

_MOMENTS = (datetime(2001, 2, 3, 4, 5, 6), datetime(2004, 5, 6, 17, 18, 19))
"""Two moments that differ in every part of a date and a time, the weekday included."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the user's turn filled in.

    `at` is the character where a system message begins; `folded` says that it begins in the user's turn,
    because the template knows no system message.
    """

    tokenizer: PreTrainedTokenizerBase
    user: str
    today: date | None
    folded: bool = False
    at: int = 0

    @property
    def _reads_clock(self) -> bool:
        return "strftime_now" in self.tokenizer.get_chat_template()

    def placed(self) -> ChatTemplate:
        """Try a system message that nobody writes, and look where it went.

        A template without a system role raises, or leaves the message out; both are tried again with the
        message in the user's turn. Raises `InputError` if that does not help.
        """
        for template in (self, replace(self, folded=True)):
            try:
                at = template.with_system(_PROBE).find(_PROBE)
            except InputError:
                if template.folded:
                    raise
                continue
            if at >= 0:
                return replace(template, at=at)
        raise InputError("the chat template leaves out what the user says; give the texts as plain text")

    def with_system(self, system: str) -> str:
        """The rendering with a system message, wherever it goes."""
        if not self.folded:
            return self._render([("system", system), ("user", self.user)])
        return self._render([("user", f"{system}\n\n{self.user}")]) if system else self.without_system()

    def without_system(self) -> str:
        return self._render([("user", self.user)])

    def check_date(self) -> None:
        """Raises `InputError` if the rendering depends on the day and no day was given."""
        if self.today is not None or not self._reads_clock:
            return
        one, other = (replace(self, today=moment) for moment in _MOMENTS)
        for first, second in (
            (one.without_system(), other.without_system()),
            (one.with_system(_PROBE), other.with_system(_PROBE)),
        ):
            if first != second:
                raise InputError(
                    f"the chat template prints today's date (such as {beyond(first, second)!r}), so tomorrow's "
                    "prompt would be another one; give the date that it shall print as today"
                )

    def check_nothing_inserted(self, text: str, system: str | None) -> None:
        """Raises `InputError` if `text`, rendered without a context, holds more than with one."""
        probe = self.with_system(_PROBE)
        if gap(probe, text, self.at) is None:
            way_out = "remove the context from the chat that was rendered with it"
            if system is None:
                way_out = f"give an explicit empty system message, or {way_out}"
            raise InputError(
                f"where no system message is given the chat template inserts one, {beyond(text, probe)!r}; {way_out}"
            )

    def _render(self, turns: list[tuple[str, str]]) -> str:
        from jinja2 import TemplateError

        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if self.today is not None and self._reads_clock:
            options["chat_template"] = _CLOCK + self.tokenizer.get_chat_template()
            options["contextfold_clock"] = _clock(self.today)
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.tokenizer.apply_chat_template(messages, **options)
        except TemplateError as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"the chat template refuses these messages ({reason}); give the texts as plain text"
            ) from error
        return str(text)


def _clock(day: date) -> dict[str, str]:
    """Date directive -> text; with a dash, which is an extension that chat templates use, without padding."""
    texts = {f"%{letter}": day.strftime(f"%{letter}") for letter in _DIRECTIVES}
    return texts | {f"%-{name[1:]}": text.lstrip("0") or "0" for name, text in texts.items()}


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix."""
    size = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        size += 1
    return size


def gap(long: Sequence[Any], short: Sequence[Any], at: int) -> tuple[int, int] | None:
    """The stretch `[start, stop)` whose removal turns `long` into `short`, or None if there is none.

    Where the stretch can be shifted (both its neighbours begin with the same turn token, say) it begins as
    late as it can, but not after `at`: late, so that the first token stays where it is and goes on to be the
    sink; not after the context's beginning, so that no token of the context stays in front of the gap.
    """
    size = len(long) - len(short)
    if size < 0:
        return None
    start = min(common(long, short), at)
    if start < len(short) - common(long[::-1], short[::-1]):
        return None
    return start, start + size


def beyond(text: str, reference: str) -> str:
    """The part of `text` between what it shares with `reference` in front and behind."""
    front = common(text, reference)
    back = common(text[front:][::-1], reference[front:][::-1])
    return text[front : len(text) - back]
