"""Loads a model from `module_or_file:callable`, as given on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kp_dynamo.exceptions import TPUConfigurationError, TPUModelPreparationError


class ModelAndArgs(NamedTuple):
    """A model and its arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...]


def load_spec(spec: str) -> ModelAndArgs:
    """Import what `spec` names and call it for a model and its arguments.

    Args:
        spec: "package.module:callable" or "folder/file.py:callable"; the callable takes nothing and returns
            (model, args) with a tuple or list of arguments.

    Raises:
        TPUConfigurationError: The spec is malformed, names something that does not exist, or returns something else.
        TPUModelPreparationError: The callable raised.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise TPUConfigurationError(
            f"SPEC is {spec!r}; allowed: module:callable or file.py:callable, as in model.py:make"
        )
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    make = getattr(module, name, None)
    if not callable(make):
        raise TPUConfigurationError(f"{place} has no callable {name!r}; define it, returning (model, args)")
    try:
        made = make()
    except Exception as cause:
        raise TPUModelPreparationError(
            f"{spec} raised {type(cause).__name__}: {cause}. It must return (model, args); call it from Python to see "
            "where it fails."
        ) from cause
    return _checked(made, spec)


def _module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise TPUConfigurationError(f"there is no module {name!r}; name one that Python finds from here, or a .py file")
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TPUConfigurationError(f"there is no file {str(path)!r}; name one as seen from here, or a module")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None, "a path that ends in .py has a loader"
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    # As for a script: modules beside the file can be imported, and pickle finds the module.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def _checked(made: Any, spec: str) -> ModelAndArgs:
    if not (
        isinstance(made, (tuple, list)) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))
    ):
        raise TPUConfigurationError(
            f"{spec} returned {_described(made)}; allowed: (model, args) with a callable and a tuple: (model, (x,))"
        )
    return ModelAndArgs(made[0], tuple(made[1]))


def _described(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
