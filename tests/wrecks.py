"""Ways to spoil a folder: contents, configurations, names, links, pipes, sizes and depths.

Whoever spoils one may know what a receipt is for: in most trials it names the files as they are now.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
from pathlib import Path
from random import Random
from typing import Any

from spoil import EVIL, NAMES, spoiled_bytes, spoiled_json, spoiled_tensors

__all__ = ["HUGE", "LEVELS", "entries_of", "sign", "small", "spoil"]

RECEIPT = "receipt.json"

HUGE = 2**40
"""Bytes that a file claims and that no disk holds."""

LEVELS = 1020
"""Folders in folders: more than Python follows, and fewer than make a name that no system takes."""


class Marks:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.mark}",))


def entries_of(folder: Path) -> list[os.DirEntry[bytes]]:
    """All that is in it, however deep; links are not followed."""
    found, waiting = [], [os.fsencode(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            here = sorted(entries, key=lambda entry: entry.name)
        found += here
        waiting += [entry.path for entry in here if entry.is_dir(follow_symlinks=False)]
    return found


def _files(folder: Path) -> list[Path]:
    return [Path(os.fsdecode(each.path)) for each in entries_of(folder) if each.is_file(follow_symlinks=False)]


SPOILT = (ValueError, RecursionError, struct.error, LookupError, AttributeError, TypeError)
"""What comes of a file that was spoilt before."""


def _content(folder: Path, rng: Random, mark: Path) -> None:
    """A file holds something else."""
    path = rng.choice(_files(folder))
    data = path.read_bytes() if path.stat().st_size < 2**20 else b""
    path.write_bytes(spoiled_bytes(data, rng))
    if rng.random() < 0.7:
        with contextlib.suppress(*SPOILT):
            match path.suffix:
                case ".safetensors":
                    path.write_bytes(spoiled_tensors(data, rng))
                case ".json":
                    path.write_bytes(spoiled_json(json.loads(data), rng).encode(errors="surrogatepass"))
                case _:
                    path.write_bytes(rng.choice((pickle.dumps(Marks(mark)), data[:1000] * 50)))


SETTINGS: dict[str, Any] = {
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.E", "evil.E"]},
    "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"},
    "megatron_config": {"tensor_model_parallel_size": 1}, "megatron_core": "evil",
    "base_model_name_or_path": "owner/model", "attn_implementation": "evil/kernel", "model_type": "evil",
    "_attn_implementation": "evil/kernel", "quantization_config": {"quant_method": "bitsandbytes"},
    "target_modules": "(a+)+$", "r": 10**9, "peft_type": "XLORA", "use_dora": True, "modules_to_save": ["lm_head"],
    "layers_to_transform": list(range(10_000)), "rank_pattern": {"(a+)+$": 8, "x": 10**9}, "runtime_config": {"x": 1},
    "vocab_size": 10**8, "hidden_size": 2**20, "intermediate_size": 10**9, "num_hidden_layers": 10**7,
    "head_dim": 2**30, "num_attention_heads": 2**20, "max_position_embeddings": 10**12,
    "tie_word_embeddings": True, "dtype": "float64", "pad_token_id": 10**9, "rope_parameters": {"rope_type": "evil"},
    "tokenizer_class": "EvilTokenizer",
    "trust_remote_code": True, "use_kernels": True, "architectures": ["Evil"], "transformers_version": "99.0.0",
    "hidden_act": "evil", "tokenizer_file": "/etc/passwd", "model_max_length": 10**400, "torch_dtype": "evil",
}  # fmt: skip
"""What a configuration may say to whoever believes it: names of code, of other models, of endless patterns; sizes."""


def _setting(folder: Path, rng: Random, mark: Path) -> None:
    """A configuration says more, or something else, and is JSON still."""
    path = rng.choice([each for each in _files(folder) if each.suffix == ".json" and each.name != "tokenizer.json"])
    with contextlib.suppress(ValueError, RecursionError):  # spoilt before
        value = json.loads(path.open("rb").read(2**20))
        if isinstance(value, dict):
            for key in rng.sample(sorted(SETTINGS), rng.randint(1, 3)):
                value[key] = SETTINGS[key] if rng.random() < 0.8 else rng.choice(EVIL)
            path.write_text(json.dumps(value))


ADDED = (
    "adapter_model.bin", "adapter_config.json", "pytorch_model.bin", "evil.py", "modeling_evil.py", "__init__.py",
    "model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.model", "generation_config.json",
    "chat_template.jinja", "adapter_model.safetensors.index.json", "sub/evil.bin", "conftest.py", "added_tokens.json",
    "special_tokens_map.json", "receipt.json.bak", "tokenizer_config.json", "custom_generate/generate.py",
)  # fmt: skip
"""Names that some loader looks for."""


def _added(folder: Path, rng: Random, mark: Path) -> None:
    """A file more: what a loader may prefer, code, a pickle."""
    name = rng.choice(ADDED)
    path = folder / name
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": rng.choice(("../../outside/kept", "x"))}}
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "owner/model",
               **rng.choice(({}, {key: SETTINGS[key] for key in ("megatron_config", "megatron_core")}))}  # fmt: skip
    content = {
        "index.json": json.dumps(index).encode(), "adapter_config.json": json.dumps(adapter).encode(),
        ".py": f"open({str(mark)!r}, 'w')\n".encode(), ".bin": pickle.dumps(Marks(mark)),
    }  # fmt: skip
    found = next((data for ending, data in content.items() if name.endswith(ending)), None)
    path.write_bytes(found if found is not None else rng.choice((b"", b"{}", b"[]", pickle.dumps(Marks(mark)))))


def _renamed(folder: Path, rng: Random, mark: Path) -> None:
    """A file is gone, or is called otherwise."""
    path = rng.choice(_files(folder))
    if rng.random() < 0.4:
        path.unlink()
        return
    names = [os.fsencode(name) for name in NAMES if name.isprintable() and "/" not in name and name not in (".", "..")]
    other = rng.choice([*names, b"\xff\xfe", b"a\nb", b"\x1b[2J", b" ", b"x" * 255, b"-rf", b"adapter_model.bin"])
    with contextlib.suppress(OSError):  # a name that this system does not take
        os.rename(path, os.path.join(os.fsencode(folder), other))


def _linked(folder: Path, rng: Random, mark: Path) -> None:
    """A link in the place of a file, or beside it: out of the folder, to itself, to nothing, to what never ends."""
    path = rng.choice(_files(folder))
    outside = folder.parent / "outside"
    if rng.random() < 0.3:
        path = path.with_name(rng.choice(("link", "sub", "adapter_model.bin", "config.json")))
    elif rng.random() < 0.5:  # the same content, elsewhere
        shutil.copyfile(path, outside / "moved")
        path.unlink()
        path.symlink_to(outside / "moved")
        return
    target = rng.choice((outside / "kept", outside, "/dev/zero", "/proc/self/mem", path, "nowhere", folder, "/", ".."))
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.symlink_to(target)


def _special(folder: Path, rng: Random, mark: Path) -> None:
    """What is no file stands in the place of one: a pipe that nobody writes to, a folder, a socket."""
    path = rng.choice(_files(folder))
    path.unlink()
    match rng.choice(("pipe", "folder", "socket", "nested")):
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            import socket

            with contextlib.closing(socket.socket(socket.AF_UNIX)) as one, contextlib.suppress(OSError):
                one.bind(str(path))  # where the name is short enough for one
        case _:
            (path / "a" / "b").mkdir(parents=True)
            (path / "a" / "b" / path.name).write_bytes(b"{}")


def _sized(folder: Path, rng: Random, mark: Path) -> None:
    """A file of no bytes, of one, or of more than any disk holds, which takes no room: nothing of it is written."""
    with rng.choice(_files(folder)).open("r+b") as file:
        file.truncate(rng.choice((0, 1, 7, 8, 9, HUGE)))


def _nested(folder: Path, rng: Random, mark: Path) -> None:
    """Folders in folders, the export in itself, or very many files."""
    match rng.choice(("deep", "itself", "many")):
        case "deep":
            before = os.open(".", os.O_RDONLY)
            os.chdir(folder)
            for _ in range(rng.choice((3, LEVELS))):
                os.makedirs("d", exist_ok=True)
                os.chdir("d")
            os.fchdir(before)
            os.close(before)
        case "itself":
            subprocess.run(["cp", "-a", str(folder), str(folder.parent / "copy")], check=True)  # pipes as pipes
            shutil.move(folder.parent / "copy", folder / "itself")
        case _:
            for number in range(500):
                (folder / f"{number}.txt").touch()


WAYS = (_content, _content, _content, _setting, _setting, _added, _renamed, _linked, _special, _sized, _nested)


def sign(folder: Path) -> None:
    """Make the receipt name all that is there, as whoever changes a folder with care would."""
    if not (folder / RECEIPT).is_file() or (folder / RECEIPT).stat().st_size > 2**20:
        return
    with contextlib.suppress(OSError, ValueError, RecursionError):
        receipt = json.loads((folder / RECEIPT).read_bytes())
        digests = {}
        for entry in entries_of(folder):
            if not entry.is_dir(follow_symlinks=False):
                name = os.fsdecode(entry.path)[len(str(folder)) + 1 :]
                digests[name] = hashlib.sha256(small(entry)).hexdigest()
        digests.pop(RECEIPT, None)
        if isinstance(receipt, dict):
            (folder / RECEIPT).write_text(json.dumps({**receipt, "files": digests}))


def small(entry: os.DirEntry[bytes]) -> bytes:
    """The content of a file that is read in no time; links are followed."""
    if not entry.is_file() or entry.stat().st_size > 2**20:
        return b""
    return Path(os.fsdecode(entry.path)).read_bytes()


def spoil(folder: Path, rng: Random, mark: Path) -> None:
    """A thing or two are changed, and the receipt goes along in most cases, or is changed itself."""
    for _ in range(rng.randint(1, 2)):
        if _files(folder):
            rng.choice(WAYS)(folder, rng, mark)
    if rng.random() < 0.7:
        sign(folder)
    receipt = folder / RECEIPT
    if rng.random() < 0.15 and receipt.is_file() and receipt.stat().st_size < 2**20:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            value = json.loads(receipt.read_bytes())
            receipt.write_bytes(spoiled_json(value, rng).encode(errors="surrogatepass"))
