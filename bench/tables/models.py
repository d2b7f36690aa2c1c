"""The tables of `bench.v5e` and `bench.kernels`: models as users have them, by a v5e's compiler."""

from __future__ import annotations

from bench.tables.results import Row, load, markdown, slashed, text, with_caption

TIMES = ("cycles ms", "modelled ms")
RATIOS = ("cycles ms ratio", "modelled ms ratio")
HEADER = ("", "openxla, ms", "balanced, ms", "balanced over openxla", "peak over openxla", "balanced over its bound")


def models() -> str:
    """A line a case: both times, their ratio and that of the peak, and our modelled time over its lower bound."""
    results = load("v5e")
    ours = {_case(row): row for row in results.rows if row["variant"] == "balanced"}

    def line(base: Row) -> list[str]:
        found = ours[_case(base)]
        ratios = slashed((found[name] for name in RATIOS), ".2f") if found[RATIOS[0]] else ""
        bounds = (text(found[name], ".2f") for name in ("peak MiB ratio", "over the floors"))
        return [", ".join(_case(base)), _times(base), _times(found), ratios, *bounds]

    bases = (row for row in results.rows if row["variant"] == "openxla")
    return with_caption(results, markdown(HEADER, map(line, bases)))


def kernels() -> str:
    """A line a case: both times without the kernel, and with it, where its calls have a roofline and no cycles."""
    results = load("kernels")

    def line(row: Row) -> list[str]:
        without = slashed((row[f"{name} without"] for name in TIMES), ".2f")
        times = (text(row[name], ".2f") for name in ("cycles ms", "roofline of calls ms", "modelled ms"))
        peaks = slashed((row["peak MiB without"], row["peak MiB"]), ".0f")
        return [", ".join(_case(row)), without, *times, peaks]

    header = (
        "", "balanced, ms", "with the kernel: cycles ms without the calls", "roofline of the calls", "modelled ms",
        "peak without / with",
    )  # fmt: skip
    return with_caption(results, markdown(header, map(line, results.rows)))


def _case(row: Row) -> tuple[str, str]:
    return row["model"], row["mode"]


def _times(row: Row) -> str:
    return "not compiled" if "failed" in row else slashed((row[name] for name in TIMES), ".2f")
