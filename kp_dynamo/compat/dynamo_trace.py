"""What Dynamo knows while it traces, of which torch 2.9 has no public view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import exc
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting


def backend_of_trace() -> Callable[..., Any] | None:
    """The backend that Dynamo traces for, without torch's wrappers; None inside the body of a higher-order operator."""
    output = InstructionTranslator.current_tx().output
    if output.current_tracer.parent is not None:
        return None
    found: Any = output.compiler_fn
    while True:
        inner = getattr(found, "_torchdynamo_orig_callable", None) or getattr(found, "compiler_fn", None)
        if inner is None or inner is found:
            return found  # type: ignore[no-any-return]
        found = inner


def changed_objects() -> dict[int, int]:
    """Objects of the user that the trace has changed so far: their ids, and how many changes of attributes."""
    effects = InstructionTranslator.current_tx().output.side_effects
    return {
        id(item): len(effects.store_attr_mutations.get(item, ()))
        for item in effects.id_to_variable.values()
        if isinstance(item.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        and effects.is_modified(item)
    }


class RestartTrace(exc.UnspecializeRestartAnalysis, exc.ShortenTraceback):
    """Raised by a backend, makes Dynamo trace the frame again: it lets what shortens a traceback pass as it is."""

    def __init__(self, reason: str) -> None:
        exc.TorchDynamoException.__init__(self, reason)
        self.restart_reason, self.first_useful_frame = reason, None
