"""lm-evaluation-harness on a patched model: a task without the context scores as one that has it in its prompts."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import tiny
from contextfold.anatomy import bind
from contextfold.errors import InputError, PatchMismatch
from contextfold.evaluation import evaluating
from contextfold.fold import fold_token
from contextfold.patch import Patch

CONTEXT, QUERY = "the keeper is ed", " so it is:"  # no space at the end: the harness would count it to the answer
LETTERS = "aeiou"


def test_without_the_harness_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    model = tiny.build("llama")
    with pytest.raises(InputError, match=r"contextfold\[eval\]"), evaluating(model, tiny.letters()):
        pass


def encoded(text):
    return torch.tensor(tiny.letters()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def folded():
    """A tiny model and a patch that is exact for the token after the query, positions counted anew."""
    bound = bind(tiny.build("llama", torch.float32))
    return bound, fold_token(bound, encoded(CONTEXT), encoded(QUERY), positions="renumbered").patch


def scores(lm, prompt, tmp_path):
    """Log-probability in nats of each letter after the prompt, as the harness scores a task of one question."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = tmp_path / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "questions.jsonl").write_text(json.dumps({"prompt": prompt, "choices": list(LETTERS), "answer": 0}) + "\n")
    settings = {
        "task": "tiny_letters",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tasks / "questions.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tasks / "tiny_letters.yaml").write_text(json.dumps(settings))  # JSON is YAML
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=["tiny_letters"], task_manager=manager, log_samples=True)
    return torch.tensor([score for ((score, _),) in found["samples"]["tiny_letters"][0]["resps"]])


def test_a_patch_scores_as_the_context_does(folded, tmp_path):
    pytest.importorskip("lm_eval")
    bound, patch = folded
    before = tiny.bits(bound.model)
    with evaluating(bound, tiny.letters()) as lm:
        wanted, bare = scores(lm, CONTEXT + QUERY, tmp_path), scores(lm, CONTEXT[0] + QUERY, tmp_path)
    with evaluating(bound, tiny.letters(), patch) as lm:
        found = scores(lm, CONTEXT[0] + QUERY, tmp_path)
    with evaluating(bound.model, tiny.letters(), patch * -1.0) as lm:
        wrong = scores(lm, CONTEXT[0] + QUERY, tmp_path)
    unpatched = float((bare - wanted).abs().max())
    assert unpatched > 1e-2
    assert float((found - wanted).abs().max()) < 1e-3 * unpatched
    assert float((wrong - wanted).abs().max()) > unpatched
    assert tiny.bits(bound.model) == before


def test_a_patch_of_another_model_is_refused(folded):
    pytest.importorskip("lm_eval")
    other = bind(tiny.build("llama", torch.float32, seed=1))
    patch: Patch = folded[1]
    with pytest.raises(PatchMismatch), evaluating(other, tiny.letters(), patch):
        pass
