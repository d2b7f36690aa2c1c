"""Known limits of this package, torch and torch_xla, with workarounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownLimit:
    """Something that does not work as a user would expect, and its workaround."""

    what: str
    cure: str


KNOWN_LIMITS = (
    KnownLimit(
        '`module.to("xla")` unties weights that two modules share, which then train apart.',
        "Call `torch.__future__.set_swap_module_params_on_conversion(True)` before it.",
    ),
    KnownLimit(
        "A backward on the CPU before the first use of the XLA device leaves torch without one for XLA tensors; "
        "training graphs on them are then refused.",
        "After `import kp_dynamo` make one tensor on the device first: `torch.ones(1, device=torch_xla.device())`.",
    ),
    KnownLimit(
        "`torch_xla.sync()` in one thread while another one makes or changes XLA tensors in eager code fails, in "
        'torch_xla alone too ("Check failed: data()->tensor_data").',
        "Let one thread work eagerly on the device. Compiled functions may be compiled and called meanwhile.",
    ),
    KnownLimit(
        "`torch_xla.manual_seed` repeats random operators of eager XLA code, not those of compiled graphs.",
        "`torch.manual_seed` repeats those of compiled graphs; set both where both are used.",
    ),
    KnownLimit(
        "Without `buckets`, every set of shapes is an XLA program of its own, with `dynamic=True` as well; after 8 of "
        "one function (`torch._dynamo.config.recompile_limit`) Dynamo runs it eagerly.",
        '`options={"buckets": "pow2"}` and `kp_dynamo.mark_sequence`.',
    ),
    KnownLimit(
        "libtpu 0.0.21 cannot compile some matmuls of bfloat16 with float32 operands at matmul precision "
        '"highest" (T5 at level conservative: "Bad lhs type").',
        '`options={"matmul_precision": "high"}`.',
    ),
    KnownLimit(
        "Every process recompiles its programs: torch_xla 2.9 writes its persistent cache and cannot read it "
        "(pytorch/xla#9094).",
        "Keep the process alive; within it, equal graphs share a program.",
    ),
    KnownLimit(
        "What `torch_xla.distributed.spmd.mark_sharding` returns is a tensor subclass, which Dynamo of torch 2.9 "
        "cannot trace (\"no attribute '_local_tensor'\").",
        "Use the tensor that was marked: it is sharded in place.",
    ),
    KnownLimit(
        "Eager work on XLA tensors may give another one's result: after `((a - b) * a).cpu()` torch_xla takes its "
        "program for `((a - b) * b).cpu()`, with a in the place of b (pytorch/xla#8353). What a compiled function is "
        "given, or `save_checkpoint`, is right. `clip_grad_norm_` is such work.",
        "Compile that work as well, the optimizer's step too. `torch_xla.sync()` after each eager step makes it rarer.",
    ),
    KnownLimit(
        "`BatchNorm(momentum=None)` on XLA tensors reads its counter, which breaks the graph: it runs in eager "
        "torch_xla, which keeps the biased running variance.",
        "Give it a momentum, or leave model and inputs on the CPU: the backend places them.",
    ),
    KnownLimit(
        "An optimizer with several parameter groups that is compiled on XLA tensors (Adam, AdamW, RAdam, NAdam, ...) "
        "counts the steps of the first group wrong: Dynamo of torch 2.9 moves the counter after it has read it.",
        "Give the optimizer `capturable=True`, or leave model and inputs on the CPU: the backend places them.",
    ),
    KnownLimit(
        "After `target.load_state_dict(model.state_dict())` on the XLA device both share buffers. Where a compiled "
        "function reads the target, and eager code then updates the model in place, the target has none left "
        '("async operation is in flight"), with torch_xla\'s own backend too.',
        "`torch_xla.sync()` after the copy. After `copy.deepcopy` the backend does this.",
    ),
    KnownLimit(
        "`.cpu()` and `.item()` of a complex128 tensor on the XLA device drop its imaginary part, in torch_xla alone "
        "too.",
        "`torch.view_as_complex(torch.view_as_real(x).cpu())`; results for inputs on the CPU come back whole.",
    ),
)

EARLIER_LIMITS = (
    KnownLimit(
        "Training freezes after a copy of the weights (`load_state_dict`, `detach`, `.data`), silently, or fails "
        "(2.5.1: `handle->HasValue()`).",
        "Copy new tensors, added to zero: `average.load_state_dict({k: v + 0 for k, v in model.named_parameters()})`.",
    ),
    KnownLimit(
        "Dropout in training, that of attention too, scales by 1/p where 1/(1-p) is right, and again in the backward.",
        "Leave dropout out of the compiled region: p=0, or `torch.compiler.disable`.",
    ),
    KnownLimit("BatchNorm keeps the biased running variance.", "Correct it by n / (n - 1), or keep it out."),
    KnownLimit(
        "`torch.manual_seed` does not repeat the random numbers of compiled graphs.", "Use `torch_xla.manual_seed`."
    ),
    KnownLimit(
        '`module.to("xla")` unties weights that two modules share, which then train apart.', "Tie them again after it."
    ),
    KnownLimit(
        "An operator without an XLA lowering runs on the CPU silently.",
        "Look at `torch_xla.debug.metrics.counter_names()` for names that begin with `aten::`.",
    ),
    KnownLimit("A graph that returns `x.detach()` of an input fails with an IndexError.", "Return it outside."),
    KnownLimit("`dynamic=True` fails at LayerNorm.", "Compile with `dynamic=False`: one program for each length."),
    KnownLimit("`torch.utils.checkpoint` around dropout fails.", "Use only one of the two."),
)
"""Bugs of torch_xla 2.5.1 and 2.8.0 themselves, seen with both. 2.6 and 2.7 were not tried."""
