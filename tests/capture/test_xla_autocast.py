"""Under autocast on XLA tensors, results have the dtypes of eager on XLA, though the graph is traced on the CPU."""

import threading

import pytest
import torch
import torch.nn.functional as F

from kp_dynamo.capture.xla_autocast import rules_of_xla
from tests.spine import compiled

OPERATORS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "pow": lambda x: x**2,
    "relu": torch.relu,
    "max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "einsum": lambda x: torch.einsum("ij,kj,lj->ikl", x, x, x),
    "avg_pool3d": lambda x: F.avg_pool3d(x.expand(2, 4, 8).contiguous()[None], 2),
    "huber_loss": lambda x: F.huber_loss(x, x * 2),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
}


@pytest.mark.quick(
    "softmax-bfloat16", "relu-float32", "avg_pool3d-bfloat16", "linalg_vecdot-float32",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_dtypes_are_eagers(name, dtype):
    found = []
    for run in (OPERATORS[name], compiled(OPERATORS[name])):
        x = torch.linspace(-1, 1, 32).reshape(4, 8).to("xla", dtype).requires_grad_()
        with torch.autocast("xla", torch.bfloat16):
            result = run(x)
        result.float().square().sum().backward()
        found.append((result.dtype, result.detach().float().cpu(), x.grad.dtype))
    (dtype, value, of_gradient), mine = found
    assert (mine[0], mine[2]) == (dtype, of_gradient)
    torch.testing.assert_close(mine[1], value, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_constant_that_dynamo_chose_for_the_dtype_stays_finite(is_inside):
    """Dynamo folds the least number of float32, which is minus infinity in bfloat16."""

    def step(x, w, hidden):
        with torch.autocast("xla", torch.bfloat16, enabled=is_inside or torch.is_autocast_enabled("xla")):
            p = torch.softmax(x @ w, -1)
            p = p.masked_fill(hidden, torch.finfo(p.dtype).min)
        return p, (p * ~hidden).sum()

    x, w, hidden = torch.ones(4, 8), torch.ones(8, 6), torch.arange(6).expand(4, 6) == 0
    with torch.autocast("xla", torch.bfloat16, enabled=not is_inside):
        p, total = compiled(step)(x.to("xla"), w.to("xla"), hidden.to("xla"))
    assert p.dtype is torch.float32
    torch.testing.assert_close(total.cpu(), torch.tensor(4 * 5 / 6))


def test_other_threads_keep_the_rules_of_the_cpu():
    found = []

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.ones(2, 4, dtype=torch.bfloat16)
            found.append((x.softmax(-1).dtype, torch.relu(x.float()).dtype, F.huber_loss(x, x * 2).dtype))

    with rules_of_xla():
        other = threading.Thread(target=run)
        other.start()
        other.join()
        run()
    run()
    cpu, xla, after = found
    assert cpu == after == (torch.bfloat16, torch.float32, torch.float32)
    assert xla == (torch.float32, torch.bfloat16, torch.bfloat16)
