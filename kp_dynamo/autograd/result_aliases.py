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

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.graph.symbol_values import SymbolReader, Values
from kp_dynamo.graph.view_chain import ViewChain, are_disjoint

_OF_INPUT = (OutputType.alias_of_input, OutputType.is_input)
_OF_INTERMEDIATE = (
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
    OutputType.alias_of_intermediate_base_is_user_output,
)


@dataclass(frozen=True)
class _View:
    """A result that the program does not compute.

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
        with contextlib.nullcontext() if self.is_of_argument or self.is_metadata else _untracked():
            return self.chain.applied(source, values)


class ResultAliases:
    """The results of a graph that share memory in eager.

    Args:
        gm: A joint or inference graph, as AOTAutograd traced it. These results are removed from it.
        metadata: AOTAutograd's metadata of the graph; None if AOTAutograd replays nothing.
        num_returned: Number of results that the caller sees.
    """

    def __init__(self, gm: fx.GraphModule, metadata: Any, num_returned: int) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._arguments = {node: i for i, node in enumerate(placeholders)}
        self._reader = SymbolReader([node.meta.get("val") for node in placeholders])
        self._output = gm.graph.output_node()
        self._results = list(self._output.args[0])  # type: ignore[arg-type]
        self._metadata, self._num_returned = metadata, num_returned
        self._views = {view.position: view for view in (*self._known_to_autograd(), *self._of_arguments())}
        self._views |= {view.position: view for view in self._overlapping()}
        self._remove_views(gm)

    def _known_to_autograd(self) -> list[_View]:
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

    def _resized_in_place(self, number: int) -> _View | None:
        """The view for an argument whose metadata changes in place while its values stay (`x.t_()`)."""
        argument = self._metadata.mutated_inp_runtime_indices[number]
        info = self._metadata.input_info[argument]
        is_view = info.mutates_metadata and not info.mutates_data and not info.mutates_storage_metadata
        return self._of_input(number, argument) if is_view else None

    def _of_input(self, position: int, argument: int) -> _View | None:
        new = self._new_values().get(argument)
        chain = ViewChain.of(self._results[position], stop=new)
        is_known = chain.base is new or self._arguments.get(chain.base) == argument
        return _View(position, argument, True, True, chain) if is_known else None

    def _new_values(self) -> dict[int, fx.Node]:
        """Written argument -> its new value."""
        updated = self._metadata.mutated_inp_runtime_indices if self._metadata is not None else []
        return {a: new for a, new in zip(updated, self._results, strict=False) if isinstance(new, fx.Node)}

    def _base_position(self, info: Any) -> int:
        first = self._metadata.num_mutated_inp_runtime_indices
        is_output = info.output_type is OutputType.alias_of_intermediate_base_is_user_output
        return int(first + info.base_idx + (0 if is_output else len(self._metadata.output_info)))

    def _of_result(self, position: int, base: int) -> _View | None:
        chain = ViewChain.of(self._results[position], stop=self._results[base])
        return _View(position, base, False, True, chain) if chain.base is self._results[base] else None

    def _others(self) -> dict[int, ViewChain]:
        """Position -> views, for the results that AOTAutograd returns unchanged."""
        first = 0 if self._metadata is None else self._metadata.num_mutated_inp_runtime_indices
        infos = [] if self._metadata is None else self._metadata.output_info
        known = {first + i for i, info in enumerate(infos) if info.output_type in (*_OF_INPUT, *_OF_INTERMEDIATE)}
        positions = [p for p in range(first, self._num_returned) if p not in known]
        return {p: ViewChain.of(self._results[p]) for p in positions if isinstance(self._results[p], fx.Node)}

    def _of_arguments(self) -> list[_View]:
        return [
            _View(position, self._arguments[chain.base], True, False, chain)
            for position, chain in self._others().items()
            if chain.base in self._arguments and isinstance(chain.base.meta.get("val"), torch.Tensor)
        ]

    def _overlapping(self) -> list[_View]:
        groups: dict[fx.Node, dict[int, ViewChain]] = defaultdict(dict)
        for position, chain in self._others().items():
            if chain.base not in self._arguments:
                groups[chain.base][position] = chain
        shared = [chains for chains in groups.values() if not are_disjoint(list(chains.values()))]
        # The base takes the position of the first result.
        return [_View(p, min(chains), False, False, chain) for chains in shared for p, chain in chains.items()]

    def _remove_views(self, gm: fx.GraphModule) -> None:
        if not self._views:
            return
        left = [None if position in self._views else result for position, result in enumerate(self._results)]
        for view in self._views.values():
            if not view.is_of_argument:
                left[view.source] = view.chain.base
        self._output.args = (left,)
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
                take = _metadata_of if view.is_metadata and not is_on_xla else _View.taken
                results[view.position] = take(view, source, values)
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
    def has_views_of_arguments(self) -> bool:
        """Whether some results are views of arguments."""
        return any(view.is_of_argument for view in self._views.values())

    @property
    def has_symbolic_views(self) -> bool:
        """Whether some results need `replay`."""
        return any(map(self._needs_replay, self._views.values()))

    def _needs_replay(self, view: _View) -> bool:
        return self._is_regenerated(view) and view.chain.is_symbolic

    def _is_regenerated(self, view: _View) -> bool:
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

    def _replay(self, view: _View, source: torch.Tensor, args: Sequence[Any], info: Any, old: Any) -> torch.Tensor:
        if info.output_type is OutputType.is_input:
            return source
        result = view.chain.applied(source, self._reader.read(args))
        result = result.detach() if source.requires_grad and not info.requires_grad else result
        if hasattr(old, "_dynamo_weak_dynamic_indices"):
            result._dynamo_weak_dynamic_indices = old._dynamo_weak_dynamic_indices  # type: ignore[attr-defined]
        return result


def _untracked() -> contextlib.AbstractContextManager[Any]:
    """Context in which views share memory without autograd tracking them."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


def _metadata_of(view: _View, source: torch.Tensor, values: Values) -> torch.Tensor:
    """A meta tensor with the sizes, strides and storage offset of the view of `source`."""
    # If a tensor has a base, torch replays the view from the base: these tensors must not have one.
    with torch.inference_mode(False), torch.no_grad(), _untracked():
        if source.device.type == "xla":
            # A strided view is taken of the values in order, whatever the tensor itself is a view of.
            return view.chain.applied(torch.empty(source.shape, dtype=source.dtype, device="meta"), values)
        extent = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
        memory = torch.empty(source.storage_offset() + max(extent, 0), dtype=source.dtype, device="meta")
        like = memory.as_strided(source.shape, source.stride(), source.storage_offset())
        return view.chain.applied(like, values)
