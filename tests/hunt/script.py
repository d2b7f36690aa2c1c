"""A program as a stand-alone script that shows what is wrong with it."""

from __future__ import annotations

import inspect

from tests.hunt import values
from tests.hunt.program import MODES, Program

_HEAD = """\
{what}
import os
os.environ.setdefault("PJRT_DEVICE", "CPU"){environment}
import copy, math
import torch, torch_xla, kp_dynamo
from torch import nn
from torch.nn import functional as F
FLOAT, HALF, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
torch.ones(1, device=torch_xla.device())
"""


def script(program: Program, what: str) -> str:
    """Runs the calls eagerly and compiled, and prints results, arguments, state and gradients that differ."""
    configuration = program.configuration
    environment = '\nos.environ["KP_TPU_POISON"] = "1"' if configuration.is_poisoned else ""
    if configuration.is_sharded:
        environment += '\nos.environ["CPU_NUM_DEVICES"] = "4"'
    comment = "\n".join(f"# {line}" for line in what.splitlines())
    lines = [_HEAD.format(what=comment, environment=environment), program.source]
    lines.append(f"def calls(device):\n{_calls(program)}")
    lines.append(_tail(program))
    return "\n".join(lines)


def _calls(program: Program) -> str:
    lines = ["    made, bases = {}, {}"]
    for number, mode in enumerate(program.modes):
        names = []
        for position, spec in enumerate(program.inputs):
            seed = program.seed + 100 * number + position
            if spec.layout == "overlapping":
                lines.append(f'    made["{spec.name}"] = bases["{spec.same_as}"][:{spec.shapes[number][0]}].detach()')
            elif spec.same_as:
                lines.append(f'    made["{spec.name}"] = made["{spec.same_as}"]')
            elif not (spec.is_kept and number):
                value = f"make({spec.values!r}, {spec.shapes[number]}, torch.{spec.dtype}, {seed})"
                if spec.layout == "offset":
                    around = f"(lambda t: torch.cat([t[:1], t, t[:1]]).to(device))({value})"
                    lines.append(f'    bases["{spec.name}"] = {around}')
                    value = f'bases["{spec.name}"][1:-1].detach()'
                lines.append(f'    made["{spec.name}"] = {_laid_out(spec.layout, value)}')
                if spec.requires_grad and MODES[mode][1] == "grad":
                    lines.append(f'    made["{spec.name}"].requires_grad_()')
            names.append(spec.name)
            if program.configuration.is_marked:
                lines += [f'    kp_dynamo.mark_sequence(made["{spec.name}"], {dim})' for dim in spec.varying]
        lines.append(f'    yield "{mode}", dict(made)')
    return "\n".join(lines)


def _laid_out(layout: str, value: str) -> str:
    if layout == "transposed":
        return f"{value}.transpose(0, -1).contiguous().to(device).transpose(0, -1)"
    if layout == "offset":
        return value
    return f"{value}.to(device)"


def _tail(program: Program) -> str:
    configuration = program.configuration
    return f"""
{_values_source()}
def run(device, compiled):
    torch.manual_seed({program.seed})
    model = Model().to(device)
    run = compiled(model)
    seen = {{}}
    for number, (mode, arguments) in enumerate(calls(device)):
        training, grad_mode = {MODES!r}[mode]
        model.train(training)
        context = dict(grad=torch.enable_grad, no_grad=torch.no_grad, inference=torch.inference_mode)[grad_mode]
        with context():
            results = torch.utils._pytree.tree_leaves(run(*arguments.values()))
        look(seen, f"call {{number}} result", enumerate(results))
        wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad and r.grad_fn is not None]
        if grad_mode == "grad" and wanted:
            for t in (*arguments.values(), *model.parameters()):
                t.grad = None
            sum((r * torch.linspace(-1, 1.3, r.numel(), dtype=r.dtype).reshape(r.shape).to(device)).sum() for r in wanted).backward()
            look(seen, f"call {{number}} gradient", [(n, t.grad) for n, t in (*arguments.items(), *model.named_parameters()) if t.requires_grad])
        look(seen, f"call {{number}} after", (*arguments.items(), *model.named_buffers()))
    with context():
        for result in results:
            if isinstance(result, torch.Tensor) and result.dtype is not torch.bool:
                try:
                    with torch.no_grad():
                        result.detach().add_(1)
                except RuntimeError:
                    pass
    look(seen, "written results", (*enumerate(results), *arguments.items()))
    return seen


def look(seen, prefix, named):
    for name, value in named:
        seen[f"{{prefix}} {{name}}"] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


eager = run("cpu", lambda model: model)
mine = run("{configuration.device}", lambda model: {_compiled(program)})
for name, expected in eager.items():
    found = mine[name]
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor) and found.shape == expected.shape:
        if found.dtype == expected.dtype and torch.allclose(found.double(), expected.double(), 1e-4, 1e-5, equal_nan=True):
            continue
    elif found is None and expected is None:
        continue
    print(f"{{name}}\\n  seen     {{found}}\\n  expected {{expected}}")
"""


def _compiled(program: Program) -> str:
    configuration = program.configuration
    if configuration.compiles_children:
        return f"kp_dynamo.compile_blocks(model, options={configuration.options!r})"
    options = f"options={configuration.options!r}, dynamic={configuration.dynamic}"
    return f'torch.compile(\n    model, backend="kp_tpu", {options})'


def _values_source() -> str:
    return inspect.getsource(values).partition("import torch\n")[2]
