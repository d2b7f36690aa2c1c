"""`doctor --cache`: whether programs that one process saved run in another one, on this machine's device."""

from __future__ import annotations

import tempfile
from typing import Any

from kp_dynamo.cli.checks import Check, run_self_test
from kp_dynamo.compat.pjrt_plugins import require_plugin
from kp_dynamo.exceptions import TPUCacheError

_NAME = "disk cache"


def check_disk_cache(timeout_s: float) -> Check:
    """Run the self-test in two processes that share an empty folder; the second must load what the first saved."""
    try:
        require_plugin()
    except TPUCacheError as reason:
        return Check(_NAME, "ok", str(reason))
    with tempfile.TemporaryDirectory(prefix="kp_dynamo-") as folder:
        processes = []
        for which in ("first", "second"):
            told, problem = run_self_test(timeout_s, folder)
            if "disk" not in told:
                return Check(_NAME, "failed", f"the {which} process stopped: {problem}")
            processes.append(told)
    wrong = _problem(*processes)
    return Check(_NAME, "failed", wrong) if wrong else Check(_NAME, "ok", _success(*processes))


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
