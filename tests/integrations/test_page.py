"""The blocks of docs/with-other-libraries.md run with the real libraries, and kp_tpu compiles them."""

import re
from pathlib import Path

import pytest
import torch

from tests.spine import counted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "with-other-libraries.md"
BLOCKS = re.findall(r"```python library=([\w-]+)\n(.*?)```", PAGE.read_text(), re.S)
LIBRARIES = {"trainer", "accelerate", "lightning", "peft", "sentence-transformers", "timm", "diffusers"}


SLOW = {"timm", "diffusers", "trainer", "peft"}  # docs/zoo.md and the tests beside this file have such models


@pytest.mark.parametrize(
    ("library", "code"),
    [pytest.param(*block, id=block[0], marks=[pytest.mark.slow] if block[0] in SLOW else []) for block in BLOCKS],
)
def test_the_block_of_a_library_runs(library, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with counted() as count:
        exec(code, {"__name__": library})
    assert count.graphs + count.capture_hits >= 1
    assert count.fallbacks == 0


def test_each_library_has_a_block():
    assert {library for library, _ in BLOCKS} == LIBRARIES
    assert len(BLOCKS) == len(LIBRARIES)


@pytest.mark.parametrize("backend", ["kp_tpu", "eager"])
def test_torch_compiles_no_bare_sequential_in_place(backend):
    """The pitfall of the page. If it is gone, so may the line there."""
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    torch._dynamo.utils.counters.clear()
    bare.compile(backend=backend)
    bare(torch.ones(2, 4))
    assert torch._dynamo.utils.counters["frames"] == {}
