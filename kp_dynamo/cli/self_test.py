"""`python -m kp_dynamo.cli.self_test`: start the device and compile a small model; each step prints a line of JSON.

`doctor` runs it in a separate process: a device that hangs or crashes affects only that process, and the lines printed
before show how far it got.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from kp_dynamo.compat.versions import earlier_version

# Relative, with float32 matmuls in full precision; two roundings differ by 1e-7.
MAX_DIFFERENCE = 1e-5


def main() -> None:
    """Print {"device", "kind"} once the device has started, then {"difference", "allowed"} of compiled from eager."""
    from kp_dynamo.compat import chips, xla

    _tell(device=str(xla.device()), kind=chips.device_kind())
    _tell(difference=compiled_against_eager(), allowed=MAX_DIFFERENCE)


def compiled_against_eager() -> float:
    """Norm of the difference over the norm, over the result and gradients of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    inputs = torch.randn(8, 16)
    options: dict[str, Any] = {"precision": "float32", "matmul_precision": "highest"}
    if earlier_version() is not None:
        model, inputs, options = model.to("xla"), inputs.to("xla"), {"lowering": "stock"}
    compiled = _results(torch.compile(model, backend="kp_tpu", options=options), model, inputs)
    eager = _results(model, model, inputs)
    return float((compiled - eager).norm() / eager.norm())


def _results(run: Any, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    result = run(inputs)
    gradients = torch.autograd.grad(result.square().sum(), list(model.parameters()))
    return torch.cat([t.detach().reshape(-1) for t in (result, *gradients)])


def _tell(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
