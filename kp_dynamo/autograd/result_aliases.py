"""Results that share memory in eager, with an argument or with each other; results of a program never do.

They are removed from the graph, and their views are taken after it has run:

* a view of an argument is taken of the argument itself;
* for results that overlap, the graph computes their base, and the results are views of it;
* a result that AOTAutograd regenerates from an argument or a result only needs the metadata of the view: its sizes,
  strides and storage offset, on torch's meta device.

AOTAutograd replays static views itself. For a view that depends on a size of the call, it uses the strides and offset
of the tensor it gets. XLA tensors have neither, so that view would be at another position: on XLA, we retake it
(`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.autograd.result_view import ResultView
from kp_dynamo.autograd.view_search import ViewSearch
from kp_dynamo.graph.symbol_values import SymbolReader


class ResultAliases:
    """The results of a graph that share memory in eager.

    Args:
        gm: A joint or inference graph, as AOTAutograd traced it. These results are removed from it.
        metadata: AOTAutograd's metadata of the graph; None if AOTAutograd replays nothing.
        num_returned: Number of results that the caller sees.
    """

    def __init__(self, gm: fx.GraphModule, metadata: Any, num_returned: int) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        self._reader = SymbolReader([node.meta.get("val") for node in inputs])
        self._metadata = metadata
        self._views = ViewSearch(gm.graph, metadata, num_returned).run()
        self._remove_views(gm)

    def _remove_views(self, gm: fx.GraphModule) -> None:
        if not self._views:
            return
        output = gm.graph.output_node()
        results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        left = [None if position in self._views else result for position, result in enumerate(results)]
        for view in self._views.values():
            if not view.is_of_argument:
                left[view.source] = view.chain.base
        output.args = (left,)
        gm.graph.eliminate_dead_code()
        gm.recompile()

    def around(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """`run`, which computes the reduced graph, plus the removed results."""
        if not self._views:
            return run

        def called(args: list[Any]) -> list[Any]:
            values, sources = self._reader.read(args), list(args)
            results = list(run(args))
            computed = list(results)
            for view in self._views.values():
                source = sources[view.source] if view.is_of_argument else computed[view.source]
                # For a result on XLA, autograd replays the operators of a real view; XLA tensors have no strides.
                is_on_xla = not view.is_of_argument and source.device.type == "xla"
                take = view.metadata_of if view.is_metadata and not is_on_xla else view.taken
                results[view.position] = take(source, values)
            return results

        called._boxed_call = True  # type: ignore[attr-defined]
        return called

    def bases_in(self, eager: Sequence[Any]) -> dict[int, Any]:
        """Position of a base of result views -> its fake tensor in eager; None if unknown."""
        first = self._metadata.num_mutated_inp_runtime_indices if self._metadata is not None else 0
        returned = range(first, first + len(eager))  # the bases follow
        views = [view for view in self._views.values() if not view.is_of_argument and view.position in returned]
        hidden = [view for view in views if view.source in self._views or view.source >= first + len(eager)]
        return {view.source: getattr(eager[view.position - first], "_base", None) for view in hidden}

    @property
    def has_written_inputs(self) -> bool:
        """Whether the graph writes to an argument in place."""
        return self._metadata is None or any(info.mutates_data for info in self._metadata.input_info)

    @property
    def has_views(self) -> bool:
        """Whether some results were removed from the graph."""
        return bool(self._views)

    @property
    def has_views_of_arguments(self) -> bool:
        """Whether some results are views of arguments."""
        return any(view.is_of_argument for view in self._views.values())

    @property
    def has_symbolic_views(self) -> bool:
        """Whether some results need `replay`."""
        return any(map(self._needs_replay, self._views.values()))

    def _needs_replay(self, view: ResultView) -> bool:
        return self._is_regenerated(view) and view.chain.is_symbolic

    def _is_regenerated(self, view: ResultView) -> bool:
        """Whether AOTAutograd regenerates this result from an argument."""
        is_result = view.position >= (self._metadata.num_mutated_inp_runtime_indices if self._metadata else 0)
        return view.is_metadata and view.is_of_argument and is_result

    def of_arguments(self) -> dict[int, int]:
        """Result that Dynamo sees -> the argument that it is a view of, for the results that `taken_of` can take."""
        if self._metadata is None:
            return {}
        first = self._metadata.num_mutated_inp_runtime_indices
        return {v.position - first: v.source for v in self._views.values() if self._is_regenerated(v)}

    def of_padded(self, may_be_padded: Callable[[int], bool]) -> list[int]:
        """Positions of the views of a padded size that `taken_of` cannot take."""
        return [
            view.position
            for view in self._views.values()
            if not self._is_regenerated(view)
            and (view.chain.is_symbolic or (view.is_of_argument and may_be_padded(view.source)))
        ]

    def taken_of(self, args: Sequence[Any], number: int, old: Any) -> torch.Tensor:
        """A result that Dynamo sees, one of `of_arguments`, as a view of one of `args`.

        Args:
            args: The arguments, in the order of the graph.
            number: Number of the result.
            old: The view that AOTAutograd took.
        """
        first = self._metadata.num_mutated_inp_runtime_indices
        view = self._views[first + number]
        return self._replay(view, args[view.source], args, self._metadata.output_info[number], old)

    def replay(self, args: Sequence[Any], results: list[Any]) -> None:
        """Replace views of XLA arguments that AOTAutograd took by strides with views taken by operators."""
        if len(self._metadata.input_info) != len(args):
            return  # AOTAutograd merged overlapping arguments, which never happens for XLA tensors
        first = self._metadata.num_mutated_inp_runtime_indices
        for view in filter(self._needs_replay, self._views.values()):
            source, number = args[view.source], view.position - first
            if source.device.type == "xla":
                results[number] = self._replay(view, source, args, self._metadata.output_info[number], results[number])

    def _replay(self, view: ResultView, source: torch.Tensor, args: Sequence[Any], info: Any, old: Any) -> torch.Tensor:
        if info.output_type is OutputType.is_input:
            return source
        result = view.chain.applied(source, self._reader.read(args))
        result = result.detach() if source.requires_grad and not info.requires_grad else result
        if hasattr(old, "_dynamo_weak_dynamic_indices"):
            result._dynamo_weak_dynamic_indices = old._dynamo_weak_dynamic_indices  # type: ignore[attr-defined]
        return result
