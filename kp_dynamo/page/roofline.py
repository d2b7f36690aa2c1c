"""The roofline: work per byte of memory against speed, with the chip's two limits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kp_dynamo.page.drawing import FAINT, INK, SERIES, Drawing, in_page_colors
from kp_dynamo.page.pictures import clipped

MAX_LABELS = 10
_GAP = 0.1  # of the height of the axes, between two labels
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Point:
    """A program on the roofline: its name, its operations, its bytes to and from memory, and its time.

    `share_ms` is its time in a step, which decides what is labelled.
    """

    name: str
    flops: float
    num_bytes: float
    ms: float
    share_ms: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.num_bytes

    @property
    def speed(self) -> float:
        """FLOP per second."""
        return self.flops / (self.ms * 1e-3)


@in_page_colors
def roofline(points: Sequence[Point], flops_per_s: float, bytes_per_s: float) -> str:
    """The picture. Labels stand in a column beside the axes, so that none collide; the longest programs have one."""
    drawing = Drawing("roofline", 3.2, "Roofline: work per byte of memory against speed")
    axes, ridge = drawing.axes, flops_per_s / bytes_per_s
    low, high = (f([ridge, *(p.intensity for p in points)]) for f in (min, max))
    low, high = low / 4, high * 4
    bottom = min([low * bytes_per_s, *(p.speed for p in points)]) / 2
    axes.plot([low, ridge, high], [low * bytes_per_s, flops_per_s, flops_per_s], color=INK, linewidth=1.2)
    labelled = sorted(points, key=lambda p: -p.share_ms)[:MAX_LABELS]
    rows = sorted(labelled, key=lambda p: (-p.speed, p.intensity))
    for point in points:
        axes.plot([point.intensity], [point.speed], "o", color=FAINT, markersize=5)
    for number, (point, color) in enumerate(zip(rows, itertools.cycle(SERIES), strict=False)):
        axes.plot([point.intensity], [point.speed], "o", color=color, markersize=7)
        _label(drawing, point, number, color)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, flops_per_s * 2))
    axes.set(xlabel="FLOP per byte of the chip's memory")
    axes.yaxis.set_major_formatter(_speed_text)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0) if flops_per_s < 100 * bottom else (1.0,))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(lambda *_: "")
    return drawing.svg()


def _label(drawing: Drawing, point: Point, number: int, color: str) -> None:
    """The name at the right, with a line to its point."""
    drawing.axes.annotate(
        clipped(point.name),
        (point.intensity, point.speed),
        xytext=(1.04, 0.97 - _GAP * number),
        textcoords="axes fraction",
        va="center",
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkB": 4},
        annotation_clip=False,
    )


def _speed_text(value: float, _: object) -> str:
    """ "10 TFLOP/s"."""
    size, prefix = next((found for found in _PREFIXES if value >= found[0]), (1.0, ""))
    return f"{value / size:g} {prefix}FLOP/s"
