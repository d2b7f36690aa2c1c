"""What Dynamo knows while it traces, of which torch 2.9 has no public view."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._dynamo import eval_frame, exc
from torch._dynamo.source import AttrSource, LocalSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._guards import ChainedSource


def backend_of_trace() -> Callable[..., Any] | None:
    """The backend that Dynamo traces for, without torch's wrappers; None inside the body of a higher-order operator."""
    output = InstructionTranslator.current_tx().output
    return backend_of_frame() if output.current_tracer.parent is None else None


def backend_of_frame() -> Callable[..., Any]:
    """As `backend_of_trace`, and the same inside the body of a higher-order operator."""
    return without_wrappers(InstructionTranslator.current_tx().output.compiler_fn)


def without_wrappers(backend: Any) -> Callable[..., Any]:
    """A backend as it was given to `torch.compile`, or as its name was registered."""
    found = backend
    while True:
        inner = getattr(found, "_torchdynamo_orig_callable", None) or getattr(found, "compiler_fn", None)
        if inner is None or inner is found:
            return found  # type: ignore[no-any-return]
        found = inner


def is_compiled_with(backend: Callable[..., Any]) -> bool:
    """Whether `torch.compile` got this backend, by its name or as an object, since Dynamo was last reset."""
    return any(without_wrappers(given) is backend for given in eval_frame.cached_backends.values())


def is_dynamo_active() -> bool:
    """Whether Dynamo compiles the functions that this thread calls."""
    return callable(get_eval_frame_callback())


def call_outside_of_graphs(code: CodeType) -> None:
    """Let Dynamo make no graph of its own from this function and what it calls; inside of another, it traces both.

    Such as a hook of a module: torch 2.9 calls the hooks of a compiled module before it captures the module itself.
    """
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


class PythonState:
    """The Python objects that a trace has changed so far, with what they hold: attributes, cells, lists and dicts.

    Dynamo notes that an object was changed, but not how often, nor what was there before.
    """

    def __init__(self) -> None:
        effects = _side_effects()
        self._effects = effects
        self._known = [*effects.id_to_variable.values()]  # keeps them alive: their ids are compared
        self._changed = {id(item) for item in _changed().values()}
        self._attributes = {id(item): dict(values) for item, values in effects.store_attr_mutations.items()}
        self._contents = _contents([item for item in self._known if effects.is_modified(item)], effects)

    def has_changed(self) -> bool:
        """Whether the trace has changed an object since, other than those that it has made since."""
        effects = _side_effects()
        known = {id(item) for item in self._known}
        if effects is not self._effects or not {id(item) for item in _changed().values()} <= self._changed:
            return True
        for item, values in effects.store_attr_mutations.items():
            if id(item) in known and not _same(_parts(values), _parts(self._attributes.get(id(item), {}))):
                return True
        return not all(_same(_parts(getattr(item, name)), parts) for item, name, parts in self._contents)


def changes_objects(*, but: tuple[type, ...] = ()) -> bool:
    """Whether the trace has changed an object of the user so far, other than those of Dynamo's classes `but`."""
    return not all(isinstance(item, but) for item in _changed().values())


def ids_of_changed_objects() -> set[int]:
    """The ids of the user's objects that the trace has changed so far: they change after the graph has run."""
    return set(_changed())


def changes_globals() -> bool:
    """Whether the trace has changed a global variable, or an object that it reached by one, a class or a closure."""
    return any(map(_is_global, _changed().values()))


def _is_global(item: VariableTracker) -> bool:
    found: Any = item.source
    while isinstance(found, ChainedSource) and not isinstance(found, TypeSource):
        if isinstance(found, AttrSource) and found.member in _SHARED_ATTRIBUTES:
            return True
        found = found.base
    return not isinstance(found, LocalSource) or found.is_derefed_cell_contents


_SHARED_ATTRIBUTES = ("__class__", "__closure__", "__globals__", "cell_contents")


def _changed() -> dict[int, VariableTracker]:
    """The user's objects that the trace has changed so far, by their ids."""
    effects = _side_effects()
    return {
        number: item
        for number, item in effects.id_to_variable.items()
        if isinstance(item.mutation_type, _EXISTING) and effects.is_modified(item)
    }


_EXISTING = (AttributeMutationExisting, ValueMutationExisting)


def _side_effects() -> Any:
    return InstructionTranslator.current_tx().output.side_effects


def _contents(items: list[VariableTracker], effects: Any) -> list[tuple[VariableTracker, str, list[Any]]]:
    """What each container holds that can be reached from changed objects: (object, field, parts)."""
    found: list[tuple[VariableTracker, str, list[Any]]] = []

    def note(item: VariableTracker) -> None:
        fields = ((name, value) for name, value in vars(item).items() if name not in item._nonvar_fields)
        found.extend((item, name, _parts(value)) for name, value in fields if isinstance(value, _CONTAINERS))

    VariableTracker.visit(note, [*items, *(list(values.values()) for values in effects.store_attr_mutations.values())])
    return found


_CONTAINERS = (list, dict, set, collections.deque)


def _parts(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects; a string, such as the name of an attribute, may be an equal one."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, str) and a == b) for a, b in zip(one, other, strict=True)
    )


class RestartTrace(exc.UnspecializeRestartAnalysis, exc.ShortenTraceback):
    """Raised by a backend, makes Dynamo trace the frame again: it lets what shortens a traceback pass as it is."""

    def __init__(self, reason: str) -> None:
        exc.TorchDynamoException.__init__(self, reason)
        self.restart_reason, self.first_useful_frame = reason, None
