"""Makes "kp_tpu" a valid backend of accelerate, and so of the Trainer of transformers, which compiles through it.

accelerate keeps the names of backends in a closed enum, `DynamoBackend`. A `TorchDynamoPlugin` turns the name into a
member, and its other fields into the arguments of `torch.compile`. While the integration is enabled,

* the enum has the member KP_TPU;
* each plugin with this member gets the options;
* two errors of accelerate 1.11 are fixed, which occur with every backend if accelerate moves a model to the XLA device:
  `prepare` does not find the parameters of the compiled model, and `save_state` does not find the data set of a loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.config.modes import accept_mode
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.integrations.enum_member import add_member, remove_member
from kp_dynamo.integrations.environment_options import merged_options
from kp_dynamo.integrations.replaced_attributes import ReplacedAttributes

logger = logging.getLogger(__name__)

NAME = "KP_TPU"
BACKEND_VARIABLE = "ACCELERATE_DYNAMO_BACKEND"


@dataclass
class _Enabled:
    """The options of plugins, and what `disable_accelerate` restores."""

    options: dict[str, Any]
    backend_variable: str | None
    attributes: ReplacedAttributes


_enabled: _Enabled | None = None


def enable_accelerate(options: Mapping[str, Any] | None = None) -> None:
    """Make `Accelerator(dynamo_backend="kp_tpu")` and `TrainingArguments(torch_compile_backend="kp_tpu")` valid.

    Call it before you construct either. A second call only replaces the options: each `Accelerator` takes those of the
    last call before it was constructed.

    Args:
        options: As in `torch.compile(options=...)`. They override KP_TPU_OPTIONS, an environment variable that holds
            options as a JSON object. The `options` of a `TorchDynamoPlugin` override both, key by key.

    Raises:
        TPUConfigurationError: KP_TPU_OPTIONS is not a JSON object, or an option is unknown or has a bad value.
        ImportError: accelerate is not installed.
    """
    global _enabled
    chosen = merged_options(options)
    if _enabled is not None:
        _enabled.options = chosen
        return
    from accelerate import Accelerator, data_loader
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    attributes = ReplacedAttributes()
    _enabled = _Enabled(chosen, os.environ.get(BACKEND_VARIABLE), attributes)
    add_member(DynamoBackend, NAME)
    attributes.put(TorchDynamoPlugin, "__post_init__", _with_options(TorchDynamoPlugin.__post_init__))
    attributes.put(Accelerator, "_get_named_parameters", _of_uncompiled_models(Accelerator._get_named_parameters))
    if hasattr(data_loader, "MpDeviceLoaderWrapper"):  # only beside torch_xla
        attributes.put(data_loader.MpDeviceLoaderWrapper, "dataset", property(lambda self: self.dataloader.dataset))


def disable_accelerate() -> None:
    """Undo `enable_accelerate`. Models that accelerate has already prepared stay compiled.

    It also restores the environment variable in which `TrainingArguments` leaves the name of the backend, because
    accelerate would then refuse that name in every `Accelerator`.
    """
    global _enabled
    if _enabled is None:
        return
    from accelerate.utils import DynamoBackend

    _enabled.attributes.restore()
    remove_member(DynamoBackend, NAME)
    if os.environ.get(BACKEND_VARIABLE, "").upper() == NAME:
        _restore_variable(_enabled.backend_variable)
    _enabled = None


def _with_options(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `__post_init__` of `TorchDynamoPlugin` that also completes the plugins for this backend."""

    def post_init_with_options(self: Any) -> None:
        post_init(self)
        if _enabled is not None and self.backend.value == NAME:
            _complete(self, _enabled.options)

    return post_init_with_options


def _complete(plugin: Any, options: dict[str, Any]) -> None:
    """Give the plugin its options, and leave `mode` out: torch takes only one of them."""
    accept_mode(plugin.mode)
    plugin.mode = "default"
    plugin.options = {**options, **_own_options(plugin)} or None
    _warn_if_ignored(plugin)


def _own_options(plugin: Any) -> dict[str, Any]:
    given = plugin.options
    if isinstance(given, Mapping):
        # torch.compile takes this key out of the options before the backend sees them.
        CompileOptions.from_dict({name: value for name, value in given.items() if name != "guard_filter_fn"})
        return dict(given)
    CompileOptions.from_dict(given)  # raises unless it is None
    return {}


def _warn_if_ignored(plugin: Any) -> None:
    """Warn if accelerate will keep another plugin: it only takes that of the first `Accelerator` of a process."""
    from accelerate.state import AcceleratorState

    kept = AcceleratorState._shared_state.get("dynamo_plugin")
    if kept is not None and kept.to_dict() != plugin.to_dict():
        logger.warning(
            "accelerate keeps the compile settings of the first Accelerator of a process (backend=%r), so these have "
            "no effect on another one. Try: construct the Accelerator with kp_tpu first, or call "
            "accelerate.state.AcceleratorState._reset_state() before.",
            str(kept.backend).lower(),
        )


def _of_uncompiled_models(get_named_parameters: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator._get_named_parameters`, without the prefix `_orig_mod.` that compilation gives to the names."""

    def get_plain_names(self: Any, *objects: Any, **how: Any) -> Any:
        from accelerate.utils import extract_model_from_parallel

        if self.state.dynamo_plugin.backend.value == NAME:
            objects = tuple(
                extract_model_from_parallel(o, keep_torch_compile=False) if hasattr(o, "named_parameters") else o
                for o in objects
            )
        return get_named_parameters(self, *objects, **how)

    return get_plain_names


def _restore_variable(value: str | None) -> None:
    if value is None:
        del os.environ[BACKEND_VARIABLE]
    else:
        os.environ[BACKEND_VARIABLE] = value
