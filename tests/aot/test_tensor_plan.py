"""The plan of tensor parallelism that is found in the graph of a model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kp_dynamo
from bench import workloads
from kp_dynamo.aot.tensor_plan import MatmulPairs, needed_plan
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.rules import own_plan, placements

WIDTH = 128
COLUMN, ROW = ("model", None), (None, "model")


def plan_of(model, *args, count=2):
    return MatmulPairs(model.to("meta"), args or (torch.zeros(4, 16, WIDTH),)).plan(count)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_llama_has_the_pairs_of_its_own_plan():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2 * WIDTH, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("meta")
    found = MatmulPairs(model, (torch.zeros(4, 16, dtype=torch.int64),)).plan(2)
    wanted = placements(model, NamedMesh.of({"data": 4, "model": 2}), "tensor")
    # Its own plan also divides the head, which no row matmul follows.
    assert own_plan(model)["lm_head"] == "colwise_rep"
    assert found == {
        name: placement for name, placement in wanted.items() if any(placement) and name != "lm_head.weight"
    }


def test_a_gpt_with_biases():
    work = workloads.gpt(1)
    found = plan_of(work.model, *work.inputs)
    block = "blocks.0"
    assert found == {
        **{f"{block}.attention.{n}.weight": COLUMN for n in ("query", "key", "value")},
        **{f"{block}.attention.{n}.bias": ("model",) for n in ("query", "key", "value")},
        f"{block}.attention.out.weight": ROW,
        f"{block}.up.weight": COLUMN,
        f"{block}.up.bias": ("model",),
        f"{block}.down.weight": ROW,
    }


class Mlp(nn.Module):
    """Two matmuls, with `between` in their middle."""

    def __init__(self, between=F.gelu, width=256, after=lambda x: x):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.scale = nn.Parameter(torch.ones(width))
        self.between, self.after = between, after

    def forward(self, x):
        return self.after(self.down(self.between(self.up(x))))


PAIR = {"up.weight": COLUMN, "up.bias": ("model",), "down.weight": ROW}


@pytest.mark.parametrize(
    "between",
    [
        F.gelu,
        lambda h: h * torch.sigmoid(h) + 1.0,
        lambda h: F.softmax(h.unflatten(-1, (8, -1)), -1).flatten(-2),
        lambda h: F.layer_norm(h.unflatten(-1, (8, -1)), (32,)).flatten(-2),
        lambda h: h.cumsum(1) - h.mean(1, keepdim=True),
        lambda h: torch.cat([h[:, :4], h[:, 4:] * 2], 1),
        lambda h: h.transpose(1, 2).clone().transpose(1, 2),
        lambda h: h.unflatten(-1, (8, 2, -1)).flatten(-3),
        lambda h: torch.where(h > 0, h, torch.zeros_like(h)),
        lambda h: h * torch.arange(256, device=h.device),
    ],
)
def test_what_each_chip_can_compute_alone(between):
    assert plan_of(Mlp(between)) == PAIR


@pytest.mark.parametrize(
    "between",
    [
        lambda h: F.softmax(h, -1),
        lambda h: F.layer_norm(h, (256,)),
        lambda h: h.cumsum(-1),
        lambda h: h.flip(-1),
        lambda h: torch.cat([h[..., 128:], h[..., :128]], -1),
        lambda h: h.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2),
        lambda h: h - h.amax(-1, keepdim=True),
        lambda h: h @ torch.ones(256, 256, device=h.device),
        lambda h: h.sort(-1)[0],
    ],
)
def test_what_needs_all_parts(between):
    assert plan_of(Mlp(between)) == {}


def test_a_vector_for_the_columns_is_divided_with_them():
    class Scaled(Mlp):
        def forward(self, x):
            return self.down(F.gelu(self.up(x)) * self.scale)

    assert plan_of(Scaled()) == {**PAIR, "scale": ("model",)}


def test_a_result_that_is_also_returned_is_whole():
    class Returns(Mlp):
        def forward(self, x):
            h = F.gelu(self.up(x))
            return self.down(h), h

    assert plan_of(Returns()) == {}


def test_columns_that_meet_are_divided_together_or_not_at_all():
    class Attention(nn.Module):
        """The values are normalized over all heads, so no head is alone."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

        def forward(self, x):
            q, k = (lin(x).unflatten(-1, (4, -1)).transpose(1, 2) for lin in (self.q, self.k))
            v = F.layer_norm(self.v(x), (WIDTH,)).unflatten(-1, (4, -1)).transpose(1, 2)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    found = plan_of(Attention())
    assert found == {"q.weight": COLUMN, "k.weight": COLUMN, "out.weight": ROW}  # each chip takes its heads of v


def test_a_weight_of_two_matmuls_that_disagree_is_whole():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return F.gelu(x @ self.weight) @ self.weight

    assert plan_of(Tied()) == {}


def test_a_weight_that_an_embedding_reads_is_whole():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.down(F.gelu(self.up(F.embedding(x, self.up.weight))))

    assert plan_of(Embeds(), torch.zeros(4, 16, dtype=torch.int64)) == {}


def test_sizes_that_do_not_divide_and_small_weights_stay_whole():
    assert plan_of(Mlp(), count=3) == {}
    assert plan_of(Mlp(lambda h: h.unflatten(-1, (8, -1)).softmax(-1).flatten(-2)), count=16) == {}  # 8 heads
    assert plan_of(Mlp(width=64)) == {}


def test_words_that_need_no_plan_are_not_searched():
    mesh = NamedMesh.of({"data": 4, "model": 2})
    model, args = Mlp(), (torch.zeros(4, 16, WIDTH),)
    assert needed_plan(model, args, mesh, "fsdp") is None
    assert needed_plan(model, None, mesh, "tensor") is None
    assert needed_plan(model, args, mesh, {"up": "colwise"}) is None
    assert needed_plan(model, args, mesh, "tensor") == PAIR


def test_a_plan_for_both_axes():
    mesh, args = NamedMesh.of({"data": 4, "model": 2}), (torch.zeros(4, 16, WIDTH),)
    plan = needed_plan(Mlp(), args, mesh, "fsdp+tensor")
    assert placements(Mlp(), mesh, "fsdp+tensor", plan) == {
        "up.weight": ("model", "data"), "up.bias": ("model",), "down.weight": ("data", "model"), "down.bias": (None,),
        "scale": (None,),
    }  # fmt: skip


def test_errors_say_what_to_do():
    mesh = NamedMesh.of({"data": 4, "model": 2})
    with pytest.raises(TPUConfigurationError, match=r"arguments to find one in its graph.*example_args=\(batch,\)"):
        placements(Mlp(), mesh, "tensor")
    with pytest.raises(TPUConfigurationError, match=r"its graph has no column matmul and row matmul.* among 2 chips"):
        placements(Mlp(), mesh, "tensor", {})


@pytest.mark.slow
def test_aot_divides_a_model_without_a_plan():
    model, args = Mlp().to("meta"), (torch.zeros(8, 512, WIDTH, device="meta"),)
    found = kp_dynamo.aot_compile(
        model, args, target="v5e", chips=4, mesh={"data": 1, "model": 4}, sharding="tensor", train=True
    )
    kinds = {row.kind for program in found.programs for row in program.collectives}
    assert "all-reduce" in kinds  # one a pair and direction, and nothing is gathered
    assert "all-gather" not in kinds
