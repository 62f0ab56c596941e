"""Texts that come with the command line: the paper's five prompts, and the demo."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEMO", "OTHER_CONTEXT", "PAPER", "PAPER_TOKENS", "Example"]

PAPER = (
    "Write a single-sentence weather forecast for Mars, from the perspective of a slightly annoyed robot:",
    "Constraint: No 'e's. Topic: The meaning of life. Length: Exactly 20 words. Write:",
    "Explain what a 'bug' is in computer programming, but explain it to a 16th-century medieval peasant. "
    "Use 20 words or less:",
    "Topic: Three siblings named Jack, Fred, and Alice. Task: Write one 5-7-5 haiku about them:",
    "We can absorb the impact of a prompt for a modern language model such as Gemma into the MLP weights. "
    "Write a two-line rhyming couplet about this fact:",
)
"""The prompts of section 4 of arXiv 2511.17864, in its order."""

PAPER_TOKENS = 20
"""Greedy tokens per prompt in that section."""


@dataclass(frozen=True)
class Example:
    """A context, and a query whose answer stands only in it."""

    context: str
    query: str


DEMO = Example(
    context="The lighthouse on Tarn Island was built in 1871 by the engineer Ottilie Brandt. Its keeper today is a "
    "retired clockmaker named Edmund Quill, who lives there with his grey parrot, Admiral Pepper.\n",
    query="Question: Who keeps the lighthouse on Tarn Island today? Answer: The keeper is",
)

OTHER_CONTEXT = (
    "Bread dough rises because yeast turns sugar into carbon dioxide. A cool kitchen slows it down, and a long, "
    "slow rise gives the better flavour; bakers therefore often leave the dough in a refrigerator over night.\n"
)
"""The context of the negative control, where the user names no other."""
