"""Convolutions for a TPU's compiler: every one has the matmul precision, and their values are eager's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_xla
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kp_dynamo.compat import xla
from kp_dynamo.lowering.convolution_forms import CONVOLUTION_FORMS
from kp_dynamo.lowering.program import settings
from kp_dynamo.ops.optimization_barrier import barriers

aten = torch.ops.aten


def convolutions(values: list[torch.Tensor]) -> list[str]:
    text = torch_xla._XLAC._get_xla_tensors_hlo(values)
    return [line for line in text.splitlines() if " convolution(" in line]


def check(target, args, precision: str = "highest") -> list[torch.Tensor | None]:
    """The form's results: their values are the operator's, and each of its convolutions has the precision."""
    on_device = [a.to("xla") if isinstance(a, torch.Tensor) else a for a in args]
    wanted = target(*args)
    with barriers(xla.optimization_barrier), settings(precision):
        found = CONVOLUTION_FORMS[target](*on_device)
        pairs = [(found, wanted)] if isinstance(wanted, torch.Tensor) else list(zip(found, wanted, strict=True))
        made = convolutions([f for f, _ in pairs if f is not None])
    assert made
    assert all(f"operand_precision={{{precision},{precision}}}" in line for line in made)
    for result, exact in pairs:
        if result is not None:
            torch.testing.assert_close(result.cpu(), exact, rtol=1e-5, atol=1e-4)  # sums of some hundred products
    return [result for result, _ in pairs]


@st.composite
def layers(draw, transposed: bool):
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    n, per_group, out_per_group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    stride, dilation = ([draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(2))
    padding = [draw(st.integers(0, 3)) for _ in range(rank)]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [max(span + draw(st.integers(0, 4)) - 2 * p, 1) for span, p in zip(spans, padding, strict=True)]
    added = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    if transposed:  # results need at least one element
        sizes = [size + 2 * p for size, p in zip(sizes, padding, strict=True)]
    ins, outs = groups * per_group, groups * out_per_group
    x = torch.randn(n, ins, *sizes)
    weight = torch.randn(*((ins, out_per_group) if transposed else (outs, per_group)), *kernel)
    bias = draw(st.sampled_from([None, torch.randn(outs)]))
    return x, weight, bias, stride, padding, dilation, transposed, added if transposed else [0] * rank, groups


@given(layers(transposed=True))
@hypothesis_settings(max_examples=25, deadline=None)
def test_transposed_convolutions(layer):
    check(aten.convolution.default, layer)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(transposed):
    @given(layers(transposed))
    @hypothesis_settings(max_examples=25, deadline=None)
    def run(layer):
        x, weight, bias, *window = layer
        gradient = torch.randn_like(aten.convolution.default(*layer))
        sizes = None if bias is None else list(bias.shape)
        check(aten.convolution_backward.default, (gradient, x, weight, sizes, *window, [True, True, bias is not None]))

    run()


@pytest.mark.parametrize("mask", [m for m in itertools.product([True, False], repeat=3) if any(m[:2])])
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_only_what_is_wanted_is_computed(mask, precision):
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    gradient = torch.randn(2, 6, 8, 8)
    args = (gradient, x, weight, [6], [1], [1], [1], False, [0], 1, list(mask))
    results = check(aten.convolution_backward.default, args, precision)
    assert [result is not None for result in results] == list(mask)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "default"), (torch.bfloat16, "highest")], ids=str)
def test_one_pass_is_left_to_torch_xla(dtype, precision):
    x, weight, gradient = (torch.randn(size, dtype=dtype).to("xla") for size in ((1, 2, 4), (2, 2, 3), (1, 2, 2)))
    args = (gradient, x, weight, [2], [1], [0], [1], False, [0], 1, [True, True, False])
    with barriers(xla.optimization_barrier), settings(precision):
        form = CONVOLUTION_FORMS[aten.convolution_backward.default]
        assert convolutions(list(form(*args)[:2])) == convolutions(list(aten.convolution_backward.default(*args)[:2]))
