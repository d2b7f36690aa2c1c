"""Runs a model of the zoo eagerly and compiled, and says how far apart the results are.

Errors are norms over the whole output and over all gradients together. A single parameter's true gradient may be zero
(a key's bias), and its relative error then means nothing: `Result.gradients_off` allows what eager is off, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree
from torch_xla.debug import metrics

import kp_dynamo
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.runtime.events import CaptureDivided
from kp_dynamo.session import Session
from kp_dynamo.telemetry import TELEMETRY
from tests.zoo.models import Inputs, ZooModel


@dataclass(frozen=True)
class Setting:
    """How to run a model: the default is plain eager float32 on the CPU.

    Attributes:
        backend: The torch.compile backend, or its name; None is eager.
        options: The backend's options.
        dtype: Dtype of parameters and of floating-point inputs.
        device: Device of parameters and inputs.
        autocast: Run the forward under torch.autocast("cpu", torch.bfloat16).
    """

    backend: str | Callable[..., object] | None = None
    options: tuple[tuple[str, object], ...] = ()
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    autocast: bool = False

    def compiled(self, module: nn.Module) -> nn.Module:
        """`module` through the backend, or itself where there is none."""
        if self.backend is None:
            return module
        return torch.compile(module, backend=self.backend, options=dict(self.options) or None)


EAGER = Setting()
FLOAT64 = Setting(dtype=torch.float64)
AUTOCAST = Setting(autocast=True)


@dataclass(frozen=True)
class Result:
    """What a model gave, each part flattened to one float64 vector on the CPU.

    Attributes:
        outputs: Every floating-point output.
        gradients: Gradients of all parameters and floating-point inputs; empty in inference.
        buffers: Floating-point buffers after the run (running statistics).
        sizes: Number of elements of each gradient, by its name.
    """

    outputs: torch.Tensor
    gradients: torch.Tensor
    buffers: torch.Tensor
    sizes: dict[str, int] = field(default_factory=dict)

    def errors(self, reference: Result) -> dict[str, float]:
        """Relative error of each part against `reference`, by name."""
        parts = ("outputs", "gradients", "buffers")
        return {part: relative_error(getattr(self, part), getattr(reference, part)) for part in parts}

    def gradients_off(self, eager: Result, exact: Result, share: float) -> dict[str, float]:
        """Relative error of each gradient that is further from `exact` than `share` of it, and 8 times eager's error.

        Eager's own error of a small tensor may be small by luck, hence 8.
        """
        parts = (r.gradients.split(list(self.sizes.values())) for r in (self, eager, exact))
        named = {name: tensors for name, *tensors in zip(self.sizes, *parts, strict=True)}
        return {
            name: relative_error(mine, true)
            for name, (mine, plain, true) in named.items()
            if (mine - true).norm() > share * true.norm() + 8 * (plain - true).norm()
        }


@dataclass(frozen=True)
class Counts:
    """What one compiled run cost, by torch's and torch_xla's own counters; fallbacks by ours too."""

    graphs: int
    graph_breaks: int
    programs: int
    fallbacks: tuple[str, ...]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted|; the norm of `got` itself where the reference is zero."""
    if got.shape != wanted.shape:
        raise AssertionError(f"{got.numel()} values where the reference has {wanted.numel()}")
    return float((got - wanted).norm() / wanted.norm()) if wanted.norm() > 0 else float(got.norm())


def infer(model: ZooModel, setting: Setting = EAGER) -> Result:
    """One forward in eval mode under no_grad."""
    module, inputs = _prepare(model, setting)
    with torch.no_grad():
        outputs = _forward(module.eval(), inputs, setting)
    return Result(_flat(outputs), _flat([]), _flat(module.buffers()))


def train(model: ZooModel, setting: Setting = EAGER) -> Result:
    """One forward and backward in train mode, the loss being a random projection of the outputs."""
    module, inputs = _prepare(model, setting)
    leaves = {name: t.requires_grad_() for name, t in inputs.items() if t.is_floating_point()}
    outputs = _forward(module.train(), inputs, setting)
    project(outputs).backward()
    leaves |= module.named_parameters()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    sizes = {name: leaf.numel() for name, leaf in leaves.items()}
    return Result(_flat(outputs), _flat(gradients), _flat(module.buffers()), sizes)


def steps(model: ZooModel, setting: Setting = EAGER, num_steps: int = 3) -> tuple[torch.Tensor, bool]:
    """Losses of a few steps of SGD on the sum of squared outputs, and whether input and output embedding are one."""
    module, inputs = _prepare(model, setting)
    compiled = setting.compiled(module.train())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = _floating(compiled(**inputs))[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), module.get_input_embeddings().weight is module.get_output_embeddings().weight


RUNS: dict[str, Callable[..., Result]] = {"infer": infer, "train": train}


def over_seeds(run: str, model: ZooModel, setting: Setting = EAGER) -> Result:
    """The results of all of the model's seeds, end to end: their errors are then one norm."""
    results = [RUNS[run](replace(model, seed=model.seed + i), setting) for i in range(model.num_seeds)]
    parts = zip(*((r.outputs, r.gradients, r.buffers) for r in results), strict=True)
    return Result(*map(torch.cat, parts))


def project(outputs: list[torch.Tensor]) -> torch.Tensor:
    """The loss: a fixed random weight for each value, in float64 on the CPU so that it adds no error of its own."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(tuple(o.shape), generator=generator, dtype=torch.float64) for o in outputs]
    return torch.stack([(o.cpu().double() * w).sum() for o, w in zip(outputs, weights, strict=True)]).sum()


def counted(run: Callable[[], Result]) -> tuple[Result, Counts]:
    """The result of `run`, from a Dynamo and a compile cache that have seen nothing, and what it cost."""
    torch._dynamo.reset()
    kp_dynamo.clear_cache()
    counters.clear()
    metrics.clear_all()
    TELEMETRY.reset()
    result = run()
    compiles = metrics.metric_data("CompileTime")
    counts = Counts(
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        programs=compiles[0] if compiles else 0,
        fallbacks=tuple(sorted({*metrics.executed_fallback_ops(), *TELEMETRY.fallbacks})),
    )
    return result, counts


def divided(run: Callable[[ZooModel, Setting], Result], model: ZooModel) -> tuple[Result, tuple[int, ...]]:
    """The result with blocks="on", and how many times each repeated block runs."""
    found: list[int] = []

    def observe(event: object) -> None:
        if isinstance(event, CaptureDivided):
            found.extend(piece.runs for piece in event.pieces if piece.runs > 1)

    torch._dynamo.reset()
    options = CompileOptions(precision="float32", blocks="on")
    return run(model, Setting(backend=Session(observe=observe).as_backend(options))), tuple(found)


def to_device(module: nn.Module, device: str) -> nn.Module:
    """`module.to(device)` with tied weights still tied, which torch_xla's plain `.to("xla")` breaks."""
    was_swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_swapping)


def _prepare(model: ZooModel, setting: Setting) -> tuple[nn.Module, Inputs]:
    module, inputs = model.make()
    inputs = {k: (t.to(setting.dtype) if t.is_floating_point() else t).to(setting.device) for k, t in inputs.items()}
    module = module.to(setting.dtype)
    return (module if setting.device == "cpu" else to_device(module, setting.device)), inputs


def _forward(module: nn.Module, inputs: Inputs, setting: Setting) -> list[torch.Tensor]:
    with _default_dtype(setting.dtype), torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        return _floating(setting.compiled(module)(**inputs))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """CLIP makes its mask in the default dtype and fills it with the smallest number of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _floating(tree: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    vectors = [t.detach().cpu().double().flatten() for t in tensors if t.is_floating_point()]
    return torch.cat(vectors) if vectors else torch.zeros(0, dtype=torch.float64)
