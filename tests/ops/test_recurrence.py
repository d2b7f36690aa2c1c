"""`kp::lstm`, `kp::rnn` and `kp::recurrence` in eager, against torch's own recurrent layers."""

import pytest
import torch
from torch.nn.modules import rnn  # not nn.GRU: torch_xla puts its own there

import kp_dynamo.ops  # noqa: F401  # registers the operators

kp = torch.ops.kp


def weights_of(cell: str, *, with_bias: bool = True, projected: int = 0) -> list[torch.Tensor]:
    gates = {"lstm": 4, "gru": 3}.get(cell, 1) * 5
    bias = [(gates,)] if with_bias else []
    shapes = [(gates, projected or 5), *bias]
    shapes += [(projected, 5)] if projected else []
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


CASES = [
    *(("lstm", how) for how in ({}, {"with_bias": False}, {"projected": 2})),
    *(("gru", how) for how in ({}, {"with_bias": False})),
    ("rnn_tanh", {}),
    ("rnn_relu", {}),
]


@pytest.mark.quick("lstm-how0-False", "lstm-how1-True", "lstm-how2-False", "gru", "rnn_tanh", "rnn_relu")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("cell", "how"), CASES)
def test_gradients_are_the_numeric_ones(cell: str, how: dict, reverse: bool) -> None:
    weights = weights_of(cell, **how)
    gates = torch.randn(3, 2, weights[0].shape[0], dtype=torch.float64, requires_grad=True)
    states = [torch.randn(2, how.get("projected") or 5, dtype=torch.float64, requires_grad=True)]
    if cell == "lstm":
        states.append(torch.randn(2, 5, dtype=torch.float64, requires_grad=True))
    count = len(states)

    def run(mask: torch.Tensor | None, gates: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = kp.recurrence(cell, gates, list(rest[:count]), list(rest[count:]), reverse, True, mask)
        results = made[0] if mask is None else made[0][mask]  # gradients of masked results are ignored
        return results, *made[1 : 1 + count]

    for mask in (None, torch.tensor([True, False, True])):
        assert torch.autograd.gradcheck(run, (mask, gates, *states, *weights), fast_mode=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_a_masked_step_is_left_out(cell: str, reverse: bool) -> None:
    """Its gates, even NaN, change nothing: the other steps are those of a sequence without it."""
    weights, keep = weights_of(cell), torch.tensor([True, False, True, True, False])
    gates = torch.randn(5, 2, weights[0].shape[0], dtype=torch.float64)
    gates[~keep] = torch.nan
    states = [torch.randn(2, 5, dtype=torch.float64) for _ in range(2 if cell == "lstm" else 1)]
    results, *finals = kp.recurrence(cell, gates, states, weights, reverse, False, keep)
    short, *wanted = kp.recurrence(cell, gates[keep], states, weights, reverse, False, None)
    torch.testing.assert_close([results[keep], *finals], [short, *wanted], rtol=0, atol=0)
    assert not results.isnan().any()


@pytest.mark.slow
def test_the_operator_is_registered_as_torch_expects() -> None:
    weights = weights_of("lstm", projected=2)
    gates, states = torch.randn(3, 2, 20).double(), [torch.randn(2, 2).double(), torch.randn(2, 5).double()]
    for is_train in (False, True):
        given = ("lstm", gates, states, [w.detach() for w in weights], False, is_train)
        for mask in (None, torch.tensor([True, True, False])):
            torch.library.opcheck(kp.recurrence.default, (*given, mask))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_a_stack_is_that_of_torch(kind: type, bias: bool) -> None:
    stack = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, bias=bias, dtype=torch.float64)
    x, h = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(4, 2, 4, dtype=torch.float64)
    settings = (stack._flat_weights, bias, 2, 0.0, True, True, True)
    if kind is rnn.LSTM:
        expected, (h_n, c_n) = stack(x, (h, h))
        torch.testing.assert_close(kp.lstm(x, [h, h], *settings), (expected, h_n, c_n))
    else:
        cell = "gru" if kind is rnn.GRU else "rnn_tanh"
        torch.testing.assert_close(kp.rnn(cell, x, h, *settings), stack(x, h))


def test_operands_of_several_dtypes_raise() -> None:
    stack, x = rnn.GRU(3, 4), torch.randn(5, 2, 3)
    with pytest.raises(RuntimeError, match="must have one dtype"):
        kp.rnn(
            "gru", x, torch.zeros(1, 2, 4, dtype=torch.float64), stack._flat_weights, True, 1, 0.0, True, False, False
        )


def test_a_backward_needs_what_train_saves() -> None:
    gates = torch.randn(3, 2, 5, requires_grad=True)
    made = kp.recurrence("rnn_tanh", gates, [torch.zeros(2, 5)], [torch.randn(5, 5)], False, False, None)
    with pytest.raises(RuntimeError, match="train=False"):
        made[0].sum().backward()
