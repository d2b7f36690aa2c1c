"""torch's own samples, as a TPU's compiler gets them: every matmul and convolution of float32 has the precision.

XLA:CPU ignores the precision, so values cannot show a missing one: the programs are read.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch_xla
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from kp_dynamo.compat import xla
from kp_dynamo.lowering import program
from kp_dynamo.ops.optimization_barrier import barriers

_NAMES = re.compile(
    "mm|mul$|mv|dot|conv|linear|einsum|inner|outer|kron|cov|corr|cdist|attention|linalg|matrix|norm|fft"
)
_OPS = [
    op
    for op in op_db
    if _NAMES.search(op.name) and "sparse" not in op.name and torch.float32 in op.supported_dtypes("cpu")
]
_NUM_SAMPLES = 4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """The floating-point matmuls and convolutions of the programs that are compiled meanwhile, as for a TPU."""
    found: list[str] = []
    compiled = program._compile

    def noted(traced, spec):
        text = torch_xla._XLAC._get_xla_tensors_hlo(list(traced.roots))
        found.extend(line.strip() for line in text.splitlines() if re.search(r"= [fc]\d+.* (dot|convolution)\(", line))
        return compiled(traced, spec)

    monkeypatch.setattr(program, "_compile", noted)
    monkeypatch.setattr(program, "barriers", lambda _, **how: barriers(xla.optimization_barrier, **how))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", _OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}".rstrip("."))
def test_every_product_has_the_precision(op, products):
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:_NUM_SAMPLES]:
        torch._dynamo.reset()
        run = torch.compile(op.op, backend="kp_tpu", options={"precision": "float32"})
        results = pytree.tree_leaves(run(sample.input, *sample.args, **sample.kwargs))
        wanted = [r.abs().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if wanted:
            torch.stack(wanted).sum().backward()
    assert [line for line in products if "operand_precision={highest,highest}" not in line] == []


def test_products_are_found(products):
    torch.compile(torch.mm, backend="kp_tpu", options={"precision": "float32"})(torch.ones(2, 3), torch.ones(3, 4))
    assert len(products) == 1
