"""Whether programs that one process saved run in another one, on this machine's device.

The cache could be tried on XLA's CPU plugin only, never on a TPU. So the first use of a folder on a TPU tries it there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kp_dynamo.compat.versions import version_of

logger = logging.getLogger(__name__)

SELF_TEST = (sys.executable, "-m", "kp_dynamo.cli.self_test")
_RUNNING = "KP_TPU_CACHE_TRIAL"  # set in the processes of a trial, which must not begin another one
_TIMEOUT_S = 600.0
# The content of a verdict's file. A file that is empty, as after a loss of power, is no verdict.
_WORKS = "works"
_SILENCE = "Another process may hold the device, or PJRT_DEVICE may name one that is not there: CPU always is."


class Outcome(NamedTuple):
    """What a trial found.

    Attributes:
        is_right: Whether the cache works.
        message: The figures, or what is wrong.
        is_lasting: Whether another trial would find the same, as far as one can know.
    """

    is_right: bool
    message: str
    is_lasting: bool = True


class SelfTest(NamedTuple):
    """The output of a self-test, and why it stopped early."""

    told: dict[str, Any]
    problem: str


def problem_at_first_use(folder: Path, plugin: str) -> str:
    """What a trial on this machine finds wrong; "" if nothing. A trial is run once for a folder and a plugin.

    Args:
        folder: The cache's folder, which keeps the result.
        plugin: The path of the device's plugin.
    """
    if os.environ.get(_RUNNING):
        return ""
    kept = folder / f"trial-{_digest(plugin)}"
    try:
        # Processes that start together, such as those of torchrun, would hold the device against each other's trials.
        with (folder / "trial-lock").open("w") as lock:
            _lock(lock.fileno())
            if (verdict := _verdict(kept)) is None:
                verdict = _tried(folder, plugin, kept)
    except OSError as cause:  # a full disk, for example
        return f"no trial could be made, or its result not kept in {folder} ({cause.strerror})."
    return "" if verdict == _WORKS else verdict


def _lock(file: int) -> None:
    """Wait for other trials. A file system without locks, such as a mounted bucket, is used without."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as problem:
        if problem.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


def _verdict(kept: Path) -> str | None:
    """What an earlier trial found; None if there was none."""
    return kept.read_text(errors="replace") or None if kept.is_file() else None


def _tried(folder: Path, plugin: str, kept: Path) -> str:
    """What a trial finds. It is written to the file `kept`, unless the device could not be used for once."""
    logger.info(
        "the disk cache is tried on this TPU, in two processes. This is done once for %s and %s.", folder, plugin
    )
    found = try_in_two_processes(_TIMEOUT_S)
    hint = f"or delete {kept} to try again" if found.is_lasting else "or start this process again"
    verdict = _WORKS if found.is_right else f"{found.message} Try: `python -m kp_dynamo doctor --cache`, {hint}."
    if not found.is_lasting:
        return verdict
    temporary = kept.with_suffix(f".{secrets.token_hex(8)}")
    temporary.write_text(verdict, errors="surrogateescape")  # the folder's name may be no UTF-8
    temporary.replace(kept)
    return verdict


def _digest(plugin: str) -> str:
    """Of what a trial depends on."""
    about = os.stat(plugin)
    parts = os.path.realpath(plugin), about.st_size, about.st_mtime_ns, version_of("kp_dynamo"), version_of("torch_xla")
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def try_in_two_processes(timeout_s: float) -> Outcome:
    """Run the self-test in two processes that share an empty folder; the second must load what the first saved."""
    with tempfile.TemporaryDirectory(prefix="kp_dynamo-") as folder:
        processes = []
        for which in ("first", "second"):
            ran = run_self_test(timeout_s, folder)
            if "disk" not in ran.told:
                # Another process may hold the device, also since the first one has ended. But if the second one has
                # started the device, it stopped at what it loaded.
                is_lasting = which == "second" and "device" in ran.told
                return Outcome(False, f"the {which} process stopped: {ran.problem}", is_lasting)
            processes.append(ran.told)
    wrong = _problem(*processes)
    return Outcome(not wrong, wrong or _success(*processes))


def _problem(first: dict[str, Any], second: dict[str, Any]) -> str:
    """What is wrong with the two runs; "" if nothing."""
    for which, told in (("first", first), ("second", second)):
        if told["disk"]["state"] != "on":
            return f"off in the {which} process: {told['disk']['state']}"
        if not told["difference"] <= told["allowed"]:  # also if it is no number
            return f"the {which} process differs from eager by {told['difference']:.1e}, allowed {told['allowed']:.0e}"
    if not first["disk"]["saved"]:
        return f"the first process saved no program: {_counted(first['disk']['unsaved'])}"
    if any(second["disk"]["misses"].values()):
        return (
            f"the second process loaded {second['disk']['hits']} programs and compiled others again: "
            f"{_counted(second['disk']['misses'])}"
        )
    if first["digest"] != second["digest"]:
        return "the programs that the second process loaded compute other results than in the first"
    return ""


def _success(first: dict[str, Any], second: dict[str, Any]) -> str:
    saved, loaded = first["disk"], second["disk"]
    return (
        f"the first process compiled and saved {saved['saved']} programs in {saved['compile_s']:.2f} s "
        f"({saved['saved_bytes'] / 1e6:.2f} MB); the second loaded them in {loaded['load_s']:.2f} s, and its results "
        "are equal to the last bit"
    )


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in reasons.items() if number) or "no reason was counted"


def run_self_test(timeout_s: float, *arguments: str) -> SelfTest:
    """Run `kp_dynamo.cli.self_test`.

    The user's disk cache stays out of it: a self-test with a folder enables the cache in that one. So do flags that ask
    for dumps, with which the cache loads nothing.
    """
    environment = {name: value for name, value in os.environ.items() if name != "KP_TPU_CACHE_DIR"}
    for name in environment.keys() & {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}:
        environment[name] = " ".join(flag for flag in environment[name].split() if "xla_dump" not in flag)
    environment[_RUNNING] = "1"
    command = [*SELF_TEST, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        problem = f"nothing{' more' if output else ''} within {timeout_s:g} s. {_SILENCE}"
        return SelfTest(_told(output), problem)
    return SelfTest(_told(done.stdout), _end_of(done))


def _told(output: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # a line of somebody else
            told |= json.loads(line) if line.startswith("{") else {}
    return told


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return last[0] if last else f"its process ended with {done.returncode}"
