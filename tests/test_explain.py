"""What `explain` says, from a model, from a configuration, and from a folder that holds nothing but one."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from contextfold.anatomy import FAMILIES, Family, bind
from contextfold.errors import InputError, UnsupportedModel
from contextfold.explain import Explanation, explain, explanation_view
from zoo import MODEL_TYPES, _class
from zoo_configs import tiny_config

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL)
GEMMA = Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8)


def names(explanation: Explanation, layer: int = 0) -> list[str]:
    return [rule.name for rule in explanation.blocks[layer].plan]


def test_a_configuration_of_70_billion_parameters_takes_seconds() -> None:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    start = time.monotonic()
    explanation = explain(config)
    assert time.monotonic() - start < 30
    assert explanation.parameters == 70_553_706_496
    assert explanation.weights == "none"
    assert len(explanation.blocks) == 80
    assert {(b.positions_sure, b.positions_possible) for b in explanation.blocks} == {(8192, 28672)}


def test_a_model_with_weights_says_so_and_is_explained_alike() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA).eval()
    met = explain(model)
    assert explain(bind(model)) == met
    assert met.weights == "present"
    assert met.blocks == explain(LLAMA).blocks


def test_a_folder_with_only_a_configuration(tmp_path: Path) -> None:
    GEMMA.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert explain(str(tmp_path)).blocks == explain(GEMMA).blocks
    (tmp_path / "model.safetensors").touch()
    assert explain(tmp_path).weights == "not loaded"
    with pytest.raises(InputError, match=r"no config\.json"):
        explain(tmp_path / "elsewhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no configuration that is known here"):
        explain(tmp_path)


def test_the_json_has_what_was_promised() -> None:
    data = json.loads(json.dumps(explain(GEMMA).to_json()))
    assert data["controllable"] is True
    block = data["blocks"][0]
    assert set(block) >= {"expression", "plan", "capacity", "conditions", "equations", "breaks", "alternatives"}
    assert block["definitions"]["u"] == "Norm(W_down h)"
    assert block["definitions"]["h"] == "gelu_pytorch_tanh(W_gate z) ⊙ W_up z"
    assert block["plan"][0]["edits"] == ["mlp.gate_proj", "mlp.up_proj"]
    assert block["plan"][1]["edits"] == ["mlp.down_proj", "post_feedforward_layernorm"]
    assert "zero source" in block["breaks"]
    assert (block["positions_sure"], block["positions_possible"]) == (1, 48)


def test_plans_by_family() -> None:
    assert names(explain(LLAMA)) == ["input weight", "output weight"]
    assert names(explain(GEMMA)) == ["input weight", "output weight through a norm: balanced"]
    assert names(explain(tiny_config("gpt_neox"))) == ["input weight", "parallel output"]
    assert names(explain(tiny_config("mamba"))) == ["output weight"]
    assert names(explain(tiny_config("bart"))) == ["input weight", "output weight"]
    mixture = explain(tiny_config("qwen2_moe"))
    assert mixture.blocks[0].kind == "experts"
    assert names(mixture) == ["experts, input weight", "experts by least norm"]
    assert "shared expert alone" in mixture.blocks[0].alternatives
    assert "shared expert alone" not in explain(tiny_config("gpt_oss")).blocks[0].alternatives


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_explained(family: Family) -> None:
    for model_type in [name for name in family.model_types if name in MODEL_TYPES][:1]:
        config = tiny_config(model_type)
        with torch.device("meta"):
            explanation = explain(_class(model_type, config)(config))
        assert explanation.controllable
        assert all(names(explanation, i) for i in range(len(explanation.blocks)))


def test_rules_asked_for_are_checked_by_the_calculus() -> None:
    assert names(explain(LLAMA, rules=["attention output"])) == ["attention output"]
    assert names(explain(GEMMA, rules=["theorem"]))[1] == "output weight through a norm: theorem"
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    assert names(explain(gpt2, rules=["input bias", "output bias"])) == ["input bias", "output bias"]
    refused = explain(LLAMA, rules=["output bias"])
    assert not refused.controllable
    assert refused.blocks[0].verdict == "no"
    assert "asked for reach by bias" in refused.blocks[0].refusal[0]
    with pytest.raises(InputError, match="theorem chooses the scale of a norm"):
        explain(LLAMA, rules=["theorem"])
    with pytest.raises(InputError, match="unknown; choose one of"):
        explain(LLAMA, rules=["magic"])


def test_more_positions_than_a_block_has_room_for() -> None:
    assert {b.verdict for b in explain(LLAMA, positions=32).blocks} == {"yes"}
    assert {b.verdict for b in explain(LLAMA, positions=48).blocks} == {"ask"}
    refused = explain(LLAMA, positions=49)
    assert not refused.controllable
    assert any("reads 48 numbers" in line for line in refused.blocks[0].refusal)
    with pytest.raises(InputError, match="at least 1"):
        explain(LLAMA, positions=0)


def test_what_has_no_anatomy_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        explain(tiny_config("rwkv"))
    with pytest.raises(InputError, match="expected a model"):
        explain(3)


def test_the_view_puts_like_layers_together() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(explanation_view(explain(LLAMA)))
    text = console.export_text()
    assert "layers 0 to 1: dense" in text
    assert "W_down h" in text
    assert "from shapes alone" in text
