"""Tables of what the TPUs' compilers estimate: cycles ms / modelled ms, and the peak of the largest program in MiB."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

from bench.tables.results import Results, Row, columns, load, markdown, slashed, text, verdict, with_caption

TIMES = ("cycles ms", "modelled ms")
RATIOS = ("cycles ms ratio", "modelled ms ratio")
PEAK = ("peak MiB ratio",)
PALLAS = "balanced + Pallas"


@dataclass(frozen=True)
class Goal:
    """Ratios to openxla that a level should not exceed, each a geometric mean over models."""

    models: tuple[str, ...]
    length: int
    mode: str
    limits: dict[str, float]
    figures: tuple[str, ...] = RATIOS

    def line(self, results: Results) -> list[str]:
        what = "peak of " if self.figures == PEAK else ""
        case = f"{self.mode}, S {self.length}: {what}{', '.join(self.models)}"
        return [case, *(cell for level, limit in self.limits.items() for cell in self._cells(results, level, limit))]

    def _cells(self, results: Results, level: str, limit: float) -> tuple[str, str]:
        rows = [results.row(model=name, S=self.length, mode=self.mode, variant=level) for name in self.models]
        means = [geometric_mean(row[name] for row in rows) for name in self.figures]
        return slashed(means, ".3f"), f"{limit:.2f}: {verdict(max(means) <= limit)}"


GOALS = (
    Goal(("gpt", "llama", "bert"), 512, "infer", {"aggressive": 0.70, "balanced": 0.78}),
    Goal(("gpt", "llama"), 2048, "infer", {"aggressive": 0.28, "balanced": 0.35}),
    Goal(("gpt", "llama", "bert"), 512, "train", {"aggressive": 0.58, "balanced": 0.65}),
    Goal(("gpt",), 2048, "train", {"aggressive": 0.28, "balanced": 0.33}),
    Goal(("gpt4",), 512, "train", {"aggressive": 0.45, "balanced": 0.55}, PEAK),
)


def levels() -> str:
    """A line a case: openxla's times, each level's as ratios to them, and the peak at balanced as a ratio."""
    results = load("units")
    names = ("conservative", "balanced", "aggressive")

    def line(base: Row) -> list[str]:
        case = {name: base[name] for name in ("model", "S", "mode")}
        found = [results.row(**case, variant=name) for name in names]
        return [
            f"{base['model']}, {base['mode']}, S {base['S']}",
            slashed((base[name] for name in TIMES), ".2f"),
            *("libtpu fails" if "failed" in row else slashed((row[name] for name in RATIOS), ".2f") for row in found),
            text(found[1]["peak MiB ratio"], ".2f"),
        ]

    bases = (row for row in results.rows if row["variant"] == "openxla")
    return with_caption(results, markdown(["", "openxla, ms", *names, "peak, balanced"], map(line, bases)))


def goals() -> str:
    results = load("units")
    header = ["over openxla", *(cell for level in GOALS[0].limits for cell in (level, "at most"))]
    return markdown(header, (goal.line(results) for goal in GOALS))


def pallas() -> str:
    """A line a case: balanced, and balanced with the kernel, whose calls have a roofline and no cycles."""
    results = load("units")

    def line(row: Row) -> list[str]:
        base = results.row(**{name: row[name] for name in ("model", "S", "mode")}, variant="balanced")
        case = f"{row['model']}, {row['mode']}, S {row['S']}"
        times = (text(row[name], ".2f") for name in ("cycles ms", "roofline of calls ms", "modelled ms"))
        return [case, _figures(base), *times, _peak(row)]

    header = ("", "balanced", "Pallas: cycles ms without the calls", "roofline of the calls", "modelled ms", "peak")
    return markdown(header, (line(row) for row in results.rows if row["variant"] == PALLAS))


def chips() -> str:
    """A line a case and chip: without rewrite_attention and fold_views, with the first, with both."""
    results = load("chips")
    variants = {"neither": "without both", "attention": "+ rewrite_attention", "both": "+ fold_views"}

    def line(row: Row) -> list[str]:
        case = f"{row['model']}, {row['mode']}, {row['chip']}"
        return [case, *(_figures(row, f"{name}: ") for name in variants)]

    rows = sorted(results.rows, key=lambda row: (row["mode"], row["model"], row["chip"]))
    return with_caption(results, markdown(["", *variants.values()], map(line, rows)))


def checkpoint() -> str:
    results = load("checkpoint")
    ratios = {f"{name} ratio": ".2f" for name in ("peak MiB", "TFLOP", "Mcycles", "modelled ms")}
    return with_caption(results, columns(results.rows, {"checkpoint": "", "blocks": "", "peak MiB": ".0f", **ratios}))


def memory_estimate() -> str:
    results = load("memory_estimate")
    formats = {
        "model": "", "size": "", "precision": "", "checkpoint": "",
        "compiler MiB": ".0f", "estimate MiB": ".0f", "error": "+.0%",
    }  # fmt: skip
    return with_caption(results, columns(results.rows, formats))


def blocks() -> str:
    results = load("blocks")
    formats = {
        "layers": "", "blocks": "", "programs": "", "libtpu CPU s": ".1f",
        "cycles ms": ".2f", "modelled ms": ".2f", "peak MiB": ".0f",
    }  # fmt: skip
    return with_caption(results, columns(results.rows, formats))


def while_loop() -> str:
    results = load("while_loop")
    formats = {
        "model": "", "layers": "", "variant": "", "runs of programs": "", "cycles ms": ".2f", "modelled ms": ".2f",
        "peak MiB": ".0f", "libtpu CPU s": ".1f",
    }  # fmt: skip
    return with_caption(results, columns(results.rows, formats))


def _figures(row: Row, prefix: str = "") -> str:
    return f"{slashed((row[prefix + name] for name in TIMES), '.2f')}, {_peak(row, prefix)}"


def _peak(row: Row, prefix: str = "") -> str:
    return text(row[f"{prefix}peak MiB"], ".0f")
