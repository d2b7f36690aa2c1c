"""The passes of a graph: which, in which order, and how they run."""

from kp_dynamo.pipeline.build import (
    Pipeline,
    build_backward_pipeline,
    build_pipeline,
    least_fused_logits,
    required_precision,
)
from kp_dynamo.pipeline.dumps import dump_key
from kp_dynamo.pipeline.memory_places import refuse_places_of_inputs, resolve_memory_places
from kp_dynamo.pipeline.run import run_pipeline

__all__ = [
    "Pipeline",
    "build_backward_pipeline",
    "build_pipeline",
    "dump_key",
    "least_fused_logits",
    "refuse_places_of_inputs",
    "required_precision",
    "resolve_memory_places",
    "run_pipeline",
]
