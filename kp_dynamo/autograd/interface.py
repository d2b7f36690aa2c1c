"""What AOTAutograd found out about a graph, as plain values, and its callable again from them in another process.

AOTAutograd's own wrappers are used again, with its metadata. Only metadata that is the same after the way through
plain values is accepted: a field that is unknown here, or has an unusual value, is a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch._dynamo  # first: torch 2.9 cannot import the next module without it
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd, RuntimeWrapper
from torch._functorch._aot_autograd.schemas import (
    AOTConfig,
    InputAliasInfo,
    MemoryFormatMeta,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
)

from kp_dynamo.autograd.argument_overlap import overlap_check
from kp_dynamo.autograd.calls import outside_dynamo, with_call_checks
from kp_dynamo.autograd.plain_gradient import Gradients, Run, plain_gradients
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.undefined_gradients import UndefinedGradients

_NEW = ("non_alias", "unsafe_view_alias")
_FORMATS = {str(f): f for f in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)}
# Only AOTAutograd's compile time reads them, or they are described apart.
_NOT_COMPARED = (
    "output_info", "traced_tangents", "traced_tangents_descs", "traced_tangent_metas", "subclass_inp_meta",
    "subclass_fw_graph_out_meta", "static_input_indices", "output_types",
)  # fmt: skip


class NotDescribedError(Exception):
    """A graph has something that plain values do not describe."""


class Differentiated(NamedTuple):
    """A graph as AOTAutograd left it.

    Attributes:
        metadata: AOTAutograd's metadata.
        num_inputs: Number of the graph's inputs.
        aliases: The results that share memory.
        gradients: Which gradients may be undefined; None without a backward.
        made: How it became differentiable.
    """

    metadata: Any
    num_inputs: int
    aliases: ResultAliases
    gradients: UndefinedGradients | None
    made: Gradients


@dataclass(frozen=True)
class Interface:
    """How the programs of a graph are called, as plain values.

    Attributes:
        inputs: The fields of AOTAutograd's `InputAliasInfo` of each input.
        outputs: The kind of each result, and whether it requires a gradient.
        tangents: For each tangent, its number among the tensors, and its memory format as sizes, strides and a name.
        others: Other fields of the metadata.
        detached: Arguments that get no gradient.
        disables_amp: Whether the programs run without autocast.
        needed: See `UndefinedGradients.needed`; None without a backward.
        is_uniform: Whether every gradient depends on every result.
    """

    inputs: list[dict[str, bool]]
    outputs: list[tuple[str, bool]]
    tangents: list[tuple[int, list[int] | None, list[int] | None, str | None]]
    others: dict[str, Any]
    detached: list[int]
    disables_amp: bool
    needed: list[list[int] | None] | None
    is_uniform: bool


def interface_of(found: Differentiated) -> Interface:
    """The interface of a graph.

    Raises:
        NotDescribedError: The graph has more than an interface describes.
    """
    metadata, gradients, made = found.metadata, found.gradients, found.made
    if metadata is None or len(metadata.input_info) != found.num_inputs:
        raise NotDescribedError("its arguments overlap in memory")
    if found.aliases.has_views:
        raise NotDescribedError("its results share memory")
    if made.has_extras:
        raise NotDescribedError("it has tensor subclasses or symbolic sizes")
    interface = Interface(
        inputs=[_plain_input(info) for info in metadata.input_info],
        outputs=[_plain_output(info) for info in metadata.output_info],
        tangents=[_plain_tangent(meta) for meta in metadata.subclass_tangent_meta],
        others={
            name: getattr(metadata, name)
            for name in (
                "keep_input_mutations",
                "is_train",
                "num_symints_saved_for_bw",
                "deterministic",
                "bw_donated_idxs",
            )
        },
        detached=list(made.detached),
        disables_amp=made.disables_amp,
        needed=None if gradients is None else gradients.needed,
        is_uniform=gradients is None or gradients.is_uniform,
    )
    _require_equal(metadata, _metadata(interface))
    return interface


def _plain_input(info: InputAliasInfo) -> dict[str, bool]:
    if info.mutates_metadata or info.mutates_storage_metadata or info.mutation_inductor_storage_resize:
        raise NotDescribedError("it changes the sizes or strides of an input")
    return asdict(info)


def _plain_output(info: OutputAliasInfo) -> tuple[str, bool]:
    is_tensor = isinstance(info.raw_type, type) and issubclass(info.raw_type, torch.Tensor)
    if not is_tensor or info.output_type.name not in _NEW or info.dynamic_dims:
        raise NotDescribedError("its results share memory")
    return info.output_type.name, info.requires_grad


def _plain_tangent(meta: Any) -> tuple[int, list[int] | None, list[int] | None, str | None]:
    layout = meta.memory_format if type(meta) is PlainTensorMeta else None
    if layout is None:
        raise NotDescribedError("it has tensor subclasses")
    if layout.memory_format is not None and str(layout.memory_format) not in _FORMATS:
        raise NotDescribedError(f"the memory format {layout.memory_format}")
    size, stride = (None if n is None else list(map(int, n)) for n in (layout.size, layout.stride))
    return meta.unwrapped_idx, size, stride, None if layout.memory_format is None else str(layout.memory_format)


def _metadata(interface: Interface) -> ViewAndMutationMeta:
    """AOTAutograd's metadata, as far as a call reads it."""
    return ViewAndMutationMeta(
        input_info=[InputAliasInfo(**info) for info in interface.inputs],
        output_info=[
            OutputAliasInfo(
                output_type=OutputType[kind],
                raw_type=torch.Tensor,
                base_idx=None,
                dynamic_dims=None,
                requires_grad=requires_grad,
            )
            for kind, requires_grad in interface.outputs
        ],
        num_intermediate_bases=0,
        traced_tangents=[],
        traced_tangents_descs=[],
        subclass_inp_meta=[],
        subclass_fw_graph_out_meta=[],
        subclass_tangent_meta=[
            PlainTensorMeta(number, _layout(size, stride, name)) for number, size, stride, name in interface.tangents
        ],
        **interface.others,
    )


def _layout(size: list[int] | None, stride: list[int] | None, name: str | None) -> MemoryFormatMeta:
    """Of the types that AOTAutograd compares with those of a gradient."""
    return MemoryFormatMeta(
        None if size is None else torch.Size(size),
        None if stride is None else tuple(stride),
        None if name is None else _FORMATS[name],
    )


def _require_equal(found: Any, rebuilt: Any) -> None:
    known, again = vars(found), vars(rebuilt)
    for name in sorted(known.keys() | again.keys()):
        if name not in _NOT_COMPARED and known.get(name) != again.get(name):
            raise NotDescribedError(f"AOTAutograd's {name} is {known.get(name)!r}")


def callable_of(
    interface: Interface, forward: Run, backward: Run | None, inputs: Sequence[Any], captured: Sequence[Any]
) -> Callable[..., Any]:
    """The callable that AOTAutograd would make of a graph.

    Args:
        interface: How its programs are called.
        forward: The forward, or the whole graph.
        backward: The backward, if there is one.
        inputs: The inputs that the graph is compiled for.
        captured: The fake tensors that Dynamo captured for them.
    """
    metadata, config = _metadata(interface), _config()
    if backward is None:
        made = Gradients()
        wrapper = RuntimeWrapper(indices_of_inps_to_detach=[], trace_joint=False, disable_amp=interface.disables_amp)
        run = wrapper.post_compile(forward, config, runtime_metadata=metadata)
    else:
        with plain_gradients(lambda: (forward, backward)) as made:
            run = AOTDispatchAutograd.post_compile(
                forward, outside_dynamo(backward), None, 0, [], interface.disables_amp, list(interface.detached), None,
                config, fw_metadata=metadata, try_save_cache_entry=None,
            )  # fmt: skip
    gradients = None if interface.needed is None else _undefined(interface)
    overlap = overlap_check(metadata, inputs, captured)
    return with_call_checks(lambda *args: run(list(args)), None, overlap, gradients, made)


def _undefined(interface: Interface) -> UndefinedGradients:
    return UndefinedGradients.of(interface.needed or [], is_uniform=interface.is_uniform)


def _config() -> AOTConfig:
    """Of its fields, a call only reads the number, for compiled autograd."""
    return AOTConfig(
        fw_compiler=_compile_nothing,
        bw_compiler=_compile_nothing,
        partition_fn=_compile_nothing,
        decompositions={},
        num_params_buffers=0,
        aot_id=-1,
        keep_inference_input_mutations=False,
    )


def _compile_nothing(*args: Any) -> Any:
    raise AssertionError("a stored graph has been compiled")
