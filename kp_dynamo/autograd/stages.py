"""AOTAutograd: Dynamo's graph -> functional ATen graphs on CPU fake tensors -> one callable.

Every graph is traced as if its tensors were on the CPU, wherever they are: eager uses ATen's CPU
decompositions, and torch_xla's own autograd kernels are never used. Only the lowering knows the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from kp_dynamo.autograd.argument_overlap import overlap_check
from kp_dynamo.autograd.calls import outside_dynamo, with_call_checks
from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.autograd.eager_strides import record_eager_strides
from kp_dynamo.autograd.function_views import keep_backward_of_views
from kp_dynamo.autograd.interface import Differentiated
from kp_dynamo.autograd.plain_gradient import plain_gradients
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.tracing_settings import (
    disable_backward_donation,
    keep_inputs_attached,
    overwritten_inputs,
    traced_metadata,
    tracing_settings,
)
from kp_dynamo.autograd.undefined_gradients import UndefinedGradients
from kp_dynamo.autograd.whole_memory import with_whole_memory
from kp_dynamo.graph.decisions import decide_once
from kp_dynamo.graph.unrepeatable import save_unrepeatable

# At 0, torch 2.9 recomputes everything, even values tagged to be saved; just above 0, it respects the tags.
_LEAST_BUDGET = 1e-9

# (graph, number of results that the user sees, name of the graph, see `overwritten_inputs`) -> compiled callable.
CompileGraph = Callable[[fx.GraphModule, int, str, tuple[int | None, ...]], Callable[[list[Any]], list[Any]]]


@dataclass(frozen=True)
class GraphStages:
    """Callbacks for the graphs that AOTAutograd makes.

    Attributes:
        transform: Edits a joint, inference or partitioned backward graph in place. Takes the graph, its name, and the
            results that share memory (None for a backward graph).
        compile: Compiles a forward, backward or inference graph.
        eager: Fake tensors of the results with eager's strides (`eager_strides.eager_results`).
        note: Called with what another process must know to call the graphs.
    """

    transform: Callable[[fx.GraphModule, str, ResultAliases | None], None]
    compile: CompileGraph
    eager: Sequence[Any]
    note: Callable[[Differentiated], None] = lambda differentiated: None


def trace_and_compile(gm: fx.GraphModule, inputs: Sequence[Any], stages: GraphStages) -> Callable[..., Any]:
    """Trace `gm` with AOTAutograd and compile the graphs; the callable has the signature of `gm`."""
    keep_backward_of_views(gm)
    tracing = _Tracing(stages, gm, len(inputs))
    disables_amp = torch._C._is_any_autocast_enabled()
    with tracing_settings(), plain_gradients(lambda: (tracing.forward, tracing.backward)) as made:
        run: Callable[..., Any] = aot_autograd.aot_module_simplified(
            gm,
            list(inputs),
            fw_compiler=tracing.compile_forward,
            bw_compiler=tracing.compile_backward,
            inference_compiler=tracing.compile_inference,
            partition_fn=tracing.partition,
            decompositions=decompositions(),
            # With symbolic shapes, torch 2.9 fails an assertion if mutations stay in the graph.
            keep_inference_input_mutations=False,
        )
    gradients = tracing.undefined
    if gradients is None:  # nothing else has said so
        made.disables_amp = disables_amp
    captured = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    stages.note(Differentiated(tracing.metadata, len(inputs), tracing.aliases, gradients, made))
    return with_call_checks(run, tracing.aliases, overlap_check(tracing.metadata, inputs, captured), gradients, made)


class _Tracing:
    """AOTAutograd's callbacks while it traces one graph, and what they record.

    AOTAutograd may trace a graph twice; the last trace counts.

    Attributes:
        metadata: AOTAutograd's metadata of mutated inputs and aliases.
        aliases: Results that share memory.
        undefined: Gradients that eager leaves undefined; None without a backward.
        forward, backward: What they were compiled to.
    """

    metadata: Any
    aliases: ResultAliases
    forward: Any
    backward: Any

    def __init__(self, stages: GraphStages, captured: fx.GraphModule, num_inputs: int) -> None:
        self._stages, self._captured, self._num_inputs = stages, captured, num_inputs
        self._num_returned = 0
        self.undefined: UndefinedGradients | None = None

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        keep_inputs_attached(joint, num_fwd_outputs)
        self.undefined = UndefinedGradients(joint, traced_metadata(), num_fwd_outputs, self._captured.graph)
        self._remove_aliases(joint, num_fwd_outputs)
        self._stages.transform(joint, "joint", self.aliases)
        budget = functorch_config.activation_memory_budget
        decide_once(joint.graph)
        least = _LEAST_BUDGET if save_unrepeatable(joint.graph) else 0.0
        with functorch_config.patch(activation_memory_budget=max(budget, least)):
            forward, backward = min_cut_rematerialization_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
            )
        self._stages.transform(backward, "backward", None)
        return forward, backward

    def compile_forward(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        disable_backward_donation()
        self.forward = self._compiled(gm, self._num_returned, "forward")
        return self.forward

    def compile_backward(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        # Dynamo must not trace what runs a backward, nor the backward itself.
        self.backward = torch._dynamo.disable(self._stages.compile)(gm, _num_results(gm), "backward", ())
        return outside_dynamo(self.backward)

    def compile_inference(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self._remove_aliases(gm, _num_results(gm))
        self._stages.transform(gm, "inference", self.aliases)
        return self._compiled(gm, _num_results(gm), "inference")

    def _remove_aliases(self, graph: fx.GraphModule, num_results: int) -> None:
        self._num_returned, self.metadata = num_results, traced_metadata()
        self.aliases = ResultAliases(graph, self.metadata, num_results)

    def _compiled(self, gm: fx.GraphModule, num_results: int, name: str) -> Callable[[list[Any]], list[Any]]:
        eager, overwritten = self._stages.eager, overwritten_inputs()
        record_eager_strides(gm, self.metadata, eager, self.aliases.bases_in(eager))
        run = self._stages.compile(gm, num_results, name, overwritten)
        is_merged = self.metadata is not None and len(self.metadata.input_info) != self._num_inputs
        return self.aliases.around(_boxed(with_whole_memory(run, gm, overwritten)) if is_merged else run)


def _boxed(run: Any) -> Any:
    run._boxed_call = True
    return run


def _num_results(gm: fx.GraphModule) -> int:
    results = gm.graph.output_node().args[0]
    return len(results) if isinstance(results, (list, tuple)) else 1
