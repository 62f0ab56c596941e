"""Patches that the tests of exports share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from patches import fold

from conformance import default_dtype


@pytest.fixture(scope="session")
def llama():
    """A bound tiny Llama with biases, and a token patch of it."""
    return fold("llama", mlp_bias=True)


@pytest.fixture(scope="session")
def gemma():
    """A bound tiny Gemma 3, whose patch edits norm scales too."""
    return fold("gemma3_text")


@pytest.fixture(autouse=True)
def _default_dtype():
    with default_dtype(torch.float32):
        yield
