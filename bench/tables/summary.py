"""The table of the README: six rows of all results."""

from __future__ import annotations

from bench.tables.results import load, markdown, slashed

VARIANTS = ("eager", "openxla", "kp_tpu float32", "kp_tpu")
TITLES = ("", "eager", "openxla, float32", "kp_tpu, float32", "kp_tpu, balanced (bfloat16)")


def summary() -> str:
    rows = (_first_call(), _second_compile(), _per_call(), _step_time(), _lengths(), _v5e())
    return markdown(TITLES, rows)


def _first_call() -> list[str]:
    rows, modes = load("first_call"), ("inference", "training")
    cells = [slashed((rows.row(variant=v, mode=m)["CPU s"] for m in modes), ".1f") for v in VARIANTS]
    return ["first call of a 32-block Llama, inference / training, CPU-seconds", *cells]


def _second_compile() -> list[str]:
    rows = load("second_compile")
    openxla, ours = (f"{rows.row(variant=v)['second CPU s']:.2f}" for v in ("openxla", "kp_tpu"))
    return ["compiling a second, equal 8-block Llama, CPU-seconds", "", openxla, "", ours]


def _per_call() -> list[str]:
    rows, sizes = load("per_call"), (8, 64, 256)

    def cell(variant: str) -> str:
        return slashed((rows.row(parameters=n, variant=variant)["main thread us"] for n in sizes), ".0f")

    title = "host time of a call with 8 / 64 / 256 parameter tensors, us (eager: with the computation)"
    return [title, cell("eager"), cell("openxla"), "", cell("kp_tpu")]


def _step_time() -> list[str]:
    rows, models = load("step_time"), ("gpt", "llama", "bert")
    cells = [slashed((rows.row(model=m, mode="training", variant=v)["ms"] for m in models), ".0f") for v in VARIANTS]
    return ["training step of GPT / Llama / BERT, two blocks, ms", *cells]


def _lengths() -> list[str]:
    rows = load("buckets")
    openxla, ours = (f"{rows.row(model='llama', variant=v)['total_s']:.0f}" for v in ("openxla", "buckets"))
    return ["100 lengths of a Llama with all compiles, seconds; kp_tpu with `buckets`", "", openxla, "", ours]


def _v5e() -> list[str]:
    rows, models = load("v5e"), ("GPT-2, B 2, S 1024", "Llama, V 32000", "BERT")

    def cell(variant: str) -> str:
        found = (rows.row(model=m, mode="train", variant=variant)["modelled ms"] for m in models)
        return slashed(found, ".1f")

    title = (
        "training step of transformers' GPT-2 (batch 2, length 1024) / Llama / BERT (both batch 4, length 512), "
        "two layers, on a v5e, modelled ms (no chip)"
    )
    return [title, "", cell("openxla"), "", cell("balanced")]
