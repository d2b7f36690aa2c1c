"""How far the TPU compiler's cycles are believed, and what stands in for them elsewhere.

The compiler prints `estimated_cycles` for each fusion. Beside published per-op times of a real v5e they are good
for matmul fusions, 4 to 14 times too high for elementwise and reduce fusions on operands in VMEM, and missing for
gathers, relayouts and exposed waits for copies. So a second estimate keeps the cycles of matmul fusions and takes
the time that the bytes need for all else. The constants below are all there is to update.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "github.com/TryDotAtwo/TPUBeamSearch at 95e9fa03, test_results/kaggle_execution_boundary_v1: "
    "per-op times of a v5e beside its HLO, JAX 0.10.2"
)

VMEM_BYTES_PER_S = 2.9e12
"""Speed of what works on VMEM alone; the elementwise points below."""

GATHER_S_PER_ROW = 1.73e-9
"""A row of a gather (kind=kCustom fusions); the gather point below."""


@dataclass(frozen=True)
class Point:
    """One measured figure, beside what the compiler says of it (ratio of its estimate to the measured time)."""

    what: str
    measured: str
    compiler_over_measured: str
    source: str = SOURCE


POINTS = (
    Point("matmul fusions (COST_MODEL_TYPE_CLASSIC), v5e", "per op", "0.95 to 1.03"),
    Point("elementwise and reduce fusions on VMEM operands, v5e", "2.9 TB/s", "4 to 14"),
    Point("gathers, v5e", "1.73 ns a row", "no cycles"),
    Point("relayout reshapes and exposed copy waits, v5e", "HBM bytes", "no cycles"),
    Point("jnp.matmul bf16 4096^3, v5e", "0.827 ms, about 0.1 ms of it dispatch", "", "jax pallas matmul notebook"),
    Point("jnp.matmul bf16 8192^3, v5e", "6.047 ms", "", "jax pallas matmul notebook"),
    Point("jnp.matmul bf16 16384^3, v5e", "46.95 ms", "", "jax sparse notebook"),
)
