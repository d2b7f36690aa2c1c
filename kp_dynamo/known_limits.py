"""What is known to go wrong, here or in the torch and torch_xla beneath, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownLimit:
    """Something that does not work as a user would expect, and what to do instead."""

    what: str
    cure: str


KNOWN_LIMITS = (
    KnownLimit(
        "Two XLA inputs that overlap in memory, one of them written to: the other keeps its old values, unnoticed.",
        "Pass the base tensor and take the views inside the compiled function.",
    ),
    KnownLimit(
        "Two CPU inputs, one of them written to: torch compiles for the overlap in memory of the first call and guards "
        "it with no backend. Another overlap later gives old values or fails an assertion.",
        "Pass the base tensor and take the views inside the compiled function.",
    ),
    KnownLimit(
        '`module.to("xla")` unties weights that two modules share, which then train apart.',
        "Call `torch.__future__.set_swap_module_params_on_conversion(True)` before it.",
    ),
    KnownLimit(
        "A backward on the CPU before the first use of the XLA device leaves torch without one for XLA tensors; "
        "training graphs on them are then refused.",
        "Make one tensor on the device first: `torch.ones(1, device=torch_xla.device())`.",
    ),
    KnownLimit(
        "`torch_xla.manual_seed` repeats random operators of eager XLA code, not those of compiled graphs.",
        "`torch.manual_seed` repeats those of compiled graphs; set both where both are used.",
    ),
    KnownLimit(
        "Without `buckets`, every set of shapes is an XLA program of its own, with `dynamic=True` as well; after 8 of "
        "one function (`torch._dynamo.config.recompile_limit`) Dynamo runs it eagerly.",
        '`options={"buckets": "pow2"}` and `kp_dynamo.mark_sequence`.',
    ),
    KnownLimit(
        "libtpu 0.0.21 cannot compile some products of bfloat16 values beside float32 ones at matmul precision "
        '"highest" (T5 at level conservative: "Bad lhs type").',
        '`options={"matmul_precision": "high"}`.',
    ),
    KnownLimit(
        "Programs are compiled anew in every process: torch_xla 2.9 writes its persistent cache and cannot read it "
        "(pytorch/xla#9094).",
        "Keep the process alive; within it, equal graphs share a program.",
    ),
)
