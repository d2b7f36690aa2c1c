"""One program, compiled and judged."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import kp_dynamo
from kp_dynamo import TPUBackendError
from kp_dynamo.passes import fuse_linear_cross_entropy
from kp_dynamo.telemetry import TELEMETRY
from tests.hunt.compare import References, differences
from tests.hunt.observe import How, Observation, Seen, observe
from tests.hunt.program import Input, Program
from tests.hunt.randomness import Kept, UnknownMask, odd_shares
from tests.hunt.rounding import Jitter, Recorder

# torch_xla 2.9 cannot write to the diagonals of a batch in eager code, as a caller does with results.
_EAGER_WRITE = "Error while lowering: [] xla::diagonal_view_update"
# Nor take a view of an ordinary tensor in inference mode, which Dynamo leaves to eager code for `x.mT`.
_EAGER_VIEW = "Cannot set version_counter for inference tensor"
# Nor write to what `as_strided` takes of a view.
_EAGER_PLACES = "setStorage: sizes"


@dataclass(frozen=True)
class Outcome:
    """What came of one program.

    Attributes:
        status: "right", "wrong", "refused" by name (its results, if it has any, are right), "raised": an error that is
            none of ours, "torch": wrong or raising with torch's own `aot_eager` as well, "uncaptured": Dynamo makes no
            single graph of it, "invalid": eager does not either, "crashed".
        text: What is wrong, or the first line of the error.
        refusals: Reasons, as the backend put them.
        ops: ATen operators that eager ran.
    """

    status: str
    text: str = ""
    refusals: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    seconds: float = 0.0


def check(program: Program) -> Outcome:
    """Compile `program`, run it, and judge what is seen of it."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _check(program)
    return Outcome(**{**vars(outcome), "seconds": time.perf_counter() - start})


def _check(program: Program) -> Outcome:
    try:
        exact = observe(program, How(floating=torch.float64))
    except Exception as error:  # noqa: BLE001
        return Outcome("invalid", _line(error))
    counts, refusals = dict(TELEMETRY.counts), []
    try:
        with _refusals_noted(refusals):
            mine = _compiled(program, exact["end written"])
    except Exception as error:  # noqa: BLE001
        return _failed(program, error, refusals)
    recorder = Recorder()
    kept: list[Kept] = []
    try:
        references = _references(program, mine, exact, recorder, kept)
    except UnknownMask:
        return Outcome("invalid", "dropout of zeros: whether they were dropped does not show")
    if references is None:
        return Outcome("invalid", "eager raises in float32 alone")
    try:
        found = differences(mine, references)
    except torch.linalg.LinAlgError as error:  # after steps of an optimizer along gradients without bound
        return Outcome("invalid", f"eager fails with other roundings: {_line(error)}")
    if (odd := odd_shares(kept)) is not None:
        found.append(odd)
    ops = tuple(sorted(recorder.ops))
    if found:
        return Outcome(_whose(program, found, references), "\n".join(found[:8]), tuple(refusals), ops)
    is_refused = any(TELEMETRY.counts[n] > counts.get(n, 0) for n in ("bucket_refusals", "exact_lengths"))
    return Outcome("refused" if is_refused else "right", "", tuple(refusals), ops)


def _compiled(program: Program, written: tuple[bool, ...]) -> Observation:
    configuration = program.configuration
    torch._dynamo.reset()
    compiled = functools.partial(_compile, program)
    how = How(compiled, device=configuration.device, mark=_marker(program), written=written)
    with _poisoned(configuration.is_poisoned), _heads_by_blocks(zlib.crc32(program.to_json().encode()) % 2 == 0):
        return observe(program, how)


def _compile(program: Program, model: nn.Module) -> Any:
    configuration = program.configuration
    options = dict(configuration.options)
    if configuration.compiles_children:
        return kp_dynamo.compile_blocks(model, options=options)
    return torch.compile(model, backend="kp_tpu", options=options, dynamic=configuration.dynamic, fullgraph=True)


def _marker(program: Program) -> Any:
    def mark(spec: Input, tensor: torch.Tensor) -> None:
        if program.configuration.is_sharded and tensor.dim():
            from tests.hunt.sharding import shard

            shard(tensor, program.configuration.sharding)
        if program.configuration.is_marked:
            for dim in spec.varying:
                kp_dynamo.mark_sequence(tensor, dim)

    return mark


@contextlib.contextmanager
def _poisoned(is_poisoned: bool) -> Iterator[None]:
    os.environ["KP_TPU_POISON"] = "1" if is_poisoned else "0"
    try:
        yield
    finally:
        os.environ["KP_TPU_POISON"] = "0"


@contextlib.contextmanager
def _heads_by_blocks(is_asked: bool) -> Iterator[None]:
    """Lower the limits of `fuse_linear_cross_entropy`: no program here has logits of 32 MiB."""
    module = fuse_linear_cross_entropy
    init = module.FuseLinearCrossEntropy.__init__
    before = init.__defaults__, module._LANES
    if is_asked:
        init.__defaults__, module._LANES = (0, 64, *before[0][2:]), 2
    try:
        yield
    finally:
        init.__defaults__, module._LANES = before


def _references(
    program: Program, mine: Observation, exact: Observation, recorder: Recorder, kept: list[Kept]
) -> References | None:
    replay = {"random": _random_results(program, mine), "stepped": mine if program.optimizer else None}
    if any(replay.values()):
        exact = observe(program, How(floating=torch.float64, kept=kept, **replay))
    if replay["random"] is not None:
        _require_known_mask(exact, observe(program, How(floating=torch.float64, keeps_zeros=True, **replay)))

    def eager(**how: Any) -> Observation:
        return observe(program, How(**replay, **how))

    def autocast() -> Observation | None:
        if program.configuration.rounding == "nothing":
            return None
        with contextlib.suppress(RuntimeError, ValueError):
            return eager(around=functools.partial(torch.autocast, "cpu", torch.bfloat16))
        return None

    def jittered(number: int) -> Observation:
        return eager(around=functools.partial(Jitter, program.configuration.rounding, number))

    try:
        # Apart: ATen takes other kernels under a dispatch mode (`max_pool1d`, whose results then lie otherwise).
        plain = eager()
        eager(around=lambda: recorder)
    except Exception:  # noqa: BLE001
        return None
    return References(exact, plain, autocast, jittered)


def _require_known_mask(dropping: Observation, keeping: Observation) -> None:
    for name, one in dropping.items():
        other = keeping[name]
        if isinstance(one, Seen) and not torch.equal(one.value.nan_to_num(), other.value.nan_to_num()):
            raise UnknownMask


def _random_results(program: Program, mine: Observation) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    if not program.num_random:
        return None
    calls = []
    for number in range(len(program.modes)):
        results = [v for n, v in mine.items() if n.startswith(f"call {number} result") and isinstance(v, Seen)]
        calls.append(tuple(seen.value for seen in results[-program.num_random :]))
    return tuple(calls)


def _whose(program: Program, found: list[str], references: References) -> str:
    """The status of a program that is wrong: "torch" if `aot_eager`, with nothing of ours, is wrong at the same place.

    "uncaptured" if the program is no single graph: with `compile_blocks`, torch_xla then ran a part of it.
    """
    # What shares memory with a result may hang on a layout: of a CPU kernel, or of a parameter before `.to("xla")`.
    is_layout = program.configuration.device == "xla" and all(text.startswith("end ") for text in found)
    try:
        stock = _stock(program, is_layout)
    except torch._dynamo.exc.TorchDynamoException:
        return "uncaptured"
    except Exception:  # noqa: BLE001
        return "wrong"
    if program.num_random or program.optimizer:  # it drew other numbers, and stepped by other gradients
        try:
            others = _references(program, stock, references.exact, Recorder(), [])
        except UnknownMask:
            return "wrong"
        if others is None:
            return "wrong"
        references = others
    theirs = differences(stock, references)
    return "torch" if {_place(text) for text in found} <= {_place(text) for text in theirs} else "wrong"


def _stock(program: Program, is_layout: bool) -> Observation:
    """What `aot_eager` does; under `no_grad` where torch_xla takes no view in inference mode."""
    try:
        return _aot_eager(program, "xla" if is_layout else "cpu")
    except Exception as error:
        if not is_layout or _EAGER_VIEW not in str(error):
            raise
        modes = tuple("no_grad" if mode == "inference" else mode for mode in program.modes)
        return _aot_eager(replace(program, modes=modes), "xla")


def _place(text: str) -> str:
    return text.partition(":")[0]


def _aot_eager(program: Program, device: str = "cpu") -> Observation:
    torch._dynamo.reset()
    dynamic = program.configuration.dynamic
    return observe(
        program,
        How(
            device=device,
            compiled=lambda model: torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True),
            mark=lambda spec, tensor: (
                [torch._dynamo.maybe_mark_dynamic(tensor, d) for d in spec.varying]
                if program.configuration.is_marked
                else None
            ),
        ),
    )


def _failed(program: Program, error: Exception, refusals: list[str]) -> Outcome:
    cause = getattr(error, "inner_exception", error)
    # Another error that is wrapped in one of ours names nothing that was refused.
    if isinstance(cause, TPUBackendError) and not re.search(r"could not be compiled: \w*Error", str(cause)):
        return Outcome("refused", _line(cause), (_line(cause), *refusals))
    is_eager = any(words in str(error) for words in (_EAGER_VIEW, _EAGER_PLACES)) and not _is_of_the_backend(error)
    if _EAGER_WRITE in str(error) or is_eager:
        return Outcome("torch", _line(cause))
    try:
        observe(program, How())
        _aot_eager(program)
    except Exception:  # noqa: BLE001
        return Outcome("torch", _line(cause))
    if isinstance(cause, torch._dynamo.exc.TorchDynamoException):
        return Outcome("uncaptured", _line(cause))
    return Outcome("raised", _line(cause))


def _is_of_the_backend(error: BaseException) -> bool:
    return any("kp_dynamo" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:300]}"


@contextlib.contextmanager
def _refusals_noted(into: list[str]) -> Iterator[None]:
    """Collect the reasons that the backend gives for what it does not pad."""
    from kp_dynamo.buckets import refusals

    original = refusals.warn
    refusals.warn = lambda text: (into.append(text), original(text))[1]
    try:
        yield
    finally:
        refusals.warn = original
