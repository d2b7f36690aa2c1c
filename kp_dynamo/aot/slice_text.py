"""The lines of a report that are about several chips."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.explanation.text_layout import first_of, table
from kp_dynamo.hardware import CHIPS

_MIB = 2**20
_NUM_LISTED = 20


def where_text(report: AotFigures) -> str:
    """ "one v5e", or "16 v5e (4x4, 2 hosts), mesh data=4,model=4, sharding fsdp+tensor"."""
    found = report.slice
    if found is None:
        return CHIPS[report.target].device_text()
    hosts = "1 host" if found.num_hosts == 1 else f"{found.num_hosts} hosts"
    devices = "" if report.num_devices == found.num_chips else f", {report.num_devices} devices"
    where = f"{found.num_chips} {report.target} ({found.topology}, {hosts}{devices})"
    return f"{where}, mesh {found.mesh}, sharding {found.sharding}"


def step_lines(report: AotFigures) -> Iterator[str]:
    """The time of a step on several chips; nothing for one."""
    if report.slice is None:
        return
    share = report.exposed_ms / report.step_ms if report.step_ms else 0
    tokens = "" if report.tokens_per_s is None else f", {report.tokens_per_s:.0f} tokens a second"
    yield (
        f"  step            {report.step_ms:.3f} ms: compute and {report.exposed_ms:.3f} ms of exposed communication "
        f"({share:.0%}){tokens}"
    )


def counted_text(report: AotFigures) -> str:
    """How the utilization counts causal attention, on several chips, where it is compared with other tools."""
    return "" if report.slice is None else " (causal attention counts in full)"


def slice_lines(report: AotFigures, verbose: bool) -> Iterator[str]:
    """The communication of a step, and the large tensors that are whole on every device."""
    if report.slice is None:
        return
    device = CHIPS[report.target].device_word
    yield f"communication of one {device} in a step"
    rows = [("", "along", "count", "MiB", "on the links ms", "exposed ms", "overlapped")]
    for row in report.collectives:
        overlapped = max(0.0, 1 - row.exposed_ms / row.link_ms) if row.link_ms else 0.0
        times = (f"{row.link_ms:.3f}", f"{row.exposed_ms:.3f}", f"{overlapped:.0%}")
        rows.append((row.kind, row.axes, str(row.count), f"{row.num_bytes / _MIB:.1f}", *times))
    if len(rows) == 1:
        yield "  none"
    else:
        yield from (f"  {line}" for line in table(rows, 2))
    yield ""
    whole = report.slice.whole
    if whole:
        yield f"whole on every {device}, more than 64 MiB: {len(whole)}"
        yield from (f"  {line}" for line in first_of(whole, None if verbose else _NUM_LISTED))
        yield ""
