"""Arguments of a padded size that a graph writes to or returns: the graph gets padded copies of the caller's tensors.

AOTAutograd writes to the copy, and returns it and views of it. After the graph has run, the written copy is sliced and
copied over the caller's tensor, and the views are taken of the caller's tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.autograd.argument_overlap import OverlapCheck
from kp_dynamo.autograd.calls import allow_views
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.buckets.symbolic_sizes import Shape

_OWN_MEMORY = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
_OF_INPUT = (OutputType.alias_of_input, OutputType.is_input)
_CLONE = "Return a copy: add .clone() to one of them"
Slice = Callable[[torch.Tensor, Shape], torch.Tensor]


class PaddedArguments:
    """Writes padded arguments back, and takes views of the caller's.

    Args:
        metadata: AOTAutograd's metadata of the graph.
        aliases: The results of the graph that share memory.

    Attributes:
        taken: Result -> the argument that it is or is a view of.
    """

    def __init__(self, metadata: Any, aliases: ResultAliases) -> None:
        self._metadata, self._aliases = metadata, aliases
        self._written = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
        self.taken = aliases.of_arguments()

    def reason_to_refuse(self, num_arguments: int, may_be_padded: Callable[[int], bool]) -> str | None:
        """Why the graph cannot be padded: tensors that share memory in eager would not.

        Args:
            num_arguments: Number of arguments of Dynamo's graph, including true lengths.
            may_be_padded: Whether an argument has a padded size.
        """
        if len(self._metadata.input_info) != num_arguments:  # AOTAutograd replaced them by their base
            return "the graph writes in place to inputs that share memory"
        for number, info in enumerate(self._metadata.input_info):
            if info.mutates_metadata and may_be_padded(number):
                return f"input {number} has a padded size and is resized in place"
        for number, info in enumerate(self._metadata.output_info):
            if info.output_type in _OF_INPUT:
                if may_be_padded(info.base_idx) and self.taken.get(number) != info.base_idx:
                    return f"result {number} shares memory with input {info.base_idx}, whose size is padded. {_CLONE}"
            elif info.output_type not in _OWN_MEMORY and info.dynamic_dims:
                return f"result {number} shares memory with another result, and its size is padded. {_CLONE}"
        for position in self._aliases.of_padded(may_be_padded):
            return f"result {position} shares memory with an input or another result, and is padded. {_CLONE}"
        return None

    @contextlib.contextmanager
    def checked(self, args: Sequence[Any]) -> Iterator[None]:
        """Raise if arguments overlap and the graph writes to one of them: their padded copies do not overlap.

        Inside the context, views of arguments can be taken, and copies can be written to as the arguments can.

        Raises:
            TPUValidationError: Arguments overlap, and the graph writes to one of them.
        """
        if self._written:
            OverlapCheck(self._written, {}).require_same(args)
        with allow_views(args, self._aliases):
            yield

    def write_back(self, args: Sequence[Any], padded: Sequence[Any], results: list[Any], sliced: Slice) -> None:
        """Copy the written padded copies over the arguments, and take views of the arguments."""
        for position in self._written:
            if padded[position] is not args[position]:
                updated = sliced(padded[position], tuple(args[position].shape))
                _as_autograd_sees(args[position], self._metadata.input_info[position]).copy_(updated)
        for number in self.taken:
            results[number] = self._aliases.taken_of(args, number, results[number])


def _as_autograd_sees(argument: torch.Tensor, info: Any) -> torch.Tensor:
    """An argument to write to: detached if autograd must not see the write, as for a leaf that requires grad."""
    is_hidden = info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode
    return argument.detach() if is_hidden or (argument.is_leaf and argument.requires_grad) else argument
