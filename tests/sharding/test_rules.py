"""Which dimension of which parameter is divided: words, dicts, tied parameters, and all that is refused."""

import pytest
import torch
from torch import nn

from kp_dynamo import TPUConfigurationError
from kp_dynamo.sharding.fsdp import SMALL
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.rules import own_plan, placements
from kp_dynamo.sharding.words import UNSUPPORTED, WORDS

MESH = NamedMesh.of({"data": 4, "model": 2})
DATA_ONLY = NamedMesh.of({"data": 4})


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(width, width))


class Model(nn.Module):
    """Two blocks; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 128), nn.Linear(128, 256, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.experts = nn.Parameter(torch.zeros(4, 128, 256))
        self.head.weight = self.embed.weight


class Planned(Model):
    _tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.gone": "colwise"}  # noqa: RUF012


@pytest.fixture
def meta_model():
    with torch.device("meta"):
        return Model()


def _llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config))


def test_data_leaves_parameters_whole(meta_model):
    found = placements(meta_model, DATA_ONLY, "data")
    assert found["layers.0.up.weight"] == (None, None)
    assert {axis for placement in found.values() for axis in placement} == {None}
    both = [*meta_model.named_parameters(remove_duplicate=False), *meta_model.named_buffers()]
    assert set(found) == {name for name, _ in both}
    assert {name: len(placement) for name, placement in found.items()} == {name: t.dim() for name, t in both}


def test_fsdp_divides_the_largest_dimension(meta_model):
    found = placements(meta_model, DATA_ONLY, "fsdp")
    assert found["layers.0.up.weight"] == ("data", None)
    assert found["layers.1.down.weight"] == (None, "data")
    assert found["experts"] == (None, None, "data")
    assert found["head.weight"] == found["embed.weight"] == ("data", None)
    assert found["layers.0.up.bias"] == found["layers.0.norm.weight"] == (None,)
    assert found["layers.0.mask"] == (None, None)  # a buffer


def test_fsdp_takes_a_dimension_that_divides():
    assert placements(nn.Embedding(50257, 768, device="meta"), DATA_ONLY, "fsdp") == {"weight": (None, "data")}
    assert placements(nn.Linear(256, 256, bias=False, device="meta"), DATA_ONLY, "fsdp") == {"weight": ("data", None)}


def test_where_small_ends():
    for rows, axis in ((SMALL // 128 - 4, None), (SMALL // 128, "data")):
        assert placements(nn.Embedding(rows, 128, device="meta"), DATA_ONLY, "fsdp")["weight"] in (
            (axis, None),
            (None, axis),
        )


def test_a_dict_of_words(meta_model):
    rules = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "embed": "rowwise"}
    found = placements(meta_model, MESH, rules)
    for layer in ("layers.0", "layers.1"):
        assert found[f"{layer}.up.weight"] == ("model", None)
        assert found[f"{layer}.up.bias"] == ("model",)
        assert found[f"{layer}.down.weight"] == (None, "model")
        assert found[f"{layer}.down.bias"] == (None,)
        assert found[f"{layer}.norm.weight"] == (None,)
    assert found["embed.weight"] == found["head.weight"] == ("model", None)


def test_a_dict_of_axes(meta_model):
    rules = {"layers.*.up.weight": ("model", "data"), "experts": [("model", "data"), None, None]}
    mesh = NamedMesh.of({"data": 2, "model": 2})
    found = placements(meta_model, mesh, {**rules, "layers.*.mask": (None, "model")})
    assert found["layers.1.up.weight"] == ("model", "data")
    assert found["layers.1.up.bias"] == (None,)
    assert found["experts"] == (("model", "data"), None, None)
    assert found["layers.0.mask"] == (None, "model")


@pytest.mark.parametrize(
    ("word", "placement"),
    [
        ("colwise", (None, "model", None)),
        ("local_colwise", (None, "model", None)),
        ("rowwise", (None, None, "model")),
        ("local_packed_rowwise", (None, None, "model")),
        ("grouped_gemm", ("model", None, None)),
    ],
)
def test_a_parameter_of_experts_that_is_named_itself(meta_model, word, placement):
    assert placements(meta_model, MESH, {"experts": word})["experts"] == placement


def test_a_parameter_comes_before_its_module(meta_model):
    found = placements(meta_model, MESH, {"layers.*.up": "colwise", "layers.*.up.bias": "replicate"})
    assert (found["layers.0.up.weight"], found["layers.0.up.bias"]) == (("model", None), (None,))


def test_a_star_is_one_name(meta_model):
    found = placements(meta_model, MESH, {"layers.*.u*": "colwise"})
    assert found["layers.1.up.weight"] == ("model", None)
    with pytest.raises(TPUConfigurationError, match="matches no module and no parameter"):
        placements(meta_model, MESH, {"*.up": "colwise"})


def test_a_module_under_two_names_is_ruled_by_either(meta_model):
    meta_model.again = meta_model.layers[0]
    found = placements(meta_model, MESH, {"again.up": "colwise"})
    assert found["again.up.weight"] == found["layers.0.up.weight"] == ("model", None)
    assert found["layers.1.up.weight"] == (None, None)


def test_the_linear_layer_of_gpt2_has_its_inputs_first():
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"up": Conv1D(64, 16), "down": Conv1D(16, 64)})
    found = placements(model, MESH, {"up": "colwise", "down": "rowwise"})
    assert found == {
        "up.weight": (None, "model"), "up.bias": ("model",), "down.weight": ("model", None), "down.bias": (None,),
    }  # fmt: skip


def test_a_plan_of_the_class_and_what_it_lacks():
    found = placements(Planned().to("meta"), MESH, "tensor")
    assert found["layers.0.up.weight"] == ("model", None)
    assert found["layers.0.down.weight"] == (None, "model")


def test_the_plan_of_a_llama_and_of_its_head():
    model = _llama()
    found = placements(model, MESH, "tensor")
    layer = "model.layers.1"
    columns = [f"{layer}.self_attn.{name}_proj" for name in "qkv"] + [f"{layer}.mlp.{n}_proj" for n in ("up", "gate")]
    assert {found[f"{name}.weight"] for name in (*columns, "lm_head")} == {("model", None)}
    assert {found[f"{layer}.{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {(None, "model")}
    assert found["model.embed_tokens.weight"] == (None, None)
    inside = placements(nn.ModuleDict({"inner": model}), MESH, "tensor")
    assert inside == {f"inner.{name}": placement for name, placement in found.items()}


def test_a_plan_that_a_dict_adds_to():
    """The plan of transformers 4.57 lists the layers twice, once without the prefix, and matches only one."""
    model = _llama()
    found = placements(model, MESH, {**model.tp_plan, "model.embed_tokens": ("model", "data")})
    assert found["model.layers.0.mlp.up_proj.weight"] == ("model", None)
    assert found["model.embed_tokens.weight"] == ("model", "data")
    assert found["lm_head.weight"] == (None, None)
    with pytest.raises(TPUConfigurationError, match="matches no module"):
        placements(model, MESH, {**model.tp_plan, "layers.*.mlp.up_proj": "rowwise"})


def test_a_llama_with_a_tied_head():
    model = _llama(tie_word_embeddings=True)
    model.tie_weights()
    found = placements(model, MESH, "fsdp+tensor")
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == ("model", "data")


def test_fsdp_and_tensor_divide_different_dimensions():
    found = placements(_llama(), MESH, "fsdp+tensor")
    layer = "model.layers.0"
    assert found[f"{layer}.mlp.up_proj.weight"] == ("model", "data")
    assert found[f"{layer}.mlp.down_proj.weight"] == ("data", "model")
    assert found[f"{layer}.self_attn.q_proj.weight"] == ("model", "data")
    assert found[f"{layer}.self_attn.k_proj.weight"] == ("model", None)  # 64 * 128 elements are small
    assert found["model.embed_tokens.weight"] == ("data", None)


def test_fsdp_and_tensor_divide_one_dimension_if_only_one_is_left():
    class Bias(nn.Module):
        _tp_plan = {"up": "colwise"}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(3, SMALL, device="meta")

    found = placements(Bias(), MESH, "fsdp+tensor")
    assert found == {"up.weight": (("model", "data"), None), "up.bias": (("model", "data"),)}


def test_the_order_of_the_rules_does_not_matter(meta_model):
    rules = {"layers.*.up.bias": "replicate", "layers.*.up": "colwise", "experts": "grouped_gemm"}
    assert placements(meta_model, MESH, rules) == placements(meta_model, MESH, dict(reversed(rules.items())))


def test_every_word_of_transformers_is_known():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES.keys()) == set(WORDS) | set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("mesh", "sharding", "words"),
    [
        ({"data": 4}, "fdsp", "sharding='fdsp' is invalid. Allowed: 'data', 'fsdp', 'tensor', 'fsdp+tensor', or a"),
        ({"data": 4}, "", "sharding='' is invalid"),
        ({"data": 4}, {}, "sharding={} is invalid"),
        ({"data": 4}, None, "sharding=None is invalid"),
        ({"data": 4}, ["fsdp"], "sharding=['fsdp'] is invalid"),
        ({"model": 4}, "data", "mesh=model=4 has no axis 'data'"),
        ({"model": 4}, "fsdp", "mesh=model=4 has no axis 'data'"),
        ({"data": 4}, "tensor", "mesh=data=4 has no axis 'model'"),
        ({"model": 4}, "fsdp+tensor", "mesh=model=4 has no axis 'data'"),
        ({"data": 4}, {"embed": "colwise"}, "mesh=data=4 has no axis 'model'"),
        ({"data": 4}, {"embed": ("expert", None)}, "mesh=data=4 has no axis 'expert'"),
        ({"data": 4, "model": 2}, "tensor", "a Model brings no plan for it"),
        ({"data": 4, "model": 2}, "fsdp", "mesh=data=4,model=2 has the axis 'model', but 'fsdp' divides nothing"),
        ({"data": 4, "expert": 2}, {"embed": ("data", None)}, "has the axis 'expert', but the given dict divides"),
        ({"data": 4, "model": 2}, {"embed": "colwize"}, "the word is unknown. Allowed: colwise, rowwise,"),
        ({"data": 4, "model": 2}, {"embed": "colwize"}, "Did you mean 'colwise'?"),
        ({"data": 4, "model": 2}, {"embed": "sequence_parallel"}, "is unsupported: it divides activations along"),
        ({"data": 4, "model": 2}, {"embed": 3}, "sharding={'embed': 3} is invalid. Allowed: a word"),
        ({"data": 4, "model": 2}, {"embed": (3, None)}, "sharding={'embed': (3, None)} is invalid. Allowed: a word"),
        ({"data": 4, "model": 2}, {"embed": ("data", "data")}, "uses an axis of the mesh twice"),
        ({"data": 4, "model": 2}, {"embed": ("data",)}, "embed.weight [256, 128]: it has 1 of 2 entries. Allowed: one"),
        ({"data": 4, "model": 2}, {"layers.*.up": ("model", None)}, "Try: a rule for 'layers.*.up.bias'"),
        ({"data": 4, "model": 2}, {"layers.*.upp": "colwise"}, "The nearest is 'layers."),
        ({"data": 4, "model": 2}, {"layers.*": "colwise"}, "a module without parameters of its own"),
        ({"data": 4, "model": 2}, {"layers.*.norm": "colwise"}, "sharding='colwise' has no meaning for a LayerNorm"),
        ({"data": 4, "model": 2}, {3: "colwise"}, "sharding has the key 3"),
        ({"data": 4, "model": 2}, {"embed": "rowwise", "head": "rowwise"}, "are one parameter (tied), but"),
        ({"data": 4, "model": 2}, {"layers.*.up": "colwise", "layers.0.*": "replicate"}, "sharding has two rules for"),
        ({"data": 4, "model": 3}, {"layers.*.up": "colwise"}, "dimension 0 of layers.0.up.weight [256, 128] into 3"),
        ({"data": 4, "model": 3}, {"layers.*.up": "colwise"}, "(multiples of 3, such as 258, do)"),
        ({"data": 4, "model": 3}, {"layers.*.*": "colwise"}, "has no meaning for a LayerNorm"),
        ({"data": 3}, "fsdp", "parameters by data=3: experts [4, 128, 256]; embed.weight"),
        ({"data": 3}, "fsdp", "; and 2 more. Allowed: parameters with a dimension that is a multiple of 3"),
    ],
)  # fmt: skip
def test_what_is_refused(meta_model, mesh, sharding, words):
    with pytest.raises(TPUConfigurationError) as caught:
        placements(meta_model, NamedMesh.of(mesh), sharding)
    assert words in str(caught.value)


def test_no_word_divides_a_convolution():
    model = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4, device="meta"))
    for pattern in ("0", "0.weight"):
        with pytest.raises(TPUConfigurationError, match="sharding='colwise' has no meaning for a Conv2d"):
            placements(model, MESH, {pattern: "colwise"})


def test_a_parameter_of_six_dimensions_is_whole():
    model = nn.ParameterDict({"six": torch.zeros(8, 4, 4, 4, 8, 8), "five": torch.zeros(8, 4, 4, 8, 64)})
    assert placements(model, DATA_ONLY, "fsdp") == {"six": (None,) * 6, "five": (*[None] * 4, "data")}
    with pytest.raises(TPUConfigurationError, match=r"cannot place: six \[8, 4, 4, 4, 8, 8\]. Allowed: up to 5"):
        placements(model, DATA_ONLY, {"six": ("data", *[None] * 5)})


def test_a_size_that_also_divides_along_another_axis():
    model = nn.Sequential(nn.Linear(10, 2052, device="meta"))
    model._tp_plan = {"0": "colwise"}
    with pytest.raises(
        TPUConfigurationError, match=r"a multiple of 4, or of 8 where another .* Try: 2056 instead of 2052"
    ):
        placements(model, NamedMesh.of({"data": 4, "model": 2}), "fsdp+tensor")


def test_words_that_divide_nothing_need_no_axis():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("meta")
    found = placements(model, DATA_ONLY, {"0.weight": ("data", None), "1": "replicate"})
    assert (found["0.weight"], found["1.weight"]) == (("data", None), (None, None))


def test_what_is_no_model():
    with pytest.raises(TPUConfigurationError, match="model of type function is invalid"):
        placements(lambda x: x, DATA_ONLY, "data")


def test_axes_of_size_one_need_no_use(meta_model):
    found = placements(meta_model, NamedMesh.of({"data": 4, "model": 1}), "fsdp")
    assert found == placements(meta_model, DATA_ONLY, "fsdp")


def test_the_plan_that_a_model_brings():
    assert own_plan(nn.Linear(2, 2)) == {}
    assert own_plan(_llama())["lm_head"] == "colwise_rep"
    assert own_plan(_llama())["model.layers.*.mlp.up_proj"] == "colwise"
