"""Nothing that comes with a model or an adapter is run: no code, no pickle, no module that a configuration names."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contextfold import models
from contextfold.anatomy import bind
from contextfold.errors import InputError, NotExportable
from contextfold.explain import explain
from contextfold.export import Checkpoint, PeftFolder, Source, check, export
from contextfold.fold import fold_token
from tiny import build, letters, tokens
from watched import Broken, kept

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))

from patches import sign


class Evil:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "was-run"


@pytest.fixture
def folder(tmp_path, mark):
    """A tiny Llama on disk, and beside it code that leaves a mark."""
    path = tmp_path / "model"
    letters().save_pretrained(path)
    build("llama", torch.float32).save_pretrained(path)
    (path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    return path


def change(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def loads(folder, outside):
    """How loading ended; nothing was run and nothing written either way."""
    return kept(lambda: models.load(str(folder)), outside, deadline=60)


NAMES = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


def test_a_type_that_only_its_own_code_knows_is_refused(folder, mark, tmp_path):
    change(folder / "config.json", model_type="evil", auto_map=NAMES)
    assert loads(folder, tmp_path / "nowhere") == "InputError"
    assert kept(lambda: explain(str(folder)), tmp_path / "nowhere", deadline=60) == "InputError"
    assert not mark.exists()


def test_a_type_that_is_known_is_loaded_without_the_code_that_it_names(folder, mark, tmp_path):
    change(folder / "config.json", auto_map=NAMES)
    assert loads(folder, tmp_path / "nowhere") == "taken"
    assert type(models.load(str(folder)).model).__module__.startswith("transformers.")
    assert kept(lambda: explain(str(folder)), tmp_path / "nowhere", deadline=60) == "taken"
    assert not mark.exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_tokenizer_that_names_code(folder, mark, tmp_path, known):
    name = {} if known else {"tokenizer_class": "EvilTokenizer"}
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, **name)
    ended = loads(folder, tmp_path / "nowhere")
    assert ended in (("taken",) if known else ("taken", "InputError"))  # a fast tokenizer needs no class of its own
    assert not mark.exists()


def test_a_chat_template_is_no_program(folder, mark, tmp_path):
    from contextfold.prompts import chat

    loaded = models.load(str(folder))
    loaded.tokenizer.chat_template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch "
        + str(mark)
        + "') }}"
    )
    assert kept(lambda: chat(loaded.tokenizer, "a", "b"), tmp_path / "nowhere") == "InputError"
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_are_refused_and_not_unpickled(folder, mark, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    assert loads(folder, tmp_path / "nowhere") == "InputError"
    assert not mark.exists()


def test_weights_as_torch_writes_them_are_refused_with_the_way_out(folder, tmp_path):
    """They are pickles too; torch reads them with care, but a promise is shorter without them."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="safetensors"):
        models.load(str(folder))


# --- adapters and checkpoints ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source():
    bound = bind(build("llama", torch.float32))
    return Source(bound, fold_token(bound, tokens(11), tokens(3, seed=2)).patch)


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    place = tmp_path_factory.mktemp("exports")
    assert export(source, PeftFolder(), place / "adapter").proven
    assert export(source, Checkpoint(), place / "checkpoint").proven
    return place


@pytest.fixture
def adapter(written, tmp_path):
    return Path(shutil.copytree(written / "adapter", tmp_path / "adapter"))


def refused(source, folder, exporter=None, error="InputError"):
    ended = kept(lambda: check(source, exporter or PeftFolder(), folder), folder.parent / "nowhere", deadline=60)
    assert ended == error


def test_pickled_weights_beside_an_adapter(source, adapter, mark):
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    refused(source, adapter)
    (adapter / "adapter_model.safetensors").unlink()  # PEFT falls back on the pickle
    sign(adapter)
    refused(source, adapter)
    assert not mark.exists()


@pytest.mark.parametrize(
    "entries",
    [
        {"megatron_config": {"x": 1}, "megatron_core": "evil"},  # PEFT imports a module that is named here
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
        {"target_modules": "(a+)+$"},  # a pattern that takes for ever
        {"r": 10**9},
        {"peft_type": "PROMPT_TUNING"},
        {"lora_dropout": float("nan")},
    ],
)
def test_a_configuration_that_says_more_than_ours(source, adapter, entries):
    change(adapter / "adapter_config.json", **entries)
    sign(adapter)
    refused(source, adapter)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a\0b", "adapter_model.safetensors/.."])
def test_a_receipt_that_names_files_elsewhere(source, adapter, name):
    receipt = json.loads((adapter / "receipt.json").read_text())
    receipt["files"][name] = "0" * 64
    (adapter / "receipt.json").write_text(json.dumps(receipt))
    refused(source, adapter)


@pytest.mark.parametrize("files", [[], None, "x", {"adapter_config.json": 3}])
def test_a_receipt_that_names_no_files(source, adapter, files):
    """A list was an AttributeError, and no files at all were taken for a whole folder."""
    receipt = json.loads((adapter / "receipt.json").read_text())
    (adapter / "receipt.json").write_text(json.dumps({**receipt, "files": files}))
    refused(source, adapter)


def test_a_receipt_of_nothing_but_brackets(source, adapter):
    (adapter / "receipt.json").write_text("[" * 100_000)
    refused(source, adapter)


def test_a_link_out_of_the_folder_is_not_followed(source, adapter, tmp_path):
    shutil.move(adapter / "adapter_model.safetensors", tmp_path / "elsewhere")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    refused(source, adapter)


def test_code_and_pickles_beside_a_checkpoint(source, written, tmp_path, mark):
    place = Path(shutil.copytree(written / "checkpoint", tmp_path / "checkpoint"))
    (place / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    refused(source, place, Checkpoint())
    change(place / "config.json", auto_map=NAMES)
    sign(place)
    assert check(source, Checkpoint(), place).proven  # transformers' own class
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    sign(place)
    refused(source, place, Checkpoint(), NotExportable.__name__)
    assert not mark.exists()


def test_the_watch_would_see_a_pickle(mark, tmp_path):
    data = pickle.dumps(Evil(mark))
    with pytest.raises(Broken):
        kept(lambda: pickle.loads(data), tmp_path / "nowhere")
    assert mark.exists()
