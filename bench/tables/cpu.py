"""Tables of what `make bench` measured on XLA:CPU."""

from __future__ import annotations

from bench.tables.results import Row, columns, load, markdown, text, with_caption

FORMATS = {
    "first_call": {
        "mode": "", "variant": "", "CPU s": ".1f", "over openxla": ".2f", "wall s": ".1f", "our passes, wall s": ".2f",
    },
    "second_compile": {
        "variant": "", "first CPU s": ".2f", "second CPU s": ".2f", "over Dynamo alone": ".2f",
        "AOTAutograd traces": "", "XLA programs": "",
    },
    "per_call": {"parameters": "", "variant": "", "main thread us": ".0f", "over openxla": ".2f", "wall us": ".0f"},
    "compile_memory": {
        "variant": "", "parameters and arguments MiB": ".0f", "peak above them MiB": ".0f",
        "peak above them at width 64 MiB": ".0f", "copies of parameters and arguments": ".2f",
    },
    "depth": {
        "layers": "", "backend s": ".2f", "AOTAutograd and passes s": ".2f", "trace and XLA s": ".2f",
        "finding layers s": ".2f", "Dynamo and running s": ".2f", "host ms of a step": ".1f",
        "with 4 layers a program": ".1f",
    },
    "buckets": {"model": "", "variant": "", "total_s": ".1f", "programs": ""},
    "components": {"component": "", "what": "", "ms": ".2f", "programs": ""},
}  # fmt: skip
"""The shown columns of a result, each with its format."""


def as_written(name: str) -> str:
    """All rows of a result."""
    results = load(name)
    return with_caption(results, columns(results.rows, FORMATS[name]))


def step_time() -> str:
    """A line a model and mode, a column a variant."""
    results = load("step_time")
    variants = list(dict.fromkeys(row["variant"] for row in results.rows))
    cases = list(dict.fromkeys((row["model"], row["mode"]) for row in results.rows))

    def line(model: str, mode: str) -> list[str]:
        found = [results.row(model=model, mode=mode, variant=name) for name in variants]
        return [f"{model}, {mode}", *map(_step, found)]

    return with_caption(results, markdown(["ms (over openxla)", *variants], (line(*case) for case in cases)))


def _step(row: Row) -> str:
    return f"{text(row['ms'], '.1f')} ({text(row['over openxla'], '.2f')})"
