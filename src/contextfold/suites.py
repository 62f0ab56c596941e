"""Texts that come with the command line: the paper's five prompts, and the demo."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEMO", "OTHER_CONTEXT", "PAPER", "PAPER_TOKENS", "QUESTIONS", "WRITE_A_QUESTION", "Example"]

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

WRITE_A_QUESTION = "Write one short question that somebody could ask you."
"""Asked of a model that has a context, it gives questions to bake that context from."""

QUESTIONS = (
    "What is photosynthesis?",
    "How does a steam engine work?",
    "What causes an earthquake?",
    "Who were the Vikings?",
    "How do magnets attract iron?",
    "What is the square root of eighty-one?",
    "Why does the moon change its shape?",
    "What is a prime number?",
    "How do vaccines protect people?",
    "What is the function of the lungs?",
    "Which metal is liquid at room temperature?",
    "How did the ancient Egyptians build the pyramids?",
    "What is inflation in economics?",
    "How do computers store numbers?",
    "What is the difference between a frog and a toad?",
    "Why do ships have anchors?",
    "What is an atom?",
    "How does a thermometer work?",
    "What is the role of a parliament?",
    "Why do some metals rust?",
    "What is a sonnet?",
    "How are diamonds formed?",
    "What does DNA do?",
    "How is the speed of sound measured?",
    "What is the theory of evolution?",
    "Why are there time zones?",
    "What is a black hole?",
    "How does a dam produce electricity?",
    "What were the causes of the First World War?",
    "How do ants find food?",
    "What is an algorithm?",
    "How do glaciers shape valleys?",
    "What is the perimeter of a square with sides of four metres?",
    "Why does bread rise?",
    "How does a camera lens focus light?",
    "What is democracy?",
    "What is the main gas in the air?",
    "How do submarines dive?",
    "What is a haiku?",
    "Why do volcanoes erupt?",
    "How does an electric motor turn?",
    "What is the purpose of a bank?",
    "How do coral reefs grow?",
    'What is the meaning of the word "ambiguous"?',
    "How do pilots navigate?",
    "What is gravity?",
    "Why do objects look smaller from far away?",
    "How is steel made from iron?",
)
"""General questions: to bake from where the user has none, as anchors, and to measure what a patch does elsewhere."""
