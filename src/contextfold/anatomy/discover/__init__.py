"""Find where the letters live in a model whose name nobody knows."""

from contextfold.anatomy.discover.agree import differences, recorded
from contextfold.anatomy.discover.model import discover
from contextfold.anatomy.discover.paste import source

__all__ = ["differences", "discover", "recorded", "source"]
