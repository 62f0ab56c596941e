"""Models and texts with hostile numbers: what training gone wrong, a bad conversion or a cruel input leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny
import zoo
from contextfold import patchfile
from contextfold.anatomy import Bound, bind
from contextfold.bake import Frame, answered, bake
from contextfold.export import Checkpoint, PeftFolder, Source, export
from contextfold.fold import fold_sequence, fold_token
from contextfold.inspection import patch_json
from contextfold.patch import Patch
from contextfold.spectra import spectra
from contextfold.stepwise import Summary, Window, generate
from contextfold.verify import Prompt, Settings, evaluate, fold_and_prove, fold_and_prove_sequence

__all__ = ["DOORS", "FAMILIES", "TEXTS", "WOUNDS", "Text", "check_numbers", "check_patch", "family", "wounded"]

FAMILIES = ("llama", "gemma3_text", "gpt2", "qwen2_moe", "olmo2", "gpt_neox")
"""Gated with biases; a norm after the MLP, of 1 + w; transposed maps; a mixture; norms after both, of w; parallel."""


def family(name: str, dtype: torch.dtype) -> nn.Module:
    """A fresh tiny model."""
    return tiny.build(name, dtype) if name in tiny.TYPES else zoo.build(name, dtype)


# --- wounds ----------------------------------------------------------------------------------------------------------

Wound = Callable[[nn.Module, Random], None]


def _layer(model: nn.Module, rng: Random) -> nn.Module:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return rng.choice(list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))))


def _of(layer: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if wanted(name, p)]


def _is_mlp(name: str, p: nn.Parameter) -> bool:
    return any(part in name for part in ("mlp", "feed_forward", "fc")) and p.dim() > 1


def _is_output(name: str, p: nn.Parameter) -> bool:
    return p.dim() > 1 and any(part in name for part in ("down_proj", "mlp.c_proj", "dense_4h_to_h"))


def _is_attention_output(name: str, p: nn.Parameter) -> bool:
    return p.dim() > 1 and any(part in name for part in ("o_proj", "attn.c_proj", "attention.dense"))


def _is_norm(name: str, p: nn.Parameter) -> bool:
    return p.dim() == 1 and ("norm" in name or "ln_" in name) and "bias" not in name


def _some(parameters: list[nn.Parameter], rng: Random) -> nn.Parameter:
    return rng.choice(parameters)


def _fill(wanted: Callable[[str, nn.Parameter], bool], value: float) -> Wound:
    def wound(model: nn.Module, rng: Random) -> None:
        for parameter in _of(_layer(model, rng), wanted):
            parameter.fill_(value)

    return wound


def _times(wanted: Callable[[str, nn.Parameter], bool], factor: float) -> Wound:
    def wound(model: nn.Module, rng: Random) -> None:
        for parameter in _of(_layer(model, rng), wanted):
            parameter.mul_(factor)

    return wound


def _entry(value: float) -> Wound:
    def wound(model: nn.Module, rng: Random) -> None:
        parameter = _some([p for p in model.parameters() if p.is_floating_point()], rng)
        parameter.view(-1)[rng.randrange(parameter.numel())] = value

    return wound


def _channel(model: nn.Module, rng: Random) -> None:
    embedding: Any = model
    table = embedding.get_input_embeddings().weight
    table[:, rng.randrange(table.shape[1])] *= 1e6


def _outlier(model: nn.Module, rng: Random) -> None:
    for parameter in _of(_layer(model, rng), _is_output):
        parameter.view(-1, parameter.shape[-1])[rng.randrange(parameter.shape[-2])] *= 1e6


def _same_rows(model: nn.Module, rng: Random) -> None:
    embedding: Any = model
    table = embedding.get_input_embeddings().weight
    table.copy_(table[:1].expand_as(table))


def _zero_rows(model: nn.Module, rng: Random) -> None:
    embedding: Any = model
    embedding.get_input_embeddings().weight.zero_()


def _rank_one(model: nn.Module, rng: Random) -> None:
    for parameter in _of(_layer(model, rng), _is_mlp):
        flat = parameter.view(-1, parameter.shape[-1])
        flat.copy_(torch.outer(flat[:, 0].clone(), flat[0].clone()))


def _one_direction(model: nn.Module, rng: Random) -> None:
    """All tokens lie on one line, so that whatever is read is of rank one before positions come in."""
    embedding: Any = model
    table = embedding.get_input_embeddings().weight
    table.copy_(torch.outer(torch.linspace(-1, 1, table.shape[0]).to(table), table[0].clone()))


WOUNDS: Mapping[str, Wound] = {
    "none": lambda model, rng: None,
    "an infinite weight": _entry(math.inf),
    "a weight that is no number": _entry(math.nan),
    "a weight of 1e38": _entry(1e38),
    "a denormal weight": _entry(1e-41),
    "denormal output maps": _times(_is_output, 1e-40),
    "denormal norm scales": _times(_is_norm, 1e-40),
    "tiny norm scales": _times(_is_norm, 1e-18),
    "huge norm scales": _times(_is_norm, 1e18),
    "huge output maps": _times(_is_output, 1e30),
    "an outlier channel": _channel,
    "an outlier row of an output map": _outlier,
    "a layer whose MLP is zero": _fill(_is_mlp, 0.0),
    "a layer whose output map is zero": _fill(_is_output, 0.0),
    "a layer whose attention output map is zero": _fill(_is_attention_output, 0.0),
    "a layer whose norm scales are zero": _fill(_is_norm, 0.0),
    "a layer whose norm scales are minus one": _fill(_is_norm, -1.0),  # effective scale 0 where a norm has 1 + w
    "a layer that is zero": _fill(lambda name, p: True, 0.0),
    "equal embeddings": _same_rows,
    "zero embeddings": _zero_rows,
    "embeddings on a line": _one_direction,
    "an MLP of rank one": _rank_one,
}


# --- texts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Token ids of a context and a query."""

    context: Tensor
    query: Tensor
    keep: tuple[tuple[int, int], ...] = ((0, 1),)


def _random(count: int, rng: Random) -> Tensor:
    return torch.tensor([rng.randrange(90) for _ in range(count)])


TEXTS: Mapping[str, Callable[[Random], Text]] = {
    "plain": lambda rng: Text(_random(9, rng), _random(4, rng)),
    "one token, dropped": lambda rng: Text(_random(1, rng), _random(3, rng), ()),
    "one token, kept": lambda rng: Text(_random(1, rng), _random(3, rng)),
    "one token of each": lambda rng: Text(_random(1, rng), _random(1, rng), ()),
    "the same token throughout": lambda rng: Text(torch.full((9,), 7), torch.full((4,), 7)),
    "the same token, nothing kept": lambda rng: Text(torch.full((9,), 7), torch.full((4,), 7), ()),
    "a query that repeats": lambda rng: Text(_random(9, rng), torch.tensor([5, 6] * 6)),
    "a query of one token": lambda rng: Text(_random(9, rng), _random(1, rng)),
    "more positions than any map is wide": lambda rng: Text(_random(5, rng), _random(60, rng)),
    "all but one token kept": lambda rng: Text(_random(9, rng), _random(4, rng), ((0, 4), (5, 9))),
}


# --- doors -----------------------------------------------------------------------------------------------------------


def check_numbers(found: Any, where: str = "") -> None:
    """Raises unless every number in plain data is finite."""
    if isinstance(found, float) and not math.isfinite(found):
        raise AssertionError(f"{where} is {found}")
    if isinstance(found, Mapping):
        for key, value in found.items():
            check_numbers(value, f"{where}/{key}")
    elif isinstance(found, list | tuple):
        for key, value in enumerate(found):
            check_numbers(value, f"{where}/{key}")


def check_patch(patch: Patch, folder: Path) -> None:
    """Raises unless it is finite as it is, in its file, and in what is said of it."""
    for site, edit in patch.edits.items():
        if not all(bool(torch.isfinite(part).all()) for part in edit.tensors):
            raise AssertionError(f"the edit of {site.name} is not finite")
    path = patchfile.save(patch, folder / "patch.safetensors")
    check_numbers([patch_json(patchfile.load(path)), spectra(patch)])


def _check_layers(layers: Any) -> None:
    """Every layer says how it was met, and a number that is not finite has its outcome."""
    for layer in layers:
        if not math.isfinite(layer.relative_error) and layer.outcome == "exact":
            raise AssertionError(f"layer {layer.layer} is called exact with an error of {layer.relative_error}")


def _token(bound: Bound, text: Text, folder: Path) -> None:
    folded = fold_token(bound, text.context, text.query, keep=text.keep)
    _check_layers(folded.layers)
    check_patch(folded.patch, folder)


def _sequence(bound: Bound, text: Text, folder: Path) -> None:
    folded = fold_sequence(bound, text.context, text.query, keep=text.keep)
    _check_layers(folded.layers)
    check_patch(folded.patch, folder)


def _verify(bound: Bound, text: Text, folder: Path) -> None:
    prompt = Prompt(text.context, text.query, text.keep)
    patch, verdict = fold_and_prove(bound, prompt, Settings(other=tiny.tokens(9, seed=4)))
    check_patch(patch, folder)
    check_numbers(verdict.to_json())
    verdict._repr_html_()


def _verify_sequence(bound: Bound, text: Text, folder: Path) -> None:
    prompt = Prompt(text.context, text.query, text.keep)
    patch, verdict = fold_and_prove_sequence(bound, prompt, Settings(other=tiny.tokens(9, seed=4)))
    check_patch(patch, folder)
    check_numbers(verdict.to_json())
    verdict._repr_html_()


def _bake(bound: Bound, text: Text, folder: Path) -> None:
    frame = Frame(text.context[:1], text.context[1:] if text.context.numel() > 1 else text.query)
    asked = [text.query, *(tiny.tokens(3, seed=seed) for seed in range(3))]
    examples = answered(bound, frame.full, asked, tokens=2)
    baked = bake(bound, frame, examples)
    check_patch(baked.patch, folder)
    held_out = answered(bound, frame.full, [tiny.tokens(4, seed=9)], tokens=2)
    check_numbers(evaluate(bound, baked, frame, held_out).to_json())


def _generate(bound: Bound, text: Text, folder: Path) -> None:
    ids = torch.cat([text.context, text.query])
    window = Window.after(text.context.numel(), ids.numel(), text.keep)
    found = tuple(generate(bound, ids, window, tokens=3, prove_every=2))
    check_numbers(Summary(found, bound.dtype).to_json())
    for token in found:
        if token.proof is not None:
            check_patch(token.proof.patch(bound), folder)


def _export(bound: Bound, text: Text, folder: Path) -> None:
    patch = fold_token(bound, text.context, text.query, keep=text.keep).patch
    for exporter, name in ((PeftFolder(), "adapter"), (Checkpoint(), "checkpoint")):
        proof = export(Source(bound, patch), exporter, folder / name)
        check_numbers(proof.to_json())
        if proof.proven and name == "adapter":
            for tensor in load_file(folder / name / "adapter_model.safetensors").values():
                if not bool(torch.isfinite(tensor).all()):
                    raise AssertionError("the adapter holds what is not finite")


DOORS: Mapping[str, Callable[[Bound, Text, Path], None]] = {
    "fold_token": _token,
    "fold_sequence": _sequence,
    "verify": _verify,
    "verify_sequence": _verify_sequence,
    "bake": _bake,
    "generate": _generate,
    "export": _export,
}


def wounded(name: str, wound: str, dtype: torch.dtype, rng: Random) -> Bound:
    """A bound tiny model with a wound. Raises as binding does: the proof of an anatomy meets the numbers first."""
    model = family(name, dtype)
    with torch.no_grad():
        WOUNDS[wound](model, rng)
    return bind(model)
