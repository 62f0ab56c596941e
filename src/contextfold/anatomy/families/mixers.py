"""Families whose layers may have no token-wise branch: the mixer's own output map carries the edit."""

from __future__ import annotations

from contextfold.anatomy.record import Dense, Experts, Family, Mixer, Wiring, read_by

__all__ = ["MIXERS"]

MAMBA = Family(
    name="mamba",
    model_types=("mamba", "mamba2", "falcon_mamba"),
    layers="backbone.layers",
    sites=(Mixer("mixer.out_proj", Wiring(residual=(read_by(""),))),),
    quirks="State-space layers without an MLP. What the output map reads cannot be matched, so it takes up the whole "
    "difference. There are no positions.",
)

_NEMOTRON = Wiring(norm_pre="norm")

NEMOTRON_H = Family(
    name="nemotron-h",
    model_types=("nemotron_h",),
    layers="model.layers",
    sites=(
        Experts(
            branch=("mixer",),
            input_maps=("mixer.gate", "mixer.shared_experts.up_proj"),
            stacked_inputs=("mixer.experts.up_proj",),
            outputs=("mixer.experts.down_proj", "mixer.shared_experts.down_proj"),
            wiring=_NEMOTRON,
        ),
        Dense(("mixer.up_proj",), "mixer.down_proj", _NEMOTRON),
        Mixer("mixer.out_proj", _NEMOTRON),
        Mixer("mixer.o_proj", _NEMOTRON),
    ),
    quirks="Each layer is a Mamba-2 mixer, attention, an MLP or a mixture of experts.",
)

MIXERS: tuple[Family, ...] = (MAMBA, NEMOTRON_H)
