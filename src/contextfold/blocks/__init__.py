"""Blocks of your own: describe any `nn.Module` with named submodules as stages, get a planned and exact patch for it.

    parts = Parts(block)
    branch = parts.norm("norm2") >> parts.linear("up") >> Pointwise("relu²", squared_relu) >> parts.linear("down")
    mine = UserBlock(block, parts.read_by("norm2", "v") >> (Skip() + branch))
    folded = fold_blocks(model, [mine], with_context, without)

The theory needs some contextual layer, not attention: whatever gives the value called v will do.
"""

from contextfold.blocks.describe import Parts, UserBlock
from contextfold.blocks.solve import BlockReport, FoldedBlocks, fold_blocks, patched

__all__ = ["BlockReport", "FoldedBlocks", "Parts", "UserBlock", "fold_blocks", "patched"]
