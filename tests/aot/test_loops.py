"""Trip counts of loops that the compiler does not annotate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kp_dynamo
from kp_dynamo.aot.hlo import Module
from kp_dynamo.aot.loops import trips_of

LOOP = """
HloModule IrToHlo.9, is_scheduled=true

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %constant.1 = s32[]{:T(128)} constant(1)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%s), index=0
  %get-tuple-element.2 = f32[8]{0:T(128)} get-tuple-element(%s), index=1
  %negate.1 = f32[8]{0:T(128)} negate(%get-tuple-element.2)
  %copy.2 = s32[]{:T(128)S(6)} copy(%get-tuple-element.1)
  %copy.3 = s32[]{:T(128)S(6)} copy(%constant.1)
  %add.1 = s32[]{:T(128)} add(%get-tuple-element.1, %constant.1)
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%add.1, %negate.1)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %constant.2 = s32[]{:T(128)} constant(256)
  %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %get-tuple-element.3 = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %compare.1 = pred[]{:T(512)} compare(%get-tuple-element.3, %constant.2), direction=LT
}

ENTRY %main.9 (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  %constant.3 = s32[]{:T(128)} constant(0)
  %copy.1 = s32[]{:T(128)} copy(%constant.3)
  %tuple.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%copy.1, %a)
  %while.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%tuple.2), condition=%condition, body=%body
  ROOT %get-tuple-element.4 = f32[8]{0:T(128)} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        (("", ""), 256),
        (("constant(0)", "constant(6)"), 250),
        (("constant(1)", "constant(3)"), 86),
        (("constant(256)", "constant(-1)"), 0),
        (("direction=LT", "direction=GT"), None),
        (("constant(1)", "constant(-1)"), None),
        (("add(%get-tuple-element.1, %constant.1)", "add(%get-tuple-element.1, %get-tuple-element.1)"), None),
        (("add(%get-tuple-element.1,", "multiply(%get-tuple-element.1,"), None),
        (("add(%get-tuple-element.1, %constant.1)", "add(%copy.2, %copy.3)"), 256),  # copies of them, as on v7
        (("add(%get-tuple-element.1, %constant.1)", "add(%copy.2, %copy.2)"), None),
        (("tuple(%copy.1, %a)", "tuple(%a, %a)"), None),
        (("while(%tuple.2)", "while(%a)"), None),
        (("condition=%condition", "condition=%other"), None),
    ],
)
def test_a_counter_from_a_constant_to_a_constant(change: tuple[str, str], trips: int | None) -> None:
    module = Module(LOOP.replace(*change))
    loop = next(i for i in module.computations["main.9"] if i.opcode == "while")
    assert trips_of(module, "main.9", loop) == trips


def test_a_recurrent_layer_takes_time_for_each_step() -> None:
    found = []
    for steps in (32, 128):
        layer = nn.LSTM(128, 128, batch_first=True).eval()
        report = kp_dynamo.aot_compile(layer, (torch.randn(8, steps, 128),), target="v5e")
        assert not report.unknown
        found.append(report.modelled_ms)
    assert found[1] > 3 * found[0]
