"""Quantised weights: a patch acts beside them, exactly; writing is refused by name, and so is what is not linear."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from conformance import gap, tokens
from contextfold import patchfile
from contextfold.anatomy import bind
from contextfold.anatomy.discover import discover
from contextfold.errors import PatchMismatch, ProbeFailed, UnsupportedModel
from contextfold.fold import fold_token
from contextfold.forms import expressions
from contextfold.patch import MatrixEdit
from contextfold.runtime import Decoder, applied, materialised, run
from tiny import bits, build


class Int8(nn.Linear):
    """Weights stored in eighths."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) / 8, self.bias)


class Float8(nn.Linear):
    """Weights of a dtype that is floating-point, and too narrow to be edited."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Packed(torch.Tensor):
    """A tensor that says it is of another dtype and keeps something else, as quantising libraries have them."""


class Nibbles(nn.Module):
    """Four bits, two to a byte, with a step per row, and no parameter that is called weight."""

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        step = linear.weight.data.abs().amax(1, keepdim=True) / 7
        codes = ((linear.weight.data / step).round() + 8).to(torch.uint8)
        self.register_buffer("codes", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("step", step)
        self.bias = linear.bias

    def forward(self, x):
        pairs = torch.stack([self.codes // 16, self.codes % 16], -1).flatten(1)
        return F.linear(x, (pairs.to(x.dtype) - 8) * self.step, self.bias)


class RoundedInput(nn.Linear):
    """Stores eighths and rounds what it reads too, to a step that the whole batch shares."""

    def forward(self, x):
        step = x.abs().max() / 127
        return F.linear((x / step).round() * step, self.weight.to(x.dtype) / 8, self.bias)


class RoundedWeight(nn.Linear):
    """Floating-point weights that are quantised whenever they are used: what is stored is not what acts."""

    def forward(self, x):
        return F.linear(x, (self.weight * 8).round() / 8, self.bias)


def eighths(w):
    return (w * 8).round().clamp(-127, 127).to(torch.int8)


def stored_as(kind, store):
    def change(linear):
        linear.__class__ = kind
        linear.weight = nn.Parameter(store(linear.weight.data), requires_grad=False)
        return linear

    return change


KINDS = {
    "int8": stored_as(Int8, eighths),
    "float8": stored_as(Float8, lambda w: w.to(torch.float8_e4m3fn)),
    "packed": stored_as(nn.Linear, lambda w: w.as_subclass(Packed)),
    "nibbles": Nibbles,
}


def quantised(change, model_type="llama", dtype=torch.float64):
    """All linear maps of all layers but the first, which shows that plain and quantised ones mix."""
    model = build(model_type, dtype)
    for layer in model.model.layers[1:]:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                owner, _, name = path.rpartition(".")
                setattr(layer.get_submodule(owner), name, change(module))
    return model


MAP = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_patch_acts_beside_quantised_weights_exactly(kind, model_type, tmp_path):
    model = quantised(KINDS[kind], model_type)
    before = bits(model)
    folded = fold_token(model, tokens(model, 9, 3), tokens(model, 6, 103), written=False)
    reduced, wanted = folded.split.reduced, folded.in_context
    limit = 1e-10 if model_type == "llama" else 1e-6  # upstream norms of Gemma compute in float32
    unpatched = gap(run(model, reduced)[0], wanted)
    assert unpatched > 1e-2
    loaded = patchfile.load(patchfile.save(folded.patch, tmp_path / "patch.safetensors"))
    with applied(model, loaded):
        assert gap(run(model, reduced)[0], wanted) <= limit * unpatched
        decoder = Decoder(model)
        decoder.extend(reduced.ids[:-1], reduced.positions[:-1])
        assert gap(decoder.extend(reduced.ids[-1:], reduced.positions[-1:]), wanted) <= limit * unpatched
    assert bits(model) == before
    one = next(e for s, e in folded.patch.edits.items() if s.module == MAP)
    assert isinstance(one, MatrixEdit)
    assert one.size() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_maps_compute_in_the_dtype_of_the_rest(kind, dtype):
    bound = bind(quantised(KINDS[kind], dtype=dtype))
    assert bound.dtype == dtype
    assert expressions(bound) == expressions(bind(build("llama", dtype)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_a_quantised_map_is_what_its_module_computes(kind):
    model = quantised(KINDS[kind])
    linear = bind(model).blocks[1].output_maps[0]
    x = torch.randn(5, linear.weight.shape[1], dtype=torch.float64)
    assert linear.weight.shape == (32, 48)
    assert torch.allclose(linear.exact(x), model.get_submodule(MAP)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_writing_is_refused_by_name(kind):
    model = quantised(KINDS[kind])
    before = bits(model)
    context, query = tokens(model, 9, 3), tokens(model, 6, 103)
    message = r"^model\.layers\.1\.mlp\.\w+\.weight of a \w+ is quantised or wrapped, .* written=False"
    with pytest.raises(UnsupportedModel, match=message):
        fold_token(model, context, query)
    patch = fold_token(model, context, query, written=False).patch
    with pytest.raises(UnsupportedModel, match=message), materialised(model, patch):
        pass
    assert bits(model) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_patch_of_other_sizes_does_not_fit():
    wide = quantised(KINDS["int8"])
    patch = fold_token(wide, tokens(wide, 9, 3), tokens(wide, 6, 103), written=False).patch
    wide.get_submodule(MAP).in_features = 47
    with pytest.raises(PatchMismatch, match="here it is"), applied(wide, patch):
        pass


@pytest.mark.parametrize(
    ("door", "dtype"),
    [(bind, torch.float64), (bind, torch.float32), (bind, torch.bfloat16), (discover, torch.float32)],
)
def test_a_map_that_rounds_what_it_reads_is_refused(door, dtype):
    model = build("llama", dtype)
    KINDS["int8"](model.get_submodule(MAP))
    door(model)
    model.get_submodule(MAP).__class__ = RoundedInput
    with pytest.raises(ProbeFailed, match=rf"{MAP} \(a RoundedInput: quantised or wrapped\?\) is not W_out h \+ b"):
        door(model)


@pytest.mark.parametrize("door", [bind, discover], ids=["bind", "discover"])
def test_a_map_that_does_not_use_what_it_stores_is_refused(door):
    model = build("llama", torch.float32)
    model.get_submodule(MAP).__class__ = RoundedWeight
    with pytest.raises(ProbeFailed, match=rf"{MAP} \(a RoundedWeight: quantised or wrapped\?\) is not W_out h \+ b"):
        door(model)


@pytest.mark.filterwarnings("ignore")
def test_torch_s_own_dynamic_quantisation_is_refused():
    """It rounds what a map reads to a step that all tokens share, so no token is served by itself."""
    model = torch.ao.quantization.quantize_dynamic(build("llama", torch.float32), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ProbeFailed, match=r"quantised or wrapped\?\) is not W"):
        bind(model)


def test_quantised_experts_are_refused():
    model = zoo.build("qwen2_moe")
    experts = next(m for m in model.modules() if type(m).__name__ == "Qwen2MoeExperts")
    experts.down_proj = nn.Parameter((experts.down_proj.data * 8).to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"experts\.down_proj of a Qwen2MoeExperts is quantised"):
        bind(model)


def test_a_quantised_shared_expert_is_refused():
    model = zoo.build("qwen2_moe")
    KINDS["int8"](model.model.layers[0].mlp.shared_expert.down_proj)
    with pytest.raises(UnsupportedModel, match=r"shared_expert\.down_proj\.weight of a Int8 is quantised"):
        bind(model)


def test_maps_that_bitsandbytes_packs_anew_are_refused():
    """On some CPUs its 4-bit weights change when they are read; the class is told by its name."""

    class Linear4bit(Nibbles):
        __module__ = "bitsandbytes.nn.modules"

        def __init__(self, linear):
            super().__init__(linear)
            self.weight = nn.Parameter(self.codes, requires_grad=False)
            self.weight.quant_state = types.SimpleNamespace(packing_format_for_cpu=False)
            self.support_avx512bf16_for_cpu = True

    model = quantised(Linear4bit)
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.\S+ is a Linear4bit .*damages.*support_avx512bf16"):
        bind(model)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    bind(model)
    model.get_submodule(MAP).weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModel, match=rf"^{MAP} is a Linear4bit"):
        bind(model)
