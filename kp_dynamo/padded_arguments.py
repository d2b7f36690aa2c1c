"""Arguments of a padded size that a graph writes to or returns: the caller's tensors stand behind padded copies.

AOTAutograd writes to the copy and returns the copy. When the graph has run, what it wrote is cut and copied over the
caller's tensor, and where the caller expects the argument itself, it is that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.argument_overlap import OverlapCheck
from kp_dynamo.resizing import Shape

_OWN_MEMORY = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
Cut = Callable[[torch.Tensor, Shape], torch.Tensor]


@dataclass(frozen=True)
class PaddedArguments:
    """What becomes of arguments besides being read.

    Attributes:
        written: Those whose values the graph changes.
        hidden: Those of them whose changes autograd does not see: made under `no_grad`, or on detached views.
        returned: (result, argument) where the argument itself is the result.
        num_updates: Results of the graph in front of those that Dynamo sees: new values of arguments.
    """

    written: tuple[int, ...] = ()
    hidden: frozenset[int] = frozenset()
    returned: tuple[tuple[int, int], ...] = ()
    num_updates: int = 0

    @staticmethod
    def of(metadata: Any) -> PaddedArguments:
        """Those of a graph.

        Args:
            metadata: What AOTAutograd knows of it.
        """
        written = tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_data)
        hidden = frozenset(i for i in written if _hides(metadata.input_info[i]))
        results = enumerate(metadata.output_info)
        returned = tuple((i, info.base_idx) for i, info in results if info.output_type is OutputType.is_input)
        return PaddedArguments(written, hidden, returned, metadata.num_mutated_inp_runtime_indices)

    def besides_arguments(self, views: Sequence[int]) -> list[int]:
        """Those of some results of the graph, views at places that sizes decide, that are not arguments themselves."""
        arguments = {result + self.num_updates for result, _ in self.returned}
        return [view for view in views if view not in arguments]

    def require_separate(self, args: Sequence[Any]) -> None:
        """Raise where arguments overlap and one is written to: of padded copies nothing tells so.

        Raises:
            TPUValidationError: They do.
        """
        if self.written:
            OverlapCheck(self.written, frozenset()).require_same(args)

    def bring_back(self, args: Sequence[Any], padded: Sequence[Any], results: list[Any], cut: Cut) -> None:
        """Copy what was written to padded copies over the arguments, and put these into the results."""
        for position in self.written:
            if padded[position] is not args[position]:
                # Autograd allows no change of a leaf with a gradient that it sees.
                is_hidden = position in self.hidden or (args[position].is_leaf and args[position].requires_grad)
                target = args[position].detach() if is_hidden else args[position]
                target.copy_(cut(padded[position], tuple(target.shape)))
        for result, position in self.returned:
            results[result] = args[position]


def reason_to_refuse(metadata: Any, num_arguments: int, may_be_padded: Callable[[int], bool]) -> str | None:
    """Why a graph cannot be padded: what it writes to or returns would be a copy.

    Args:
        metadata: What AOTAutograd knows of the graph.
        num_arguments: Arguments that Dynamo's graph has, true lengths among them.
        may_be_padded: Whether an argument has a padded size.
    """
    if len(metadata.input_info) != num_arguments:  # AOTAutograd has put their base in their place
        return "inputs that share memory are written in place"
    for number, info in enumerate(metadata.input_info):
        if info.mutates_metadata and may_be_padded(number):
            return f"input {number} has a padded size and gets other sizes in place"
    for number, info in enumerate(metadata.output_info):
        if info.output_type is OutputType.is_input:
            continue
        if info.output_type is OutputType.alias_of_input:
            if may_be_padded(info.base_idx):
                return f"result {number} shares memory with input {info.base_idx}, whose size is padded"
        elif info.output_type not in _OWN_MEMORY and info.dynamic_dims:
            return f"result {number} shares memory with another result, and its size is padded"
    return None


def _hides(info: Any) -> bool:
    return bool(info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode)
