"""Text to token ids: one BOS, no merge across a boundary, and no template that slips in a text of its own."""

from __future__ import annotations

from datetime import date

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contextfold import prompts
from contextfold.chattemplate import gap
from contextfold.errors import InputError

MERGES = [("Ġ", "a"), ("Ġ", "b"), ("a", "b"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("o", "n"), ("on", "e"), ("Ġ", "one")]
SPECIALS = ["<unk>", "<bos>", "<eos>", "<|turn|>", "<|end|>"]

CHATML = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
DEFAULT = "You are a helpful machine."
CHATML_WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|turn|>system\n" + DEFAULT + "<|end|>\n{% endif %}" + CHATML
)
DEFAULT_WHEN_EMPTY = CHATML_WITH_DEFAULT.replace(
    "messages[0]['role'] != 'system'", "messages[0]['role'] != 'system' or not messages[0]['content']"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)
SILENT_ABOUT_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
FOLDING = (
    "{{ bos_token }}{% set first = '' %}{% set rest = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}<|turn|>{{ m['role'] }}\n{{ first if loop.first else '' }}{{ m['content'] }}<|end|>\n"
    "{% endfor %}<|turn|>model\n"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
DATED = (
    "{{ bos_token }}<|turn|>system\nToday is {{ strftime_now('%d %b %Y') }}.\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}<|end|>\n"
    "<|turn|>user\n{{ messages[-1]['content'] }}<|end|>\n"
)
DATED_BY_DEFAULT = CHATML_WITH_DEFAULT.replace(DEFAULT, "{{ strftime_now('%A') }}")


def make(template: str | None = None, *, bos: bool = False, eos: bool = False):
    """A byte-level tokenizer with eight merges; `bos` and `eos` are added to every text if asked for."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers import models as cores
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *letters, *("".join(pair) for pair in MERGES)]
    core = Tokenizer(cores.BPE({token: index for index, token in enumerate(tokens)}, MERGES))
    # One piece for the whole text, so that merges may cross anything.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if bos or eos:
        single = ["<bos>"] * bos + ["$A"] + ["<eos>"] * eos
        ids = [(token, SPECIALS.index(token)) for token in ("<bos>", "<eos>")]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------ plain text


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_encode_is_the_one_text_with_what_the_tokenizer_puts_in_front(bos, eos):
    tokenizer = make(bos=bos, eos=eos)
    spans = prompts.encode(tokenizer, "one a", " b one")
    whole = torch.cat([spans.context, spans.query]).tolist()
    assert whole == tokenizer("one a b one")["input_ids"][: -1 if eos else None]
    assert spans.query.tolist() == ids(tokenizer, " b one")
    assert (spans.context.dtype, spans.query.dtype) == (torch.long, torch.long)
    assert (spans.context.dim(), spans.query.dim()) == (1, 1)
    assert spans.sink == (0, 1)
    assert whole.count(tokenizer.bos_token_id) == bos


def test_a_context_that_begins_with_bos_gets_no_second_one():
    tokenizer = make(bos=True)
    for context in ("one", "<bos>one"):
        assert prompts.encode(tokenizer, context, " a").context.tolist() == tokenizer("one")["input_ids"]
        assert prompts.encode_text(tokenizer, context).tolist() == tokenizer("one")["input_ids"]
    assert "two BOS" in refusal(prompts.encode, tokenizer, "<bos><bos>one", " a")


@pytest.mark.parametrize(
    ("context", "query", "way_out"),
    [
        ("one ", "a b", "move the ' ' at the end of the context to the start of the query"),
        ("one\n", "\na", r"move the '\n' at the end of the context"),
        ("one ", " one", "move the ' ' at the end of the context"),
        ("a", "b", "put a space or a newline at the start of the query"),
    ],
)
def test_a_merge_across_the_boundary_is_refused_and_shown(context, query, way_out):
    tokenizer = make()
    message = refusal(prompts.encode, tokenizer, context, query)
    assert way_out in message
    last, first = ids(tokenizer, context)[-1], ids(tokenizer, query)[0]
    for token in (last, first):
        assert repr(tokenizer.convert_ids_to_tokens(token)) in message.split("together …")[0]
    merged = set(ids(tokenizer, context + query)) - {*ids(tokenizer, context), *ids(tokenizer, query)}
    assert repr(tokenizer.convert_ids_to_tokens(merged.pop())) in message.split("together …")[1]


def test_the_way_out_that_a_refusal_names_works():
    spans = prompts.encode(make(), "one", " a b")
    assert len(spans.query) == 2


@given(st.text("ab one\n", min_size=1, max_size=12), st.text("ab one\n", min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_encode_gives_the_joint_tokens_or_refuses(context, query):
    tokenizer = TOKENIZER
    fits = ids(tokenizer, context + query) == ids(tokenizer, context) + ids(tokenizer, query)
    if fits:
        spans = prompts.encode(tokenizer, context, query)
        assert torch.cat([spans.context, spans.query]).tolist() == ids(tokenizer, context + query)
    else:
        refusal(prompts.encode, tokenizer, context, query)


TOKENIZER = make()


@pytest.mark.parametrize(("context", "query", "name"), [("", "a", "context"), ("a", "", "query")])
def test_empty_texts_are_refused(context, query, name):
    assert name in refusal(prompts.encode, make(bos=True), context, query)


def test_encode_text_is_what_the_tokenizer_gives_without_its_end():
    tokenizer = make(bos=True, eos=True)
    assert prompts.encode_text(tokenizer, "one a").tolist() == tokenizer("one a")["input_ids"][:-1]
    assert "empty" in refusal(prompts.encode_text, tokenizer, "")


# ------------------------------------------------------------------------------------------------ chats


def kept_ids(chat: prompts.Chat) -> list[int]:
    start, stop = chat.removed
    return [*chat.ids[:start].tolist(), *chat.ids[stop:].tolist()]


@pytest.mark.parametrize("context", ["one a b", "<one", "  one\n", "user", "one a b\n\none"])
@pytest.mark.parametrize("user", ["a b one", "one a b", "one"])
def test_a_chat_without_its_context_is_what_the_template_renders_without_it(context, user):
    tokenizer = make(CHATML)
    found = prompts.chat(tokenizer, context, user)
    bare = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
    )
    assert found.kept == found.bare == bare
    assert kept_ids(found) == ids(tokenizer, bare)
    assert context in found.removed_text
    assert len(found.text) == len(found.kept) + len(found.removed_text)
    assert (found.inserted, found.folded) == ("", False)
    assert found.ids.tolist() == ids(tokenizer, found.text)


def test_the_sink_of_a_chat_is_its_first_token_and_stays():
    tokenizer = make(CHATML)
    spans = prompts.chat(tokenizer, "one", "a").spans()
    assert spans.sink == (0, 1)
    assert spans.context[0] == tokenizer.convert_tokens_to_ids("<|turn|>")
    assert tokenizer.decode(spans.query).startswith("user\na<|end|>")


def test_a_template_that_begins_with_the_context_keeps_its_first_token_as_the_sink():
    tokenizer = make("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    found = prompts.chat(tokenizer, "one a", "b")
    assert found.removed[0] == 0
    assert found.spans().sink == (0, 1)


def test_a_default_system_prompt_is_kept_out_and_shown():
    tokenizer = make(CHATML_WITH_DEFAULT)
    found = prompts.chat(tokenizer, "one a b", "one")
    assert found.removed_text == "one a b"
    assert found.kept == "<|turn|>system\n<|end|>\n<|turn|>user\none<|end|>\n<|turn|>assistant\n"
    assert found.inserted == DEFAULT
    assert DEFAULT in found.bare
    assert DEFAULT not in tokenizer.decode(kept_ids(found))
    assert kept_ids(found) == prompts.chat(tokenizer, "", "one").ids.tolist()  # the explicit empty message


def test_a_default_system_prompt_is_refused_where_there_is_no_context():
    message = refusal(prompts.chat, make(CHATML_WITH_DEFAULT), None, "one")
    assert DEFAULT in message
    assert "explicit empty system message" in message
    assert DEFAULT in refusal(prompts.chat, make(DEFAULT_WHEN_EMPTY), "", "one")
    for system in (None, ""):  # the same without a default is fine
        found = prompts.chat(make(CHATML), system, "one")
        assert found.removed[0] == found.removed[1]
        assert (found.removed_text, found.kept) == ("", found.text)


def test_a_context_that_repeats_the_default_is_removed_whole():
    tokenizer = make(CHATML_WITH_DEFAULT)
    for context in (DEFAULT, DEFAULT + " one", "one " + DEFAULT):
        found = prompts.chat(tokenizer, context, "a")
        assert found.removed_text == context
        assert DEFAULT not in tokenizer.decode(kept_ids(found))


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT_ABOUT_SYSTEM])
def test_without_a_system_role_the_context_goes_into_the_user_turn_and_the_result_says_so(template):
    tokenizer = make(template)
    found = prompts.chat(tokenizer, "one a", "one b")
    assert found.folded
    assert "<|turn|>user\none a\n\none b<|end|>" in found.text
    assert found.removed_text == "one a\n\n"
    assert found.kept == found.bare
    # The context goes, not the like-named beginning of what the user says.
    spans = found.spans()
    assert tokenizer.decode(spans.context).endswith("user\none a\n\n")
    assert tokenizer.decode(spans.query).startswith("one b<|end|>")
    for system in (None, ""):
        assert prompts.chat(tokenizer, system, "one b").text == found.bare


def test_a_template_that_folds_by_itself_is_not_called_folded():
    found = prompts.chat(make(FOLDING), "one a", "one b")
    assert not found.folded
    assert found.removed_text == "one a\n\n"
    assert found.kept == found.bare


def test_a_rendered_chat_has_the_bos_of_its_template_and_no_other():
    tokenizer = make(FOLDING, bos=True)
    found = prompts.chat(tokenizer, "one", "a")
    assert found.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert kept_ids(found).count(tokenizer.bos_token_id) == 1
    assert make(CHATML, bos=True).bos_token_id not in prompts.chat(make(CHATML, bos=True), "one", "a").ids
    doubled = make("{{ bos_token }}" + FOLDING, bos=True)
    assert "two BOS" in refusal(prompts.chat, doubled, "one", "a")


@pytest.mark.parametrize(("system", "user"), [("one <bos>", "a"), ("one", "<bos>a")])
def test_a_message_that_holds_bos_is_refused(system, user):
    assert "<bos>" in refusal(prompts.chat, make(FOLDING), system, user)


def test_a_template_that_strips_messages_is_taken_as_it_renders():
    tokenizer = make(TRIMMING)
    found = prompts.chat(tokenizer, "\n one\n", "a")
    assert "\n one" not in found.text
    assert "one" in found.removed_text
    assert kept_ids(found) == ids(tokenizer, found.bare)


def test_a_template_that_rewrites_messages_is_refused():
    tokenizer = make(CHATML.replace("m['content']", "m['content'] | replace('z', 'a')"))
    assert "rewrites" in refusal(prompts.chat, tokenizer, "one z", "b")


def test_a_merge_at_the_edge_of_the_context_is_refused():
    tokenizer = make(NO_SYSTEM)
    assert "merges" in refusal(prompts.chat, tokenizer, "\none", "a")  # role, newline, newline
    assert prompts.chat(tokenizer, "one", "a").removed_text == "one\n\n"


@pytest.mark.parametrize("template", [DATED, DATED_BY_DEFAULT])
@pytest.mark.parametrize("system", ["one", None])
def test_a_template_that_prints_the_date_needs_one(template, system):
    assert "date" in refusal(prompts.chat, make(template), system, "a")


def test_a_frozen_date_is_printed_in_both_renderings():
    found = prompts.chat(make(DATED), "one", "a", today=date(2020, 2, 29))
    assert "Today is 29 Feb 2020." in found.kept
    assert found.removed_text == "one"
    assert found.kept == found.bare


@pytest.mark.parametrize(
    "start", ["", "\n", "\n\n  ", "  {% if true %} {% endif %}\n", "{{ 1 }}\n", "{%- set x = 1 -%}\n a"]
)
@pytest.mark.parametrize("form", ["%d %b %Y", "%-d. %B %y, %A", "%Y-%m-%dT%H"])
def test_freezing_the_date_changes_nothing_else(start, form):
    """Against the template's own clock, of which only the hour is not ours: a day that is given has none."""
    tokenizer = make(start + DATED.replace("%d %b %Y", form))
    today = date.today()
    free = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert date.today() == today, "midnight passed, run it again"
    frozen = prompts.chat(tokenizer, None, "a", today=today).text
    if form.endswith("T%H"):
        at = free.index("T", free.index("Today is") + 1)
        free = free[: at + 1] + "00" + free[at + 3 :]
    assert frozen == free


def test_a_dated_default_is_shown_like_any_other():
    found = prompts.chat(make(DATED_BY_DEFAULT), "one", "a", today=date(2020, 2, 29))
    assert found.inserted == "Saturday"


def test_chats_that_make_no_sense_are_refused():
    assert "no chat template" in refusal(prompts.chat, make(), "one", "a")
    assert "blank" in refusal(prompts.chat, make(CHATML), " \n", "a")
    assert "no context" in refusal(prompts.chat(make(CHATML), None, "a").spans)
    broken = make("{{ raise_exception('never') }}")
    assert "never" in refusal(prompts.chat, broken, "one", "a")
    assert "leaves out" in refusal(prompts.chat, make("<|turn|>"), "one", "a")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_gap_is_the_latest_stretch_that_does_not_begin_after(data):
    long = data.draw(st.lists(st.integers(0, 1), max_size=9))
    short = data.draw(st.lists(st.integers(0, 1), max_size=9))
    at = data.draw(st.integers(0, len(long)))
    size = len(long) - len(short)
    starts = [start for start in range(at + 1) if size >= 0 and long[:start] + long[start + size :] == short]
    assert gap(long, short, at) == ((starts[-1], starts[-1] + size) if starts else None)


# ------------------------------------------------------------------------------------------------ arguments


def test_read_argument(tmp_path):
    path = tmp_path / "context.txt"
    path.write_bytes("\ufeffé one\r\n ".encode())
    assert prompts.read_argument(f"@{path}") == "é one\r\n "
    assert prompts.read_argument("one @ a") == "one @ a"
    assert prompts.read_argument("@@one") == "@one"
    assert prompts.read_argument("") == ""


@pytest.mark.parametrize("name", ["missing", ".", ""])
def test_unreadable_file_is_refused(tmp_path, name):
    assert "@@" in refusal(prompts.read_argument, f"@{tmp_path / name}" if name else "@")


def test_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin1"
    path.write_bytes("one é".encode("latin-1"))
    assert "byte 4 is 0xe9" in refusal(prompts.read_argument, f"@{path}")


def test_parse_spans():
    assert prompts.parse_spans("0:1,5:9", 9) == ((0, 1), (5, 9))
    assert prompts.parse_spans(" 0:1 , 1:2 ", 2) == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "start:stop"),
        ("3", "start:stop"),
        ("a:b", "start:stop"),
        ("-1:2", "start:stop"),
        ("1:", "start:stop"),
        ("0:1,", "start:stop"),
        ("1:2:3", "start:stop"),
        ("²:3", "start:stop"),
        ("2:2", "empty"),
        ("3:2", "empty"),
        ("5:11", "10 tokens"),
        ("0:3,2:4", "overlaps"),
        ("4:5,0:1", "precedes"),
    ],
)
def test_spans_that_make_no_sense_are_refused(text, reason):
    assert reason in refusal(prompts.parse_spans, text, 10)


# ------------------------------------------------------------------------------------------------ real tokenizers


@pytest.fixture(scope="module")
def smollm2():
    from contextfold import models

    return models.load("smollm2").tokenizer


@pytest.fixture(scope="module")
def gemma():
    from contextfold import models

    return models.load("gemma3-270m").tokenizer


@pytest.mark.real
def test_gemma_adds_bos_and_smollm2_does_not(smollm2, gemma):
    for tokenizer, expected in ((smollm2, 0), (gemma, 1)):
        spans = prompts.encode(tokenizer, "Paris is in France.", " The capital is")
        whole = torch.cat([spans.context, spans.query]).tolist()
        assert whole.count(tokenizer.bos_token_id) == expected
        assert whole == tokenizer("Paris is in France. The capital is")["input_ids"]


@pytest.mark.real
def test_real_boundaries(smollm2, gemma):
    for tokenizer in (smollm2, gemma):
        message = refusal(prompts.encode, tokenizer, "Paris is in France. ", "The capital is")
        assert "move the ' '" in message
    assert "'Ġ'" in refusal(prompts.encode, smollm2, "France. ", "The capital is")


@pytest.mark.real
def test_the_default_prompt_of_smollm2_never_slips_in(smollm2):
    found = prompts.chat(smollm2, "Answer in French.", "What is the capital of Spain?")
    assert found.removed_text == "Answer in French."
    assert found.kept.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")
    assert found.inserted == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert kept_ids(found) == ids(smollm2, found.kept)
    assert "SmolLM" not in smollm2.decode(kept_ids(found))
    assert found.spans().sink[0] == 0
    assert "SmolLM" in refusal(prompts.chat, smollm2, None, "What is the capital of Spain?")
    assert kept_ids(found) == prompts.chat(smollm2, "", "What is the capital of Spain?").ids.tolist()


@pytest.mark.real
def test_the_base_model_of_gemma_has_no_chat(gemma):
    assert "no chat template" in refusal(prompts.chat, gemma, "Answer in French.", "Hello")
