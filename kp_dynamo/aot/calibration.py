"""Calibration of the time estimates: where the TPU compiler's cycles are used, and what replaces them elsewhere.

The compiler prints `estimated_cycles` for each fusion. Compared with published per-op times of a real v5e, they are
accurate for matmul fusions, 4 to 14 times too high for elementwise and reduce fusions on operands in VMEM, and missing
for gathers, relayouts and exposed waits for copies. The modelled time therefore uses the cycles of matmul fusions, and
bytes over bandwidth for everything else. Update the calibration by changing the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "github.com/TryDotAtwo/TPUBeamSearch at 95e9fa03, test_results/kaggle_execution_boundary_v1: "
    "per-op times of a v5e with its HLO, JAX 0.10.2"
)

VMEM_BYTES_PER_S = 2.9e12
"""Throughput of fusions that only touch VMEM, from the elementwise points below."""

GATHER_S_PER_ROW = 1.73e-9
"""Seconds per row of a gather (kind=kCustom fusions), from the gather point below."""


@dataclass(frozen=True)
class Point:
    """One measured figure, and the ratio of the compiler's estimate to the measured time.

    Attributes:
        matmul_size: For a square bfloat16 matmul, its size; `python -m bench.calibration` compiles it.
        measured_ms: Its measured time without dispatch.
    """

    what: str
    measured: str
    compiler_over_measured: str
    source: str = SOURCE
    matmul_size: int = 0
    measured_ms: float = 0.0


POINTS = (
    Point("matmul fusions (COST_MODEL_TYPE_CLASSIC), v5e", "per op", "0.95 to 1.03"),
    Point("elementwise and reduce fusions on VMEM operands, v5e", "2.9 TB/s", "4 to 14"),
    Point("gathers, v5e", "1.73 ns a row", "no cycles"),
    Point("relayout reshapes and exposed copy waits, v5e", "HBM bytes", "no cycles"),
    Point(
        "jnp.matmul bf16 4096^3, v5e", "0.827 ms, about 0.1 ms of it dispatch", "0.98", "jax pallas matmul notebook",
        4096, 0.727,
    ),
    Point("jnp.matmul bf16 8192^3, v5e", "6.047 ms", "1.05", "jax pallas matmul notebook", 8192, 6.047),
    Point("jnp.matmul bf16 16384^3, v5e", "46.95 ms", "1.03", "jax sparse notebook", 16384, 46.95),
)  # fmt: skip
MATMULS = tuple(point for point in POINTS if point.matmul_size)


def error_range() -> tuple[float, float]:
    """The least and the largest of the estimates of matmuls over their measured times."""
    found = [float(n) for p in (POINTS[0], *MATMULS) for n in p.compiler_over_measured.split(" to ")]
    return min(found), max(found)
