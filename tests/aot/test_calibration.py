"""What the page says of its own error is what the compiler gives."""

from __future__ import annotations

from bench.calibration import ratio_of
from kp_dynamo.aot.calibration import MATMULS, POINTS, error_range


def test_a_measured_matmul_is_compiled_to_the_ratio_that_is_written():
    point = MATMULS[0]
    assert point.matmul_size == 4096
    assert f"{ratio_of(point):.2f}" == point.compiler_over_measured


def test_the_range_of_errors_is_that_of_all_points_of_matmuls():
    assert error_range() == (0.95, 1.05)
    assert all(point.compiler_over_measured for point in POINTS)
