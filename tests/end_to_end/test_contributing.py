"""CONTRIBUTING's steps to a new pass, followed on a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PASS = '''
"""The pass `drop_doubles`."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from kp_dynamo.graph.editing import replace_node
from kp_dynamo.graph.nodes import calls
from kp_dynamo.passes.base import PassReport


@dataclass(frozen=True)
class DropDoubles:
    """relu(relu(x)) -> relu(x)."""

    name: ClassVar[str] = "drop_doubles"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        relu = torch.ops.aten.relu.default
        found = [n for n in calls(gm.graph, relu) if n.args[0].target is relu]
        for node in found:
            replace_node(node, node.args[0])
        return PassReport(self.name, len(found))
'''

USE = """
import torch, kp_dynamo
assert kp_dynamo.__file__.startswith({root!r})
def rewritten(**options):
    torch._dynamo.reset()
    kp_dynamo.clear_cache()
    x = torch.tensor([-1.0, 2.0])
    found = kp_dynamo.explain(lambda x: x.relu().relu(), x, options=options)
    return [p.rewritten for p in found.passes if p.name == "drop_doubles"]
try:
    print(rewritten(), rewritten(disable_passes=["drop_doubles"]))
except torch._dynamo.exc.BackendCompilerFailed as error:
    print(str(error.inner_exception).partition(".")[0])
except kp_dynamo.TPUConfigurationError as error:
    print(str(error))
"""


def _edit(path, before, after):
    text = path.read_text()
    assert before in text, before
    path.write_text(text.replace(before, after, 1))


def _used(root):
    source = USE.format(root=str(root))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_a_pass_is_added_in_the_places_that_are_named_and_deleted_again(tmp_path):
    steps = re.sub(r"\s+", " ", (ROOT / "CONTRIBUTING.md").read_text())
    assert "one line to `PASSES` in `kp_dynamo/passes/__init__.py`" in steps
    assert "another line to the list in `build_pipeline` of `kp_dynamo/pipeline/build.py`" in steps
    package = tmp_path / "kp_dynamo"
    shutil.copytree(ROOT / "kp_dynamo", package, ignore=shutil.ignore_patterns("__pycache__"))
    index, pipeline, new = (
        package / "passes/__init__.py",
        package / "pipeline/build.py",
        package / "passes/drop_doubles.py",
    )
    before = index.read_text(), pipeline.read_text()

    new.write_text(PASS)
    line = "from kp_dynamo.passes.drop_doubles import DropDoubles\n"
    _edit(index, "from kp_dynamo.passes.fold_casts", f"{line}from kp_dynamo.passes.fold_casts")
    _edit(index, "    FoldConstants,", "    DropDoubles,  # relu(relu(x)) becomes relu(x)\n    FoldConstants,")
    _edit(pipeline, "from kp_dynamo.passes.fold_casts", f"{line}from kp_dynamo.passes.fold_casts")
    _edit(pipeline, "        FoldConstants(),\n", "        FoldConstants(),\n        DropDoubles(),\n")
    assert _used(tmp_path) == "[1] []"

    new.unlink()
    index.write_text(before[0])
    pipeline.write_text(before[1])
    assert "disable_passes=['drop_doubles'] is invalid" in _used(tmp_path)
