"""`inspect --discover` on tiny model folders: with a record, against a wrong one, without any, and refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from contextfold import cli
from contextfold.anatomy import FAMILIES, Dense, Experts, Family, Mixer, Tap, Wiring, bind
from contextfold.anatomy.discover import differences, discover
from tiny import build


class NewcomerConfig(transformers.LlamaConfig):
    model_type = "newcomer"


class NewcomerForCausalLM(transformers.LlamaForCausalLM):
    config_class = NewcomerConfig


@pytest.fixture
def save(tmp_path):
    """Write a model with a tokenizer of one token per letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(model):
        words = ["<unk>", "<bos>", *(chr(c) for c in range(32, 127))]
        core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        folder = tmp_path / "model"
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>")
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["contextfold", "inspect", *arguments])
        capsys.readouterr()  # progress bars of saving
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out, printed.err

    return run


def pasted(text: str) -> Family:
    """What a person gets who pastes `text` into a file of families."""
    names = {kind.__name__: kind for kind in (Dense, Experts, Family, Mixer, Tap, Wiring)}
    return eval(text, names)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_discovery_agrees_with_the_record(call, save, model_type):
    folder = save(build(model_type, torch.float32))
    code, printed, _ = call(folder, "--discover", "--json")
    found = json.loads(printed)
    assert (code, found["agrees"], found["differences"]) == (0, True, [])
    assert found["family"] == f"discovered {model_type}"
    assert found["record"] in {family.name for family in FAMILIES}
    code, plain, _ = call(folder, "--json")
    assert (code, json.loads(plain)["blocks"]) == (0, found["blocks"])
    assert bind(build(model_type, torch.float32), pasted(found["source"])).blocks


def test_the_table_says_so_and_holds_the_record(call, save):
    code, printed, _ = call(save(build("gemma3_text", torch.float32)), "--discover")
    assert code == 0
    for words in ("m = 1 + w", "mlp.down_proj", "all", "Agrees with the record 'gemma2'"):
        assert words in printed
    assert pasted(printed[printed.index("Family(") :]).model_types == ("gemma3_text",)


def test_a_type_without_a_record_is_discovered(call, save):
    transformers.AutoConfig.register("newcomer", NewcomerConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(NewcomerConfig, NewcomerForCausalLM, exist_ok=True)
    settings = build("llama").config.to_dict() | {"model_type": "newcomer", "architectures": None}
    torch.manual_seed(0)
    folder = save(NewcomerForCausalLM(NewcomerConfig(**settings)))
    code, printed, errors = call(folder)
    assert (code, printed) == (2, "")
    assert "--discover" in errors
    code, printed, _ = call(folder, "--discover", "--json")
    found = json.loads(printed)
    assert (code, found["record"], found["agrees"]) == (0, None, None)
    assert pasted(found["source"]).sites == discover(build("llama")).sites
    code, printed, _ = call(folder, "--discover")
    assert code == 0
    assert "no record for model type 'newcomer'" in printed


def test_what_cannot_be_proven_is_one_line_and_exit_code_2(call, save):
    import zoo

    model = zoo.build("hrm_text", torch.float32, num_hidden_layers=2)
    code, printed, errors = call(save(model), "--discover")
    assert (code, printed) == (2, "")
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1
    assert "one edit cannot serve several depths" in lines[0]


def test_a_patch_file_has_nothing_to_discover(call, tmp_path):
    code, printed, errors = call(str(tmp_path / "p.safetensors"), "--discover")
    assert (code, printed) == (2, "")
    assert "is a patch file" in errors


def test_every_difference_is_named():
    model = build("gemma3_text")
    record = bind(model)
    first, *rest = record.blocks
    maps = (first.input_maps[0], replace(first.input_maps[1], site=replace(first.input_maps[1].site, transposed=True)))
    changed = {
        "up_proj.weight is an edited input map": replace(first, input_maps=first.input_maps[:1]),
        "for discovery only": replace(first, input_maps=maps),
        "for the record only": replace(first, output_map=first.input_maps[0]),
        "of convention w for discovery": replace(first, norm_post=replace(first.norm_post, offset=0)),
        "none for discovery": replace(first, norm_post=None),
        "the norm over the sum": replace(first, norm_outer=first.norm_pre),
        "alpha is 1.0 in the record, 2.0": replace(first, alpha=2 * first.alpha),
    }
    assert differences(record, record) == ()
    for words, block in changed.items():
        said = differences(record, replace(record, blocks=(block, *rest)))
        assert any(words in line and line.startswith("layer 0: ") for line in said), (words, said)
    assert differences(record, replace(record, blocks=record.blocks[1:])) == (
        "layer 0: one of them has no block there",
    )
