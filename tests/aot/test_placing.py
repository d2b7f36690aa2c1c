"""How the tensors of a step lie on several chips: nothing is compiled here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kp_dynamo.aot.placing import StepPlacer
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.aot.trace_programs import call_on_fakes
from kp_dynamo.compat import xla
from kp_dynamo.exceptions import TPUConfigurationError, XLACompilationError
from kp_dynamo.explanation.run_once import fresh_dynamo
from kp_dynamo.passes.flash_attention import FlashAttention
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import hlo_sharding
from tests.cross_entropies import fuse_small_heads

WHOLE = "{replicated}"


class Layer(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step(model, args, mesh, sharding, train=True, options=None):
    """The programs of a step with their shardings, the placer and the runs."""
    chips = NamedMesh.of(mesh).num_devices
    request = request_of(model, args, Machine("v5e", chips, mesh, sharding), options, "kp_tpu", train)
    found = []
    placer = StepPlacer(request.slice.mesh, lambda _, placed: found.append(placed))
    xla.device()
    with fresh_dynamo(), torch.set_grad_enabled(train):
        runs = call_on_fakes(request, lambda _: None, lambda _: None, placer)
    return found, placer, runs


def along(mesh, *placement):
    return hlo_sharding(placement, NamedMesh.of(mesh), len(placement))


def by_shape(program, placeholders=True):
    """The sharding of each input or result, by its shape."""
    graph = program.gm.graph
    nodes = graph.find_nodes(op="placeholder") if placeholders else graph.output_node().args[0]
    positions = program.inputs if placeholders else program.results
    shardings = program.input_shardings if placeholders else program.result_shardings
    pairs = zip(positions, shardings, strict=True)
    return [(tuple(nodes[p].meta["val"].shape), text) for p, text in pairs if p is not None]


def test_parameters_lie_as_the_sharding_says_and_the_batch_along_data():
    mesh = {"data": 4}
    [program], _, _ = step(Layer(), (torch.empty(8, 16, 128),), mesh, "fsdp", train=False)
    found = dict(by_shape(program))
    assert found[(512, 128)] == along(mesh, "data", None)
    assert found[(128, 512)] == along(mesh, None, "data")
    assert found[(128,)] == WHOLE
    assert found[(8, 16, 128)] == along(mesh, "data", None, None)
    assert by_shape(program, False) == [((8, 16, 128), along(mesh, "data", None, None))]


def test_gradients_lie_as_their_parameters_and_saved_values_along_the_batch():
    mesh = {"data": 4}
    model = nn.Sequential(Layer(), Layer())
    (forward, backward), placer, _ = step(model, (torch.empty(8, 16, 128),), mesh, "fsdp", options={"blocks": "off"})
    saved = by_shape(forward, False)
    assert saved
    assert {text for shape, text in saved if shape[0] in (8, 128)} <= {
        along(mesh, "data", *[None] * n) for n in range(4)
    }
    gradients = by_shape(backward, False)
    assert [text for shape, text in gradients if shape == (512, 128)] == [along(mesh, "data", None)] * 2
    assert [text for shape, text in gradients if shape == (128, 512)] == [along(mesh, None, "data")] * 2
    assert {text for shape, text in gradients if len(shape) == 1} == {WHOLE}
    assert placer.whole == []


def test_a_backward_takes_what_its_forward_saved_as_it_lies():
    mesh = {"data": 2, "model": 2}
    sharding = {"*.up": "colwise", "*.down": "rowwise"}
    model = nn.Sequential(Layer(), Layer())
    (forward, backward), _, _ = step(model, (torch.empty(8, 16, 128),), mesh, sharding, options={"blocks": "off"})
    saved, taken = by_shape(forward, False), by_shape(backward)
    flattened = ((8 * 16, 512), along(mesh, "data", "model"))  # what the matmul before the GELU returns
    assert saved.count(flattened) == taken.count(flattened) == 2


def test_repeated_layers_share_a_program_and_its_shardings():
    mesh = {"data": 4}
    model = nn.Sequential(*(Layer() for _ in range(4)))
    programs, _, runs = step(model, (torch.empty(8, 16, 128),), mesh, "fsdp", options={"blocks": "on"})
    assert len(runs) == sum(program.num_runs for program in programs) == 8
    # The first layer has a backward of its own: the input needs no gradient.
    [repeated] = [p for p in programs if p.num_runs == 3 and p.name == "backward"]
    gradients = by_shape(repeated, False)
    assert ((512, 128), along(mesh, "data", None)) in gradients
    assert ((8, 16, 128), along(mesh, "data", None, None)) in gradients


def test_other_shardings_are_another_program():
    """Three equal layers, of which a sharding divides one."""
    mesh = {"data": 2, "model": 2}
    model = nn.Sequential(*(Layer() for _ in range(4)))
    sharding = {"2.up": "colwise", "2.down": "rowwise"}
    programs, _, _ = step(model, (torch.empty(8, 16, 128),), mesh, sharding, options={"blocks": "on"})
    runs = sorted(program.num_runs for program in programs if program.name == "forward")
    assert runs == [1, 1, 2]
    [divided] = [p for p in programs if p.name == "forward" and along(mesh, "model", None) in p.input_shardings]
    assert divided.num_runs == 1


def test_a_chip_holds_its_shard():
    """In the backward, the step holds its input and the parameters that are whole beside what the program takes."""
    args = (torch.empty(8, 16, 128),)
    model = nn.Sequential(Layer(), Layer())
    four, eight = (max(run.held_bytes for run in step(model, args, {"data": n}, "fsdp")[2]) for n in (4, 8))
    assert four - eight == args[0].nbytes / 4 - args[0].nbytes / 8


def test_a_large_tensor_that_is_whole_is_named():
    model = nn.Linear(8192, 4096, bias=False, device="meta")
    _, placer, _ = step(model, (torch.empty(8, 8192, device="meta"),), {"data": 4}, "data", train=True)
    assert "weight: float32[4096, 8192], 128 MiB" in placer.whole


def test_an_operator_of_the_cpu_is_refused():
    with pytest.raises(XLACompilationError, match=r"has no XLA lowering .*unsupported for several chips"):
        step(lambda x: torch.special.bessel_j0(x) + 1, (torch.empty(8, 16),), {"data": 4}, "data", train=False)


def test_a_function_has_no_parameters_to_divide():
    with pytest.raises(TPUConfigurationError, match="sharding='fsdp' needs a module"):
        step(torch.relu, (torch.empty(8, 16),), {"data": 4}, "fsdp", train=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(self.project(q), k, v, is_causal=True)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 512)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.head(x), target)


def test_chips_along_the_batch_gather_a_head_that_is_computed_by_blocks(monkeypatch):
    fuse_small_heads(monkeypatch)
    args = torch.empty(64, 64), torch.empty(64, dtype=torch.long)
    for mesh, sharding, gathers in (
        ({"data": 4}, "fsdp", True),
        ({"data": 2, "model": 2}, {"head": "colwise"}, False),
    ):
        programs, _, _ = step(Head(), args, mesh, sharding)
        assert [b"kp_sharding" in program.stablehlo for program in programs] == [gathers, gathers]


KERNEL = {"extra_passes": [FlashAttention()]}


def test_a_pallas_kernel_is_divided_along_the_batch_and_the_heads_only():
    args = tuple(torch.empty(4, 4, 256, 64) for _ in range(3))
    with pytest.raises(TPUConfigurationError, match="a Pallas kernel, which is divided along 'data' and 'model' only"):
        step(Attention(), args, {"data": 2, "x": 2}, {"project.weight": ("x", None)}, train=False, options=KERNEL)
    step(Attention(), args, {"data": 2, "model": 2}, {"project": "colwise"}, train=False, options=KERNEL)
    step(Attention(), args, {"data": 4}, "data", train=False, options=KERNEL)


@pytest.mark.parametrize("options", [{}, KERNEL], ids=["attention", "kernel"])
def test_the_statistics_of_attention_lie_along_the_batch(options):
    args = tuple(torch.empty(4, 4, 256, 64) for _ in range(3))
    (forward, _), _, _ = step(Attention(), args, {"data": 4}, "data", options=options)
    assert dict(by_shape(forward, placeholders=False))[2, 16, 256] == along({"data": 4}, None, "data", None)


def test_heads_that_do_not_divide_among_the_chips_are_refused():
    args = tuple(torch.empty(2, 3, 256, 64) for _ in range(3))
    with pytest.raises(XLACompilationError, match=r"6 heads .* does not divide among 4 chips"):
        step(Attention(), args, {"data": 2, "model": 2}, {"project": "colwise"}, train=False, options=KERNEL)

    def attention(x, q, k, v):
        return Attention()(q, k, v) + x.sum()

    args = torch.empty(4, 1), *(torch.empty(2, 3, 256, 64) for _ in range(3))
    with pytest.raises(XLACompilationError, match=r"6 heads .* does not divide among 4 chips"):
        step(attention, args, {"data": 4}, "data", train=False, options=KERNEL)
