"""The lines of Python that run a plan."""

from __future__ import annotations

from typing import Any

from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow

_OURS = "FlashAttention("
"""The pass that `kp_dynamo` has for this option; others are the user's own."""


def code_of(plan: PlanFigures) -> str:
    """A program that runs the winner; if that needs several hosts, the best way on one. "" if there is none.

    `model`, and `batches` in training or `batch` in inference, are the user's. A batch is the argument of the model, or
    the tuple of its arguments.
    """
    row = plan.winner if plan.winner.is_runnable else plan.one_host
    return "" if row is None else _lines_of(row, plan)


def _lines_of(row: PlanRow, plan: PlanFigures) -> str:
    options = {**plan.options, **({"checkpoint": row.checkpoint} if plan.train else {})}
    lines = [*(_on_a_mesh(row, plan) if row.sharding else _ON_ONE_CHIP), f"model.{'train' if plan.train else 'eval'}()"]
    lines.append(f'compiled = torch.compile(model, backend="kp_tpu"{_options(options) if options else ""})')
    return "\n".join([*lines, *(_training(row, plan) if plan.train else _inference(row, plan))])


_ON_ONE_CHIP = ("import torch", "import torch_xla", "import kp_dynamo", "", 'model.to("xla")')


def _on_a_mesh(row: PlanRow, plan: PlanFigures) -> list[str]:
    example = ""
    if "tensor" in row.sharding:
        # A model that brings no plan for "tensor" needs them; any other ignores them.
        given = "next(iter(batches))" if plan.train else "batch"
        example = f", example_args={given if plan.num_args > 1 else f'({given},)'}"
    shard = f"kp_dynamo.shard(model, mesh, {row.sharding!r}{example})  # before any other use"
    return ["import torch", "import kp_dynamo", "", f"mesh = {row.mesh!r}", shard]


def _call(row: PlanRow, plan: PlanFigures) -> str:
    """The call of the compiled model with a batch, on its devices."""
    is_one = plan.num_args == 1
    if row.sharding:
        return f"compiled({'' if is_one else '*'}kp_dynamo.shard_batch(batch, mesh))"
    return 'compiled(batch.to("xla"))' if is_one else 'compiled(*(part.to("xla") for part in batch))'


def _inference(row: PlanRow, plan: PlanFigures) -> list[str]:
    return ["with torch.no_grad():", f"    result = {_call(row, plan)}  # a batch of {row.batch}"]


def _training(row: PlanRow, plan: PlanFigures) -> list[str]:
    update = ["optimizer.step()", "optimizer.zero_grad()"]
    if row.accumulate > 1:
        update = [f"if number % {row.accumulate} == 0:", *(f"    {line}" for line in update)]
    return [
        "optimizer = torch.optim.AdamW(model.parameters())  # after the lines above",
        f"for number, batch in enumerate(batches, 1):  # batches of {row.batch}, {row.accumulate} a step",
        f"    loss = {_call(row, plan)}{f' / {row.accumulate}' if row.accumulate > 1 else ''}",
        "    loss.backward()",
        *(f"    {line}" for line in update),
    ]


def _options(options: dict[str, Any]) -> str:
    """The argument. A plan has passes as texts, such as "FlashAttention(block=512)"."""
    values = {name: _passes(value) if name == "extra_passes" else repr(value) for name, value in options.items()}
    return f", options={{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"


def _passes(passes: list[str]) -> str:
    return f"[{', '.join(f'kp_dynamo.{text}' if text.startswith(_OURS) else text for text in passes)}]"
