"""A GGUF file of a one-layer Llama, a few kilobytes: what a conversion needs, without a quarter of a gigabyte."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, MLP, HEADS = 32, 64, 2
QUANTISED = "blk.0.ffn_down.weight"

SPECIALS = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that byte-level tokenizers write bytes with."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """name -> float32 array, in the order (out, in) of numpy."""
    generator = np.random.default_rng(seed)
    vocabulary = len(SPECIALS) + 256 + 1
    shapes = {
        "token_embd.weight": (vocabulary, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (MLP, WIDTH),
        "blk.0.ffn_up.weight": (MLP, WIDTH),
        QUANTISED: (WIDTH, MLP),
    }
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(path: Path, *, leave_out: str = "", architecture: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """Write the file; return what its tensors hold: exact ones, and one that went through eight bits."""
    content = tensors(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(SPECIALS) + 257)
    tokens = [*SPECIALS, *byte_letters(), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in content.items():
        if name == leave_out:
            continue
        if name == QUANTISED:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            content[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return content
