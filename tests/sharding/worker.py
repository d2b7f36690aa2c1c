"""Checks on eight of XLA's CPU devices under SPMD, a property of a whole process; answers as JSON, a line a check.

`python -m tests.sharding.worker CHECK...` runs these checks, by default the quick ones. A check returns what JSON has,
or raises: then its answer is the error as text.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn
from torch.nn import functional as F

import kp_dynamo
from kp_dynamo.aot.tensor_plan import needed_plan
from kp_dynamo.compat import xla
from kp_dynamo.lowering import device_spread
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import hlo_sharding, shard_shape
from kp_dynamo.sharding.rules import placements
from kp_dynamo.telemetry import snapshot

STEPS = 6
CHECKS: dict[str, Callable[[], Any]] = {}
DATA, BOTH = {"data": 8}, {"data": 4, "model": 2}


SLOW: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def slow_check(function: Callable[[], Any]) -> Callable[[], Any]:
    SLOW[function.__name__] = function
    return function


def spec(tensor: torch.Tensor) -> str:
    return xla.xlac()._get_xla_sharding_spec(tensor)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))


def tokens(seed: int = 1, rows: int = 8) -> torch.Tensor:
    return torch.randint(0, 128, (rows, 16), generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="kp_tpu", options={"precision": "float32", **options})


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "use_cache": False,
    }
    return LlamaForCausalLM(
        LlamaConfig(**config, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, **changes)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=32, n_embd=128, n_layer=2, n_head=4, use_cache=False, **dropout)
    )


# GPT-2 brings no plan. Its head is the embedding, divided by classes.
GPT2_TENSOR = {
    "transformer.h.*.attn.c_attn": "colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise",
}
GPT2_BOTH = {
    "transformer.h.*.attn.c_attn.weight": ("data", "model"),
    "transformer.h.*.attn.c_proj.weight": ("model", "data"),
    "transformer.h.*.mlp.c_fc.weight": ("data", "model"),
    "transformer.h.*.mlp.c_fc.bias": ("model",),
    "transformer.h.*.mlp.c_proj.weight": ("model", "data"),
    "transformer.wte.weight": ("model", "data"),
}


def loss_of(run: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = run(batch).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))


def trained(model: nn.Module, run: Any, mesh: Any = None, steps: int = STEPS) -> dict[str, Any]:
    """The gradients of the first step, and the losses of all steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for step in range(steps):
        batch = tokens(step)
        batch = batch if mesh is None else kp_dynamo.shard_batch(batch, mesh)
        optimizer.zero_grad()
        loss = loss_of(run, batch)
        loss.backward()
        gradients = gradients or {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters()}
        if mesh is not None and step == 1:
            misplaced = [n for n, p in model.named_parameters() if _spec_of(p.grad) != _spec_of(p)]
        optimizer.step()
        if mesh is not None:
            torch_xla.sync()
        losses.append(loss.item())
    found = {"gradients": gradients, "losses": losses}
    if mesh is not None:
        state = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        found["misplaced"] = [
            *misplaced, *[name for name, p in model.named_parameters() if _spec_of(state[name]) != _spec_of(p)],
        ]  # fmt: skip
    return found


def _spec_of(tensor: torch.Tensor) -> str:
    torch_xla.sync()
    return spec(tensor) or "{replicated}"


def against_one_device(
    make: Callable[[], nn.Module], mesh: Any, sharding: Any, *, has_plan: bool = True, **options: Any
) -> dict[str, Any]:
    """Differences to eager on the CPU in float32, which is one device; and what lies where."""
    eager, mine = make(), make()
    expected = trained(eager, eager)
    named, example = NamedMesh.of(mesh), None if has_plan else (tokens(0),)
    kp_dynamo.shard(mine, mesh, sharding, example_args=example)
    plan = needed_plan(mine, example, named, sharding)
    wanted = {name: hlo_sharding(p, named, len(p)) for name, p in placements(mine, named, sharding, plan).items()}
    before = snapshot()["programs"]
    found = trained(mine, compiled(mine, **options), mesh)
    pairs = [(found["gradients"][name], gradient) for name, gradient in expected["gradients"].items()]
    norm = sum(float(b.double().pow(2).sum()) for _, b in pairs) ** 0.5
    return {
        "gradients": sum(float((a.double() - b.double()).pow(2).sum()) for a, b in pairs) ** 0.5 / norm,
        "loss": max(abs(a - b) / b for a, b in zip(found["losses"], expected["losses"], strict=True)),
        "losses": found["losses"],
        "misplaced": found["misplaced"],
        "moved": [name for name, p in mine.named_parameters() if _spec_of(p) != wanted[name]],
        "divided": sum(text != "{replicated}" for text in wanted.values()),
        "programs": snapshot()["programs"] - before,
    }


@slow_check
def llama_data() -> Any:
    return against_one_device(llama, DATA, "data")


@slow_check
def llama_fsdp() -> Any:
    return against_one_device(llama, DATA, "fsdp")


@slow_check
def llama_tensor() -> Any:
    return against_one_device(llama, {"model": 2, "data": 4}, "tensor")


@check
def llama_both() -> Any:
    return against_one_device(llama, BOTH, "fsdp+tensor")


@slow_check
def llama_blocks() -> Any:
    return against_one_device(llama, BOTH, "fsdp+tensor", blocks="on")


@slow_check
def llama_tied() -> Any:
    def make() -> nn.Module:
        return llama(tie_word_embeddings=True)

    return against_one_device(make, BOTH, "fsdp+tensor")


@slow_check
def gpt2_data() -> Any:
    return against_one_device(gpt2, DATA, "data")


@slow_check
def gpt2_fsdp() -> Any:
    return against_one_device(gpt2, DATA, "fsdp")


@slow_check
def gpt2_tensor() -> Any:
    return against_one_device(gpt2, BOTH, GPT2_TENSOR)


@slow_check
def gpt2_both() -> Any:
    return against_one_device(gpt2, BOTH, GPT2_BOTH)


@slow_check
def gpt2_pairs() -> Any:
    return against_one_device(gpt2, BOTH, "fsdp+tensor", has_plan=False)


class Logits(NamedTuple):
    logits: torch.Tensor


class Plain(nn.Module):
    """A model of nobody's library: attention with biases, and a gated MLP whose weights are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norms = nn.Embedding(128, 128), nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))
        self.up, self.gate = (nn.Parameter(torch.randn(128, 256) * 0.05) for _ in range(2))
        self.down, self.head = nn.Parameter(torch.randn(256, 128) * 0.05), nn.Linear(128, 128)

    def forward(self, batch: torch.Tensor) -> Logits:
        x = self.embed(batch)
        h = self.norms[0](x)
        q, k, v = (lin(h).unflatten(-1, (4, -1)).transpose(1, 2) for lin in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return Logits(self.head(x + (F.silu(h @ self.gate) * (h @ self.up)) @ self.down))


@slow_check
def plain_pairs() -> Any:
    found = against_one_device(Plain, {"model": 2, "data": 4}, "tensor", has_plan=False)
    return found | {"is_all": found["divided"] == 10}  # the weights and biases of q, k and v; out, up, gate, down


@check
def what_each_device_holds() -> Any:
    """Of the parameters after `shard`, as torch_xla's public wrapper tells it."""
    model = kp_dynamo.shard(
        small(), BOTH, {"1.weight": ("model", "data"), "3.weight": ("data", "model"), "1.bias": ("model",)}
    )
    expected, mesh = small(), NamedMesh.of(BOTH)
    rules = {"1.weight": ("model", "data"), "3.weight": ("data", "model"), "1.bias": ("model",)}
    shapes, equal = {}, []
    for name, parameter in model.named_parameters():
        shards = xs.XLAShardedTensor(parameter).local_shards
        shapes[name] = sorted({tuple(shard.data.shape) for shard in shards})
        whole = dict(expected.named_parameters())[name].detach()
        equal += [torch.equal(shard.data, whole[shard.indices]) for shard in shards]
        assert shapes[name] == [shard_shape(whole.shape, rules.get(name, ()), mesh)], name
    return [shapes["1.weight"], shapes["0.weight"], all(equal), len(equal)]


@check
def a_batch_in_parts() -> Any:
    sent = kp_dynamo.shard_batch({"x": tokens(), "y": [torch.arange(8.0), torch.ones(3)]}, {"model": 2, "data": 4})
    return [spec(sent["x"]), spec(sent["y"][0]), spec(sent["y"][1]), torch.equal(sent["x"].cpu(), tokens())]


@check
def a_mesh_of_torch_xla() -> Any:
    ids = [7, 6, 5, 4, 3, 2, 1, 0]
    mesh = xs.Mesh(ids, (4, 2), ("data", "model"))
    model = kp_dynamo.shard(small(), mesh, {"1": "colwise", "3": "rowwise"})
    x = kp_dynamo.shard_batch(tokens(), mesh)
    y = compiled(model)(tokens().to("xla"))
    return [spec(model[1].weight), spec(x), (y.detach().cpu() - small()(tokens()).detach()).abs().max().item()]


@check
def sharded_again() -> Any:
    """Another sharding of the same model, after it was trained."""
    model, eager = kp_dynamo.shard(small(), DATA, "fsdp"), small()
    found = [spec(model[1].weight)]
    words = {"1": "colwise", "3": "rowwise"}
    for mesh, sharding in ((DATA, "fsdp"), (BOTH, words), ({"model": 8}, words), (DATA, "data")):
        kp_dynamo.shard(model, mesh, sharding)  # from the second time on, the optimizer's update is pending
        found.append(spec(model[1].weight))
        mine, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(eager.parameters(), lr=0.1)
        for run, optimizer, device in ((compiled(model), mine, "xla"), (eager, theirs, "cpu")):
            optimizer.zero_grad()
            run(tokens().to(device)).pow(2).mean().backward()
            optimizer.step()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [*found, max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)]


@check
def accumulated_gradients() -> Any:
    """Two backwards before a step, of batches of other sizes; one parameter was frozen when the model was divided."""
    model, eager = small(), small()
    model[3].weight.requires_grad_(False)
    kp_dynamo.shard(model, DATA, "fsdp")
    frozen = model[3].weight.requires_grad
    model[3].weight.requires_grad_(True)
    run = compiled(model)
    for seed, rows in ((1, 8), (2, 10), (3, 3)):
        run(tokens(seed, rows).to("xla")).pow(2).mean().backward()
        eager(tokens(seed, rows)).pow(2).mean().backward()
    torch_xla.sync()
    misplaced = [name for name, p in model.named_parameters() if spec(p.grad) != spec(p)]
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [frozen, misplaced, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def gradients_of_weights_that_are_marked_by_hand() -> Any:
    """Without the hooks of `shard`: the backward divides the gradients of the weights that it reads."""
    model, eager = small().to("xla"), small()
    mesh, found = xs.Mesh(list(range(8)), (4, 2), ("data", "model")), {}
    for name, axes in (("1.weight", ("model", "data")), ("3.weight", ("data", "model"))):
        xs.mark_sharding(dict(model.named_parameters())[name], mesh, axes)
    run = compiled(model)
    for seed in (1, 2):
        run(tokens(seed).to("xla")).pow(2).mean().backward()
        eager(tokens(seed)).pow(2).mean().backward()
        weights = [(n, p) for n, p in model.named_parameters() if n in ("1.weight", "3.weight")]
        found = found or {name: (spec(weight.grad), spec(weight)) for name, weight in weights}
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [found, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def gradients_that_their_program_divides() -> Any:
    """Without the hooks of `shard`: of weights that the backward reads, and of an embedding and biases."""
    model, eager = small(), small()
    kp_dynamo.shard(model, BOTH, {"0.weight": ("data", "model"), "1": "colwise", "3": "rowwise"})
    for parameter in model.parameters():
        parameter._backward_hooks.clear()
    run = compiled(model)
    run(kp_dynamo.shard_batch(tokens(), BOTH)).pow(2).mean().backward()
    eager(tokens()).pow(2).mean().backward()
    found = {name: [spec(p.grad), spec(p)] for name, p in model.named_parameters()}
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [found, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def equal_backwards_with_other_gradients() -> Any:
    """Without the hooks of `shard`: two backwards that differ only in where the gradient of an embedding lies."""
    found = []
    for axes in (("data", "model"), (None, "model")):
        model = kp_dynamo.shard(nn.Sequential(nn.Embedding(128, 64)), BOTH, {"0.weight": axes})
        model[0].weight._backward_hooks.clear()
        compiled(model)(kp_dynamo.shard_batch(tokens(), BOTH)).pow(2).sum().backward()
        found.append([spec(model[0].weight.grad), spec(model[0].weight)])
    return found


@check
def results_of_inference() -> Any:
    """On "fsdp" the result lies along the batch, and so does what a piece passes on."""
    model, eager = small(), small()
    kp_dynamo.shard(model, DATA, "fsdp")
    with torch.no_grad():
        run, results = compiled(model), []
        for rows in (8, 16, 6):
            result = run(kp_dynamo.shard_batch(tokens(rows=rows), DATA))
            results.append([spec(result), (result.cpu() - eager(tokens(rows=rows))).abs().max().item()])
    return results


class Wrapped(nn.Module):
    """Unlike those of torch's own Sequential, the hooks of a user's class run before Dynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@check
def programs_of_each_step() -> Any:
    """Of a user's class, for a batch that was divided, and for one that was not."""
    model, counts = kp_dynamo.shard(Wrapped(), DATA, "fsdp"), []
    run, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    for step in range(4):
        before = snapshot()["programs"]
        batch = kp_dynamo.shard_batch(tokens(step), DATA) if step < 2 else tokens(step).to("xla")
        run(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(snapshot()["programs"] - before)
    return counts


@check
def state_of_a_compiled_optimizer() -> Any:
    """What lies in another way than its parameter, for two placements of equal sizes; programs; the error."""
    model, eager = kp_dynamo.shard(small(), BOTH, {"1": "colwise", "3": "rowwise", "0": (None, "model")}), small()
    mine = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="xla"), eps=1e-3, capturable=True)
    theirs = torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3)
    run, counts, misplaced = compiled(model), [], []

    @torch.compile(backend="kp_tpu")
    def step() -> None:
        mine.step()

    for number in range(3):
        before = snapshot()["programs"]
        for _ in range(2):  # the second adds to the gradients lazily
            run(kp_dynamo.shard_batch(tokens(number), BOTH)).pow(2).mean().backward()
            eager(tokens(number)).pow(2).mean().backward()
        step()
        theirs.step()
        counts.append(snapshot()["programs"] - before)
        for name, p in model.named_parameters():
            state = mine.state[p]
            misplaced += [(name, key) for key in ("exp_avg", "exp_avg_sq") if _spec_of(state[key]) != _spec_of(p)]
        mine.zero_grad()
        theirs.zero_grad()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [misplaced, counts, max((a.detach().cpu() - b).abs().max().item() for a, b in pairs)]


@check
def memory_of_all_devices() -> Any:
    """A model that only all devices together can hold; then one that they cannot."""
    model, found = kp_dynamo.shard(small(), DATA, "fsdp"), []
    held = sum(p.nbytes for p in model.parameters())
    for budget in (held / 4, held / 16):
        run = compiled(model, memory_budget_gb=budget / 1e9)
        try:
            with torch.no_grad():
                found.append(list(run(kp_dynamo.shard_batch(tokens(), DATA)).shape))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            found.append(str(error))
    return found


@check
def the_chips_of_a_program() -> Any:
    """By the mesh that tensors were placed on last."""
    found = []
    for mesh, sharding in ((DATA, "data"), (BOTH, {"1": "colwise"})):
        kp_dynamo.shard(small(), mesh, sharding)
        found.append(dataclasses.astuple(device_spread()))
    return found


@check
def a_miss_names_the_sharding() -> Any:
    """Two layers of equal sizes that are divided in other ways: the second program, and what its key differs in."""
    log, records = logging.getLogger("kp_dynamo.runtime.compiled_graph"), []
    log.setLevel(logging.DEBUG)
    log.addFilter(lambda record: records.append(record.getMessage()) or False)
    kp_dynamo.clear_cache()  # the nearest entry is that of the first layer
    with torch.no_grad():
        for words in ("colwise", "rowwise"):
            layer = kp_dynamo.shard(nn.Sequential(nn.Linear(64, 64)), BOTH, {"0": words})
            compiled(layer)(kp_dynamo.shard_batch(torch.ones(8, 64), BOTH))
    log.setLevel(logging.NOTSET)
    return records


@check
def batch_norm() -> Any:
    """Its statistics are those of the whole batch, and stay whole."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    mine = kp_dynamo.shard(copy.deepcopy(eager), DATA, "data")
    run, x = compiled(mine), torch.randn(8, 16)
    difference = max((run(x.to("xla")).cpu() - eager(x)).abs().max().item() for _ in range(2))
    buffers = zip(mine.buffers(), eager.buffers(), strict=True)
    return [difference, max((a.cpu() - b).abs().max().item() for a, b in buffers), [spec(b) for b in mine.buffers()]]


@check
def eager_without_compile() -> Any:
    """Lazy XLA tensors, without the backend."""
    model, eager = kp_dynamo.shard(small(), DATA, "fsdp"), small()
    model(kp_dynamo.shard_batch(tokens(), DATA)).pow(2).mean().backward()
    eager(tokens()).pow(2).mean().backward()
    torch_xla.sync()
    misplaced = [name for name, p in model.named_parameters() if spec(p.grad) != spec(p)]
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return [misplaced, max((a.grad.cpu() - b.grad).abs().max().item() for a, b in pairs)]


@check
def the_devices_of_the_notation() -> Any:
    """torch_xla writes a placement as we do."""
    from kp_dynamo.lowering.placed_tensors import place

    mesh, found = NamedMesh.of({"data": 2, "model": 2, "expert": 2}), []
    for placement in (
        ("data", "model"), ("model", "data"), (None, "expert"), (("model", "data"), None), (None, ("expert", "data")),
        ("expert", ("data", "model")), (None, None), (("expert", "model", "data"), None),
    ):  # fmt: skip
        tensor = torch.arange(64.0).reshape(8, 8).to("xla")
        place(tensor, placement, mesh)
        result = tensor.cpu()
        found.append(
            [spec(tensor), hlo_sharding(placement, mesh, 2), torch.equal(result, torch.arange(64.0).reshape(8, 8))]
        )
    return found


@check
def a_mesh_of_too_few_devices() -> Any:
    return kp_dynamo.shard(small(), {"data": 4}, "data")


@check
def a_mesh_of_too_many_devices() -> Any:
    return kp_dynamo.shard_batch(tokens(), {"data": 16})


@check
def a_mesh_without_names() -> Any:
    return kp_dynamo.shard(small(), xs.Mesh(list(range(8)), (8,)), "data")


@check
def a_mesh_that_is_a_tuple() -> Any:
    return kp_dynamo.shard(small(), (4, 2), "data")


@check
def a_batch_without_its_axis() -> Any:
    return kp_dynamo.shard_batch(tokens(), {"model": 8})


@check
def a_batch_without_tensors() -> Any:
    return kp_dynamo.shard_batch({"x": 3}, DATA)


@check
def a_sharding_that_is_refused() -> Any:
    """The model is as it was."""
    model = small()
    try:
        kp_dynamo.shard(model, DATA, "tensor")
    except kp_dynamo.TPUConfigurationError:
        return [{p.device.type for p in model.parameters()} == {"cpu"}, len(model._forward_pre_hooks)]


@check
def large_tensors_that_stay_whole() -> Any:
    """Every device gets a copy of the table: 8 x 65 MiB, for the time of the check."""
    log, records = logging.getLogger("kp_dynamo.api.sharded_model"), []
    log.addFilter(lambda record: records.append(record.getMessage()) or False)
    model = nn.Sequential(nn.Embedding(130, 2**17), nn.Linear(128, 128))
    for sharding in ("data", {"1.weight": ("data", None)}):
        kp_dynamo.shard(model, DATA, sharding)
    return records


@check
def what_explain_names() -> Any:
    """With a limit of 32 KiB: the weight that is whole, and nothing that is divided; then with the real one."""
    import kp_dynamo.sharding.large_tensors as limit

    layer = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64))
    kp_dynamo.shard(layer, {"model": 8}, {"0": "colwise", "1": "replicate", "2": "colwise"})
    x, usual, found = torch.ones(48, 64).to("xla"), limit.LARGE_BYTES, []
    for limit.LARGE_BYTES in (32 * 1024, usual):
        explanation = kp_dynamo.explain(layer, x)
        found.append([[tensor.name, list(tensor.shape), tensor.size_bytes] for tensor in explanation.whole])
        found.append("1.weight: float32[256, 64], 0 MiB" in explanation.text())
    return found


@check
def models_of_the_object_api() -> Any:
    """Where a weight and the batch lie, by an `SPMDConfig`, by an argument, and on a mesh that divides no batch."""
    devices = kp_dynamo.XLADeviceManager(kp_dynamo.TPUConfig(topology="pod"))
    words, found = {"1": "colwise", "3": "rowwise"}, []
    for mesh, sharding in (
        (kp_dynamo.SPMDConfig((4, 2), sharding=words), None),
        (None, "fsdp"),
        (kp_dynamo.SPMDConfig((1, 8), sharding="data"), words),
    ):
        distributed = kp_dynamo.XLADistributedTraining(devices, mesh)
        model, x = distributed.wrap_model(small(), sharding), distributed.shard_batch(tokens())
        y = compiled(model)(x).detach().cpu()
        found.append([spec(model[1].weight), spec(x), (y - small()(tokens()).detach()).abs().max().item()])
    return found


@check
def an_optimizer_of_the_object_api() -> Any:
    config = kp_dynamo.KernelPyTorchConfig()
    config.hardware.tpu.topology = "pod"
    mesh = kp_dynamo.SPMDConfig(mesh_shape=(8, 1), sharding="fsdp")
    result = kp_dynamo.TPUOptimizer(config, spmd_config=mesh).optimize(small(), tokens())
    weight = next(p for n, p in result.optimized_model.named_parameters() if n.endswith("1.weight"))
    return [spec(weight), result.performance_metrics["relative_difference"]]


@check
def a_mesh_of_the_object_api_that_does_not_fit() -> Any:
    devices = kp_dynamo.XLADeviceManager(kp_dynamo.TPUConfig(topology="pod"))
    return kp_dynamo.XLADistributedTraining(devices, kp_dynamo.SPMDConfig((4, 4)))


@check
def no_module() -> Any:
    return kp_dynamo.shard(lambda x: x, DATA, "data")


def answer(function: Callable[[], Any]) -> Any:
    torch._dynamo.reset()
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    torch_xla.runtime.use_spmd()  # for the checks that call nothing of `shard` first
    kp_dynamo.shard_batch(torch.ones(8), DATA)  # starts the devices before a backward on the CPU
    for name in sys.argv[1:] or CHECKS:
        sys.stdout.write(json.dumps({name: answer((CHECKS | SLOW)[name])}) + "\n")
        sys.stdout.flush()
