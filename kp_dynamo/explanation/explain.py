"""`explain`: reports how the backend compiles a model, from one run of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.compat import given_up_frames, xla
from kp_dynamo.compat.given_up_frames import GivenUp
from kp_dynamo.compat.versions import version_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.disk_cache.enable import disk_stats
from kp_dynamo.explanation.disk_report import disk_report
from kp_dynamo.explanation.reports import Explanation
from kp_dynamo.explanation.run_once import (
    dynamo_seconds,
    fresh_dynamo,
    graph_breaks,
    run_backward,
    uncompiled,
    uncompiled_call,
    uncompiled_frame,
)
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.telemetry.log import trace_report

__all__ = ["Explanation", "explain"]

_VERSIONS = ("torch", "torch_xla", "libtpu", "kp_dynamo")


def explain(model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` once through the backend and report how it was compiled.

    If results require a gradient, the backward of their sum runs too; it does not touch any `.grad`.

    `explain` compiles with its own caches, so those of the process and their statistics do not change; the disk cache,
    whose programs it uses, counts them. The reported
    hits and misses are what `torch.compile(model, backend="kp_tpu", options=options)` would find in the process's
    caches now. Like `torch._dynamo.explain`, it resets Dynamo before and after: functions compiled earlier are captured
    again when called. Torch's random state is restored; buffer updates of the model are not undone.

    Args:
        model: A module or function, compiled or not.
        *args: Positional arguments of the model.
        options: As for `torch.compile`.
        **kwargs: Keyword arguments of the model.

    Raises:
        TPUConfigurationError: The options are not valid.
        Exception: Whatever `torch.compile` or the model itself raises.
    """
    chosen = CompileOptions.from_dict(options)
    xla.device()
    # These imports need torch_xla, so they come after the check that it is installed and compatible.
    from kp_dynamo.explanation.recorder import Recorder
    from kp_dynamo.explanation.whole_tensors import whole_tensors
    from kp_dynamo.runtime.event_log import log_event
    from kp_dynamo.runtime.events import Event
    from kp_dynamo.session import SESSION, Session

    recorder = Recorder(SESSION.captures.keys(), SESSION.runtime.cache.keys())

    def observe(event: Event) -> None:
        log_event(event)
        recorder(event)

    session, given_up = Session(chosen.cache_size, observe=observe, with_examples=True), list[GivenUp]()
    backend = session.as_backend(chosen)
    if not chosen.strict:
        backend.on_given_up = given_up.append  # type: ignore[attr-defined]

    with fresh_dynamo():
        dynamo_before, disk_before = dynamo_seconds(), disk_stats()
        run_backward(torch.compile(uncompiled_call(model), backend=backend)(*args, **kwargs), uncompiled(model))
        given_up_frames.collect()
        explanation = Explanation(
            subject=Subject.of_call(uncompiled(model), args, kwargs),
            uncompiled=tuple(uncompiled_frame(found) for found in dict.fromkeys(given_up)),
            versions={name: version for name in _VERSIONS if (version := version_of(name))},
            graph_breaks=graph_breaks(),
            whole=whole_tensors(uncompiled(model), recorder.programs()),
            disk=disk_report(disk_before, disk_stats()),
            captures=tuple(recorder.captures),
            divisions=tuple(recorder.divisions),
            passes=tuple(recorder.passes),
            graphs=tuple(recorder.graphs()),
            fallbacks=tuple(recorder.fallbacks()),
            seconds={"dynamo": dynamo_seconds() - dynamo_before, **recorder.seconds()},
        )
    trace_report("explain", explanation)
    return explanation
