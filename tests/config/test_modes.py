"""The argument `mode` of `torch.compile`, with the graphs that Dynamo passes it with."""

import logging

import torch

from kp_dynamo.config import modes
from tests.spine import counted


def test_reduce_overhead_is_the_default_with_one_log_line(caplog):
    modes._log_reduce_overhead.cache_clear()

    def two_graphs(x):
        x = x * 2 + 1
        torch._dynamo.graph_break()
        return x.sin()

    x = torch.randn(4)
    with caplog.at_level(logging.INFO, "kp_dynamo"), counted() as count:
        found = torch.compile(two_graphs, backend="kp_tpu", mode="reduce-overhead")(x)
    # sin of XLA and of torch each round once.
    torch.testing.assert_close(found, two_graphs(x), rtol=1e-6, atol=1e-6)
    assert count.graphs == 2
    lines = [record.getMessage() for record in caplog.records if "reduce-overhead" in record.getMessage()]
    assert lines == ["mode='reduce-overhead' is taken as 'default': a compiled graph already runs as one XLA program."]
    with counted() as count:
        torch.compile(two_graphs, backend="kp_tpu", mode="default")(x)
    assert (count.graphs, count.capture_hits) == (0, 2)
