"""The passes of a graph: which, in which order, and how they run."""

from kp_dynamo.pipeline.build import Pipeline, build_backward_pipeline, build_pipeline, required_precision
from kp_dynamo.pipeline.dumps import dump_key
from kp_dynamo.pipeline.run import check_captured, prepare_graph, run_pipeline

__all__ = [
    "Pipeline",
    "build_backward_pipeline",
    "build_pipeline",
    "check_captured",
    "dump_key",
    "prepare_graph",
    "required_precision",
    "run_pipeline",
]
