"""Models larger than the memory that they may take."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import large
import zoo
from contextfold import ceiling, models, patchfile
from contextfold.anatomy import weights_digest
from contextfold.ceiling import place, read_size, size_text
from contextfold.errors import InputError
from contextfold.fold import fold_sequence, fold_token
from contextfold.runtime import materialised, run
from tiny import build, letters, tokens

pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 gib", 3 * 2**29), (" 2kb ", 2000), ("7b", 7)],
)
def test_sizes_are_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "8 GiB GiB", "8xb", "1e9", "nan", "٣GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="write bytes, or a number with a unit"):
        read_size(text)


@pytest.fixture(autouse=True)
def _no_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def saved(folder, model):
    model.save_pretrained(folder, max_shard_size="20KB")
    letters().save_pretrained(folder)
    return folder


@pytest.fixture
def in_files(monkeypatch):
    """Every weight that can stay in its file does: as if nothing more fitted, whatever this process takes."""
    monkeypatch.setattr(ceiling, "_kept", lambda *_: set())


def in_the_files(model):
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p.device.type == "meta"]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "phi3", "qwen2_moe"])
def test_a_patch_from_files_is_that_from_memory_bit_for_bit(model_type, tmp_path, in_files):
    built = zoo.build(model_type, torch.float32) if model_type not in ("llama", "gemma3_text") else build(model_type)
    folder = saved(tmp_path / "model", built)
    kept = models.load(str(folder), max_memory=2**50)
    plain = models.load(str(folder))
    assert kept.placement.streamed > 0
    away = in_the_files(kept.model)
    assert any("attn" in name for name in away)
    assert any("mlp" in name for name in away) is (model_type != "qwen2_moe")
    assert not any("norm" in name for name in away)
    assert weights_digest(kept.model) == weights_digest(plain.model)
    vocabulary = plain.model.config.vocab_size
    context, query = tokens(9) % vocabulary, tokens(6, 2) % vocabulary
    for fold in (fold_token, fold_sequence):
        first, second = (fold(each.model, context, query) for each in (kept, plain))
        for name, each in (("kept", first), ("plain", second)):
            patchfile.save(each.patch, tmp_path / name)
        found, wanted = load_file(tmp_path / "kept"), load_file(tmp_path / "plain")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert torch.equal(first.in_context, second.in_context)
        with materialised(kept.model, first.patch) as a, materialised(plain.model, first.patch) as b:
            assert torch.equal(run(a, first.split.reduced), run(b, first.split.reduced))
    assert in_the_files(kept.model) == away


def test_weights_in_files_are_converted_as_they_come(tmp_path, in_files):
    folder = saved(tmp_path / "model", build("llama", torch.bfloat16))
    kept, plain = (models.load(str(folder), dtype=torch.float64, max_memory=most) for most in (2**50, None))
    assert weights_digest(kept.model) == weights_digest(plain.model)


def test_what_fits_stays_in_memory_layers_first(tmp_path):
    folder = saved(tmp_path / "model", build("llama", torch.float32))
    everything = place("it", str(folder), torch.float32, 2**50)
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert (everything.resident, everything.streamed) == (sum(sizes.values()) + buffers, 0)
    assert not any("_hf_hook" in vars(m) for m in models.load(str(folder), max_memory=2**50).model.modules())
    movable = {name.removesuffix(".weight"): size for name, size in sizes.items() if "norm" not in name}
    movable = {name: size for name, size in movable.items() if not name.endswith(".bias")}
    groups = [[name] for name in movable]
    vocabulary = {"lm_head", "model.embed_tokens"}
    layers = sum(size for name, size in movable.items() if name not in vocabulary)
    assert ceiling._kept(model, groups, movable, layers) == movable.keys() - vocabulary
    assert ceiling._kept(model, groups, movable, movable[groups[1][0]]) == {"model.layers.0.self_attn.q_proj"}
    assert ceiling._kept(model, groups, movable, 0) == set()
    assert ceiling._kept(model, [sorted(vocabulary)], movable, movable["lm_head"]) == vocabulary


def test_half_of_the_room_is_for_weights(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", build("llama", torch.float32))
    monkeypatch.setattr(ceiling, "used_memory", lambda: 2**30)
    monkeypatch.setattr(ceiling, "peak_memory", lambda: 2**30)
    rooms = []
    monkeypatch.setattr(ceiling, "_kept", lambda *given: rooms.append(given[-1]) or set())
    least = place("it", str(folder), torch.float32, 2**40).needed
    wide, norms = 101 * 32 * 4, 7 * 32 * 4
    rotary = 2 * 4 * 4
    assert least == 2**30 + ceiling.MARGIN + norms + rotary + wide + 2 * wide
    place("it", str(folder), torch.float32, least + 1000)
    assert rooms[-1] == 500
    with pytest.raises(InputError, match="too small"):
        place("it", str(folder), torch.float32, least - 1)


def test_tied_weights_count_once_and_stay_together(tmp_path, in_files):
    model = large.transformers.LlamaForCausalLM(
        large.transformers.LlamaConfig(
            **{
                **large.SETTINGS,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "tie_word_embeddings": True,
            }
        )
    )
    folder = saved(tmp_path / "model", model)
    loaded = models.load(str(folder), max_memory=2**50)
    device_map = loaded.placement.device_map
    assert device_map["lm_head"] == device_map["model.embed_tokens"] == "disk"
    maps = sum(p.numel() * 4 for name, p in model.named_parameters() if "norm" not in name)
    assert loaded.placement.streamed == maps
    assert weights_digest(loaded.model) == weights_digest(models.load(str(folder)).model)


def test_a_ceiling_that_is_too_low_is_refused_with_one_that_will_do(tmp_path, call):
    folder = saved(tmp_path / "model", build("llama", torch.float32))
    code, out, err = call(
        "fold", folder, "--context", "abc", "--query", "de", "--max-memory", "10MB", "--out", tmp_path / "p"
    )
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "p").exists()
    least = re.search(r"a ceiling of 10 MiB is too small for .* will do is --max-memory (\d+MiB)$", err.strip())
    assert least is not None
    code, out, _ = call("fold", folder, "--context", "abc", "--query", "de", "--max-memory", least[1], "--json")
    told = json.loads(out)
    assert told["max_memory"] == read_size(least[1])
    assert told["proven"]


def test_what_cannot_be_left_in_files_is_refused_by_name(tmp_path, monkeypatch, call):
    folder = saved(tmp_path / "model", build("llama", torch.float32))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(InputError, match="quantised"):
        models.load(str(folder), max_memory=2**50)
    (folder / "config.json").write_text(json.dumps(settings))
    present = ceiling.importlib.util.find_spec
    monkeypatch.setattr(
        ceiling.importlib.util, "find_spec", lambda name: None if name == "accelerate" else present(name)
    )
    with pytest.raises(InputError, match=r"needs the package accelerate.*contextfold\[offload\]"):
        models.load(str(folder), max_memory=2**50)
    code, out, err = call("fold", folder, "--context", "abc", "--query", "de", "--max-memory", "8xb")
    assert (code, out) == (2, "")
    assert err.startswith("error: the size '8xb' is not one")


def test_every_command_that_works_on_a_model_keeps_weights_in_their_files(tmp_path, in_files, call):
    folder = saved(tmp_path / "model", build("llama", torch.float32))
    patch, texts = tmp_path / "patch", ("--context", "The fox has it.", "--query", "Who?")
    for command in (
        ("fold", folder, *texts, "--out", patch),
        ("fold", folder, *texts, "--positions", "all"),
        ("verify", folder, *texts, "--patch", patch),
        ("export", folder, patch, "--to", "checkpoint", "--out", tmp_path / "out"),
        ("generate", folder, "--context", "The fox has it.", "--prompt", "Who?", "--tokens", "2"),
        ("ablate", folder, "--part", "a=The fox has it.", "--part", "b= So there.", "--query", "Who?"),
    ):
        code, out, _ = call(*command, "--json", "--max-memory", "1TiB")
        told = json.loads(out)
        assert code == 0
        assert told["max_memory"] == 2**40 > told["peak_bytes"] > told["streamed_bytes"] > told["resident_bytes"] > 0
    code, out, _ = call("fold", folder, *texts, "--max-memory", "1TiB")
    assert code == 0
    line = " ".join(out.split())
    assert re.search(r"Peak memory \d+ MiB, within the ceiling of 1024\.0 GiB; 1 MiB of weights stayed in memory", line)
    code, out, _ = call("fold", folder, *texts, "--json")
    told = json.loads(out)
    assert (told["max_memory"], told["resident_bytes"], told["streamed_bytes"]) == (None, None, None)
    assert told["peak_bytes"] > 0


def test_sizes_are_told_in_binary_units():
    assert size_text(2**20 + 1) == "2 MiB"
    assert size_text(25 * 2**29) == "12.5 GiB"


def test_a_model_of_three_times_the_room_is_folded_and_baked_within_it(tmp_path):
    weights = large.save(tmp_path / "model")
    room = weights // 3
    kept = large.measured(tmp_path / "model", room)
    assert kept["peak"] <= kept["ceiling"] == kept["before"] + room
    assert kept["peak_without"] > kept["before"] + 0.9 * weights  # what is said of a model that is all in memory
    assert kept["streamed"] > 0.8 * weights
    assert kept["token"]["proven"]
    assert kept["token"]["worst_logit_gap"] < 1e-5 * kept["token"]["unpatched_logit_gap"]
    assert kept["sequence"]["gap"] < 1e-5 * kept["sequence"]["unpatched"]
    assert kept["bake"]["recovered"] > 0.8 > 0.2 > kept["bake"]["random"]


def test_a_bake_whose_sums_do_not_fit_keeps_its_ceiling(tmp_path):
    """The sums of the output map lie on disk; without the ceiling, in memory, the same bake passes it."""
    large.save(tmp_path / "model", **large.WIDE)
    room = 160 * 2**20
    found = large.measured(tmp_path / "model", room, "sums")
    assert found["kept"]["on_disk"] == [False, True], "attention has few inputs"
    assert found["free"]["on_disk"] == [False, False]
    assert found["kept"]["sums"] > 40 * 2**20
    assert found["kept"]["peak"] <= found["ceiling"] < found["free"]["peak"]
    assert found["kept"]["factors"] == found["free"]["factors"]
