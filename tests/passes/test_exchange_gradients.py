"""ExchangeGradients: which gradients are sums of one part for each chip, and that they are the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.utils._pytree import tree_leaves

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls, fake_of
from kp_dynamo.graph.weight_matmuls import DividedWeight
from kp_dynamo.hardware import Spread
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.exchange_gradients import ExchangeGradients
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.gather_weights import GatherWeights
from kp_dynamo.pipeline import build_pipeline
from tests.graphs import applied, graph_text, trace_inference, trace_joint

SUM = torch.ops.kp.sum_parts.default
WEIGHT = (DividedWeight(1),)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, requires_grad=True, dtype=dtype)


def linear(x, w):
    return F.linear(x, w).tanh()


def heads(x, w):
    """A projection to 4 heads of 32, as attention reads it."""
    return F.linear(x, w).view(8, 32, 4, 32).transpose(1, 2).tanh()


def test_a_gradient_is_the_sum_of_a_part_for_each_chip():
    gm = trace_joint(linear, leaf(512, 128), leaf(128, 128))
    applied(CastBf16("matmul", (), (1,)), gm)
    assert applied(ExchangeGradients(WEIGHT, 4), gm).rewritten == 1
    text = graph_text(gm)
    assert_expected_inline(
        text[text.index("t_default_1:") : text.index("_to_copy_default_5:")],
        """\
t_default_1: bf16[128, 512] = aten.t.default(_to_copy_default_3)
reshape_default: bf16[128, 4, 128] = aten.reshape.default(t_default_1, [128, 4, 128])
reshape_default_1: bf16[4, 128, 128] = aten.reshape.default(_to_copy_default, [4, 128, 128])
contract_default: bf16[4, 128, 128] = kp.contract.default(reshape_default, reshape_default_1, None, adb,dbc->dac)
sum_parts_default: f32[128, 128] = kp.sum_parts.default(contract_default, 0)
t_default_3: f32[128, 128] = aten.t.default(sum_parts_default)
""",
    )


@pytest.mark.parametrize("fn", [linear, heads])
@pytest.mark.parametrize("reduced", [(), (1,)])
@pytest.mark.parametrize("folds", [False, True])
def test_the_gradient_is_the_same(fn, reduced, folds):
    x, w = leaf(8, 32, 128), leaf(128, 128)
    gm = trace_joint(fn, x, w)
    for graph_pass in (CastBf16("matmul", (), reduced), *([FoldViews()] if folds else [])):
        applied(graph_pass, gm)
    values = [x.detach(), w.detach()], [torch.randn(fn(x, w).shape)]
    before = tree_leaves(gm(*values))
    assert applied(ExchangeGradients(WEIGHT, 8), gm).rewritten == 1
    after = tree_leaves(gm(*values))
    [total] = calls(gm.graph, SUM)
    assert fake_of(total).dtype == torch.float32
    for old, new in zip(before, after, strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        # Narrow parts are rounded to bfloat16, and so was the whole gradient before: by 2**-9 of each at most.
        assert (new - old).norm() <= (2 * 2**-9 if reduced else 1e-6) * old.norm()


@pytest.mark.parametrize(("out", "inner", "dim"), [(128, 512, 1), (512, 128, 0), (128, 128, 0)])
def test_the_parts_are_divided_as_the_parameter_is(out, inner, dim):
    """Along the largest dimension, of equal ones the first; the gradient is a view of the matmul's result."""
    gm = trace_joint(linear, leaf(2048, inner), leaf(out, inner))
    applied(ExchangeGradients(WEIGHT, 4), gm)
    [total] = calls(gm.graph, SUM)
    whole = list(fake_of(total).shape)
    assert whole[total.args[1]] == (out, inner)[dim]


def test_a_bfloat16_parameter_has_a_bfloat16_gradient():
    x, w = leaf(512, 128, dtype=torch.bfloat16), leaf(128, 128, dtype=torch.bfloat16)
    gm = trace_joint(linear, x, w)
    assert applied(ExchangeGradients(WEIGHT, 4), gm).rewritten == 1
    *_, gradient = tree_leaves(gm([x.detach(), w.detach()], [torch.ones_like(x)]))
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "out", "chips"), [
    (510, 128, 4),  # rows that do not divide
    (512, 100, 4),  # few elements: the parameter lies whole on each chip
    (64, 512, 4),  # more elements than what is multiplied
])  # fmt: skip
def test_other_gradients_are_left_alone(rows, out, chips):
    gm = trace_joint(linear, leaf(rows, 128), leaf(out, 128))
    assert applied(ExchangeGradients(WEIGHT, chips), gm).rewritten == 0


def test_gradients_of_other_arguments_and_of_other_operators_are_left_alone():
    def tied(x, w, v):
        return (F.linear(x, w) + F.linear(x, w).tanh()) @ v

    gm = trace_joint(tied, leaf(512, 128), leaf(128, 128), leaf(128, 128))
    assert applied(ExchangeGradients(WEIGHT, 4), gm).rewritten == 0  # the sum of two matmuls
    assert applied(ExchangeGradients((), 4), gm).rewritten == 0
    assert applied(ExchangeGradients(WEIGHT, 4), trace_inference(linear, leaf(512, 128), leaf(128, 128))).rewritten == 0


def test_complex_numbers_are_left_alone():
    x, w = leaf(512, 128, dtype=torch.complex64), leaf(128, 128, dtype=torch.complex64)
    gm = trace_joint(lambda x, w: (x @ w).abs(), x, w)
    assert applied(ExchangeGradients(WEIGHT, 4), gm).rewritten == 0


def test_what_is_exchanged_is_not_summed_whole():
    gm = trace_joint(linear, leaf(512, 128), leaf(128, 128))
    applied(ExchangeGradients(WEIGHT, 4), gm)
    assert applied(GatherWeights(WEIGHT), gm).rewritten == 1  # the weight


@pytest.mark.parametrize(("spread", "asked", "is_there"), [
    (Spread(8, 8), "all_to_all", True), (Spread(8, 8), None, False), (Spread(8, 4), "all_to_all", False),
    (Spread(), "all_to_all", False),
])  # fmt: skip
def test_where_nothing_is_known_of_weights_it_runs_on_request_if_all_chips_are_along_the_batch(spread, asked, is_there):
    pipeline = build_pipeline(CompileOptions(reduce_scatter=asked).over(spread), parameters={2, 1})
    assert (ExchangeGradients((DividedWeight(1), DividedWeight(2)), 8) in pipeline) == is_there
    assert any(p.name == "exchange_gradients" for p in pipeline) == is_there


@pytest.mark.parametrize(("axes", "dim", "expected"), [
    (("model", ""), 1, (1, "model,")), (("", "model"), 0, (0, ",model")), (("model", ""), 0, (0, "model,")),
])  # fmt: skip
def test_other_axes_divide_the_sum_as_they_divide_the_weight(axes, dim, expected):
    gm = trace_joint(linear, leaf(2048, 128), leaf(128, 128))
    applied(ExchangeGradients((DividedWeight(1, axes, dim),), 4, 2), gm)
    [total] = calls(gm.graph, SUM)
    assert total.args[1:] == expected


def test_parameters_that_lie_along_the_batch_exchange_on_a_mesh_of_two_axes():
    options = CompileOptions(reduce_scatter="all_to_all").over(Spread(8, 4))
    pipeline = build_pipeline(options, parameters={0, 1}, placements={1: ("model", "data")})
    assert ExchangeGradients((DividedWeight(1, ("model", ""), 1),), 4, 2) in pipeline
