"""`doctor`: installed versions, device start, a self-test of a small compilation, and known limits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from kp_dynamo.cli.check_disk_cache import check_disk_cache
from kp_dynamo.cli.checks import Check
from kp_dynamo.compat.known_limits import EARLIER_LIMITS, KNOWN_LIMITS, KnownLimit
from kp_dynamo.compat.versions import CURE, check_versions, earlier_version, version_of
from kp_dynamo.disk_cache.trial import run_self_test
from kp_dynamo.exceptions import TPUBackendError

_DISTRIBUTIONS = ("kp_dynamo", "torch", "torch_xla", "libtpu", "jax", "jaxlib")
_ON = {"CPU": ": there is no TPU here, or PJRT_DEVICE says so; compiled programs run on the processor, right but slow"}
_SETTINGS = ("PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TORCH_LOGS", "KP_TPU_LOG", "KP_TPU_CACHE_DIR")


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`; `str()` is for people, `to_dict()` for JSON.

    Attributes:
        versions: By distribution, "" if not installed; libtpu and jax are optional.
        settings: The relevant environment variables that are set.
        checks: The checks, in order; those that could not run after a failure are omitted.
        known_limits: Known problems with these versions.
    """

    versions: dict[str, str]
    settings: dict[str, str]
    checks: tuple[Check, ...]
    known_limits: tuple[KnownLimit, ...] = KNOWN_LIMITS

    @property
    def is_healthy(self) -> bool:
        """Whether nothing failed."""
        return all(check.status == "ok" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        return {"is_healthy": self.is_healthy, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diagnose(timeout_s: float = 300.0, *, disk_cache: bool = False) -> Diagnosis:
    """Check this machine. The device starts in a separate process, so a device that hangs or crashes is only reported.

    Args:
        timeout_s: Time limit for starting the device and compiling. A TPU that others use can take minutes.
        disk_cache: Also save programs in one process and load them in another, each within `timeout_s`.
    """
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in _DISTRIBUTIONS}}
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    checks = [_check_versions(), _check_registration()]
    if all(check.status == "ok" for check in checks):
        checks += _check_device(timeout_s)
    if disk_cache and all(check.status == "ok" for check in checks):
        checks.append(check_disk_cache(timeout_s))
    return Diagnosis(versions, settings, tuple(checks), EARLIER_LIMITS if earlier_version() else KNOWN_LIMITS)


def _check_versions() -> Check:
    try:
        fitting = check_versions()
    except TPUBackendError as problem:
        return Check("versions", "failed", str(problem))
    less = f", with lowering='stock' alone; for all the rest: {CURE}" if earlier_version() else ""
    return Check("versions", "ok", f"{' and '.join(f'{n} {v}' for n, v in fitting.items())} work together{less}")


def _check_registration() -> Check:
    homes = {entry.value for entry in metadata.entry_points(group="torch_dynamo_backends", name="kp_tpu")}
    if homes == {"kp_dynamo.backend:kp_tpu"}:
        return Check("registration", "ok", 'torch.compile finds backend="kp_tpu" without an import')
    found = f"found instead: {', '.join(sorted(homes))}" if homes else "there is no entry point of that name"
    return Check(
        "registration", "failed", f'torch.compile does not find backend="kp_tpu": {found}; install the package with pip'
    )


def _check_device(timeout_s: float) -> Iterator[Check]:
    told, problem = run_self_test(timeout_s)
    if "device" not in told:
        yield Check("device", "failed", f"the XLA device does not start: {problem}")
        return
    yield Check("device", "ok", f"{told['device']} starts, a {told['kind']}{_ON.get(told['kind'], '')}")
    if "difference" not in told:
        yield Check("self-test", "failed", f"a small model does not compile: {problem}")
        return
    difference, allowed = told["difference"], told["allowed"]
    text = (
        f"result and gradients of a small compiled model differ from eager by {difference:.1e}, allowed {allowed:.0e}"
    )
    yield Check("self-test", "ok" if difference <= allowed else "failed", text)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield "versions: " + ", ".join(
        f"{name} {version or 'not installed'}" for name, version in diagnosis.versions.items()
    )
    yield "settings: " + (", ".join(f"{name}={value}" for name, value in diagnosis.settings.items()) or "none")
    for check in diagnosis.checks:
        yield f"{check.status:6} {check.name}: {check.message}"
    yield "known limits:"
    for limit in diagnosis.known_limits:
        yield f"  {limit.what}"
        yield f"    {limit.cure}"
