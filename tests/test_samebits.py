"""The same inputs give the same bits in another process; `scripts/attack_same_bits.py` looks at threads and batches."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

import samebits
import tiny
from contextfold.anatomy import bind
from contextfold.store import key_of


def test_another_process_gives_the_same_bits(tmp_path):
    import contextfold

    torch.set_num_threads(1)
    paths = [str(each) for each in (samebits.__file__, contextfold.__path__[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.dirname(path) for path in paths)}
    command = [sys.executable, samebits.__file__, "1", "gemma3_text", str(tmp_path / "other"), *samebits.WORKS]
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    bound = bind(samebits.model_of("gemma3_text"))
    rows = samebits.apart(samebits.everything(bound), load_file(tmp_path / "other"))
    assert all(row["tensors"] > 0 for row in rows.values())
    assert [work for work, row in rows.items() if row["other_bits"]] == []


def test_a_bit_is_seen():
    one = {"bake/a": torch.ones(3), "fold_token/b": torch.ones(2)}
    two = {"bake/a": torch.tensor([1.0, 1.0, 1.0 + 2**-23]), "fold_token/b": torch.ones(2)}
    rows = samebits.apart(one, two)
    assert (rows["bake"]["other_bits"], rows["fold_token"]["other_bits"]) == (1, 0)
    assert 0 < rows["bake"]["relative"] < 1e-6
    assert samebits.apart(one, {"bake/a": torch.ones(3)})["fold_token"]["relative"] == float("inf")


def test_work_that_other_threads_began_is_not_gone_on_with(monkeypatch):
    """Another number of threads may round otherwise: a patch would be of neither."""
    bound = bind(tiny.build("llama"))
    here = key_of(bound, "asked")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert key_of(bound, "asked") != here
