"""Eager work on XLA tensors, pending when a compiled function needs it: torch_xla takes one for another (#8353)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_xla
from torch import nn

from kp_dynamo import load_checkpoint, save_checkpoint
from kp_dynamo.compat import xla
from tests.spine import compiled


def ones_to(count):
    tensors = [torch.full((2,), i + 1.0).to("xla") for i in range(count)]
    torch_xla.sync()
    return tensors


def test_arguments():
    a, b = ones_to(2)
    run = compiled(lambda x: x + 0)
    assert [run((a - b) * x).cpu().tolist() for x in (a, b)] == [[-1, -1], [-2, -2]]
    # And what the CPU is given of them.
    mode = compiled(lambda x: x.mode().values * 2)
    assert [mode((a - b) * x).item() for x in (a, b)] == [-2, -4]


def test_a_backward_computes_only_what_it_reads():
    """The caller's thread may be making tensors meanwhile, as the backward of `.cpu()` does; a call computes all."""
    run, (x,) = compiled(lambda x: x.sin()), ones_to(1)
    result = run(x.requires_grad_())
    other = x.detach() * 3
    (result * 2).sum().backward()
    assert is_pending(other)
    run(x.detach() * 4)
    assert not is_pending(other)
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.ones(2).cos())


def is_pending(tensor):
    return xla.xlac()._check_tensor_need_materialization([tensor])[0]


def test_clipped_gradients_one_by_one():
    gradients = ones_to(4)
    total = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(total)
    run = compiled(lambda g: g + 0)
    expected = [(i + 1) * 60.0**0.5 for i in range(4)]
    assert [run(g).cpu()[0].item() for g in gradients] == pytest.approx(expected)
    assert [g.cpu()[0].item() for g in gradients] == pytest.approx(expected)


def test_blocks_after_a_clipped_step():
    def sums(device):
        torch.manual_seed(0)
        model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).to(device), torch.randn(4, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 5.0)
        compiled(model, precision="float32")(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            return [compiled(layer, precision="float32")(x).sum().item() for layer in model]

    assert sums("xla") == pytest.approx(sums("cpu"), rel=1e-4)


@pytest.mark.parametrize("syncs", [False, True])
def test_a_deep_copy_keeps_its_weights(syncs):
    """A student and its teacher, which run one program: torch_xla gives the student's old buffers away."""
    student = nn.Linear(4, 3).to("xla")
    teacher, x = copy.deepcopy(student), torch.ones(5, 4).to("xla")
    before, run = student.weight.detach().cpu(), [compiled(m, precision="float32") for m in (student, teacher)]
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(2):
        (run[0](x) - run[1](x).detach() + 1).pow(2).sum().backward()
        optimizer.step()
        if syncs:
            torch_xla.sync()
    assert torch.equal(teacher.weight.detach().cpu(), before)
    assert not torch.equal(student.weight.detach().cpu(), before)


def test_deep_copies_in_turns_with_others():
    """Equal layers run one program: a copy is checked also where the program has seen others' parameters in between."""
    student, other = nn.Linear(4, 3).to("xla"), nn.Linear(4, 3).to("xla")
    x, optimizer = torch.ones(5, 4).to("xla"), torch.optim.SGD(student.parameters(), 0.1)
    run = {model: compiled(model, precision="float32") for model in (student, other)}
    for _ in range(3):
        teacher = copy.deepcopy(student)
        before, teach = student.weight.detach().cpu(), compiled(teacher, precision="float32")
        for _ in range(2):
            (run[student](x) - teach(x).detach() + run[other](x) + 1).pow(2).sum().backward()
            optimizer.step()
        assert torch.equal(teacher.weight.detach().cpu(), before)
        assert not torch.equal(student.weight.detach().cpu(), before)


def test_deep_copies_that_die():
    """A new copy may get the id of one that has died, with the other parameters as before."""
    student = nn.Linear(4, 3).to("xla")
    model, x, seen = nn.Linear(4, 3).to("xla"), torch.ones(5, 4).to("xla"), set()
    run = compiled(model, precision="float32")
    for _ in range(8):
        model.weight = None
        model.weight = copy.deepcopy(student.weight)
        seen.add(id(model.weight))
        before = student.weight.detach().cpu()
        with torch.no_grad():
            run(x)
            student.weight += 1
        torch_xla.sync()
        assert torch.equal(model.weight.detach().cpu(), before)
    assert len(seen) < 8


def test_checkpoints(tmp_path):
    a, b = ones_to(2)
    models = [nn.Module(), nn.Module()]
    for model, x in zip(models, (a, b), strict=True):
        model.register_buffer("x", (a - b) * x)
        save_checkpoint(tmp_path / "saved", model)
    loaded = nn.Module()
    loaded.register_buffer("x", torch.zeros(2))
    load_checkpoint(tmp_path / "saved", loaded)
    assert loaded.x.tolist() == [-2, -2]


def test_an_eager_optimizer_compiles_no_new_program_for_each_step():
    """Its state is never asked for: left pending, its recipe would grow."""
    model, x = nn.Linear(4, 4).to("xla"), torch.randn(2, 4).to("xla")
    optimizer, run, compiles = torch.optim.AdamW(model.parameters()), compiled(model), []
    for _ in range(7):
        optimizer.zero_grad()
        run(x).sum().backward()
        optimizer.step()
        compiles.append(torch_xla._XLAC._xla_counter_value("UncachedCompile"))
    assert compiles[-1] == compiles[3]
