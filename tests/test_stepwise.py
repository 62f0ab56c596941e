"""Generation that folds at every step. The oracle is the model itself, run anew over all tokens without a cache."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zoo
from contextfold.anatomy import bind
from contextfold.errors import InputError, NotControllable, UnsupportedModel
from contextfold.fold import fold_token
from contextfold.outcomes import Outcome
from contextfold.patch import MatrixEdit, ScaleEdit
from contextfold.runtime import Run, materialised, run
from contextfold.stepwise import PAPER, Summary, Window, generate, pair
from contextfold.stepwise.cache import KeptCache, SharedCache, empty_cache
from contextfold.stepwise.once import few_rows
from tiny import FLOAT32_NORMS, POST_NORM, TYPES, WITHOUT_SDPA, bits, build, shared, tokens

PROMPT = tokens(14)
STEPS = 5
SPAN = Window(((0, 1), (9, 11)), generated=True)
WINDOWS = {"paper": PAPER, "sink": Window(((0, 1),)), "generated": Window((), generated=True), "span": SPAN}


def oracle(model, ids):
    """In-context logits from transformers alone."""
    return model(ids[None]).logits[0, -1]


def history(prompt, found, step):
    return torch.cat([prompt, torch.tensor([token.chosen for token in found[:step]], dtype=torch.int64)])


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", TYPES)
def test_every_step_is_proven_in_every_family(model_type, attention, window):
    if attention == "sdpa" and model_type in WITHOUT_SDPA:
        pytest.skip(f"{model_type} has no sdpa attention")
    model = build(model_type, attention=attention)
    found = list(generate(model, PROMPT, window, tokens=STEPS, prove_every=1))
    assert [token.index for token in found] == list(range(STEPS))
    for step, token in enumerate(found):
        wanted = oracle(model, history(PROMPT, found, step))
        without = token.proof.unpatched.logit_gap
        assert without > 0.05, "the dropped tokens do nothing here, so the test would prove nothing"
        assert token.match
        assert token.in_context == int(wanted.argmax())
        assert token.position == PROMPT.numel() + step - 1
        assert token.proof.written.logit_gap < FLOAT32_NORMS * max(without, 1)
        assert token.logit_gap < FLOAT32_NORMS * max(without, 1)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_patch_meets_the_model_with_its_context(model_type):
    """Nothing kept: the patch, written by another door, against a plain forward over all tokens."""
    model = build(model_type)
    bound = bind(model)
    found = list(generate(bound, PROMPT, tokens=3, prove_every=1))
    for step, token in enumerate(found):
        ids = history(PROMPT, found, step)
        patch = token.proof.patch(bound)
        assert patch.header.kind == "token"
        with materialised(bound, patch):
            patched = run(model, Run(ids[-1:], torch.tensor([ids.numel() - 1])))[0]
        assert float((patched - oracle(model, ids)).abs().max()) < FLOAT32_NORMS


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text"])
def test_the_patches_are_those_of_the_naive_algorithm(model_type):
    """Full recompute per token, as Algorithm 1 has it, gives the same edits."""
    bound = bind(shared(model_type))
    found = list(generate(bound, PROMPT, tokens=3, prove_every=1))
    for step, token in enumerate(found):
        ids = history(PROMPT, found, step)
        naive = fold_token(bound, ids[:-1], ids[-1:], keep=()).patch
        header = token.proof.patch(bound).header
        assert (header.tokens_digest, header.context_digest) == (
            naive.header.tokens_digest,
            naive.header.context_digest,
        )
        assert (header.positions, header.plan) == (naive.header.positions, naive.header.plan)
        assert set(naive.edits) == set(token.proof.edits)
        for site, edit in naive.edits.items():
            mine = token.proof.edits[site]
            if isinstance(edit, MatrixEdit):
                gap = (edit.delta - mine.delta).norm() / edit.delta.norm()
            else:
                assert isinstance(edit, ScaleEdit)
                gap = float((edit.value - mine.value).norm() / edit.value.norm())
            assert gap < 1e-4


@pytest.mark.parametrize("model_type", ["gpt2", "olmo2", "granite", "gpt_neox", "gemma4_text", "qwen2_moe", "gpt_oss"])
def test_other_forms_of_block(model_type):
    """Transposed maps, a norm of w, a multiplier, a parallel block, shared keys, experts."""
    model = zoo.build(model_type)
    ids = torch.randint(3, zoo.build(model_type).config.get_text_config().vocab_size, (14,))
    found = tuple(generate(model, ids, SPAN, tokens=3, prove_every=1))
    summary = Summary(found, torch.float64)
    assert summary.matches == 3
    assert summary.worst_proven_gap < FLOAT32_NORMS * summary.unpatched_gap
    assert summary.unpatched_gap > 0.05


def test_maps_of_the_branch_read_one_row_and_attention_two():
    model = build("llama")
    seen = {}
    layer = model.model.layers[1]
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        forward = layer.get_submodule(name).forward

        def call(x, name=name, forward=forward):
            seen.setdefault(name, []).append(x.shape[0])
            return forward(x)

        layer.get_submodule(name).forward = call
    list(generate(model, PROMPT, tokens=3, prove_every=0))
    # The steps after the first; before them the prompt is read, and the first row is checked by itself.
    assert {name: counts[-2:] for name, counts in seen.items()} == {
        "self_attn.q_proj": [2] * 2, "self_attn.o_proj": [2] * 2,
        "mlp.gate_proj": [1] * 2, "mlp.up_proj": [1] * 2, "mlp.down_proj": [1] * 2,
    }  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_the_order_of_a_product_changes_no_logits(bias):
    """Only a float32 vocabulary matrix takes the other order; the oracle calls it on all rows."""
    head = nn.Linear(32, 500, bias=bias)
    holder = SimpleNamespace(get_output_embeddings=lambda: head)
    x = torch.randn(4, 1, 32)
    with torch.no_grad(), ExitStack() as stack:
        wanted = head(x)
        few_rows(holder, stack)
        heard = []
        stack.callback(head.register_forward_hook(lambda _m, _a, output: heard.append(output)).remove)
        assert torch.allclose(head(x), wanted, atol=1e-6, rtol=0)
        assert heard[0].shape == (4, 1, 500)
        few_rows(SimpleNamespace(get_output_embeddings=lambda: None), stack)
    assert torch.equal(head(x), wanted)
    assert not head._forward_hooks
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("mistake", ["sign", "layer", "position", "kept"])
def test_the_suite_can_fail(mistake, monkeypatch):
    bound = bind(build("llama"))
    if mistake == "sign":
        right = pair._Joint._lost
        monkeypatch.setattr(pair._Joint, "_lost", lambda joint, k: -right(joint, k))
        found = list(generate(bound, PROMPT, tokens=2, prove_every=0))
        assert found[1].logit_gap > 1e-2
        return
    if mistake == "kept":
        # The proof must not see what was dropped, nor something else in place of what was kept.
        right_of = KeptCache.of.__func__
        monkeypatch.setattr(
            KeptCache,
            "of",
            classmethod(lambda cls, m, c, row, columns, seen: right_of(cls, m, c, row, columns + 1, seen)),
        )
        kept = next(generate(bound, PROMPT, SPAN)).proof
        monkeypatch.undo()
        assert kept.unpatched.logit_gap != next(generate(bound, PROMPT, SPAN)).proof.unpatched.logit_gap
        return
    token = next(generate(bound, PROMPT, tokens=1))
    patch = token.proof.patch(bound)
    at = PROMPT.numel() - (2 if mistake == "position" else 1)
    layers = [0, 2] if mistake == "layer" else [0, 1, 2]
    with materialised(bound, patch.select(layers) if mistake == "layer" else patch):
        patched = run(bound.model, Run(PROMPT[-1:], torch.tensor([at])))[0]
    gap = float((patched - oracle(bound.model, PROMPT)).abs().max())
    # A lone token attends to itself alone, so its position does not matter; a forgotten layer does.
    assert gap > 1e-2 if mistake == "layer" else gap < 1e-9


@pytest.mark.parametrize("forced", ["free", "forced"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text"])
def test_what_is_said_is_what_greedy_decoding_says(model_type, forced):
    model = shared(model_type)
    ids = PROMPT
    for _ in range(8):
        ids = torch.cat([ids, oracle(model, ids).argmax()[None]])
    found = list(generate(model, PROMPT, SPAN, tokens=8, history=forced, prove_every=3))
    assert [token.chosen for token in found] == ids[PROMPT.numel() :].tolist()
    assert [token.proof is not None for token in found] == [step % 3 == 0 for step in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_batch_is_its_sequences_one_by_one(model_type, temperature):
    """Left-padded prompts of different lengths, each with its own window; longer than the sliding window too."""
    bound = bind(shared(model_type))
    prompts = [tokens(length, seed=length) for length in (3, 14, 9)]
    windows = [PAPER, SPAN, Window(((0, 1),), generated=True)]
    settings = {"tokens": 5, "prove_every": 2, "temperature": temperature}
    together = list(generate(bound, prompts, windows, seed=3, **settings))
    for row, (prompt, window) in enumerate(zip(prompts, windows, strict=True)):
        alone = list(generate(bound, prompt, window, seed=3 + row, **settings))
        mine = [token for token in together if token.sequence == row]
        key = lambda t: (t.index, t.position, t.in_context, t.patched, t.chosen, t.proof is None)  # noqa: E731
        assert [key(token) for token in mine] == [key(token) for token in alone]
        for a, b in zip(mine, alone, strict=True):
            if a.proof is not None:
                assert a.proof.written.logit_gap < FLOAT32_NORMS
                assert a.proof.unpatched.logit_gap == pytest.approx(b.proof.unpatched.logit_gap, rel=1e-5)
                assert torch.equal(a.proof.full.ids, b.proof.full.ids)


def test_sampling_is_seeded_and_both_models_use_one_noise():
    bound = bind(shared("llama"))
    drawn = {seed: list(generate(bound, PROMPT, tokens=12, temperature=2.0, seed=seed)) for seed in (0, 0, 1)}
    again = list(generate(bound, PROMPT, tokens=12, temperature=2.0, seed=0))
    chosen = lambda found: [token.chosen for token in found]  # noqa: E731
    assert chosen(again) == chosen(drawn[0]) != chosen(drawn[1])
    assert all(token.match for token in (*drawn[0], *drawn[1]))
    assert chosen(again) != chosen(list(generate(bound, PROMPT, tokens=12)))


def test_samples_follow_the_softmax():
    model = shared("llama")
    bound = bind(model)
    drawn = Counter(
        next(generate(bound, PROMPT, tokens=1, temperature=0.5, seed=seed)).in_context for seed in range(400)
    )
    likely = torch.softmax(oracle(model, PROMPT) / 0.5, 0).topk(3)
    for token, p in zip(likely.indices.tolist(), likely.values.tolist(), strict=True):
        assert abs(drawn[token] / 400 - p) < 4 * (p * (1 - p) / 400) ** 0.5 + 0.01


def test_a_stop_token_ends_its_sequence_alone():
    bound = bind(shared("llama"))
    prompts = [tokens(9, seed=1), tokens(6, seed=2)]
    free = list(generate(bound, prompts, tokens=6, temperature=2.0))
    first, second = ([token.chosen for token in free if token.sequence == row] for row in (0, 1))
    stop = next(token for token in first if token not in second)
    found = list(generate(bound, prompts, tokens=6, temperature=2.0, stop={stop}))
    assert [token.chosen for token in found if token.sequence == 0] == first[: first.index(stop) + 1]
    assert [token.chosen for token in found if token.sequence == 1] == second


def test_one_forward_a_token():
    model = build("llama")
    bound = bind(model)
    calls = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    list(generate(bound, PROMPT, tokens=8, prove_every=0))
    handle.remove()
    # The prompt, the check of the first row, and the proof's three; then two rows a token.
    assert Counter(tuple(shape) for shape in calls) == {(1, PROMPT.numel() - 1): 1, (1, 1): 4, (2, 1): 8}


def test_the_cache_is_stored_once():
    cache = empty_cache(shared("llama"))
    both = SharedCache(cache, 1)
    keys = torch.randn(2, 2, 3, 8)
    read, _ = both.update(keys, keys, 0)
    assert read.shape[0] == 2
    assert read.data_ptr() == cache.layers[0].keys.data_ptr()
    assert read.stride(0) == 0
    assert cache.layers[0].keys.shape[0] == 1


def test_kept_keys_are_those_of_the_kept_tokens_alone():
    model = shared("gemma3_text")
    full = model(PROMPT[None], use_cache=True).cache
    kept = KeptCache.of(model, full, 0, torch.tensor([0, 9, 10]), PROMPT.numel())
    sizes = {layer: keys.shape[2] for layer, keys, _ in kept.stored}
    # The window of 6 holds the five columns from 9 on before the next token comes, so the sink is out of it.
    window = [layer.is_sliding for layer in full.layers]
    assert sizes == {layer: 2 if slides else 3 for layer, slides in enumerate(window)}
    assert kept.fresh().get_seq_length(window.index(True)) == 2


@pytest.mark.parametrize("model_type", POST_NORM)
@pytest.mark.parametrize("when", ["between", "pair", "proof"])
def test_an_interrupt_leaves_the_model_untouched(model_type, when):
    model = build(model_type)
    bound = bind(model)
    before = bits(model)
    steps = generate(bound, PROMPT, SPAN, tokens=9, prove_every=4)
    next(steps)
    if when != "between":
        rows = 1 if when == "proof" else 2

        def interrupt(module, args, output):
            if output.shape[0] == rows:
                raise KeyboardInterrupt

        handle = bound.blocks[1].output_map.module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(steps)
        handle.remove()
    steps.close()
    assert bits(model) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_of_another_kind_are_refused_by_name():
    for model_type, word in (
        ("qwen3_next", "LinearAttentionLayer"),
        ("bart", "count their tokens"),
        ("llama4_text", "chunks"),
        ("openai-gpt", "no cache"),
    ):
        with pytest.raises(UnsupportedModel, match=word):
            generate(zoo.build(model_type), PROMPT)


def test_a_zero_source_is_refused_by_name():
    model = build("qwen2")
    model.model.layers[1].mlp.gate_proj.weight.zero_()
    with pytest.raises(NotControllable) as caught:
        list(generate(model, PROMPT))
    assert caught.value.findings[0].outcome is Outcome.ZERO_SOURCE
    assert caught.value.findings[0].where == "layer 1"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompts": []}, "nothing to generate"),
        ({"tokens": 0}, "nothing to generate"),
        ({"prompts": torch.tensor([], dtype=torch.int64)}, "empty"),
        ({"prompts": torch.tensor([5, 500])}, "outside"),
        ({"prompts": torch.tensor([0.5])}, "integer"),
        ({"tokens": 300}, "positions"),
        ({"window": Window(((3, 20),))}, "not inside"),
        ({"window": Window(((0, 14),))}, "nothing to fold"),
        ({"window": [PAPER, PAPER]}, "2 windows"),
        ({"history": "both"}, "history"),
        ({"prove_every": -1}, "negative"),
        ({"temperature": float("nan")}, "negative"),
        ({"rule": "best"}, "unknown"),
    ],
)
def test_bad_input_is_told_before_anything_runs(changes, word):
    settings = {"prompts": PROMPT, "window": PAPER, **changes}
    with pytest.raises(InputError, match=word):
        generate(bind(shared("llama")), settings.pop("prompts"), settings.pop("window"), **settings)


def test_the_summary_says_when_nothing_was_put_to_the_test():
    """A window that holds all that the model can see."""
    found = tuple(generate(shared("mistral"), PROMPT, Window(((1, 14),), generated=True), tokens=4))
    summary = Summary(found, torch.float64)
    assert not summary.holds
    assert "nothing was put to the test" in summary.sentence()


def test_the_summary_in_json():
    found = tuple(generate(shared("llama"), PROMPT, SPAN, tokens=5, prove_every=2))
    summary = Summary(found, torch.float64)
    json = summary.to_json()
    assert summary.holds
    assert (json["tokens"], json["top1_matches"], json["proven_steps"]) == (5, 5, 3)
    assert json["worst_layer"]["layer"] in range(3)
    assert json["mismatches"] == []
    assert [step["proven_gap"] is not None for step in json["steps"]] == [True, False, True, False, True]


def test_a_single_token_prompt_starts_from_nothing():
    found = list(generate(shared("llama"), PROMPT[:1], tokens=3, prove_every=1))
    assert found[0].proof.unpatched.logit_gap < 1e-9  # nothing before it, so nothing to fold
    assert found[2].proof.written.logit_gap < 1e-9 < 1e-2 < found[2].proof.unpatched.logit_gap
