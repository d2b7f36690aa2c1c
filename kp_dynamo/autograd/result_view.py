"""A result that is a view, and how it is taken of a tensor after a program has run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.graph.symbol_values import Values
from kp_dynamo.graph.view_chain import ViewChain


@dataclass(frozen=True)
class ResultView:
    """A result that the program does not compute, but that is a view of an argument or of another result.

    Attributes:
        position: Position of the result.
        source: Position of the argument or result that it is a view of.
        is_of_argument: Whether it is a view of an argument.
        is_metadata: Whether AOTAutograd makes the tensor and only needs its metadata.
        chain: The views between them.
    """

    position: int
    source: int
    is_of_argument: bool
    is_metadata: bool
    chain: ViewChain

    def taken(self, source: torch.Tensor, values: Values) -> torch.Tensor:
        """The view of `source`. Views of results are hidden from autograd: a detached one would get a gradient."""
        with contextlib.nullcontext() if self.is_of_argument or self.is_metadata else _without_autograd():
            return self.chain.applied(source, values)

    def metadata_of(self, source: torch.Tensor, values: Values) -> torch.Tensor:
        """A meta tensor with the sizes, strides and storage offset of the view of `source`."""
        # If a tensor has a base, torch replays the view from the base: these tensors must not have one.
        with torch.inference_mode(False), torch.no_grad(), _without_autograd():
            if source.device.type == "xla":
                # A strided view is taken of the values in order, whatever the tensor itself is a view of.
                return self.chain.applied(torch.empty(source.shape, dtype=source.dtype, device="meta"), values)
            extent = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
            memory = torch.empty(source.storage_offset() + max(extent, 0), dtype=source.dtype, device="meta")
            like = memory.as_strided(source.shape, source.stride(), source.storage_offset())
            return self.chain.applied(like, values)


def _without_autograd() -> contextlib.AbstractContextManager[Any]:
    """Context in which views share memory without autograd tracking them."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
