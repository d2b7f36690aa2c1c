"""The lines of Python that run a plan."""

from __future__ import annotations

from typing import Any

from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow

_OURS = "FlashAttention("
"""The pass that `kp_dynamo` has for this option; others are the user's own."""


def code_of(plan: PlanFigures) -> str:
    """A program that runs the winner; if that needs several hosts, the best way on one. "" if there is none.

    `model`, and `batches` in training or `batch` in inference, are the user's.
    """
    row = plan.winner if plan.winner.is_runnable else plan.one_host
    return "" if row is None else _lines_of(row, plan.train, plan.options)


def _lines_of(row: PlanRow, train: bool, given: dict[str, Any]) -> str:
    options = {**given, **({"checkpoint": row.checkpoint} if train else {})}
    lines = ["import torch", "import kp_dynamo", ""]
    if row.sharding:
        # A model that brings no plan for "tensor" needs them; any other ignores them.
        given_batch = "next(iter(batches))" if train else "batch"
        example = f", example_args=({given_batch},)" if "tensor" in row.sharding else ""
        shard = f"kp_dynamo.shard(model, mesh, {row.sharding!r}{example})  # before any other use"
        lines += [f"mesh = {row.mesh!r}", shard]
    lines.append(f'compiled = torch.compile(model, backend="kp_tpu"{_options(options) if options else ""})')
    batch = "kp_dynamo.shard_batch(batch, mesh)" if row.sharding else 'batch.to("xla")'
    if not row.sharding:
        lines[1:3] = ["import torch_xla", "import kp_dynamo", "", 'model.to("xla")']
    if not train:
        return "\n".join([*lines, f"result = compiled({batch})  # a batch of {row.batch}"])
    step = [
        "optimizer = torch.optim.AdamW(model.parameters())  # after the lines above",
        f"for number, batch in enumerate(batches, 1):  # batches of {row.batch}, {row.accumulate} a step",
        f"    loss = compiled({batch}){f' / {row.accumulate}' if row.accumulate > 1 else ''}",
        "    loss.backward()",
    ]
    update = ["optimizer.step()", "optimizer.zero_grad()"]
    if row.accumulate == 1:
        return "\n".join([*lines, *step, *(f"    {line}" for line in update)])
    guarded = [f"    if number % {row.accumulate} == 0:", *(f"        {line}" for line in update)]
    return "\n".join([*lines, *step, *guarded])


def _options(options: dict[str, Any]) -> str:
    """The argument. A plan has passes as texts, such as "FlashAttention(block=512)"."""
    values = {name: _passes(value) if name == "extra_passes" else repr(value) for name, value in options.items()}
    return f", options={{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"


def _passes(passes: list[str]) -> str:
    return f"[{', '.join(f'kp_dynamo.{text}' if text.startswith(_OURS) else text for text in passes)}]"
