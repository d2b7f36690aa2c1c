"""Passes that the option `ledger` takes back: the graph is compiled as if they were off."""

from __future__ import annotations

import logging

from torch import fx

from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.passes.base import PassErrors, PassReport
from kp_dynamo.passes.mask_padding import MaskPadding

logger = logging.getLogger(__name__)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with the same names and values, for a trial."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    return copy


def taken_back(report: PassReport, graph_name: str, *, strict: bool) -> PassReport:
    """The report of a pass that was taken back, with a warning.

    Raises:
        TPUOptimizationError: `strict` is set.
    """
    assert report.errors is not None, "its errors are why it was taken back"
    reason = _reason(report.errors)
    if strict:
        raise TPUOptimizationError(
            f"strict=True and pass {report.name!r} exceeds its bound on graph {graph_name}: {reason}. "
            f'Try: disable it with options={{"disable_passes": ["{report.name}"]}}, or take it back with strict=False.'
        )
    logger.warning(
        "ledger: pass %r exceeds its bound on graph %s: %s. The graph is compiled without it.",
        report.name, graph_name, reason,
    )  # fmt: skip
    # Without masks, padded lengths would be wrong.
    refused = (("mask_padding", "the ledger took it back"),) if report.name == MaskPadding.name else ()
    note = f"taken back by the ledger: {reason}"
    return PassReport(report.name, 0, refused, (note,), errors=report.errors)


def _reason(errors: PassErrors) -> str:
    kinds = {"results": (errors.exact.results, errors.bound.results)}
    kinds["gradients"] = (errors.exact.gradients, errors.bound.gradients)
    over = [
        f"the error of its {kind} is {error:.2g}, the bound {bound:.2g}"
        for kind, (error, bound) in kinds.items()
        if error is not None and bound is not None and error > bound
    ]
    return " and ".join(over) or errors.reason
