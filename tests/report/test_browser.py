"""The page in a real browser: Chromium, headless, driven by Playwright. `make report-test` says how to get it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import runs
from contextfold.report import chapter, page, run_of

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium found: install the Debian package chromium, or set CHROMIUM to its path"
    ),
]

WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(made, tmp_path_factory) -> dict[str, tuple[dict[str, Any], Path]]:
    """A page of every kind, and a long one."""
    folder = tmp_path_factory.mktemp("pages")
    long = runs.sequence(200)
    written = {}
    for name, (run, text) in {**made, "long": (long, page([chapter(run_of(long), 1)]))}.items():
        path = folder / f"{name}.html"
        path.write_text(text, encoding="utf-8")
        written[name] = (run, path)
    return written


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """The page, and everything that it should not do: messages, errors, dialogs and requests."""
    context = browser.new_context(**options)
    tab = context.new_page()
    met: list[str] = []
    tab.on("console", lambda message: met.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: met.append(f"error: {error}"))
    tab.on("dialog", lambda dialog: met.append(f"dialog: {dialog.message}"))
    own = path.as_uri()
    tab.on("request", lambda r: met.append(f"request: {r.url}") if not r.url.startswith((own, "data:")) else None)
    tab.goto(own)
    yield tab, met
    context.close()


def viewport(width: int) -> dict[str, Any]:
    return {"viewport": {"width": width, "height": 900}}


@pytest.mark.parametrize("name", [*runs.ALL, "long"])
def test_it_renders_and_asks_for_nothing(browser, files, name):
    run, path = files[name]
    for width in WIDTHS:
        with opened(browser, path, **viewport(width)) as (tab, met):
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("svg").count() >= 2
            assert tab.locator("svg").first.bounding_box()["width"] > 250
            assert run.get("verdict", runs.SENTENCES.get(name)) in tab.locator(".verdict").inner_text()
            assert met == []


NUMBERS = """run => [...document.querySelectorAll("data")].map(shown => {
  let there = run;
  for (const step of shown.dataset.key.split("/")) there = there[step.replace("~1", "/").replace("~0", "~")];
  return [shown.dataset.key, shown.textContent, shown.value, there];
})"""


@pytest.mark.parametrize("name", runs.ALL)
def test_numbers_in_the_browser_are_those_of_the_json(browser, files, name):
    run, path = files[name]
    with opened(browser, path) as (tab, _):
        rows = tab.evaluate(NUMBERS, run)
    assert len(rows) > 8
    for key, shown, value, there in rows:
        assert float(value) == there, key
        if shown.endswith("%"):
            assert float(shown[:-1]) / 100 == pytest.approx(there, abs=0.00051), key
        else:
            assert float(shown) == pytest.approx(there, rel=0.05), key


def test_it_can_be_read_without_a_script(browser, files):
    run, path = files["fold"]
    with opened(browser, path, java_script_enabled=False, **viewport(390)) as (tab, met):
        assert run["verdict"] in tab.locator(".verdict").inner_text()
        assert tab.locator("svg").first.is_visible()
        token = tab.locator(".token").first
        assert not token.locator(".tip").is_visible()
        token.focus()
        assert token.locator(".tip").is_visible()
        assert "1.8" in token.locator(".tip").inner_text()  # the margin
        tab.locator("summary", has_text="All tokens in numbers").click()
        assert tab.locator("td", has_text="1.8").first.is_visible()
        assert met == []


def test_a_pointer_and_the_keyboard_reach_what_is_known_of_a_token(browser, files):
    _, path = files["sequence"]
    with opened(browser, path, **viewport(390)) as (tab, met):
        tokens = tab.locator(".token")
        tokens.nth(1).hover()
        assert tokens.nth(1).locator(".tip").is_visible()
        box = tokens.nth(1).locator(".tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        tab.mouse.move(0, 0)
        assert tab.locator(".token[tabindex='0']").count() == 1  # one stop of the Tab key
        tokens.nth(0).focus()
        tab.keyboard.press("ArrowRight")
        tip = tokens.nth(1).locator(".tip")
        assert tip.is_visible()
        assert runs.HOSTILE[1][:38] in tip.inner_text()
        tab.keyboard.press("Escape")
        assert not tip.is_visible()
        assert met == []


def test_a_heat_map_is_read_by_pointer_and_keyboard(browser, files):
    _, path = files["sequence"]
    with opened(browser, path, **viewport(1280)) as (tab, met):
        plot, readout = tab.locator("[data-heat]"), tab.locator(".readout")
        plot.focus()
        tab.keyboard.press("ArrowRight")
        assert "token 0" in readout.inner_text()
        assert "layer 0: 0.250" in readout.inner_text()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowUp")
        assert "token 1" in readout.inner_text()
        assert "layer 1: 1.25" in readout.inner_text()
        image = plot.locator("svg image").first.bounding_box()
        tab.mouse.move(image["x"] + 0.25 * image["width"], image["y"] + 0.25 * image["height"])
        assert "token 0" in readout.inner_text()
        assert "layer 1: 1.25" in readout.inner_text()
        assert met == []


def test_colours_follow_the_reader(browser, files):
    _, path = files["fold"]
    seen = {}
    for scheme in ("light", "dark"):
        with opened(browser, path, color_scheme=scheme) as (tab, _):
            seen[scheme] = tab.evaluate(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
                " getComputedStyle(document.querySelector('svg text')).fill]"
            )
    assert all(first != second for first, second in zip(seen["light"], seen["dark"], strict=True))
    assert all(contrast(colours[0], colours[1]) > 7 for colours in seen.values())


def contrast(first: str, second: str) -> float:
    """WCAG 2, of two `rgb(r, g, b)`."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(first), light(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_paper_shows_what_was_folded_away(browser, files, tmp_path):
    _, path = files["fold"]
    with opened(browser, path) as (tab, met):
        tab.emulate_media(media="print")
        assert not tab.locator(".tip").first.is_visible()
        printed = tmp_path / "page.pdf"
        tab.pdf(path=printed)
        assert printed.stat().st_size > 10_000
        texts = tab.locator("details.text")
        assert texts.count() == tab.locator("details.text[open]").count() > 0  # beforeprint unfolds them
        assert not tab.locator("details.numbers").first.is_visible()
        assert met == []
