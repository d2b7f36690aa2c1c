"""Finds the results of a graph that share memory in eager, with an argument or with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.autograd.result_view import ResultView
from kp_dynamo.graph.view_chain import ViewChain, are_disjoint

_OF_INPUT = (OutputType.alias_of_input, OutputType.is_input)
_OF_INTERMEDIATE = (
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
    OutputType.alias_of_intermediate_base_is_user_output,
)


class ViewSearch:
    """One search through the results of a joint or inference graph.

    Args:
        graph: The graph, as AOTAutograd traced it.
        metadata: AOTAutograd's metadata of the graph; None if AOTAutograd replays nothing.
        num_returned: Number of results that the caller sees.
    """

    def __init__(self, graph: fx.Graph, metadata: Any, num_returned: int) -> None:
        self._arguments = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
        self._metadata, self._num_returned = metadata, num_returned

    def run(self) -> dict[int, ResultView]:
        """Position of a result -> its view. Results that overlap are views of one base."""
        found = (*self._known_to_autograd(), *self._of_arguments(), *self._overlapping())
        return {view.position: view for view in found}

    def _known_to_autograd(self) -> list[ResultView]:
        if self._metadata is None:
            return []
        first = self._metadata.num_mutated_inp_runtime_indices
        found = [self._resized_in_place(number) for number in range(first)]
        for number, info in enumerate(self._metadata.output_info):
            if info.output_type in _OF_INPUT:
                found.append(self._of_input(first + number, info.base_idx))
            elif info.output_type in _OF_INTERMEDIATE:
                found.append(self._of_result(first + number, self._base_position(info)))
        return [view for view in found if view is not None]

    def _resized_in_place(self, number: int) -> ResultView | None:
        """The view for an argument whose metadata changes in place while its values stay (`x.t_()`)."""
        argument = self._metadata.mutated_inp_runtime_indices[number]
        info = self._metadata.input_info[argument]
        is_view = info.mutates_metadata and not info.mutates_data and not info.mutates_storage_metadata
        return self._of_input(number, argument) if is_view else None

    def _of_input(self, position: int, argument: int) -> ResultView | None:
        new = self._new_values().get(argument)
        chain = ViewChain.of(self._results[position], stop=new)
        is_known = chain.base is new or self._arguments.get(chain.base) == argument
        return ResultView(position, argument, True, True, chain) if is_known else None

    def _new_values(self) -> dict[int, fx.Node]:
        """Written argument -> its new value."""
        updated = self._metadata.mutated_inp_runtime_indices if self._metadata is not None else []
        return {a: new for a, new in zip(updated, self._results, strict=False) if isinstance(new, fx.Node)}

    def _base_position(self, info: Any) -> int:
        first = self._metadata.num_mutated_inp_runtime_indices
        is_output = info.output_type is OutputType.alias_of_intermediate_base_is_user_output
        return int(first + info.base_idx + (0 if is_output else len(self._metadata.output_info)))

    def _of_result(self, position: int, base: int) -> ResultView | None:
        chain = ViewChain.of(self._results[position], stop=self._results[base])
        return ResultView(position, base, False, True, chain) if chain.base is self._results[base] else None

    def _others(self) -> dict[int, ViewChain]:
        """Position -> views, for the results that AOTAutograd returns unchanged."""
        first = 0 if self._metadata is None else self._metadata.num_mutated_inp_runtime_indices
        infos = [] if self._metadata is None else self._metadata.output_info
        known = {first + i for i, info in enumerate(infos) if info.output_type in (*_OF_INPUT, *_OF_INTERMEDIATE)}
        positions = [p for p in range(first, self._num_returned) if p not in known]
        return {p: ViewChain.of(self._results[p]) for p in positions if isinstance(self._results[p], fx.Node)}

    def _of_arguments(self) -> list[ResultView]:
        return [
            ResultView(position, self._arguments[chain.base], True, False, chain)
            for position, chain in self._others().items()
            if chain.base in self._arguments and isinstance(chain.base.meta.get("val"), torch.Tensor)
        ]

    def _overlapping(self) -> list[ResultView]:
        groups: dict[fx.Node, dict[int, ViewChain]] = defaultdict(dict)
        for position, chain in self._others().items():
            if chain.base not in self._arguments:
                groups[chain.base][position] = chain
        shared = [chains for chains in groups.values() if not are_disjoint(list(chains.values()))]
        # The base takes the position of the first result.
        return [ResultView(p, min(chains), False, False, chain) for chains in shared for p, chain in chains.items()]
