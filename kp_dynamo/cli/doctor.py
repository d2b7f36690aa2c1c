"""`doctor`: installed versions, device start, a self-test of a small compilation, and known limits."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from kp_dynamo.compat.known_limits import EARLIER_LIMITS, KNOWN_LIMITS, KnownLimit
from kp_dynamo.compat.versions import CURE, check_versions, earlier_version, version_of
from kp_dynamo.exceptions import TPUBackendError

Status = Literal["ok", "failed"]

_DISTRIBUTIONS = ("kp_dynamo", "torch", "torch_xla", "libtpu", "jax", "jaxlib")
_ON = {"CPU": ": there is no TPU here, or PJRT_DEVICE says so; compiled programs run on the processor, right but slow"}
_SELF_TEST = (sys.executable, "-m", "kp_dynamo.cli.self_test")
_SILENCE = "Another process may hold the device, or PJRT_DEVICE may name one that is not there: CPU always is."
_SETTINGS = ("PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TORCH_LOGS", "KP_TPU_LOG")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    message: str


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


def diagnose(timeout_s: float = 300.0) -> Diagnosis:
    """Check this machine. The device starts in a separate process, so a device that hangs or crashes is only reported.

    Args:
        timeout_s: Time limit for starting the device and compiling. A TPU that others use can take minutes.
    """
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in _DISTRIBUTIONS}}
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    checks = [_check_versions(), _check_registration()]
    if all(check.status == "ok" for check in checks):
        checks += _check_device(timeout_s)
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
    told, problem = _self_test(timeout_s)
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


def _self_test(timeout_s: float) -> tuple[dict[str, Any], str]:
    """The output of `kp_dynamo.cli.self_test`, and why it stopped early."""
    try:
        done = subprocess.run(_SELF_TEST, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        return _told(output), f"nothing{' more' if output else ''} within {timeout_s:g} s. {_SILENCE}"
    return _told(done.stdout), _problem(done)


def _told(output: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return {name: value for line in lines for name, value in line.items()}


def _problem(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return last[0] if last else f"its process ended with {done.returncode}"


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
