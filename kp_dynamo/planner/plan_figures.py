"""The figures of a plan, and of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kp_dynamo.explanation.subject import Subject

Kind = Literal["compiled", "bound", "late", "failed"]


@dataclass(frozen=True)
class PlanRow:
    """One way to train.

    With kind "bound", memory and times are lower bounds, and so are prices; MFU is an upper bound. With "compiled",
    they are those of the programs that the TPU compiler made, and a bound of the optimizer's part. With "late" too; its
    bounds met the deadline, and it does not. With "failed", the compiler did not make it fit, or failed; the figures
    are bounds.

    Attributes:
        kind: What the figures are.
        target: The generation.
        topology: The slice, such as "2x4".
        num_chips: Its chips.
        num_hosts: Its machines; only a slice of one can be run by this version.
        mesh: Axes and sizes, in chips; on v7, in devices.
        sharding: How the parameters lie on the mesh; "" on one chip.
        batch: Samples of a call of the model, on all chips together.
        accumulate: Calls of an optimizer step.
        step_samples: Samples of an optimizer step.
        step_tokens: Its tokens; 0 if samples have none.
        checkpoint: The checkpoint mode.
        memory_bytes: Memory of one chip in a step; on v7, of one device.
        budget_bytes: What it may be.
        memory_parts: Of its bound: "parameters", "optimizer", "gradients", "activations" and "inputs".
        step_ms: An optimizer step.
        time_parts_ms: Of its bound: "matmuls", "traffic", "gathers", "gradient_sums", "result_sums" and "optimizer".
        mfu: Model FLOP utilization, without recomputed FLOPs.
        usd_per_million: Price of a million tokens, or of a million samples if they have no tokens.
        hours: Hours of the whole training; None if its tokens are unknown.
        usd: Its price.
        why: What this row is, or why it is not the first.
    """

    kind: Kind
    target: str
    topology: str
    num_chips: int
    num_hosts: int
    mesh: dict[str, int]
    sharding: str
    batch: int
    accumulate: int
    step_samples: int
    step_tokens: int
    checkpoint: str | float
    memory_bytes: int
    budget_bytes: float
    memory_parts: dict[str, int]
    step_ms: float
    time_parts_ms: dict[str, float]
    mfu: float
    usd_per_million: float
    hours: float | None
    usd: float | None
    why: str

    @property
    def is_compiled(self) -> bool:
        """Whether the figures are those of compiled programs, and no bounds."""
        return self.kind in ("compiled", "late")

    @property
    def is_runnable(self) -> bool:
        """Whether this version can run it: on one host."""
        return self.num_hosts == 1


@dataclass(frozen=True)
class PlanFigures:
    """What `plan` found, as frozen values.

    Attributes:
        rows: At most ten ways, the best first. If any was compiled, the first one is.
        one_host: The best way on one host; None if there is none.
        train: Training, or inference.
        objective: "cost" or "time".
        targets: The generations that were searched.
        max_chips: The most chips of a slice.
        num_searched: Ways that were bounded.
        num_without_memory: Those that no chip has the memory for.
        num_too_late: Those that cannot meet the deadline.
        deadline_hours: The deadline.
        tokens: Tokens of the whole training.
        left_out: Shardings and meshes that the model cannot have, each with the reason.
        options: The options that the user gave.
        seconds: Of this process, by stage: "capture", "bounds" and "compile".
        subject: The model and its inputs.
        num_args: Arguments of the model.
    """

    rows: tuple[PlanRow, ...]
    one_host: PlanRow | None
    train: bool
    objective: str
    targets: tuple[str, ...]
    max_chips: int
    num_searched: int
    num_without_memory: int
    num_too_late: int
    deadline_hours: float | None
    tokens: float | None
    left_out: dict[str, str]
    options: dict[str, Any]
    seconds: dict[str, float]
    subject: Subject = Subject()
    num_args: int = 1

    @property
    def winner(self) -> PlanRow:
        """The best way."""
        return self.rows[0]
