"""Generation that folds at every step, at nearly the price of plain decoding, proven every so often."""

from contextfold.stepwise.generate import History, generate
from contextfold.stepwise.proof import Proof
from contextfold.stepwise.summary import Summary
from contextfold.stepwise.token import Token
from contextfold.stepwise.window import PAPER, Window

__all__ = ["PAPER", "History", "Proof", "Summary", "Token", "Window", "generate"]
