"""A folder that `peft.PeftModel.from_pretrained` loads: LoRA pairs, and norms saved whole.

Every pair has `alpha = r` and rsLoRA is off, so the scaling is 1 by every convention that loaders follow.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from contextfold.anatomy.wrapped import execution_device, is_offloaded
from contextfold.errors import InputError, NotExportable, one_line
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.folder import LARGEST
from contextfold.export.layout import Layout, Pair, lay_out, refuse_scales
from contextfold.export.names import stored_names
from contextfold.export.proof import gap, logits, rounding_gap
from contextfold.export.ranks import check_rank, cut, served_rank
from contextfold.files import parsed_json, read_regular
from contextfold.patch import MatrixEdit, Patch
from contextfold.runtime import Run, applied

__all__ = ["PeftFolder"]

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

REFUSALS = (ValueError, TypeError, KeyError, RuntimeError, AttributeError, NotImplementedError, SafetensorError)
"""What PEFT was seen to raise for modules that it cannot wrap, and for weights that it cannot read."""


@final
@dataclass(frozen=True)
class PeftFolder(Exporter):
    """`lora_only`: pairs and nothing else, as servers want. `uniform_rank`: one rank for all pairs, one that vLLM
    allows; `auto` takes the smallest that holds the patch. What does not fit is cut by SVD, and the loss reported."""

    name: ClassVar[str] = "peft"
    title: ClassVar[str] = "A PEFT adapter (LoRA)"

    lora_only: bool = False
    uniform_rank: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.uniform_rank, int):
            check_rank(self.uniform_rank)

    def write(self, source: Source, folder: Path) -> Mapping[str, Any]:
        if self.lora_only:
            refuse_scales(source.patch)
        shipped, losses = self.shipped(source.patch)
        layout = lay_out(source.bound, shipped, self._rank(source.patch))
        if not layout.pairs:
            raise NotExportable("the patch edits no matrix, and a PEFT adapter needs one; export a checkpoint")
        settings = _settings(source, layout)
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        save_file(_tensors(source.bound.model, layout), folder / WEIGHTS, metadata={"format": "pt"})
        rank = settings["r"]
        return {
            "pairs": len(layout.pairs),
            "saved_modules": len(layout.saved),
            "rank": rank,
            "vllm": f"--enable-lora --max-lora-rank {served_rank(rank)}" if _served(layout, rank) else None,
            "losses": losses,
        }

    def shipped(self, patch: Patch) -> tuple[Patch, dict[str, float]]:
        """The patch that the folder holds, and by parameter the relative Frobenius loss where its rank was cut."""
        rank = self._rank(patch)
        if rank is None:
            return patch, {}
        edits = dict(patch.edits)
        losses = {}
        for site, edit in patch.edits.items():
            if isinstance(edit, MatrixEdit) and edit.delta.rank > rank:
                delta, losses[site.name] = cut(edit.delta, rank)
                edits[site] = MatrixEdit(delta)
        return (replace(patch, edits=edits), losses) if losses else (patch, {})

    def _rank(self, patch: Patch) -> int | None:
        if self.uniform_rank != "auto":
            return self.uniform_rank
        return served_rank(max((e.delta.rank for e in patch.edits.values() if isinstance(e, MatrixEdit)), default=1))

    def check(self, source: Source, folder: Path, probe: Run) -> Proof:
        """Load with PEFT on a copy of the model."""
        patch, losses = self.shipped(source.patch)
        layout = lay_out(source.bound, patch, self._rank(source.patch))
        _check_settings(folder, _settings(source, layout))
        expected = _parameters(layout)
        found, held = _loaded(source.bound.model, folder, layout, probe)
        with applied(source.bound, patch) as model:
            ours = logits(model, probe)
        whole = ours
        if losses:
            with applied(source.bound, source.patch) as model:
                whole = logits(model, probe)
        by_name = {pair.key for pair in layout.pairs if pair.parameter is not None}
        rounded = [site for site in patch.edits if f"{site.module}.{site.parameter}" in by_name]
        return Proof(
            target=self.name,
            loader=f"peft {version('peft')}",
            expected=len(expected),
            matched=len(expected & held),
            missing=tuple(sorted(expected - held)),
            tokens=probe.ids.numel(),
            logit_gap=gap(found, ours),
            rounding_gap=rounding_gap(source.bound, patch, probe, rounded),
            base_gap=gap(logits(source.bound.model, probe), ours),
            losses=losses,
            cut_gap=gap(whole, ours),
            remarks=_remarks(layout),
        )


def _served(layout: Layout, rank: int) -> bool:
    """Whether a server that knows LoRA pairs of modules only can take it."""
    plain = all(pair.parameter is None and pair.bias is None for pair in layout.pairs)
    return plain and not layout.saved and rank <= served_rank(rank)


def _remarks(layout: Layout) -> tuple[str, ...]:
    remarks = []
    if layout.saved:
        remarks.append(
            f"{len(layout.saved)} norms are saved whole (modules_to_save), which servers such as vLLM refuse: "
            "give those a checkpoint"
        )
    if any(pair.parameter is not None for pair in layout.pairs):
        remarks.append("Parameters are targeted by name (target_parameters), which needs PEFT itself.")
    if layout.biased:
        remarks.append("Biases are edited too (lora_bias), which servers such as vLLM refuse: give those a checkpoint.")
    return tuple(remarks)


def _settings(source: Source, layout: Layout) -> dict[str, Any]:
    """`adapter_config.json`. Keys that only some loaders know are left out where they say nothing."""
    model: Any = source.bound.model
    rank = max(pair.rank for pair in layout.pairs)
    other = {pair.key: pair.rank for pair in layout.pairs if pair.rank != rank}
    targets = [pair.key for pair in layout.pairs if pair.parameter is not None]
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.can_generate() else None,
        "base_model_name_or_path": source.name or None,
        "revision": getattr(model.config, "_commit_hash", None),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other,
        "alpha_pattern": other,
        "target_modules": [pair.module for pair in layout.pairs if pair.parameter is None],
        "modules_to_save": sorted(layout.saved) or None,
        "fan_in_fan_out": layout.turned,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if targets:
        settings["target_parameters"] = targets
    if layout.biased:
        settings["lora_bias"] = True
    return settings


def _check_settings(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse a configuration that says more than ours: PEFT imports modules and runs patterns that one names."""
    try:
        found = parsed_json(read_regular(folder / CONFIG, LARGEST).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG} cannot be read ({one_line(error)}); export the patch again") from error
    if found != wanted or not (folder / WEIGHTS).is_file():  # without it PEFT looks for pickled ones
        raise InputError(f"{folder / CONFIG} is not the one of this patch: export the patch again")


def _tensors(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """`adapter_model.safetensors`. Of several targeted parameters of one module, the first registered is innermost."""
    stored = stored_names(model)
    tensors: dict[str, Tensor] = {}
    for pair, path in _paths(layout):
        tensors[PREFIX + stored(f"{path}.lora_A.weight")] = pair.A
        tensors[PREFIX + stored(f"{path}.lora_B.weight")] = pair.B
        if layout.biased:
            bias = pair.B.new_zeros(pair.B.shape[0]) if pair.bias is None else pair.bias
            tensors[PREFIX + stored(f"{path}.lora_B.bias")] = bias
    for name, state in layout.saved.items():
        tensors |= {f"{PREFIX}{name}.{key}": value for key, value in state.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _paths(layout: Layout) -> Iterator[tuple[Pair, str]]:
    """Each pair and the module path at which PEFT puts it."""
    for index, pair in enumerate(layout.pairs):
        outside = sum(other.module == pair.module for other in layout.pairs[index + 1 :])
        yield pair, pair.module + ".base_layer" * outside


def _parameters(layout: Layout) -> set[str]:
    """Names of everything that the folder holds: weights, biases, and modules saved whole."""
    names = {f"{pair.module}.{pair.parameter or 'weight'}" for pair in layout.pairs}
    names |= {f"{pair.module}.bias" for pair in layout.pairs if pair.bias is not None}
    return names | set(layout.saved)


def _loaded(model: nn.Module, folder: Path, layout: Layout, probe: Run) -> tuple[Tensor, set[str]]:
    """Logits of a copy of the model with the adapter as PEFT loads it, and the parameters that it holds."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            "proving a PEFT folder needs the package peft, which is not installed; run: pip install 'contextfold[peft]'"
        ) from error
    fresh: Any = _copy(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(fresh, str(folder)).eval()
            found = logits(loaded.get_base_model(), probe)
    except REFUSALS as error:
        raise NotExportable(
            f"peft {version('peft')} does not take this patch ({one_line(error)}); export a checkpoint"
        ) from error
    return found, _held(loaded, layout)


def _copy(model: nn.Module) -> nn.Module:
    """A second model for PEFT to put its modules into.

    Where weights are offloaded, both share them. And the copy has no map of devices: given one, PEFT 0.21 renames the
    tensors in the very files that the weights lie in, for its own modules, and the folder is a model no more. PEFT puts
    its pairs where the weights beside them lie; until a call brings those, tensors without memory stand in.
    """
    away = [module for module in model.modules() if is_offloaded(module)]
    if not away:
        return copy.deepcopy(model)
    sources = (vars(module)["_hf_hook"].weights_map for module in away)
    shared = (*model.parameters(), *model.buffers(), *sources)
    fresh = copy.deepcopy(model, {id(each): each for each in shared})
    vars(fresh).pop("hf_device_map", None)
    for module in fresh.modules():
        if is_offloaded(module):
            where = execution_device(module)
            for name, p in list(module.named_parameters(recurse=False)):
                stand_in = torch.zeros((), dtype=p.dtype, device=where).expand(p.shape)
                setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    return fresh


def _held(loaded: Any, layout: Layout) -> set[str]:
    """The parameters of the folder that the loaded model holds, bit for bit as far as its dtype goes."""
    state = loaded.state_dict()
    held = set()
    for pair, path in _paths(layout):
        found = {part: state.get(f"{PREFIX}{path}.lora_{part}.default.weight") for part in "AB"}
        if _same(found["A"], pair.A) and _same(found["B"], pair.B):
            held.add(f"{pair.module}.{pair.parameter or 'weight'}")
        if pair.bias is not None and _same(state.get(f"{PREFIX}{path}.lora_B.default.bias"), pair.bias):
            held.add(f"{pair.module}.bias")
    for name, saved in layout.saved.items():
        where = f"{PREFIX}{name}.modules_to_save.default"
        if all(_same(state.get(f"{where}.{key}"), value) for key, value in saved.items()):
            held.add(name)
    return held


def _same(found: Tensor | None, written: Tensor) -> bool:
    if found is None or found.shape != written.shape:
        return False
    return bool(torch.equal(found.cpu(), written.cpu().to(found.dtype)))
