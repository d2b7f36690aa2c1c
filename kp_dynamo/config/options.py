"""The options of `torch.compile(model, backend="kp_tpu", options={...})`, each defined once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from kp_dynamo.config import rules
from kp_dynamo.config.levels import LEVELS, CastScope, Level
from kp_dynamo.config.matmul_precision import MatmulPrecision
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.hardware import DEVICES, ONE_CHIP, Chip, Spread, memory_budget_bytes

Precision = Literal["float32", "bfloat16"]
Target = Literal["auto", "v4", "v5e", "v5p", "v6e", "v7"]
LoweringName = Literal["openxla", "stock"]
Blocks = Literal["auto", "on", "off"] | int


def _option(
    default: Any,
    rule: rules.Rule,
    *,
    not_in_key: str | None = None,
) -> Any:
    """A field of `CompileOptions` with its metadata.

    Args:
        default: The value if neither the user nor the level sets it.
        rule: The allowed values.
        not_in_key: Why the option cannot change the compiled program; None if it can.
    """
    return field(default=default, metadata={"rule": rule, "not_in_key": not_in_key})


UNLIMITED_GB = 1e9
"""The memory budget of captures that `plan` takes before it chooses a chip. They tell the least that a model needs."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Validated options. An option that is not set takes its value from the level, or else its default below.

    Raises:
        TPUConfigurationError: An unknown key or a bad value.
    """

    given: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names of the options that the user set; the level determines the others."""

    spread: Spread = field(default=ONE_CHIP, init=False, repr=False)
    """The chips that share the work of a program. Not an option: the session knows it."""

    level: Level = _option("balanced", rules.one_of(*get_args(Level)))
    """Preset. It determines what `cast_bf16` may cast (`cast_scope`) and the defaults of `fuse` and `checkpoint`.
    The default is balanced because bfloat16 is profitable and safe for matmuls."""

    precision: Precision = _option("bfloat16", rules.one_of(*get_args(Precision)))
    """Compute dtype of the ops that may be cast. The default at every level is bfloat16, the dtype of the MXU.
    "float32" disables all casts."""

    matmul_precision: MatmulPrecision | None = _option(None, rules.one_of(*get_args(MatmulPrecision)) | rules.nothing())
    """MXU passes of a float32 matmul: one, three ("high") or six ("highest"). None follows
    `torch.get_float32_matmul_precision()` at compile time, see `resolve_matmul_precision`."""

    keep_float32: tuple[str, ...] = _option((), rules.names("ATen op names or module-path globs"))
    """Ops ("aten.mm") and modules ("model.layers.*.mlp") that are never cast, in addition to the built-in table of
    sensitive ops, which applies at every level."""

    reduce_dtype: Literal["bfloat16"] | None = _option(None, rules.one_of("bfloat16") | rules.nothing())
    """The dtype in which the chips of a sharded model sum the gradients of matmul weights. None: that of the weight.
    "bfloat16" rounds what each chip adds, and halves what the chips send each other. On a mesh with an axis "model" it
    does so for the results of matmuls too. It needs a `precision` of "bfloat16" and the pass cast_bf16, and has no
    effect on one chip."""

    reduce_scatter: Literal["all_to_all"] | None = _option(None, rules.one_of("all_to_all") | rules.nothing())
    """How the chips of a sharded model sum the gradients of matmul weights. None: by a reduce-scatter or an all-reduce,
    as XLA chooses. "all_to_all": each chip sends each other one its part of what that one sums, in float32. It has no
    effect where no batch is divided."""

    fuse: bool = _option(None, rules.boolean())
    """Linear+activation fusion (one rounding instead of two), attention and a large head with its cross entropy as one
    operator each, `fold_views`, and `recompute_activations`. On at every level except conservative."""

    checkpoint: str | float = _option(
        None, rules.one_of("off", "attention", "blocks", "auto") | rules.number(minimum=0, maximum=1)
    )
    """Gradient checkpointing; a number is the share of activation bytes to keep. Default: "off" at conservative, else
    "auto". "auto" recomputes what the memory budget requires. As a level's default it also recomputes attention scores
    that would fit, because the TPU compiler's code is then faster."""

    blocks: Blocks = _option(
        "auto",
        rules.one_of("auto", "on", "off") | rules.integer(minimum=2),
        not_in_key="it decides how a graph is divided, not what a program contains; captures are looked up by it",
    )
    """Whether repeated layers are compiled once, as programs of their own. "auto": at least three equal layers, if the
    host time of the extra calls is small beside the step; as many layers a program as that needs. "on": wherever it is
    correct. A number: as "on", with this many layers in each program. "off": never."""

    buckets: Literal["pow2"] | tuple[int, ...] | Mapping[str, int] | None = _option(
        None, rules.one_of("pow2") | rules.buckets() | rules.nothing()
    )
    """Padded lengths of dynamic dimensions, so that one program serves many lengths. "pow2": the next power of two.
    None compiles every length exactly."""

    over_bucket: Literal["error", "exact"] = _option("exact", rules.one_of("error", "exact"))
    """What happens to a length over the last bucket. "exact" compiles it without padding: slow but correct."""

    memory_fraction: float = _option(0.90, rules.number(above=0, maximum=1))
    """Share of the chip's memory that a program may use; the rest is for other allocations. If this,
    `memory_budget_gb` or `target` is set, a graph whose inputs and outputs alone exceed the budget is refused."""

    memory_budget_gb: float | None = _option(None, rules.number(above=0) | rules.nothing())
    """Memory budget in gigabytes (1e9 bytes); overrides chip memory x `memory_fraction`."""

    optimizer_state_factor: float = _option(2.0, rules.number(minimum=0))
    """Bytes of optimizer state per parameter byte, for `checkpoint="auto"`. The default is AdamW's two moments."""

    disable_passes: tuple[str, ...] = _option((), rules.names("pass names"))
    """Passes to remove from the pipeline, which rejects unknown names."""

    extra_passes: tuple[Any, ...] = _option((), rules.graph_passes())
    """`GraphPass` objects that run after the built-in passes; their `repr` enters the compile key. The type is Any
    because options must not import passes."""

    donate: Literal["off", "mutated"] = _option("off", rules.one_of("off", "mutated"))
    """Whether mutated graph inputs are donated, so that outputs reuse their buffers. Off by default: a program that
    fails at run time then loses their values, and so does anything that holds a buffer without torch's knowledge."""

    target: Target = _option("auto", rules.one_of(*get_args(Target)))
    """The chip whose memory sets the budget. "auto": the chip of this machine, or else v5e, the cheapest to rent."""

    cache_size: int = _option(
        100, rules.integer(1), not_in_key="it limits how many programs are kept, not what is in them"
    )
    """Compiled graphs kept in the process; the least recently used are evicted first. 100 holds the forward and
    backward graphs of any one model; a program takes some megabytes of host memory."""

    compile_timeout_s: float | None = _option(
        300.0,
        rules.number(above=0) | rules.nothing(),
        not_in_key="it limits how long compiling may take, not what is compiled",
    )
    """Soft time budget of one compilation in seconds. XLA cannot be interrupted: exceeding the budget warns, and
    raises when the compilation ends. None: no budget."""

    lowering: LoweringName = _option("openxla", rules.one_of(*get_args(LoweringName)))
    """This package's bridge to XLA, or torch_xla's own ("stock"), which is silently wrong in known cases and exists for
    comparison."""

    strict: bool = _option(False, rules.boolean())
    """Refusals, CPU fallbacks and graph surprises raise instead of warning. It is in the key because a program
    compiled without it may contain what it forbids."""

    check_indices: bool = _option(False, rules.boolean())
    """Indices out of range raise IndexError, as in eager: they are copied to the CPU in each call. For debug runs."""

    ledger: bool = _option(False, rules.boolean())
    """Measure on the CPU, with the inputs of the call that compiles a graph, what each pass does to the numbers, and
    take back a pass that exceeds its bound. For debug runs: every pass runs the whole graph once. A capture is then
    never looked up, because other inputs may give other errors."""

    dump_dir: Path | None = _option(
        None, rules.folder() | rules.nothing(), not_in_key="it sets where graphs are written, not what is in them"
    )
    """Folder for the graphs before and after each pass, the reports of the passes, and the key of each graph. It is
    created when it is first written to. A capture that the cache holds runs no pass, and writes nothing."""

    def __new__(cls, **given: object) -> Self:
        """Check the keys before the generated `__init__`, which would raise TypeError for an unknown one."""
        for key in given:
            _require_known(key)
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        by_name = {f.name: f for f in option_fields()}
        self._store("level", _accepted(by_name["level"], self.level))
        for name, option in by_name.items():
            chosen = getattr(self, name) if name in self.given else self._unset(option)
            self._store(name, _accepted(option, chosen))

    @classmethod
    def from_dict(cls, options: object) -> CompileOptions:
        """Options as torch passes them to a backend: a dict, or None if the user set none."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise TPUConfigurationError(
                f"options={rules.short(options)} ({type(options).__name__}) is invalid. Allowed: a dict such as "
                "{'level': 'balanced'}. Try: torch.compile(model, backend='kp_tpu', options={...})."
            )
        for key in options:
            _require_known(key)
        return cls(**options)

    def given_values(self) -> dict[str, object]:
        """The options that the user set, with their values."""
        return {f.name: getattr(self, f.name) for f in option_fields() if f.name in self.given}

    def on(self, present: str | None) -> CompileOptions:
        """These options with target "auto" resolved to the chip `present`; None if the machine has none."""
        if present is None or self.target != "auto":
            return self
        return self.with_values(target=present)

    def with_values(self, **values: object) -> CompileOptions:
        """These options, with some of them set to other values."""
        return CompileOptions.from_dict({**self.given_values(), **values}).over(self.spread)

    def over(self, spread: Spread) -> CompileOptions:
        """These options for programs that these chips share."""
        copied = copy.copy(self)
        copied._store("spread", spread)
        return copied

    @property
    def chip(self) -> Chip:
        """The chip that `target` selects if no chip is present: what a program has of it, so half of a v7."""
        return DEVICES["v5e" if self.target == "auto" else self.target]

    @property
    def memory_budget_bytes(self) -> float:
        """Bytes that a program may use of the memory of all its chips, as if each tensor were divided among them."""
        of_a_chip = memory_budget_bytes(self.chip, self.memory_fraction, self.memory_budget_gb)
        return of_a_chip * self.spread.num_chips

    @property
    def reads_modules(self) -> bool:
        """Whether passes may read which module an operator came from. A pass of the user's says if it does not."""
        return bool(self.keep_float32) or any(getattr(p, "reads_modules", True) for p in self.extra_passes)

    @property
    def divides_always(self) -> bool:
        """Whether graphs are divided at repeated layers wherever it is correct, whether or not it pays."""
        return self.blocks not in ("auto", "off")

    @property
    def is_for_bounds(self) -> bool:
        """Whether the graphs only tell the least that a model needs: the batch of a chip and its memory are unknown."""
        return self.memory_budget_gb == UNLIMITED_GB

    @property
    def is_memory_bounded(self) -> bool:
        """Whether graphs that exceed the memory are refused: on a TPU, and if the user sets a chip or a budget."""
        return bool(self.given & {"target", "memory_fraction", "memory_budget_gb"})

    @property
    def cast_scope(self) -> CastScope:
        """What `cast_bf16` may cast: Linear layers, all matmuls, or everything except the sensitive ops."""
        return LEVELS[self.level].cast_scope

    def key(self) -> str:
        """Stable text of every option that may change the compiled program, one `name=value` per line.

        `matmul_precision=None` follows torch's setting, which the compile key holds separately.
        """
        in_key = (f.name for f in option_fields() if f.metadata["not_in_key"] is None)
        return "\n".join(f"{name}={getattr(self, name)!r}" for name in in_key)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen after construction

    def _unset(self, option: Field[Any]) -> object:
        """The value of an option that the user did not set: the level's if it has one, else the default."""
        return getattr(LEVELS[self.level], option.name, option.default)


def option_fields() -> list[Field[Any]]:
    """The fields that are options, in documentation order."""
    return [f for f in fields(CompileOptions) if f.init]


def ignored_in_key() -> dict[str, str]:
    """Options that `CompileOptions.key` omits, each with the reason."""
    return {f.name: f.metadata["not_in_key"] for f in option_fields() if f.metadata["not_in_key"]}


def _require_known(key: object) -> None:
    known = [f.name for f in option_fields()]
    if isinstance(key, str) and key in known:
        return
    nearest = difflib.get_close_matches(str(key), known, n=1) if isinstance(key, str) else []
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise TPUConfigurationError(f"option {rules.short(key)} is unknown{hint} Allowed: {', '.join(known)}.")


def _accepted(option: Field[Any], value: object) -> object:
    """The value in its stored form; raises if it is not allowed."""
    rule: rules.Rule = option.metadata["rule"]
    try:
        normal = rule.normalise(value)
    except ValueError as reason:
        because = f": {reason}" if str(reason) else ""
        raise TPUConfigurationError(
            f"option {option.name}={rules.short(value)} is invalid{because}. Allowed: {rule.allowed}. "
            "Try: correct it, or omit the option to use its default."
        ) from None
    return normal
