"""Lightning: 20 steps of a model that `configure_model` compiles lose as eager's do, also after a resume."""

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.spine import counted

STEPS = 20
# Of 20 steps: the loss, the gradients and so each step of AdamW round 1e-7 of their size some hundred times.
TOLERANCE = dict(rtol=1e-5, atol=0)
pytestmark = pytest.mark.slow


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, checkpointing):
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(3)), torch.nn.Linear(16, 4)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


class Task(lightning.LightningModule):
    def __init__(self, how, checkpointing=False):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.how, self.losses = Model(checkpointing), how, []

    def configure_model(self):
        options = {"precision": "float32"}
        if self.how == "in place":
            self.model.compile(backend="kp_tpu", options=options)
        elif self.how == "wrapped" and not hasattr(self.model, "_orig_mod"):
            self.model = torch.compile(self.model, backend="kp_tpu", options=options)

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = F.cross_entropy(self.model(x), target)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def batches():
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS * 8 * 4, 16, generator=draw), torch.randint(4, (STEPS * 8 * 4,), generator=draw)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=8)


def trainer(**arguments):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    return lightning.Trainer(**{"accelerator": "cpu", "max_steps": STEPS, **quiet, **arguments})


def losses(how, checkpointing=False, **arguments):
    task = Task(how, checkpointing)
    trainer(**arguments).fit(task, batches())
    return torch.tensor(task.losses)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}, {"checkpointing": True}],
    ids=["plain", "accumulated", "clipped", "checkpointed"],
)
def test_twenty_steps_lose_as_eager_does(how, arguments):
    with counted() as count:
        found = losses(how, **arguments)
    assert count.graphs + count.capture_hits >= 1
    expected = losses("not at all", **arguments)
    assert len(expected) == STEPS * arguments.get("accumulate_grad_batches", 1)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def _resumed(how, folder):
    first, second, half = Task(how), Task(how), trainer(max_steps=STEPS // 2)
    half.fit(first, batches())
    half.save_checkpoint(folder / f"{how}.ckpt")
    trainer().fit(second, batches(), ckpt_path=folder / f"{how}.ckpt")
    return torch.tensor(first.losses + second.losses)


def test_a_resumed_run_loses_as_eager_does(tmp_path):
    """Lightning begins again with the first batch, so that the run differs from an uninterrupted one."""
    expected = _resumed("not at all", tmp_path)
    assert len(expected) == STEPS
    torch.testing.assert_close(_resumed("in place", tmp_path), expected, **TOLERANCE)


def test_a_model_compiled_in_place_keeps_its_keys(tmp_path):
    run, task = trainer(max_steps=2), Task("in place")
    run.fit(task, batches())
    run.save_checkpoint(tmp_path / "model.ckpt")
    keys = torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"]
    assert set(keys) == set(Task("not at all").state_dict())


def test_validation_and_test_reuse_the_compiled_model():
    task = Task("in place")
    run = trainer(max_steps=2, limit_val_batches=2)
    run.fit(task, batches(), batches())
    x = torch.randn(8, 16)
    task.eval()
    with torch.no_grad(), counted() as count:
        run.validate(task, batches(), verbose=False)
        found = task.model(x)
        torch.testing.assert_close(found, Model.forward(task.model, x), rtol=1e-5, atol=1e-6)
    assert count.programs <= 1  # of the remaining batch, if any: the epoch has whole batches
