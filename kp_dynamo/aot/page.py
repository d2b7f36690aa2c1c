"""A report as one self-contained HTML page with pictures, without scripts."""

from __future__ import annotations

import io
import itertools
from html import escape
from typing import Any

from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.memory_line import in_order
from kp_dynamo.aot.report_text import text_of
from kp_dynamo.exceptions import TPUNotAvailableError
from kp_dynamo.hardware import CHIPS
from kp_dynamo.page.units import time_unit

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{background:#f6f6f4;padding:1rem;overflow-x:auto;font-size:13px;line-height:1.4}"
    "figure{margin:2rem 0}figcaption{color:#555;font-size:14px}svg{max-width:100%;height:auto}"
)
_LABELS = {"custom call": "custom call (roofline)"}
_COLORS = ("#3366aa", "#dd8833", "#55aa77", "#aa4455", "#8866aa", "#999999")


def page_of(report: AotFigures, verbose: bool = False) -> str:
    """The page: pictures first, then the whole text."""
    title = f"{'Training step' if report.train else 'Inference'} on one {report.target}"
    pictures = [
        (
            "Roofline: work per byte to and from the chip's memory against speed. Each point is a program.",
            _roofline(report),
        ),
        ("Where the modelled time goes, by kind of operation. Custom calls take at least that long.", _bars(report)),
        ("Memory of each program against the chip's.", _memory(report)),
    ]
    if report.calls:
        pictures.append(("Memory over the step, at each run of a program.", _memory_over_the_step(report)))
    figures = "".join(f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for text, svg in pictures)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(DISCLAIMER)}</p>"
        f"{figures}<h2>The report</h2><pre>{escape(text_of(report, verbose))}</pre></body></html>\n"
    )


def _drawing(height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise TPUNotAvailableError(
            'the pictures of the page need matplotlib. Try: pip install "kp_dynamo[tpu]"'
        ) from cause
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure as an SVG element, without a date, so that equal reports give equal pages."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _roofline(report: AotFigures) -> str:
    chip = CHIPS[report.target]
    figure, axes = _drawing(4.5)
    ridge = chip.bf16_flops / chip.hbm_bytes_per_s
    moving = [p for p in report.programs if p.hbm_bytes and p.modelled_ms and p.flops]
    points = [(p.flops / p.hbm_bytes, p.flops / (p.modelled_ms * 1e-3), p.name) for p in moving]
    low = min([ridge, *(x for x, _, _ in points)]) / 4
    high = max([ridge, *(x for x, _, _ in points)]) * 4
    axes.plot([low, ridge, high], [low * chip.hbm_bytes_per_s, chip.bf16_flops, chip.bf16_flops], color="#444444")
    for (x, y, name), color in zip(points, _COLORS * len(points), strict=False):
        axes.scatter([x], [y], color=color, zorder=3)
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(6, -12))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of the chip's memory",
        ylabel="FLOP/s",
        title=f"{report.target} roofline",
    )
    return _svg(figure)


def _bars(report: AotFigures) -> str:
    figure, axes = _drawing(1.2 + 0.5 * len(report.programs))
    unit = time_unit(report.modelled_ms)
    kinds = sorted({kind for p in report.programs for kind in p.ms_by_kind})
    names = [f"{p.name} x {p.runs}" if p.runs > 1 else p.name for p in report.programs]
    left = [0.0] * len(report.programs)
    for kind, color in zip(kinds, _COLORS, strict=False):
        values = [p.runs * p.ms_by_kind.get(kind, 0.0) * unit.per_ms for p in report.programs]
        axes.barh(names, values, left=left, label=_LABELS.get(kind, kind), color=color)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel=f"modelled {unit.name} of a step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, frameon=False)
    return _svg(figure)


def _memory(report: AotFigures) -> str:
    figure, axes = _drawing(1.2 + 0.5 * len(report.programs))
    names = [p.name for p in report.programs]
    parts = {
        "arguments": [p.argument_bytes - p.alias_bytes for p in report.programs],
        "results": [p.output_bytes for p in report.programs],
        "temporaries": [p.temp_bytes for p in report.programs],
        "code": [p.generated_code_bytes for p in report.programs],
    }
    left = [0.0] * len(names)
    for (label, sizes), color in zip(parts.items(), _COLORS, strict=False):
        gigabytes = [size / 1e9 for size in sizes]
        axes.barh(names, gigabytes, left=left, label=label, color=color)
        left = [start + value for start, value in zip(left, gigabytes, strict=True)]
    axes.axvline(report.memory_budget_bytes / 1e9, color="#aa4455", linestyle="--", label="allowed")
    axes.axvline(CHIPS[report.target].hbm_bytes / 1e9, color="#444444", label=f"memory of a {report.target}")
    axes.invert_yaxis()
    axes.set(xlabel="GB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, frameon=False)
    return _svg(figure)


def _memory_over_the_step(report: AotFigures) -> str:
    figure, axes = _drawing(3.5)
    points = report.memory_line
    runs = range(1, len(points) + 1)
    live, peak = [p.live_bytes / 1e9 for p in points], [p.peak_bytes / 1e9 for p in points]
    axes.fill_between(runs, live, step="mid", color=_COLORS[0], alpha=0.6, label="live when the program starts")
    axes.step(runs, peak, where="mid", color=_COLORS[1], label="peak of the program")
    if report.step_peak_bytes > report.memory_budget_bytes / 4:  # otherwise the line would flatten the picture
        axes.axhline(report.memory_budget_bytes / 1e9, color="#aa4455", linestyle="--", label="allowed")
    names = in_order(points)
    first = itertools.accumulate((count for _, count in names[:-1]), initial=1)
    axes.set_xticks(list(first), [f"{name} x {count}" if count > 1 else name for name, count in names], rotation=90)
    axes.set(ylabel="GB", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return _svg(figure)
