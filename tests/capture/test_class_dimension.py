"""Cross entropies of several positions are computed from rows of classes, with eager's values and errors."""

import pytest
import torch
import torch.nn.functional as F

from tests.cross_entropies import fuse_small_heads
from tests.spine import DEVICES, assert_same, check_gradients_like_eager, compiled, on

CLASSES = 300
FORMS = {
    "mean": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "sum": lambda x, t: F.cross_entropy(x.permute(0, 2, 1), t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x.mT, t, reduction="none").cumsum(1),
    "shifted": lambda x, t: F.cross_entropy(x[:, :-1].transpose(1, 2), t[:, 1:]),
    "by keyword": lambda x, t: F.cross_entropy(
        input=x.transpose(1, 2), target=t.clamp(0), ignore_index=7, label_smoothing=0.1
    ),
    "weights": lambda x, t: F.cross_entropy(x.transpose(1, 2), t, torch.arange(1.0, CLASSES + 1, device=x.device)),
    "three positions": lambda x, t: F.cross_entropy(x.unflatten(1, (2, 2)).movedim(-1, 1), t.view(-1, 2, 2)),
    "channels_last images": lambda x, t: F.cross_entropy(
        x.mT[..., None].contiguous(memory_format=torch.channels_last), t[..., None]
    ),
    "images": lambda x, t: F.cross_entropy(x.transpose(1, 2).contiguous(), t),
}  # fmt: skip


def of_a_head(name):
    return lambda x, w, t: FORMS[name](F.linear(x, w), t)


def logits_and_target(rows: int = 2, positions: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(rows * positions).view(rows, positions) * 7
    target[0, :1] = -100
    return torch.randn(rows, positions, CLASSES, generator=generator), target


@pytest.mark.quick("shifted", "by keyword", "weights", "three positions", "channels_last images")
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_eagers(name):
    x, target = logits_and_target()
    check_gradients_like_eager(FORMS[name], x.requires_grad_(), target)


def without_gradient(w, x, target):
    """A loss that is only measured: its logits are a view that passes no gradient on."""
    rows = F.linear(x, w)
    with torch.no_grad():
        logits = rows.transpose(1, 2)
    return F.cross_entropy(logits, target) + rows.square().mean()


@pytest.mark.parametrize("takes", [lambda fn: fn, torch.func.grad], ids=["backward", "torch.func"])
def test_a_view_made_without_gradients_passes_none_on(takes):
    x, weight = torch.linspace(-1, 1, 12).view(2, 3, 2), torch.linspace(0, 2, 8).view(4, 2).requires_grad_()
    check_gradients_like_eager(takes(without_gradient), weight, x, torch.arange(6).view(2, 3) % 4)


@pytest.mark.quick("buckets-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"buckets": [8]}], ids=["exact", "buckets"])
def test_other_lengths_and_batches(options, device):
    run, weight = compiled(of_a_head("none"), **options), torch.eye(CLASSES)
    for rows, positions in ((2, 4), (2, 6), (3, 5), (1, 1), (3, 1)):
        x, target = logits_and_target(rows, positions)
        given = x, weight, target
        assert_same(run(*on(device, given)), of_a_head("none")(*given))


@pytest.mark.quick("shifted")
@pytest.mark.parametrize("name", ["mean", "none", "shifted", "by keyword", "weights", "three positions"])
def test_a_head_with_such_a_loss_is_computed_by_blocks(name, monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    _, target = logits_and_target()
    weight = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    check_gradients_like_eager(of_a_head(name), x, weight, target)
    assert rewritten
    assert set(rewritten) == {1}


def test_a_target_of_another_shape_is_eagers_error():
    x, target = logits_and_target()
    with pytest.raises(Exception, match="Expected target size"):
        compiled(FORMS["mean"])(x, target[:, 1:])
