"""The default lowering: one XLA program per graph, traced with placeholders (see `trace`).

If XLA cannot lower an operator, the graph is split around it. The parts before and after it are programs, and the
operator itself runs on the CPU; it is counted and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.source_lines import source_line
from kp_dynamo.lowering.base import Executable, LoweringSpec
from kp_dynamo.lowering.checks import check_donation, check_layouts, check_operands, check_runs_somewhere
from kp_dynamo.lowering.constants import device_constants
from kp_dynamo.lowering.placed_tensors import placement_of_argument
from kp_dynamo.lowering.program import compile_program
from kp_dynamo.lowering.random_state import with_one_seed
from kp_dynamo.lowering.split_graph import cut_around
from kp_dynamo.ops.at_true_sizes import name_of
from kp_dynamo.sharding.placement import Placement

logger = logging.getLogger(__name__)


class OpenXla:
    """Compiles and runs graphs through torch_xla's entry points."""

    name = "openxla"

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        check_layouts(gm)
        check_operands(gm)
        run, missing, seconds, donation, portable, refusal = compile_program(gm, args, device_constants(gm), spec)
        if run is not None:
            check_donation(donation.kept, args, spec)
            return Executable(
                run,
                num_programs=1,
                seconds=seconds,
                donated=donation.arguments,
                kept=donation.kept,
                portable=portable,
                not_portable=refusal,
            )
        unexpected = [node for node in missing if node.target is not torch.ops.kp.check_indices.default]
        check_runs_somewhere(unexpected, spec)
        pieces = cut_around(gm, set(missing), spec)
        pieces.seconds.update(seconds)
        fallbacks = tuple((name_of(n), source_line(n)) for n in unexpected)
        kept = tuple(
            (a, "a part of the graph runs on the CPU") for a in spec.overwritten if a is not None and spec.donate
        )
        check_donation(kept, args, spec)
        return Executable(
            with_one_seed(pieces),
            pieces.num_programs,
            fallbacks,
            pieces.seconds,
            pieces.moved_bytes,
            kept=kept,
            not_portable="a part of the graph runs on the CPU",
        )

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        return placement_of_argument(tensor)
