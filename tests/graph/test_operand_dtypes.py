"""Matmuls of several dtypes and embeddings of floats are eager's errors, with the place in the model."""

import pytest
import torch
from torch import nn

from tests.spine import compiled


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).sin()


WIDE = torch.ones(2, 4, dtype=torch.float64)
WRONG = {
    "a float64 input of a Linear": (Model(nn.Linear(4, 3)), (WIDE,), "mat1 torch.float64, mat2.*in layer"),
    "with an activation": (nn.Sequential(nn.Linear(4, 3), nn.GELU()), (WIDE,), "mat1 torch.float64.*in 0 "),
    "without a bias": (Model(nn.Linear(4, 3, bias=False)), (WIDE,), "mat1 torch.float64, mat2 torch.float32.*in layer"),
    "a batched matmul": (lambda a, b: a @ b, (WIDE[None], torch.ones(1, 4, 3)), "mat1 torch.float64, mat2 torch.f"),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (WIDE, torch.ones(4, 3)), "mat1 torch.float64"),
    "a vector": (lambda a, b: a @ b, (WIDE, torch.ones(4)), "torch.float64"),
    "floats of an Embedding": (Model(nn.Embedding(5, 3)), (WIDE,), "int64 or int32, but got torch.float64.*in layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("level", ["conservative", "balanced"])
def test_what_eager_refuses(name, level):
    fn, args, text = WRONG[name]
    with pytest.raises(RuntimeError):
        fn(*args)
    with pytest.raises(Exception, match=f"(?s){text}.*Eager raises as well"):
        compiled(fn, level=level)(*args)


def test_the_process_compiles_the_next_call():
    run = compiled(Model(nn.Linear(4, 3)))
    with pytest.raises(Exception, match="must have the same dtype"):
        run(WIDE)
    assert run(WIDE.float()).dtype == torch.float32
