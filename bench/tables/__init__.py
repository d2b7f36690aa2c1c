"""Every generated table of README.md and docs, by the name between its markers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.tables import cpu, tpu
from bench.tables.fsdp import fsdp
from bench.tables.models import kernels, models
from bench.tables.published import published
from bench.tables.summary import summary
from bench.tables.tensor import tensor

TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    **{name: partial(cpu.as_written, name) for name in cpu.FORMATS},
    "step_time": cpu.step_time,
    "models": models,
    "kernels": kernels,
    "levels": tpu.levels,
    "goals": tpu.goals,
    "pallas": tpu.pallas,
    "chips": tpu.chips,
    "checkpoint": tpu.checkpoint,
    "memory_estimate": tpu.memory_estimate,
    "blocks": tpu.blocks,
    "while_loop": tpu.while_loop,
    "published": published,
    "fsdp": fsdp,
    "tensor": tensor,
}
