"""torch is as it was after somebody else imported torch_xla: before our backend is loaded, and between that and a call.

torch_xla turns off automatic dynamic shapes and replaces `torch.nn.GRU`, whose eager forward then fails on the CPU.
"""

import pytest

from tests.spine import run_script

LOADED_AFTER = """
from transformers import Trainer, TrainingArguments
import torch, torch._dynamo.config as config
assert "torch_xla" in __import__("sys").modules
replaced = torch.nn.GRU(4, 5)
assert type(replaced) is not torch.nn.modules.rnn.GRU
run = torch.compile(double, backend="kp_tpu")
"""
LOADED_BEFORE = """
import torch, torch._dynamo.config as config
run = torch.compile(double, backend="kp_tpu")
assert "torch_xla" not in __import__("sys").modules
from transformers import Trainer, TrainingArguments
replaced = torch.nn.GRU(4, 5)
assert type(replaced) is not torch.nn.modules.rnn.GRU
run(torch.ones(3))
"""
CHECKS = """
from kp_dynamo.telemetry import snapshot
assert torch.nn.GRU is torch.nn.modules.rnn.GRU
assert (config.automatic_dynamic_shapes, config.specialize_float) == (True, False)
x = torch.randn(3, 2, 4)
plain = torch.nn.GRU(4, 5)
plain.load_state_dict(replaced.state_dict())
torch.testing.assert_close(replaced(x), plain(x))
for length in range(2, 19):
    x = torch.randn(length)
    assert torch.equal(run(x), 2 * x)
assert config.automatic_dynamic_shapes
print(snapshot()["graphs"])
"""


@pytest.mark.parametrize(
    "order",
    [pytest.param(LOADED_AFTER, id="after"), pytest.param(LOADED_BEFORE, id="before", marks=pytest.mark.slow)],
)
def test_what_an_import_of_the_trainer_changes_is_undone(order):
    source = f"def double(x):\n    return 2 * x\n{order}{CHECKS}"
    assert int(run_script(source, {"USE_TORCH_XLA": "1"}).split()[-1]) == 2


@pytest.mark.slow
def test_what_is_set_after_the_backend_is_loaded_stays():
    source = """
import torch_xla, torch, torch._dynamo.config as config
run = torch.compile(lambda x: x + 1, backend="kp_tpu")
config.automatic_dynamic_shapes = False
run(torch.ones(2))
print(config.automatic_dynamic_shapes, config.specialize_float)
"""
    assert run_script(source).split() == ["False", "False"]


@pytest.mark.slow
def test_what_was_set_before_stays_if_nobody_else_imports_torch_xla():
    source = """
import torch, torch._dynamo.config as config
config.automatic_dynamic_shapes = False
torch.compile(lambda x: x + 1, backend="kp_tpu")(torch.ones(2))
import kp_dynamo.backend
print(config.automatic_dynamic_shapes, config.specialize_float)
"""
    assert run_script(source).split() == ["False", "False"]
