"""`make bench-units`: small models compiled by a v5e's compiler, at each level and through stock openxla.

No time here is measured on a chip, see `bench.compared`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.compared import OPENXLA, figures, with_ratios
from bench.unit_workloads import CAUSAL, MODELS, WITH_LENGTHS, workload

LENGTHS = (512, 2048)
LEVELS = ("conservative", "balanced", "aggressive")
PALLAS = "balanced + Pallas"
"""For models whose attention the kernel supports; its cycles exclude the kernel, which has a roofline instead."""
OPTIONS: dict[str, dict[str, Any]] = {
    **{level: {"level": level} for level in LEVELS},
    PALLAS: {"level": "balanced", "extra_passes": [kp_dynamo.FlashAttention()]},
}


def cases(models: list[str], lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, int, bool]]:
    """(model, length, whether it trains); models without a length appear once."""
    for length in lengths:
        for model in models:
            if length == lengths[0] or model in WITH_LENGTHS:
                yield model, length, False
                yield model, length, True


def variants(model: str) -> tuple[str, ...]:
    """What a model is compiled through, openxla first."""
    return (OPENXLA, *LEVELS, *([PALLAS] if model in CAUSAL else []))


def measure(model: str, length: int, train: bool, variant: str) -> dict[str, Any]:
    """One row: a model through a level or through openxla."""
    found = figures(workload(model, length), train, variant, OPTIONS.get(variant, {}))
    if variant != PALLAS:
        found.pop("roofline of calls ms")
    return {"model": model, "S": length, "mode": "train" if train else "infer", "variant": variant, **found}


def picture(rows: list[dict[str, Any]]) -> None:
    """Modelled time of each level over openxla's, by case, as bench/results/units.png."""
    names = list(dict.fromkeys(_title(r) for r in rows if r["variant"] != OPENXLA))
    figure = Figure(figsize=(9, 1 + 0.35 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for offset, (level, color) in enumerate(zip(LEVELS, ("#9bb7d4", "#3366aa", "#dd8833"), strict=True)):
        ratios = {_title(r): r["modelled ms ratio"] or 0 for r in rows if r["variant"] == level}
        places = [names.index(name) + 0.27 * (offset - 1) for name in ratios]
        axes.barh(places, list(ratios.values()), height=0.25, label=level, color=color)
    axes.axvline(1, color="#444444", label="stock openxla")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="modelled time over stock openxla's, on a v5e (lower is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    report.RESULTS.mkdir(exist_ok=True)
    figure.savefig(report.RESULTS / "units.png", dpi=120)


def _title(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['mode']} S{row['S']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.units", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of: {', '.join(MODELS)}; all by default")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="S")
    parser.add_argument(
        "--keep",
        nargs="+",
        default=[],
        choices=(OPENXLA, *LEVELS, PALLAS),
        help="take these rows from the last time, if there",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.models) - set(MODELS))
    if unknown:
        parser.error(f"{unknown[0]!r} is not a model. Allowed: {', '.join(MODELS)}")
    rows: list[dict[str, Any]] = []
    for model, length, train in tqdm(list(cases(args.models or list(MODELS), tuple(args.lengths))), unit="case"):
        case = {"model": model, "S": length, "mode": "train" if train else "infer"}
        kept = {variant: report.last_row("units", **case, variant=variant) for variant in args.keep}
        found = [kept.get(variant) or measure(model, length, train, variant) for variant in variants(model)]
        rows += with_ratios(found)
        _keep(rows)
    print(f"\n{TITLE}\n\n{report.table(rows)}\n")


TITLE = "What a v5e's compiler makes of one block (gpt4: four) and head of width 1024 (estimates; no chip ran this)"


def _keep(rows: list[dict[str, Any]]) -> None:
    """Write the rows, and keep the existing rows of other cases: a run takes long and may cover only some models."""
    file = report.RESULTS / "units.json"
    done = {_case(row) for row in rows}
    together = [row for row in report.last_rows("units") if _case(row) not in done] + rows
    together.sort(key=lambda row: (row["S"], list(MODELS).index(row["model"]), row["mode"]))
    report.RESULTS.mkdir(exist_ok=True)
    content = {"name": "units", "title": TITLE, "rows": together, "environment": report.environment()}
    file.write_text(json.dumps(content, indent=1) + "\n")
    picture(together)


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["S"], row["mode"]


if __name__ == "__main__":
    main()
