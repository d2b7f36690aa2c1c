"""Known limits of this package, torch and torch_xla, with workarounds.

`KNOWN_LIMITS` hold with this package; `EARLIER_LIMITS` are torch_xla's own, before 2.9. What only stock torch_xla 2.9
gets wrong is in docs/correctness.md, "Where stock torch_xla is wrong".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownLimit:
    """Something that does not work as a user would expect, and its workaround."""

    what: str
    cure: str


KNOWN_LIMITS = (
    KnownLimit(
        '`model.to("xla")` before torch_xla is imported raises an error of torch that does not say so. '
        "`import kp_dynamo` does not import torch_xla; the first compiled call does.",
        "`import torch_xla` first, or leave the model and its inputs on the CPU: the backend copies them.",
    ),
    KnownLimit(
        '`module.to("xla")` unties weights that two modules share. They then train apart.',
        "Call `torch.__future__.set_swap_module_params_on_conversion(True)` first.",
    ),
    KnownLimit(
        "If a backward runs on the CPU before the first use of the XLA device, torch has no backward for XLA tensors. "
        "Training graphs on XLA tensors are then refused.",
        "After `import kp_dynamo`, first make one tensor on the device: `torch.ones(1, device=torch_xla.device())`. "
        "`kp_dynamo.shard` does so too: call it before the first backward.",
    ),
    KnownLimit(
        "`torch_xla.sync()` fails while another thread creates or changes XLA tensors in eager code "
        '("Check failed: data()->tensor_data"). torch_xla alone has this limit too.',
        "Let only one thread work eagerly on the device. Other threads may compile and call compiled functions.",
    ),
    KnownLimit(
        "`torch_xla.manual_seed` repeats the random numbers of eager XLA code, and not those of compiled graphs.",
        "`torch.manual_seed` repeats those of compiled graphs. Set both seeds if you use both.",
    ),
    KnownLimit(
        "Without `buckets`, each set of shapes is a separate XLA program, also with `dynamic=True`. After 8 graphs of "
        "one function (`torch._dynamo.config.recompile_limit`), Dynamo runs the function eagerly.",
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
        "`kp_dynamo.enable_disk_cache(folder)` keeps them where the compiler is a plugin, as libtpu is.",
    ),
    KnownLimit(
        "`torch_xla.distributed.spmd.mark_sharding` returns a tensor subclass that Dynamo of torch 2.9 cannot trace "
        "(\"no attribute '_local_tensor'\").",
        "Use the tensor that you marked. It is sharded in place.",
    ),
    KnownLimit(
        "Eager code on XLA tensors may return the result of another expression: after `((a - b) * a).cpu()`, torch_xla "
        "runs the same program for `((a - b) * b).cpu()`, with a in place of b (pytorch/xla#8353). `clip_grad_norm_` "
        "is affected. Compiled functions and `save_checkpoint` receive correct values.",
        "Compile the eager code too, including the optimizer step. `torch_xla.sync()` after each eager step makes this "
        "error rarer.",
    ),
    KnownLimit(
        "`BatchNorm(momentum=None)` on XLA tensors breaks the graph, because it reads its counter. It runs in eager "
        "torch_xla, which keeps the biased running variance.",
        "Set a momentum, or leave the model and its inputs on the CPU: the backend copies them.",
    ),
    KnownLimit(
        "Backward hooks of a module break the graph. On XLA tensors, the module runs in eager torch_xla, whose "
        "gradient of `F.elu` is wrong for negative numbers.",
        "Use `register_hook` of a tensor, or leave the model and its inputs on the CPU: the backend copies them.",
    ),
    KnownLimit(
        "A compiled optimizer with several parameter groups on XLA tensors (Adam, AdamW, RAdam, NAdam, ...) counts the "
        "steps of the first group wrong: Dynamo of torch 2.9 moves the counter after it has read it.",
        "Set `capturable=True`, or leave the model and its inputs on the CPU: the backend copies them.",
    ),
    KnownLimit(
        "`target.load_state_dict(model.state_dict())` on the XLA device makes both models share buffers, and so does "
        "`clone()` of a tensor that is no parameter. If a compiled function reads the copy, and eager code then "
        "updates the source in place, the copy's buffer is gone (\"async operation is in flight\"). torch_xla's own "
        "backend has this limit too.",
        "Call `torch_xla.sync()` after the copy. After `copy.deepcopy` the backend does this, but for a model that "
        "`kp_dynamo.shard` has divided: call `shard` for its copy.",
    ),
    KnownLimit(
        "Functions that were compiled with `dynamic=False`, as `compile_blocks` does, and are called by several "
        "threads at once can leave `torch._dynamo.config.automatic_dynamic_shapes` False for the whole process: torch "
        "2.9 sets it for the time of a call, with every backend. Results are right.",
        "Set it again, or call them from one thread.",
    ),
    KnownLimit(
        "`.cpu()` and `.item()` of a complex128 tensor on the XLA device drop its imaginary part. torch_xla alone has "
        "this limit too.",
        "`torch.view_as_complex(torch.view_as_real(x).cpu())`. Results for inputs on the CPU are complete.",
    ),
)

EARLIER_LIMITS = (
    KnownLimit(
        "After a copy of the weights (`load_state_dict`, `detach`, `.data`), training freezes silently or fails "
        "(2.5.1: `handle->HasValue()`).",
        "Load `v + 0` instead of `v`: `average.load_state_dict({k: v + 0 for k, v in model.named_parameters()})`.",
    ),
    KnownLimit(
        "Dropout in training, also in attention, scales by 1/p instead of 1/(1-p), and again in the backward.",
        "Keep dropout out of the compiled region: p=0, or `torch.compiler.disable`.",
    ),
    KnownLimit(
        "BatchNorm keeps the biased running variance.",
        "Correct it by n / (n - 1), or keep it out of the compiled region.",
    ),
    KnownLimit(
        "`torch.manual_seed` does not repeat the random numbers of compiled graphs.", "Use `torch_xla.manual_seed`."
    ),
    KnownLimit(
        '`module.to("xla")` unties weights that two modules share. They then train apart.', "Tie them again afterwards."
    ),
    KnownLimit(
        "An operator without an XLA lowering runs on the CPU silently.",
        "Look at `torch_xla.debug.metrics.counter_names()` for names that begin with `aten::`.",
    ),
    KnownLimit(
        "A graph that returns `x.detach()` of an input fails with an IndexError.",
        "Call `detach` outside of the compiled function.",
    ),
    KnownLimit("`dynamic=True` fails at LayerNorm.", "Compile with `dynamic=False`: one program for each length."),
    KnownLimit("`torch.utils.checkpoint` around dropout fails.", "Use only one of the two."),
)
"""Bugs of torch_xla itself, seen with 2.5.1 and 2.8.0. 2.6 and 2.7 were not tried."""
