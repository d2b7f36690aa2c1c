"""Frames that Dynamo gives up although kp_tpu was asked for: a warning once, an error under `strict`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed

from kp_dynamo.compat import given_up_frames
from kp_dynamo.compat.dynamo_trace import is_compiled_with
from kp_dynamo.compat.given_up_frames import GivenUp
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.warn_once import warn_once

logger = logging.getLogger(__name__)

_SIZE = re.compile(r"tensor '(?P<source>.+?)' size mismatch at index (?P<dim>\d+)")
_LENGTH = re.compile(r"len\((?P<source>L\[.+?\][^)]*)\)")
_COMPARED = re.compile(r"(?:not )?(?P<name>[A-Za-z_][\w.\[\]']*)(?= [=!<>]| is )")
_CACHE = re.compile(r"past|cache|key_value", re.IGNORECASE)


def report(found: GivenUp) -> None:
    """Warn, or raise if the options of the backend say `strict`.

    Raises:
        BackendCompilerFailed: With an XLACompilationError as its `.inner_exception`, as torch wraps errors of backends.
    """
    report_as(found, CompileOptions.from_dict(found.options).strict)


def report_as(found: GivenUp, strict: bool) -> None:
    """As `report`, for a backend that has its options already."""
    TELEMETRY.count("uncompiled_frames")
    text = description(found)
    if strict:
        raise BackendCompilerFailed(
            SimpleNamespace(__name__="kp_tpu"), XLACompilationError(f"strict=True and {text}"), None
        )
    warn_once(logger, "%s", text)


def description(found: GivenUp) -> str:
    """What happened, why, and what to do."""
    if found.is_limit:
        why, remedy = _recompiled(found.reason)
        return (
            f"{found.frame} was compiled {found.limit} times, the limit of Dynamo. From now on it runs eagerly for "
            f"arguments that fit none of these programs: {why}. {remedy}"
        )
    at = f" at {found.line}" if found.line else ""
    return (
        f"Dynamo gave up {found.frame}{at}: it runs eagerly, and kp_tpu compiles nothing of it. Reason: "
        f"{short(found.reason)}. Try: change that line, or move it into a function with torch.compiler.disable, so "
        "that the rest is compiled. kp_dynamo.explain(model, *args) lists all such places."
    )


def short(reason: str) -> str:
    """The first line of a reason of Dynamo, and its explanation."""
    title, *rest = reason.strip().splitlines() or [""]
    explanation = next((line.strip() for line in rest if line.strip().startswith("Explanation:")), "")
    return f"{title} {explanation.removeprefix('Explanation:').strip()}".strip().rstrip(".")


def _recompiled(reason: str) -> tuple[str, str]:
    """Why the last program does not fit, with the argument by its Python name, and the remedy."""
    limit = "or raise torch._dynamo.config.recompile_limit if the number of cases is small."
    if found := (_SIZE.search(reason) or _LENGTH.search(reason)):
        name, dim = python_name(found["source"]), found.groupdict().get("dim")
        if _CACHE.search(name):
            return f"{name} grows from call to call", (
                "Try: a cache of a fixed size, such as transformers.StaticCache, and the option donate='mutated'."
            )
        if dim is not None:
            return f"dimension {dim} of {name} has another size in each call", (
                f"Try: kp_dynamo.mark_sequence({name}, {dim}) before the first call, and the option buckets='pow2'."
            )
        return f"the length of {name} differs from call to call", f"Try: pass a tensor of a fixed size, {limit}"
    why = python_name(reason.split(": ", 1)[-1].split("  #")[0].strip())
    if compared := _COMPARED.match(why):
        name = compared["name"]
        return f"{name} differs ({why})", f"Try: keep {name} the same in all calls, or pass it as a tensor, {limit}"
    return why or "Dynamo gives no reason", f"Try: TORCH_LOGS=recompiles, which shows each reason, {limit}"


def python_name(source: str) -> str:
    """The name of a source of Dynamo as in Python: `self.layers.0.weight` for `L['self']._modules['layers']...`."""
    name = re.sub(r"L\['(\w+)'\]", r"\1", source)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)


def warn_if_unused(backend: Callable[..., Any]) -> None:
    """Warn if the backend was asked for, by its name or as an object, and never called; runs at exit."""
    given_up_frames.collect()
    is_asked_for = "kp_tpu" in registry._COMPILER_FNS or is_compiled_with(backend)
    if is_asked_for and not TELEMETRY.counts["captures"]:
        logger.warning(
            "this process asked for backend='kp_tpu', and nothing was compiled with it. No compiled function was "
            "called, or Dynamo gave up all of them. A method of the model is not compiled: for torch.compile(model)"
            ".generate, use kp_dynamo.compile_for_generation; for another method, compile what it calls, with "
            "model.forward = torch.compile(model.forward, backend='kp_tpu')."
        )
