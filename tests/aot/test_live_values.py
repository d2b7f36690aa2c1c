"""What lives at the peak of a step, by module of the model."""

from __future__ import annotations

import pytest

import kp_dynamo
from bench.workloads import gpt
from kp_dynamo.aot.live_values import LiveValues, live_values, num_bytes
from kp_dynamo.explanation.graph_reports import PieceReport
from kp_dynamo.lowering.step_memory import Owner

LAYERS = tuple(f"layers.{i}" for i in range(4))


def test_equal_layers_are_one_row_and_the_largest_is_first():
    live = [(Owner("parameters", f"layers.{i}.attn"), 10) for i in range(4)]
    live += [(Owner("inputs"), 7), (Owner("parameters", "norm_1"), 50), (Owner("activations", "layers.2.attn"), 3)]
    assert live_values(tuple(live), lambda _: ()) == (
        LiveValues("parameters", "norm_1", 1, 50),
        LiveValues("parameters", "layers.*.attn", 4, 40),
        LiveValues("inputs", "", 1, 7),
        LiveValues("activations", "layers.2.attn", 1, 3),
    )


def test_the_runs_of_a_repeated_layer_are_its_modules_and_a_backward_runs_them_from_the_last():
    forward = tuple((Owner("activations", "layers.0.attn", "one", i), 10) for i in range(3))
    backward = ((Owner("gradients", "layers.0.attn", "two", 0), 5),)
    outside = ((Owner("activations", "layers.01", "one", 0), 1),)  # not below layers.0
    piece = PieceReport(0, "layers.0", 9, 4, LAYERS)
    assert live_values((*forward, *backward, *outside), lambda _: piece) == (
        LiveValues("activations", "layers.*.attn", 3, 30),
        LiveValues("gradients", "layers.3.attn", 1, 5),
        LiveValues("activations", "layers.01", 1, 1),
    )


@pytest.mark.parametrize(
    ("kind", "layer", "module"), [("activations", 0, 2), ("activations", 1, 3), ("gradients", 1, 1)]
)
def test_the_second_run_of_two_layers_is_that_of_their_modules(kind, layer, module):
    piece = PieceReport(0, "layers.0", 18, 2, LAYERS, layers=2)
    live = ((Owner(kind, f"layers.{layer}.attn", "one", 1), 10),)
    assert live_values(live, lambda _: piece) == (LiveValues(kind, f"layers.{module}.attn", 1, 10),)


# Divided, this small step has its peak in its last backward, which is that of the first layer.
@pytest.mark.parametrize(("blocks", "saved"), [("off", ("blocks.*.attention", 3)), ("on", ("blocks.0.attention", 1))])
def test_parameters_and_saved_activations_of_a_step_are_told_apart(blocks, saved):
    work = gpt(3, width=64, batch=2, length=32)
    report = kp_dynamo.aot_compile(work.model, work.inputs, train=True, options={"blocks": blocks})
    parameters = num_bytes(row for row in report.live_at_peak if row.kind == "parameters")
    assert parameters == sum(p.numel() * p.element_size() for p in work.model.parameters())
    assert saved in {(row.module, row.num_modules) for row in report.live_at_peak if row.kind == "activations"}
    # The compiler pads arguments to its tiles.
    peak = max(report.memory_line, key=lambda point: point.peak_bytes)
    assert 0.5 * peak.live_bytes < num_bytes(report.live_at_peak) <= peak.live_bytes
