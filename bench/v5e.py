"""`make bench-v5e`: models as users have them by a v5e's compiler, at level balanced and through stock openxla.

No time here is measured on a chip, see `bench.compared`. `bench.units` has our own small models at each level.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean
from typing import Any

from tqdm import tqdm

from bench import report
from bench.compared import OPENXLA, figures, with_ratios
from bench.v5e_workloads import BY_NAME, CASES, Case

LEVEL = "balanced"
VARIANTS = (OPENXLA, LEVEL)
LIMITS = {"train": 0.55, "infer": 0.65}
"""Of the geometric means of modelled time over openxla's."""
LARGEST_RATIO, LARGEST_PEAK_RATIO, NEAR_BOUND = 0.90, 0.95, 1.15
TITLE = "Models of transformers, timm and diffusers by a v5e's compiler (estimates; no chip ran this)"


def measure(case: Case, mode: str, variant: str) -> dict[str, Any]:
    """One row: a model through kp_tpu or through openxla."""
    train = mode == "train"
    made = case.workload(train, is_stock=variant == OPENXLA)
    found = figures(made, train, variant, {"level": LEVEL, **dict(case.options)})
    return {"model": case.name, "mode": mode, "variant": variant, **found}


def _keep(rows: list[dict[str, Any]]) -> None:
    """Write the rows, and keep the existing rows of other cases: a run takes long and may cover only some models."""
    done = {_case(row) for row in rows}
    together = [row for row in report.last_rows("v5e") if _case(row) not in done and row["model"] in BY_NAME] + rows
    together.sort(key=lambda row: (list(BY_NAME).index(row["model"]), row["mode"]))
    report.write(report.Report("v5e", TITLE, together, targets(together)))


def targets(rows: list[dict[str, Any]]) -> tuple[report.Target, ...]:
    """The means of both modes, and the worst rows; the ratio of a row near its lower bound is not judged."""
    ours = [row for row in rows if row["variant"] == LEVEL and row["modelled ms ratio"] is not None]
    by_mode = {mode: [row["modelled ms ratio"] for row in ours if row["mode"] == mode] for mode in LIMITS}
    far = [row["modelled ms ratio"] for row in ours if row["over the floors"] > NEAR_BOUND]
    peaks = [row["peak MiB ratio"] for row in ours]
    figures_and_limits = (
        *((f"{mode}: geometric mean of modelled time", geometric_mean, by_mode[mode], LIMITS[mode]) for mode in LIMITS),
        (f"modelled time, of rows over {NEAR_BOUND} times their bound", max, far, LARGEST_RATIO),
        ("peak", max, peaks, LARGEST_PEAK_RATIO),
    )
    return tuple(report.Target(name, of(found), limit) for name, of, found, limit in figures_and_limits if found)


def _case(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["mode"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.v5e", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of: {'; '.join(BY_NAME)}. Default: all")
    parser.add_argument("--modes", nargs="+", choices=("infer", "train"), default=["infer", "train"])
    parser.add_argument(
        "--keep", nargs="+", default=[], choices=VARIANTS, help="take these rows from the last time, if there"
    )
    args = parser.parse_args()
    unknown = sorted(set(args.models) - set(BY_NAME))
    if unknown:
        parser.error(f"{unknown[0]!r} is not a model. Allowed: {', '.join(BY_NAME)}")
    chosen = [case for case in CASES if not args.models or case.name in args.models]
    rows: list[dict[str, Any]] = []
    for case, mode in tqdm([(c, mode) for c in chosen for mode in c.modes if mode in args.modes], unit="case"):
        kept = {v: report.last_row("v5e", model=case.name, mode=mode, variant=v) for v in args.keep}
        rows += with_ratios([kept.get(variant) or measure(case, mode, variant) for variant in VARIANTS])
        _keep(rows)
    print(f"\n{TITLE}\n\n{report.table(rows)}\n")


if __name__ == "__main__":
    main()
