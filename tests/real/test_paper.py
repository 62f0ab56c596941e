"""The paper's experiment on the built-in models, and the README as pasted."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from contextfold import models, prompts, suites
from contextfold.anatomy import bind
from contextfold.verify import Prompt, Settings, verify_prompts

pytestmark = pytest.mark.real


@cache
def bound(name, dtype):
    loaded = models.load(name, dtype=dtype)
    return bind(loaded.model), tuple(Prompt(prompts.encode_text(loaded.tokenizer, text)) for text in suites.PAPER)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_float32_is_exact_on_every_token(name):
    """Five prompts × 5 tokens (`make measured` runs all 20), weights written, the current token alone in the window."""
    model, items = bound(name, torch.float32)
    verdict = verify_prompts(model, items, tokens=5, settings=Settings(name=name))
    found = verdict.to_json()
    assert verdict.proven, verdict.sentence()
    assert found["top1_matches"] == found["tokens"] == 25
    assert found["worst_logit_gap"] <= 1e-4
    assert found["max_abs_dm"] <= 1e4
    assert found["smallest_unpatched_logit_gap"] > 1
    assert found["perturbed_top1_matches"] >= 24  # exact, and not only in the run that it was solved in


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_bfloat16_agrees_as_well_as_the_model_with_itself(name):
    model, items = bound(name, torch.bfloat16)
    verdict = verify_prompts(model, items, tokens=2)
    found = verdict.to_json()
    # Where two tokens have exactly the same in-context logit, either is right; every other mismatch counts.
    wrong = [mismatch for mismatch in found["mismatches"] if mismatch["margin"] > 0]
    assert found["tokens"] - len(wrong) >= found["scatter_top1_matches"]
    assert found["worst_logit_gap"] < 0.05 * found["unpatched_logit_gap"]


def test_the_theorem_is_exact_and_fragile():
    """The finding that the default rule answers: exact as solved, lost under one rounding of the embeddings."""
    model, items = bound("gemma3-270m", torch.float32)
    found = verify_prompts(model, items[:1], tokens=1, settings=Settings(rule="theorem")).to_json()
    assert found["worst_logit_gap"] < 1e-3
    assert found["max_abs_dm"] > 1e5
    assert found["perturbed_worst_logit_gap"] > 1
    default = verify_prompts(model, items[:1], tokens=1).to_json()
    assert default["perturbed_worst_logit_gap"] < 1e-3


def test_scales_that_are_zero_in_a_real_model_are_named():
    from contextfold.errors import NotControllable
    from contextfold.outcomes import Outcome

    model, items = bound("gemma3-270m", torch.float32)
    for rule in ("scalar", "appendix"):
        with pytest.raises(NotControllable) as caught:
            verify_prompts(model, items[:1], settings=Settings(rule=rule))
        assert caught.value.findings[0].outcome is Outcome.TINY_SCALE


def test_the_readme_works_as_pasted(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Edmund" in printed
    assert "Proven" in printed
