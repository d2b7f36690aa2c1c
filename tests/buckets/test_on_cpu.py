"""Operators that XLA has no form of: the CPU computes them at the true sizes, by one program for many lengths."""

import pytest
import torch
import torch.nn.functional as F

from kp_dynamo import clear_cache, mark_sequence
from kp_dynamo.telemetry import TELEMETRY
from tests.spine import compiled, counted


def eye_beside(x):
    return torch.eye(x.shape[1])


# torch calls it a beta.
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")

FUNCTIONS = {
    "rfft": lambda x: torch.fft.rfft(x, dim=1).abs() + 1,
    "fft": lambda x: torch.fft.fft(x, dim=1).real * 1.0,
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1) * 1,
    "stft": lambda x: torch.stft(x[..., 0], 2, 1, 2, torch.ones(2), return_complex=True, pad_mode="constant").abs() * 1,
    "mode": lambda x: x.round().mode(1)[0] * 2,
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + eye_beside(x)) * 1,
    "solve": lambda x: torch.linalg.solve(x @ x.mT + eye_beside(x), x) * 1,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + eye_beside(x)) * 1,
    "det of many": lambda x: torch.linalg.det(x.unsqueeze(-1) * x.unsqueeze(-2) + torch.eye(4)) * 1,
    "singular values": lambda x: torch.linalg.svdvals(x) * 1,
    "index_reduce": lambda x: x.index_reduce(1, torch.zeros(1, dtype=torch.long), x[:, :1] * 2, "amax") * 1,
    "pool": lambda x: F.adaptive_avg_pool1d(x.mT, 3) * 1,
    "grid_sample": lambda x: F.grid_sample(x[None], x[:1, :, None, :2].tanh() * 0.9, align_corners=False) * 1,
}


@pytest.mark.quick("fft", "pool", "mode", "index_reduce")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_true_sizes(name):
    fn = FUNCTIONS[name]
    clear_cache()
    run = compiled(fn, buckets=[8], precision="float32")
    with counted() as inside:
        for length in (5, 8, 6):
            mine, eager = (torch.randn(2, length, 4, generator=torch.Generator().manual_seed(length)) for _ in range(2))
            mark_sequence(mine.requires_grad_(), 1), eager.requires_grad_()
            results = run(mine), fn(eager)
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
            gradients = [torch.autograd.grad(r.cos().sum(), x)[0] for r, x in zip(results, (mine, eager), strict=True)]
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    # stft is compiled for each length, as programs of the same two graphs: its number of frames varies.
    assert inside.graphs == 2


def test_the_operator_is_named_that_runs_on_the_cpu():
    before = dict(TELEMETRY.fallbacks)
    compiled(lambda x: x.round().mode(1)[0] * 2, buckets=[8])(mark_sequence(torch.randn(2, 5), 1))
    assert TELEMETRY.fallbacks["aten.mode.default"] > before.get("aten.mode.default", 0)
    with pytest.raises(Exception, match=r"no lowering for: aten\.mode\.default"):
        compiled(lambda x: x.round().mode(1)[0] + 2, buckets=[8], strict=True)(mark_sequence(torch.randn(2, 5), 1))


@pytest.mark.quick("<lambda>1", "linalg_inv")
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.mT, lambda a: a.flip(-1), torch.linalg.inv])
def test_an_lu_is_that_of_the_matrix_that_autograd_has_seen(view):
    """ATen factors the transpose of a contiguous matrix; a tail is no reason to ask anew how it lies."""

    def fn(x):
        a = view(x @ x.mT + torch.arange(1.0, x.shape[1] + 1).diag())
        return torch.linalg.solve(a, x.roll(1, 2)) * torch.linalg.det(a).unsqueeze(-1).unsqueeze(-1)

    mine, eager = (0.3 * torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    results = (
        compiled(fn, buckets=[8], precision="float32")(mark_sequence(mine.requires_grad_(), 1)),
        fn(eager.requires_grad_()),
    )
    gradients = [torch.autograd.grad(r.sum(), x)[0] for r, x in zip(results, (mine, eager), strict=True)]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
