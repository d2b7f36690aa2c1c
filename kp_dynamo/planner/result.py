"""The result of `plan`: rows of figures, as frozen values that survive JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.explanation.subject import Subject

SCHEMA = 1
"""Version of the JSON form."""

Kind = Literal["compiled", "bound", "failed"]


@dataclass(frozen=True)
class PlanRow:
    """One way to train.

    With kind "bound", memory and times are lower bounds, and so are prices; MFU is an upper bound. With "compiled",
    they are those of the programs that the TPU compiler made, and a bound of the optimizer's part. With "failed", the
    compiler did not make it fit, or failed; the figures are bounds.

    Attributes:
        kind: What the figures are.
        target: The generation.
        topology: The slice, such as "2x4".
        num_chips: Its chips.
        num_hosts: Its machines; only a slice of one can be run by this version.
        mesh: Axes and sizes.
        sharding: How the parameters lie on the mesh; "" on one chip.
        batch: Samples of a call of the model, on all chips together.
        accumulate: Calls of an optimizer step.
        step_samples: Samples of an optimizer step.
        step_tokens: Its tokens; 0 if samples have none.
        checkpoint: The checkpoint mode.
        memory_bytes: Memory of one chip in a step.
        budget_bytes: What it may be.
        memory_parts: Of its bound: "parameters", "optimizer", "gradients", "activations" and "inputs".
        step_ms: An optimizer step.
        time_parts_ms: Of its bound: "matmuls", "traffic", "links" and "optimizer".
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
    def is_runnable(self) -> bool:
        """Whether this version can run it: on one host."""
        return self.num_hosts == 1


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

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

    @property
    def winner(self) -> PlanRow:
        """The best way."""
        return self.rows[0]

    @property
    def code(self) -> str:
        """Lines of Python that run the winner, or on several hosts the best way of one host."""
        from kp_dynamo.planner.code_lines import code_of

        row = self.winner if self.winner.is_runnable else self.one_host
        return "" if row is None else code_of(row, self.train, self.options)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form; `from_dict` is its inverse."""
        return {"schema": SCHEMA, **asdict(self), "code": self.code}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`.

        Raises:
            TPUConfigurationError: The content is no plan, or of another version.
        """
        found = content.get("schema") if isinstance(content, Mapping) else None
        if found != SCHEMA:
            raise TPUConfigurationError(
                f"schema={found!r} of the plan is invalid. Allowed: {SCHEMA}. Try: write the plan again with "
                "python -m kp_dynamo plan SPEC --json FILE."
            )
        given = {name: value for name, value in content.items() if name not in ("schema", "code")}
        try:
            one_host = given["one_host"]
            lists = {
                "rows": tuple(PlanRow(**row) for row in given["rows"]),
                "one_host": None if one_host is None else PlanRow(**one_host),
                "targets": tuple(given["targets"]),
                "subject": Subject.from_dict(given["subject"]) if "subject" in given else Subject(),
            }
            return cls(**{**given, **lists})
        except (KeyError, TypeError) as cause:
            raise TPUConfigurationError(
                f"the plan of version {SCHEMA} is incomplete: {cause}. Try: write the plan again."
            ) from cause

    def text(self) -> str:
        """The plan for people."""
        from kp_dynamo.planner.result_text import text_of

        return text_of(self)

    def to_html(self, date: str = "") -> str:
        """The plan as one page, without scripts or a network; `date` is shown, such as "2026-03-01"."""
        from kp_dynamo.page.render import html_of
        from kp_dynamo.planner.page_content import page_of

        return html_of(page_of(self, date))

    def _repr_html_(self) -> str:
        from kp_dynamo.page.render import notebook_html

        return notebook_html(self.to_html())

    def __str__(self) -> str:
        return self.text()
