"""`python -m bench.calibration`: the modelled time of matmuls that were measured on a v5e, over the measured time.

The ratios are written in `kp_dynamo/aot/calibration.py`, and the page of `aot` shows them.
"""

from __future__ import annotations

import torch

import kp_dynamo
from kp_dynamo.aot.calibration import MATMULS, Point


def ratio_of(point: Point) -> float:
    """The modelled time of the point's matmul over the measured one."""
    x = torch.empty(point.matmul_size, point.matmul_size, dtype=torch.bfloat16, device="meta")
    return kp_dynamo.aot_compile(torch.mm, (x, x)).modelled_ms / point.measured_ms


def main() -> None:
    """Print a line for each matmul."""
    for point in MATMULS:
        print(f"{point.what}: measured {point.measured}; compiler over measured {ratio_of(point):.2f}")


if __name__ == "__main__":
    main()
