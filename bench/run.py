"""`make bench`: every benchmark, one after the other."""

from __future__ import annotations

import argparse
import time

from tqdm import tqdm

from bench import (
    bench_components,
    buckets,
    compile_memory,
    first_call,
    per_call,
    report,
    second_compile,
    step_time,
)

BENCHMARKS = {
    "components": bench_components.main,
    "per_call": per_call.main,
    "second_compile": second_compile.main,
    "compile_memory": compile_memory.main,
    "step_time": step_time.main,
    "first_call": first_call.main,
    "buckets": buckets.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}; all by default")
    chosen = parser.parse_args().names or list(BENCHMARKS)
    unknown = sorted(set(chosen) - set(BENCHMARKS))
    if unknown:
        parser.error(f"{unknown[0]!r} is not a benchmark. Allowed: {', '.join(BENCHMARKS)}")
    print(", ".join(f"{name} {value}" for name, value in report.environment().items()))
    start = time.perf_counter()
    for name in (progress := tqdm(chosen, unit="benchmark")):
        progress.set_description(name)
        BENCHMARKS[name]()
    print(f"\nTook {(time.perf_counter() - start) / 60:.1f} minutes; figures are in bench/results/.")


if __name__ == "__main__":
    main()
