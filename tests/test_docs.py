"""What the pages show is run: the Python blocks of a page one after the other, as a reader would paste them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

REAL = {"index.md"}
"""Pages whose code loads a built-in model."""

PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text(encoding="utf-8")))

TINY = """
from pathlib import Path
import torch, tiny, contextfold as cf
model = cf.bind(tiny.build("llama", torch.float32))
context, query = tiny.tokens(150), tiny.tokens(3, seed=2)
prompt = cf.Prompt(context, query, keep=cf.SINK)
"""

GIVEN = {
    "ablate.md": TINY,
    "bake.md": TINY
    + """
from types import SimpleNamespace
loaded = SimpleNamespace(tokenizer=tiny.letters())
context, asked = "abc", [f"which is {i}" for i in range(12)]
""",
    "blocks.md": """
import runpy, torch
globals().update(runpy.run_path("examples/own_block.py"))
block = HomeBlock().double().eval()
model = torch.nn.Sequential(block)
with_context = torch.randn(1, 9, D, dtype=torch.float64)
without = with_context[:, 4:]
""",
    "export.md": TINY + "patch = cf.fold_token(model, context, query).patch; model = model.model",
    "interop.md": TINY
    + """
from peft import LoraConfig, PeftModel, get_peft_model
get_peft_model(tiny.build("llama", torch.float32), LoraConfig(target_modules=["q_proj"])).save_pretrained("adapter")
base = tiny.build("llama", torch.float32)
""",
    "report.md": TINY,
    "stepwise.md": TINY + "document, ids = context[:20], context",
}
"""What the reader of a page is taken to have, beyond what the page shows."""


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.real] if p in REAL else []) for p in PAGES])
def test_the_code_on_a_page_runs(page, capsys, tmp_path, monkeypatch):
    names: dict[str, object] = {"__name__": "page"}
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    monkeypatch.chdir(tmp_path)
    exec(GIVEN.get(page, ""), names)
    found = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    for block in (text for text in found if "lm_eval" not in text or find_spec("lm_eval")):
        exec(compile(block, page, "exec"), names)
    assert page != "index.md" or "Edmund" in capsys.readouterr().out


def test_every_page_is_in_the_navigation():
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f": {page.name}\n" not in menu] == []
