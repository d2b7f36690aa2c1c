"""Pin the results of a traced graph: XLA computes each with the sharding that was chosen for it.

XLA's propagation alone leaves the gradient of a divided weight whole, or whole along one axis of the mesh: every device
then holds it, after an all-reduce. With the sharding of the weight it is reduced and scattered in the program that
computes it. A sharding never changes a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.lowering.spmd import WHOLE, replicated
from kp_dynamo.lowering.tensor_shardings import annotated
from kp_dynamo.sharding.placement import MOST_DIMS

_TILES = re.compile(r"\{devices=\[(?P<tiles>[\d,]+)\](?P<devices>[\d,]+)(?P<copies> last_tile_dim_replicate)?\}")


def pinned(results: list[Any], texts: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
    """The results, with these shardings in XLA's notation; "" leaves the choice to XLA.

    A result that is an argument, or needs no program, stays what it is. Results that are one tensor stay one, so that
    they share their memory.
    """
    if not texts:
        return results
    kept, done = {id(a) for a in arguments}, dict[tuple[str, str], torch.Tensor]()

    def of(result: Any, text: str) -> Any:
        sharding = _sharding(text)
        if sharding is None or not isinstance(result, torch.Tensor) or id(result) in kept or not _is_computed(result):
            return result
        key = (xla.xlac()._unique_id_for_ir_and_data(result), text)
        if key not in done:
            done[key] = annotated(result, sharding)
        return done[key]

    return [of(result, text) for result, text in zip(results, texts, strict=True)]


def pin_pending(tensor: torch.Tensor, text: str) -> None:
    """Divide a tensor whose value is pending, so that no device computes the whole of it."""
    if (sharding := _sharding(text)) is not None:
        with torch.no_grad():
            tensor.copy_(annotated(tensor, sharding))


def _is_computed(result: torch.Tensor) -> bool:
    return bool(xla.xlac()._check_tensor_need_materialization([result])[0])


@cache
def _sharding(text: str) -> Any | None:
    """XLA's sharding of its text for a tensor that is divided among all devices, or whole.

    None for any other text, whose result is left to XLA: "", what is marked on a single device, {maximal device=0}, and
    what torch_xla cannot write.
    """
    if text == WHOLE:
        return replicated()
    found = _TILES.fullmatch(text)
    if found is None:
        return None
    from torch_xla.distributed.spmd import Mesh

    tiles = tuple(map(int, found["tiles"].split(",")))
    if len(tiles) - bool(found["copies"]) > MOST_DIMS:
        return None
    mesh = Mesh(list(map(int, found["devices"].split(","))), tiles)
    return mesh.get_op_sharding(tuple(range(len(tiles) - bool(found["copies"]))))
