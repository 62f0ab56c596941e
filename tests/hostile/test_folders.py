"""Whatever a folder holds, and whatever lies in it that is no file: a typed error in one line or a right answer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from random import Random

import pytest

import folders
import ggufs
import wrecks
from contextfold import models
from contextfold.errors import ContextfoldError, InputError
from contextfold.explain import explain
from contextfold.export import Checkpoint, PeftFolder, check, export
from contextfold.files import read_regular
from contextfold.incoming import check_configuration
from contextfold.scratch import hidden_folder
from folders import FOLDERS, ended
from watched import Broken, kept

TRIALS = 10
"""Per door; `scripts/attack.py folders` has hundreds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.mark.parametrize("door", FOLDERS, ids=lambda door: door.name.replace(" ", "-"))
def test_spoilt_folders_are_refused_or_read_right(door, place):
    here = place / door.name
    here.mkdir()
    assert ended(door, here, Random(0), lambda *_: None) == "taken"
    for trial in range(TRIALS):
        assert ended(door, here, Random(f"short {trial}"))


def through(door, place, change):
    """How a door ended on a folder with one change."""
    here = place / f"{door}-one"
    here.mkdir(exist_ok=True)
    found = next(each for each in FOLDERS if each.name == door)
    return ended(found, here, Random(0), lambda folder, rng, mark: change(folder))


def pipe(name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        wrecks.sign(folder)

    return change


def sparse(name):
    def change(folder):
        with (folder / name).open("r+b") as file:
            file.truncate(wrecks.HUGE)
        wrecks.sign(folder)

    return change


# --- what the campaign found, one by one -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("door", "name"),
    [
        ("PEFT adapter", "receipt.json"),
        ("PEFT adapter", "adapter_config.json"),
        ("checkpoint", "model.safetensors"),
        ("GGUF adapter", "adapter.gguf"),
        ("place of an export", "receipt.json"),
        ("model", "tokenizer.json"),
        ("model", "generation_config.json"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(door, name, place):
    """Each of them hung."""
    assert through(door, place, pipe(name)) == "InputError"


@pytest.mark.parametrize(
    ("door", "name"),
    [("PEFT adapter", "adapter_model.safetensors"), ("checkpoint", "config.json"), ("model", "tokenizer.json")],
)
def test_a_file_larger_than_any_disk_is_not_read(door, name, place):
    """A hash of 2^40 bytes that take no room takes an hour; a tokenizer was asked for as a whole."""
    assert through(door, place, sparse(name)) == "InputError"


def test_weights_that_are_none_are_a_line(place):
    """A SafetensorError."""

    def change(folder):
        (folder / "adapter_model.safetensors").write_bytes(b"\0" * 7)
        wrecks.sign(folder)

    assert through("PEFT adapter", place, change) == "NotExportable"


def test_a_header_of_a_gguf_file_that_counts_for_ever(place):
    """The reader makes a list with an entry per element, for an array of 2^40 of no bytes at all."""

    def change(folder):
        data = (folder / "adapter.gguf").read_bytes()
        count = (1).to_bytes(8, "little")
        array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2**40).to_bytes(8, "little")
        (folder / "adapter.gguf").write_bytes(data[:16] + count + (1).to_bytes(8, "little") + b"x" + array)
        wrecks.sign(folder)

    assert through("GGUF adapter", place, change) == "InputError"


def test_folders_deeper_than_python_follows(place):
    """A RecursionError."""

    def change(folder):
        path = str(folder)
        for _ in range(wrecks.LEVELS):
            path += "/d"
            os.mkdir(path)

    assert through("PEFT adapter", place, change) == "taken"  # folders hold nothing


def test_what_lies_in_a_deep_folder_goes_with_it(tmp_path):
    """A RecursionError too, when an export had replaced such a folder."""
    with hidden_folder(tmp_path / "target") as path:
        deep = str(path)
        for level in range(wrecks.LEVELS):
            if level % 100 == 0:
                os.symlink(tmp_path, f"{deep}/link")
            deep += "/d"
            os.mkdir(deep)
        (tmp_path / "kept").write_text("kept")
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("target", ["x" * 10**6, "a\nb", "\x1b[2J", ["peft"]])
def test_a_receipt_of_another_target_is_quoted_in_one_line(target, place):
    """A message of a million characters."""

    def change(folder):
        receipt = json.loads((folder / "receipt.json").read_text())
        (folder / "receipt.json").write_text(json.dumps({**receipt, "target": target}))

    assert through("PEFT adapter", place, change) == "InputError"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J"])
def test_a_link_with_a_name_of_two_lines(name, place):
    """A message of two lines, or one that acts on a terminal."""
    assert through("PEFT adapter", place, lambda folder: (folder / name).symlink_to("x")) == "InputError"


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("config.json", {"eos_token_id": "2"}),  # an error of huggingface_hub's own
        ("config.json", {"hidden_act": ["silu"]}),
        ("config.json", {"num_hidden_layers": 10**7}),  # built one by one, for hours
        ("config.json", {"num_hidden_layers": float("inf")}),
        ("config.json", {"text_config": {"num_experts": 10**8}}),
        ("tokenizer.json", {"truncation": {"direction": "Right"}}),  # an Exception, and no more than that
        ("tokenizer_config.json", {"model_max_length": {}}),  # a TypeError with the first text
    ],
)
def test_a_configuration_that_transformers_believes(file, entries, place):
    def change(folder):
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **entries}))

    assert through("model", place, change) == "InputError"


def test_a_checkpoint_whose_configuration_transformers_believes(place):
    """An error of huggingface_hub's own."""

    def change(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, "hidden_size": [32]}))
        wrecks.sign(folder)

    assert through("checkpoint", place, change) == "NotExportable"


# --- code that a configuration names ---------------------------------------------------------------------------------

ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("entries", [{}, {"megatron_config": {"x": 1}, "megatron_core": "evil"}])
def test_an_adapter_inside_a_model_is_refused_by_name(entries, tmp_path):
    """It was put into the model unseen, and PEFT imported the module that it names."""
    folders._model(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps({**ADAPTER, **entries}))
    with pytest.raises(InputError, match=r"adapter_config\.json.*merge_and_unload"):
        models.load(str(tmp_path / "model"))
    assert kept(lambda: models.load(str(tmp_path / "model")), tmp_path / "nowhere") == "InputError"
    assert kept(lambda: explain(str(tmp_path / "model")), tmp_path / "nowhere") == "InputError"


@pytest.mark.parametrize("named", ["evil/kernel", {"": "evil/kernel"}, "kernels-community/flash-attn2", ["sdpa"], 3])
def test_a_kernel_that_a_configuration_names_is_not_fetched(named, tmp_path):
    folders._model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": named}))
    with pytest.raises(InputError, match="attention"):
        models.load(str(tmp_path / "model"))


def test_an_attention_of_its_own_is_none_that_is_fetched(tmp_path):
    folders._model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": "eager"}))
    assert models.load(str(tmp_path / "model")).model.config._attn_implementation == "eager"


def test_a_model_that_needs_its_own_code_is_refused_by_name(tmp_path):
    """`trust_remote_code` is False for every call, and nothing turns it on."""
    folders._model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "evil", "auto_map": names}))
    for door in (models.load, explain):
        with pytest.raises(ContextfoldError, match="no such code is run here: there is no option") as met:
            door(str(path.parent))
        assert str(path.parent) in str(met.value)
        assert "trust_remote_code" not in str(met.value)  # which transformers advises
        assert len(str(met.value).splitlines()) == 1


def test_a_tokenizer_beside_a_gguf_file_runs_no_code(tmp_path, monkeypatch):
    """transformers asked whether it may run what a configuration there names."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ggufs.write(tmp_path / "tiny.gguf")
    names = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with contextlib.suppress(InputError):
        models.load(str(tmp_path / "tiny.gguf"))
    assert not asked


# --- the helpers can fail --------------------------------------------------------------------------------------------


def test_the_campaign_sees_other_weights_that_are_called_proven(place, monkeypatch):
    def change(folder):
        data = bytearray((folder / "adapter_model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "adapter_model.safetensors").write_bytes(bytes(data))
        wrecks.sign(folder)

    proof = check(folders._whole(), PeftFolder(), export_of(place))
    assert proof.proven
    assert through("PEFT adapter", place, change) == "taken"  # not proven, which is right
    monkeypatch.setattr(folders, "check", lambda *_: proof)
    with pytest.raises(Broken, match="called proven"):
        through("PEFT adapter", place, change)


def export_of(place):
    path = place / "whole"
    assert export(folders._whole(), PeftFolder(), path).proven
    return path


def test_the_campaign_sees_what_is_written(place, monkeypatch):
    def load(name):
        Path(f"{name}/../outside/kept").write_text("changed")
        raise InputError("no model")

    through("model", place, lambda folder: None)  # what is done once in a process, before the first trial, is done
    monkeypatch.setattr(folders.models, "load", load)
    with pytest.raises((Broken, AssertionError), match=r"wrote|changed"):
        through("model", place, lambda folder: None)


def test_what_is_no_file_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(OSError, match=r"no file"):
            read_regular(path, 10)


def test_counts_that_are_what_models_have():
    check_configuration({"num_hidden_layers": 126, "text_config": {"num_experts": 512}, "n_layer": None}, "a")
    with pytest.raises(InputError, match="n_layer of 2001"):
        check_configuration({"text_config": {"n_layer": 2001}}, "a")


def test_a_checkpoint_of_the_wrong_kind(place):
    with pytest.raises(InputError, match="'peft', not to 'checkpoint'"):
        check(folders._whole(), Checkpoint(), export_of(place))
