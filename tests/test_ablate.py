"""What parts of a prompt are worth. The oracle removes them by transformers' own forward, and writes weights itself."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contextfold import ablate as module
from contextfold.ablate import ablate
from contextfold.compare import cosine
from contextfold.errors import InputError
from contextfold.patch import MatrixEdit, ScaleEdit
from contextfold.prompts import encode_parts
from tiny import FLOAT32_NORMS, POST_NORM, TYPES, bits, build, shared, tokens

CONTEXT, QUERY = tokens(14), tokens(3, seed=2)
PARTS = {"first": ((0, 4),), "second": ((4, 7),), "third": ((8, 14),)}
WITHOUT_WINDOW = ("llama", "qwen2", "qwen3", "gemma")


def whole(model, answer=()):
    ids = torch.cat([CONTEXT, QUERY, torch.tensor(answer, dtype=torch.int64)])
    return model(ids[None]).logits[0, -1].double()


def removed(model, spans, answer=()):
    """Logits after the tokens of `spans` are cut out; what stays keeps its positions, and so does the first token."""
    ids = torch.cat([CONTEXT, QUERY, torch.tensor(answer, dtype=torch.int64)])
    stays = [i for i in range(ids.numel()) if i == 0 or not any(a <= i < b for a, b in spans)]
    cut = ids[stays][None]
    return model(cut, position_ids=torch.tensor([stays]), attention_mask=torch.ones_like(cut)).logits[0, -1].double()


def masked(model, spans):
    """The same without cutting: attention is forbidden to look at what is gone."""
    ids = torch.cat([CONTEXT, QUERY])[None]
    mask = torch.ones_like(ids)
    for start, stop in spans:
        mask[0, max(start, 1) : stop] = 0
    return model(ids, position_ids=torch.arange(ids.shape[1])[None], attention_mask=mask).logits[0, -1].double()


def divergence(p, q):
    log_p, log_q = torch.log_softmax(p, 0), torch.log_softmax(q, 0)
    return float(torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True))


def rewritten(model, patch):
    """A copy of the model with the edits added by hand, in dense float64."""
    other = copy.deepcopy(model)
    for site, edit in patch.edits.items():
        parameter = other.get_submodule(site.module).get_parameter(site.parameter)
        match edit:
            case MatrixEdit(delta):
                parameter.data += delta.B.double() @ delta.A.double()
            case ScaleEdit(_, value, offset):
                parameter.data = value - offset
    return other


@pytest.mark.parametrize("model_type", TYPES)
def test_costs_are_those_of_removal_and_patches_undo_it(model_type):
    model = shared(model_type)
    found = ablate(model, CONTEXT, QUERY, PARTS)
    full = whole(model)
    assert [part.name for part in found.parts] == list(PARTS)
    assert found.answer == (int(full.argmax()),)
    for part in found.parts:
        without = removed(model, PARTS[part.name])
        gap = float((full - without).abs().max())
        assert gap > 0.1, "the part does nothing here, so the test would prove nothing"
        assert part.logit_gap == pytest.approx(gap, rel=1e-6)
        assert part.kl_nats == pytest.approx(divergence(full, without), rel=1e-6)
        lost = torch.log_softmax(full, 0) - torch.log_softmax(without, 0)
        assert part.answer_nats == pytest.approx(float(lost[full.argmax()]), rel=1e-6, abs=1e-9)
        assert part.top1_changes == int(full.argmax() != without.argmax())
        patched = removed(rewritten(model, part.removals[0].patch), PARTS[part.name])
        assert float((full - patched).abs().max()) < 10 * FLOAT32_NORMS * gap
        assert part.patched_logit_gap < 10 * FLOAT32_NORMS * gap
    costs = {name: divergence(full, removed(model, spans)) for name, spans in PARTS.items()}
    assert [part.name for part in found.ranked()] == sorted(costs, key=costs.get, reverse=True)
    # Upstream norms compute in float32, and the limit for float64 is finer than that on gaps as small as these.
    assert found.proven or model_type in POST_NORM


@pytest.mark.parametrize("model_type", WITHOUT_WINDOW)
def test_cutting_out_is_the_same_as_forbidding_to_look(model_type):
    model = shared(model_type)
    full = whole(model)
    for part in ablate(model, CONTEXT, QUERY, PARTS).parts:
        assert part.kl_nats == pytest.approx(divergence(full, masked(model, PARTS[part.name])), rel=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_norms_are_those_of_the_dense_changes(model_type):
    for part in ablate(shared(model_type), CONTEXT, QUERY, PARTS).parts:
        (removal,) = part.removals
        squares = {}
        for site, edit in removal.patch.edits.items():
            if isinstance(edit, MatrixEdit):
                change = float((edit.delta.B.double() @ edit.delta.A.double()).square().sum())
                squares[site.layer] = squares.get(site.layer, 0.0) + change
        assert part.patch_norm == pytest.approx(math.sqrt(sum(squares.values())))
        assert removal.layer_norms() == pytest.approx([math.sqrt(squares[layer]) for layer in sorted(squares)])
        assert (part.max_abs_dm > 0) == (model_type in POST_NORM)
        assert 0 < part.weight_ratio < 10


def test_the_first_token_stays_and_the_report_says_so():
    found = ablate(shared("llama"), CONTEXT, QUERY, PARTS)
    first, second, _ = found.parts
    assert (first.keeps_sink, first.spans, first.dropped) == (True, ((1, 4),), 3)
    assert (second.keeps_sink, second.spans, second.dropped) == (False, ((4, 7),), 3)
    with pytest.raises(InputError, match="attention rests on it"):
        ablate(shared("llama"), CONTEXT, QUERY, {"sink": ((0, 1),)})


def test_a_part_may_be_several_spans_and_parts_may_overlap():
    model, spans = shared("llama"), ((2, 4), (9, 12))
    found = ablate(model, CONTEXT, QUERY, {"pair": spans, "everything": ((0, 14),)})
    pair, everything = found.parts
    assert pair.spans == spans
    assert pair.kl_nats == pytest.approx(divergence(whole(model), removed(model, spans)))
    assert everything.kl_nats == pytest.approx(divergence(whole(model), removed(model, ((0, 14),))))
    assert found.proven


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_an_answer_of_several_tokens(model_type):
    """Greedy history, one patch for each token, costs added up."""
    model, answer = shared(model_type), []
    sums = dict.fromkeys(PARTS, 0.0)
    for _ in range(3):
        full = whole(model, answer)
        for name, spans in PARTS.items():
            sums[name] += divergence(full, removed(model, spans, answer))
        answer.append(int(full.argmax()))
    seen = []
    found = ablate(model, CONTEXT, QUERY, PARTS, tokens=3, progress=seen.append)
    assert len(seen) == 9
    assert found.answer == tuple(answer)
    assert {part.name: part.kl_nats for part in found.parts} == pytest.approx(sums, rel=1e-6)
    assert [r.position for r in found.parts[0].removals] == [16, 17, 18]
    assert found.proven
    (row,) = [p for p in found.to_json()["parts"] if p["name"] == "second"]
    assert row["kl_nats"] == pytest.approx(sum(position["kl_nats"] for position in row["positions"]))
    assert row["patch_norm"] == pytest.approx(sum(position["patch_norm"] for position in row["positions"]) / 3)
    assert len(row["positions"][2]["layers"]) == 3


def test_a_part_that_says_nothing_takes_no_patch():
    """With attention all but silent nothing is missing. The default rule then changes nothing; `balanced` would."""
    model = build("gemma3_text")
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.fill_(-1 + 1e-9)
    quiet = ablate(model, CONTEXT, QUERY, PARTS)
    loud = ablate(model, CONTEXT, QUERY, PARTS, rule="balanced")
    for silent, costly in zip(quiet.parts, loud.parts, strict=True):
        assert silent.logit_gap < 1e-6
        assert silent.patch_norm < 1e-4
        assert costly.patch_norm > 1e-2


def test_the_model_is_as_it_was():
    model = build("gemma3_text")
    before = bits(model)
    ablate(model, CONTEXT, QUERY, PARTS)
    assert bits(model) == before


def test_patches_of_parts_can_be_compared_and_combined():
    """The attribution and the algebra meet: each part's patch is a value."""
    found = ablate(shared("llama"), CONTEXT, QUERY, PARTS)
    first, second, _ = (part.removals[0].patch for part in found.parts)
    assert cosine(first, first) == pytest.approx(1)
    assert abs(cosine(first, second)) < 1
    assert (first + second).header.exact_at == ()


@pytest.mark.parametrize("mistake", [lambda p: p * 0.5, lambda p: p * 0.999, lambda p: p.select([0, 1])])
def test_the_proof_can_fail(mistake, monkeypatch):
    """Half a patch, a slightly wrong one, and a forgotten layer are not proven."""
    honest = module.fold_token

    def broken(*arguments, **options):
        folded = honest(*arguments, **options)
        return replace(folded, patch=mistake(folded.patch))

    monkeypatch.setattr(module, "fold_token", broken)
    found = ablate(shared("llama"), CONTEXT, QUERY, PARTS)
    assert not found.proven
    assert not any(part["proven"] for part in found.to_json()["parts"])


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({}, {}, "at least one part"),
        (PARTS, {"tokens": 0}, "one token"),
        ({"x": ((3, 99),)}, {}, "'x'.*not inside the context"),
        ({"x": ((5, 2),)}, {}, "not inside"),
        ({"x": ()}, {}, "no token"),
        (PARTS, {"rule": "magic"}, "choose one of"),
    ],
)
def test_bad_input_says_what_to_do(parts, options, message):
    with pytest.raises(InputError, match=message):
        ablate(shared("llama"), CONTEXT, QUERY, parts, **options)


# --- the command line ------------------------------------------------------------------------------------------

GIVEN = ("--part", "one=a b c ", "--part", "two=d e f ", "--part", "three=g h ", "--query", "i j k l")


def test_json_has_the_documented_keys(call, folder):
    code, printed, _ = call("ablate", folder, *GIVEN, "--tokens", 2, "--json")
    found = json.loads(printed)
    assert (code, found["proven"], found["model"]) == (0, True, folder)
    assert [part["name"] for part in found["parts"]] == ["one", "two", "three"]
    assert sorted(found["ranking"]) == ["one", "three", "two"]
    assert sorted(part["rank"] for part in found["parts"]) == [1, 2, 3]
    assert found["parts"][0]["keeps_sink"] is True
    assert found["parts"][1]["spans"] == [[6, 12]]
    assert len(found["answer"]) == 2
    page = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
    # What all commands print stands before the first heading.
    documented = page.split("\n## ")[0] + page.split("## `ablate`")[1].split("\n## ")[0]
    part = found["parts"][0]
    keys = {*found, *part, *part["positions"][0], *part["positions"][0]["layers"][0]}
    assert [key for key in keys if f"`{key}`" not in documented] == []


def test_tables_show_cost_patch_and_proof(call, folder):
    code, printed, _ = call("ablate", folder, *GIVEN)
    assert code == 0
    for words in (
        "what the removal of each part alone costs",
        "the patch that absorbs it",
        "Proven",
        "Part 'one' keeps",
    ):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part", "a b c", "--query", "d"), "NAME=TEXT"),
        (("--part", "=a b c", "--query", "d"), "NAME=TEXT"),
        (("--part", "x=a", "--part", "x=b", "--query", "d"), "'x'"),
        (("--part", "x=", "--query", "d"), "'x' is empty"),
        (("--part", "x=@missing.txt", "--query", "d"), "missing.txt"),
        (("--part", "x=a", "--query", "d"), "attention rests on it"),
        (("--part", "x=a b", "--query", ""), "empty"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(call, folder, arguments, message):
    code, printed, errors = call("ablate", folder, *arguments)
    assert (code, printed) == (2, "")
    assert len([line for line in errors.splitlines() if line.strip()]) == 1
    assert message in errors


def tokenizer(merges):
    """Letters, with "ab" as one token if `merges`, and a BOS in front of every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<bos>", *"abcdefgh"]
    vocabulary = {w: i for i, w in enumerate([*words, "ab"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")] if merges else [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    core.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>")


def test_parts_are_spans_of_one_text_and_bos_is_in_none():
    whole, spans = encode_parts(tokenizer(False), {"x": "ab", "y": "cde"}, "fg")
    assert whole.context.tolist() == [1, 2, 3, 4, 5, 6]
    assert whole.query.tolist() == [7, 8]
    assert spans == {"x": (1, 3), "y": (3, 6)}


def test_parts_that_merge_are_refused_by_name():
    with pytest.raises(InputError, match="between part 'y' and what follows"):
        encode_parts(tokenizer(True), {"x": "c", "y": "da"}, "b")
    with pytest.raises(InputError, match="no parts"):
        encode_parts(tokenizer(True), {}, "b")
