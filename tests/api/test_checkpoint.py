"""Models and optimizers into one file and back: what survives, what is refused, and that a refusal changes nothing."""

import copy
import json
import math
import os
import pickle
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from kp_dynamo import TPUCheckpointError, __version__, load_checkpoint, save_checkpoint
from kp_dynamo.api.checkpoint import file as checkpoint_file
from kp_dynamo.api.checkpoint.values import Encoder, decode
from kp_dynamo.compat import xla
from tests.spine import run_script

pytestmark = pytest.mark.compat


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def trained(model, make=torch.optim.AdamW, steps=2, **settings):
    """An optimizer of `model` that has made some steps."""
    optimizer = make(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * torch.linspace(-1, 2, p.numel()).view_as(p)).sum() for p in model.parameters()).backward()
        optimizer.step()
    return optimizer


def state_of(*owners):
    """A deep copy of all that a load may touch."""
    return copy.deepcopy([owner.state_dict() for owner in owners])


def assert_equal(actual, expected):
    """Equal trees, tensors to the last bit."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for mine, wanted in zip(actual, expected, strict=True):
            assert_equal(mine, wanted)
    else:
        assert actual == expected


def refused(match, path, *owners):
    """Loading raises, and model and optimizer are what they were, to the object."""
    before, objects = state_of(*owners), [list(owners[0].parameters()), *(o.state for o in owners[1:])]
    with pytest.raises(TPUCheckpointError, match=match):
        load_checkpoint(path, *owners)
    assert_equal(state_of(*owners), before)
    after = [list(owners[0].parameters()), *(o.state for o in owners[1:])]
    assert all(a is b for a, b in zip(after[0], objects[0], strict=True))
    assert all(a is b for a, b in zip(after[1:], objects[1:], strict=True))


# What survives.


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.SGD, {}),
    ],
)
def test_a_model_and_its_optimizer_come_back_to_the_last_bit(tmp_path, make, settings):
    model = Tied()
    optimizer = trained(model, make, **settings)
    save_checkpoint(tmp_path / "a", model, optimizer, step=2)
    other = Tied()
    its_optimizer = make(other.parameters(), lr=0.5, **settings)
    assert load_checkpoint(tmp_path / "a", other, its_optimizer).step == 2
    assert_equal(state_of(other, its_optimizer), state_of(model, optimizer))


def test_training_goes_on_as_if_nothing_had_been(tmp_path):
    model = Tied()
    optimizer = trained(model)
    save_checkpoint(tmp_path / "a", model, optimizer)
    other = Tied()
    its_optimizer = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    for owner, steps in ((model, optimizer), (other, its_optimizer)):
        steps.zero_grad()
        owner(torch.tensor([0, 3, 6])).square().sum().backward()
        steps.step()
    assert_equal(state_of(other, its_optimizer), state_of(model, optimizer))


def test_moments_keep_their_dtype_beside_bfloat16_parameters(tmp_path):
    """torch's own load_state_dict rounds them to bfloat16."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = trained(model, torch.optim.SGD, momentum=0.9)
    momentum = torch.linspace(0, 1, 6).reshape(2, 3)
    optimizer.state[model.weight] = {"momentum_buffer": momentum, "count": torch.tensor(2**40 + 1)}
    save_checkpoint(tmp_path / "a", model, optimizer)
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert_equal(optimizer.state[model.weight], {"momentum_buffer": momentum, "count": torch.tensor(2**40 + 1)})


def test_state_in_lists_keeps_its_dtype_too(tmp_path):
    """As of Shampoo or an L-BFGS history."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = trained(model, torch.optim.SGD, momentum=0.9)
    factors = [torch.linspace(0, 1, 4), {"inverse": torch.linspace(1, 2, 3)}]
    optimizer.state[model.weight] = {"factors": factors, "kind": "abc", "of": ("def", 1)}
    save_checkpoint(tmp_path / "a", model, optimizer)
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert_equal(optimizer.state[model.weight], {"factors": factors, "kind": "abc", "of": ("def", 1)})


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path / "a", model)
    assert sorted(load_file(tmp_path / "a")) == sorted(set(model.state_dict()) - {"head.weight"})
    other.head.weight = nn.Parameter(torch.zeros(7, 4))  # what module.to("xla") does
    load_checkpoint(tmp_path / "a", other)
    assert other.head.weight is other.embed.weight
    assert_equal(state_of(other), state_of(model))


def test_weights_that_share_their_memory_and_not_their_object_are_one(tmp_path):
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    save_checkpoint(tmp_path / "a", model)
    assert "head.weight" not in load_file(tmp_path / "a")
    other = Tied()
    load_checkpoint(tmp_path / "a", other)
    assert_equal(state_of(other), state_of(model))


def test_a_tie_is_not_made_where_one_of_the_two_is_frozen(tmp_path):
    model, other = Tied(), Tied()
    save_checkpoint(tmp_path / "a", model)
    other.head.weight = nn.Parameter(torch.zeros(7, 4), requires_grad=False)
    load_checkpoint(tmp_path / "a", other)
    assert other.head.weight is not other.embed.weight
    assert_equal(state_of(other), state_of(model))


class Overlapping(nn.Module):
    """Two buffers that share four of their elements, or none."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        base = torch.arange(10.0)
        self.register_buffer("head", base[:7] if shares else base[:7].clone())
        self.register_buffer("tail", base[3:])


def test_tensors_that_share_some_elements_come_back_or_are_refused(tmp_path):
    file, model = tmp_path / "overlap", Overlapping(shares=True)
    model.head.add_(1)
    save_checkpoint(file, model)
    again = Overlapping(shares=True)
    load_checkpoint(file, again)
    assert torch.equal(again.head, model.head)
    assert torch.equal(again.tail, model.tail)

    apart = Overlapping(shares=False)
    apart.head.add_(100)
    save_checkpoint(file, apart)
    versions = again.head._version, again.tail._version
    with pytest.raises(TPUCheckpointError, match=r"'head' of shape \[7\] shares elements .* differ in the file"):
        load_checkpoint(file, again)
    assert (again.head._version, again.tail._version) == versions, "it was written to before it was checked"
    assert torch.equal(again.head, model.head)
    assert torch.equal(again.tail, model.tail)


def test_weights_tied_since_load_where_the_values_are_equal(tmp_path):
    apart, tied = Tied(), Tied()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    save_checkpoint(tmp_path / "a", apart)
    load_checkpoint(tmp_path / "a", tied)
    assert_equal(state_of(tied), state_of(apart))
    apart.head.weight.data[0, 0] += 1
    save_checkpoint(tmp_path / "a", apart)
    refused("'head.weight' and 'embed.weight' are one tensor in the model and differ", tmp_path / "a", tied)


def awkward():
    """Buffers that are no plain dense tensors of their own."""
    module, base = nn.Module(), torch.arange(24.0)
    module.register_buffer("permuted", base.reshape(2, 3, 4).permute(2, 0, 1))
    module.register_buffer("strided", base[::5])
    module.register_buffer("part", base[3:7])
    module.register_buffer("overlapping", base[5:9])
    module.register_buffer("expanded", torch.tensor([[1.0], [2.0]]).expand(2, 5))
    module.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 1j]).conj())
    module.register_buffer("last", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    module.register_buffer("empty", torch.zeros(0, 3))
    module.register_buffer("number", torch.tensor(math.pi))
    module.register_buffer("not_kept", torch.ones(1), persistent=False)
    return module


def test_tensors_that_are_not_contiguous_keep_values_and_strides(tmp_path):
    model, other = awkward(), awkward()
    save_checkpoint(tmp_path / "a", model)
    for value in other.state_dict().values():
        if not value.is_conj() and 0 not in value.stride():
            value.zero_()
    strides = [value.stride() for value in other.state_dict().values()]
    load_checkpoint(tmp_path / "a", other)
    assert_equal(state_of(other), state_of(model))
    assert [value.stride() for value in other.state_dict().values()] == strides
    assert "not_kept" not in load_file(tmp_path / "a")


def test_a_value_that_an_expanded_buffer_cannot_hold_is_refused(tmp_path):
    model, other = nn.Module(), nn.Module()
    model.register_buffer("mask", torch.arange(10.0).reshape(2, 5))
    other.register_buffer("mask", torch.zeros(2, 1).expand(2, 5))
    save_checkpoint(tmp_path / "a", model)
    refused(r"'mask' of shape \[2, 5\] is expanded in the model, and these elements", tmp_path / "a", other)


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.uint16, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_survive(tmp_path, dtype):
    model, other = nn.Module(), nn.Module()
    model.register_buffer("x", torch.tensor([0.0, 1.0, 3.0]).to(dtype))
    other.register_buffer("x", torch.zeros(3).to(dtype))
    save_checkpoint(tmp_path / "a", model)
    load_checkpoint(tmp_path / "a", other)
    assert other.x.dtype is dtype
    assert other.x.to(torch.complex64).tolist() == model.x.to(torch.complex64).tolist()


def test_nan_and_infinity_survive_in_tensors_and_settings(tmp_path):
    model = nn.Linear(2, 1)
    model.weight.data = torch.tensor([[math.nan, -math.inf]])
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    save_checkpoint(tmp_path / "a", model, optimizer)
    other = nn.Linear(2, 1)
    its_optimizer = torch.optim.SGD(other.parameters())
    load_checkpoint(tmp_path / "a", other, its_optimizer)
    assert_equal(state_of(other, its_optimizer), state_of(model, optimizer))


def test_a_learning_rate_that_is_a_tensor_survives(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    save_checkpoint(tmp_path / "a", model, optimizer)
    assert "optimizer.param_groups.0.lr" in load_file(tmp_path / "a")
    optimizer.param_groups[0]["lr"].fill_(1)
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"].item() == 0.25


def test_a_compiled_model_and_its_module_share_their_files(tmp_path):
    model, other = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")), nn.Sequential()
    other.extend([nn.Linear(2, 2), nn.Linear(2, 2)])
    save_checkpoint(tmp_path / "a", torch.compile(model, backend="eager"))
    load_checkpoint(tmp_path / "a", other)
    assert_equal([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])
    save_checkpoint(tmp_path / "b", other)
    other[0].weight.data.zero_()
    load_checkpoint(tmp_path / "a", torch.compile(other, backend="eager"))
    assert_equal([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])


def test_a_model_made_in_inference_mode_loads(tmp_path):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "a", model)
    with torch.inference_mode():
        other = nn.Linear(2, 1)
    load_checkpoint(tmp_path / "a", other)
    assert_equal(state_of(other), state_of(model))


def test_a_model_on_the_device_goes_to_the_cpu_and_back(tmp_path):
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, device="xla")).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "a", model, optimizer)
    on_cpu = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    cpu_optimizer = torch.optim.AdamW(on_cpu.parameters())
    load_checkpoint(tmp_path / "a", on_cpu, cpu_optimizer)
    assert_equal([v.cpu() for v in model.state_dict().values()], list(on_cpu.state_dict().values()))
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert_equal(cpu_optimizer.state[on_cpu[0].weight]["exp_avg"], moments.cpu())
    expected = state_of(on_cpu)
    with torch.no_grad():
        model[0].weight.zero_()
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert {p.device.type for p in model.parameters()} == {"xla"}
    assert optimizer.state[model[0].weight]["exp_avg"].device.type == "xla"
    assert_equal([v.cpu() for v in model.state_dict().values()], list(expected[0].values()))


def test_what_is_pending_on_the_device_comes_as_one_program(tmp_path):
    model = nn.Sequential(*(nn.Linear(3, 3 + i) for i in range(4))).to("xla")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(1)
    count = xla.xlac()._xla_counter_value
    before = count("UncachedCompile") or 0
    save_checkpoint(tmp_path / "a", model)
    assert count("UncachedCompile") - before <= 1


def test_tensors_that_were_tied_on_the_device_are_stored_once(tmp_path):
    model = Tied().to("xla")
    model.head.weight = model.embed.weight
    save_checkpoint(tmp_path / "a", model)
    assert "head.weight" not in load_file(tmp_path / "a")


def test_a_file_loads_without_torch_xla(tmp_path):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "a", model, trained(model))
    code = f"""
import sys
sys.modules["torch_xla"] = None  # an import of it fails
import torch
from kp_dynamo import load_checkpoint
model = torch.nn.Linear(2, 1)
load_checkpoint({str(tmp_path / "a")!r}, model, torch.optim.AdamW(model.parameters()))
print(model.weight.tolist())
"""
    assert json.loads(run_script(code)) == model.weight.tolist()


def test_step_config_and_versions_are_in_the_file(tmp_path):
    model, config = nn.Linear(2, 1), {"lr": 1e-3, "betas": (0.9, 0.99), "layers": {1: "a"}, "top": math.inf, "no": None}
    save_checkpoint(tmp_path / "a", model, config=config, step=7)
    info = load_checkpoint(tmp_path / "a", model)
    assert (info.step, info.config) == (7, config)
    assert info.versions["kp_dynamo"] == __version__
    assert info.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    save_checkpoint(tmp_path / "a", model, config=types.SimpleNamespace(to_dict=lambda: {"mode": "training"}))
    info = load_checkpoint(tmp_path / "a", model)
    assert (info.step, info.config) == (None, {"mode": "training"})


def test_other_programs_can_read_the_tensors(tmp_path):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "a", model, trained(model))
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        names = set(file.keys())
    moments = {f"optimizer.state.{i}.{name}" for i in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")}
    assert names == {"weight", "bias", *moments}


NAMES = [
    "model.pth",
    "model",
    "ä ö.safetensors",
    "a" * 255,
    ".hidden",
    "-rf",
    b"\xff\xfe".decode(errors="surrogateescape"),
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_any_file_name_is_accepted(tmp_path, name):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / name, model)
    load_checkpoint(os.fspath(tmp_path / name), model)
    assert os.listdir(tmp_path) == [name]


def test_an_open_file_is_replaced_not_written_to(tmp_path):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "a", model)
    held = load_file(tmp_path / "a")["weight"]
    expected = held.clone()
    model.weight.data.fill_(5)
    save_checkpoint(tmp_path / "a", model)
    assert_equal(held, expected)


# What is refused.


@pytest.fixture
def saved(tmp_path):
    """A file, and a model and an optimizer that it fits, with other values."""
    model = Tied()
    save_checkpoint(tmp_path / "saved", model, trained(model), step=1, config={"a": 1})
    other = Tied()
    return tmp_path / "saved", other, trained(other, steps=1)


def test_a_file_that_is_not_there(tmp_path):
    refused("No such file", tmp_path / "none", nn.Linear(1, 1))


class _Path:
    def __init__(self, name):
        self.name = name

    def __fspath__(self):
        return self.name


@pytest.mark.parametrize("path", ["a\0b", "", None, 3, b"a", _Path(b"a"), _Path("a\0b"), _Path(""), _Path(3)])
def test_what_is_no_path(path):
    with pytest.raises(TPUCheckpointError, match="Allowed: the name of a file"):
        save_checkpoint(path, nn.Linear(1, 1))
    with pytest.raises(TPUCheckpointError, match="Allowed: the name of a file"):
        load_checkpoint(path, nn.Linear(1, 1))


def test_a_folder_or_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        refused("not a regular file", path, nn.Linear(1, 1))


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99, 0.9999])
def test_a_truncated_file(saved, share):
    path, *owners = saved
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refused("cannot be read as a checkpoint", path, *owners)


def test_a_file_with_bytes_after_its_end(saved):
    path, *owners = saved
    path.write_bytes(path.read_bytes() + b"\0")
    refused("cannot be read as a checkpoint", path, *owners)


def test_a_torn_file_whose_tail_was_never_written(saved):
    path, *owners = saved
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] + b"\0" * 64)
    refused("was altered", path, *owners)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file, its bytes, and what it fits."""
    path, model = tmp_path_factory.mktemp("whole") / "file", nn.Linear(3, 3)
    optimizer = trained(model)
    save_checkpoint(path, model, optimizer, step=3)
    return path, path.read_bytes(), model, optimizer


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_changed_byte_is_seen(whole, where, change):
    path, content, *owners = whole
    changed = bytearray(content)
    changed[int(where * len(changed))] ^= change
    path.write_bytes(changed)
    refused(None, path, *owners)


def rewrite(path, change):
    """Write a file again with `change(tensors, metadata)` made, and its old digest."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, metadata: tensors["embed.weight"][0, 0].add_(1e-6),
        lambda tensors, metadata: tensors.update(extra=torch.zeros(1)),
        lambda tensors, metadata: tensors.pop("norm.bias"),
        lambda tensors, metadata: tensors.update({"norm.bias": tensors["norm.bias"].view(torch.int32)}),
        lambda tensors, metadata: tensors.update({"norm.bias": tensors["norm.bias"].reshape(2, 2)}),
        lambda tensors, metadata: metadata.update({"kp_tpu.step": "9"}),
        lambda tensors, metadata: metadata.update({"kp_tpu.config": "null"}),
        lambda tensors, metadata: metadata.update(added="x"),
        lambda tensors, metadata: metadata.pop("kp_tpu.digest"),
    ],
)
def test_a_tampered_file(saved, change):
    path, *owners = saved
    rewrite(path, change)
    refused("was altered", path, *owners)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", "[]"),
        ("model", '{"embed.weight": 5}'),
        ("model", "{"),
        ("model", "[" * 100000),
        ("step", '"first"'),
        ("step", "-1"),
        ("optimizer", "{}"),
        ("optimizer_state", '{"state": {"$dict": [[0, {"exp_avg": {"$tensor": "no such"}}]]}, "param_groups": []}'),
        ("optimizer_state", '{"$code": "import os"}'),
        ("config", '{"$tuple": 5}'),
    ],
)
def test_metadata_that_a_forger_gave_a_right_digest(saved, name, text):
    path, *owners = saved

    def change(tensors, metadata):
        metadata[f"kp_tpu.{name}"] = text
        metadata["kp_tpu.digest"] = checkpoint_file._digest(tensors, metadata)

    rewrite(path, change)
    refused(None, path, *owners)


def test_a_safetensors_file_of_another_program(tmp_path):
    model = nn.Linear(2, 1)
    save_file(model.state_dict(), tmp_path / "a")
    refused("of another program. Allowed: a file of save_checkpoint or TPUBackend.save_model", tmp_path / "a", model)


def test_a_file_of_a_later_format(saved):
    path, *owners = saved
    rewrite(path, lambda tensors, metadata: metadata.update({"kp_tpu.format": "2"}))
    refused("has format '2'; this version of kp_tpu reads '1'", path, *owners)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("write", [lambda f: torch.save(Bomb(), f), lambda f: pickle.dump(Bomb(), f)])
def test_a_pickle_is_never_unpickled(tmp_path, write):
    with open(tmp_path / "a", "wb") as file:
        write(file)
    refused("Other files are never unpickled", tmp_path / "a", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Linear(3, 2), r"'bias' is float32\[1\] in the file and float32\[2\] in the model"),
        (nn.Linear(2, 1).double(), r"'weight' is float32\[1, 2\] in the file and float64\[1, 2\] in the model"),
        (nn.Linear(2, 1, bias=False), "'bias' is not in the model"),
        (nn.Bilinear(2, 2, 1), "float32"),
        (nn.BatchNorm1d(1), "'running_mean' is missing in the file"),
        (nn.Linear(2, 1, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(1), "'weight' has no shape yet"),
    ],
)
def test_a_model_that_the_file_does_not_fit(tmp_path, model, match):
    save_checkpoint(tmp_path / "a", nn.Linear(2, 1))
    before = copy.deepcopy(model.state_dict()) if "meta" not in match and "shape yet" not in match else None
    with pytest.raises(TPUCheckpointError, match=match):
        load_checkpoint(tmp_path / "a", model)
    if before is not None:
        assert_equal(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters()),
            "the file has the class AdamW where the given optimizer has the class SGD",
        ),
        (
            lambda m: torch.optim.AdamW([m.embed.weight]),
            r"has groups of \[3\] parameters where the given optimizer has groups of \[1\] parameters",
        ),
        (lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()]), r"\[3\].*\[1, 1, 1\]"),
        (
            lambda m: torch.optim.AdamW([m.embed.weight, m.norm.bias, m.norm.weight]),
            "has norm.weight of shape .* where the given optimizer has norm.bias",
        ),
        (
            lambda m: torch.optim.AdamW([m.embed.weight, m.norm.weight, nn.Parameter(torch.ones(4))]),
            "where the given optimizer has a parameter outside the model",
        ),
    ],
)
def test_an_optimizer_that_the_file_does_not_fit(saved, make, match):
    path, model, _ = saved
    refused(match, path, model, make(model))


def test_a_file_without_optimizer_state(tmp_path):
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "a", model)
    refused("has no optimizer state", tmp_path / "a", model, torch.optim.SGD(model.parameters()))


def test_an_optimizer_that_refuses_its_state_is_left_as_it_was(saved):
    path, model, optimizer = saved

    def refuse(optimizer):
        raise OSError("no")

    optimizer.register_load_state_dict_post_hook(refuse)
    refused("AdamW rejects its state: no", path, model, optimizer)


@pytest.mark.parametrize(("error", "raised"), [(OSError, TPUCheckpointError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_load_that_fails_midway_leaves_all_as_it_was(saved, monkeypatch, error, raised):
    """Whatever stops it: memory that runs out, the user."""
    path, model, optimizer = saved
    before, state, copy_, num_copied = state_of(model, optimizer), optimizer.state, torch.Tensor.copy_, 0

    def stop_at_the_third(target, value):
        nonlocal num_copied
        num_copied += 1
        if num_copied == 3:
            copy_(target, value)
            raise error("no more")
        return copy_(target, value)

    monkeypatch.setattr(torch.Tensor, "copy_", stop_at_the_third)
    with pytest.raises(raised, match="no more"):
        load_checkpoint(path, model, optimizer)
    monkeypatch.undo()
    assert num_copied > 3, "nothing was given back"
    assert_equal(state_of(model, optimizer), before)
    assert optimizer.state is state


def test_a_model_that_cannot_be_written_to_gives_the_optimizer_back(saved, monkeypatch):
    path, model, optimizer = saved
    copy_ = torch.Tensor.copy_

    def stop_at_the_model(target, value):
        if target is model.norm.weight:
            monkeypatch.undo()
            raise RuntimeError("no more")
        return copy_(target, value)

    optimizer.state[model.norm.weight]["step"] += 1  # the file has another state
    groups = optimizer.param_groups
    monkeypatch.setattr(torch.Tensor, "copy_", stop_at_the_model)
    refused("could not be written to: no more", path, model, optimizer)
    assert optimizer.param_groups is groups


def test_tensors_that_share_elements_are_given_back_too(tmp_path, monkeypatch):
    model = Overlapping(shares=True)
    model.register_buffer("last", torch.zeros(1))
    save_checkpoint(tmp_path / "a", model)
    model.tail.mul_(10)
    before, copy_ = state_of(model), torch.Tensor.copy_

    def stop_at_the_last(target, value):
        if target is model.last:
            monkeypatch.undo()
            raise RuntimeError("no more")
        return copy_(target, value)

    monkeypatch.setattr(torch.Tensor, "copy_", stop_at_the_last)
    with pytest.raises(TPUCheckpointError, match="no more"):
        load_checkpoint(tmp_path / "a", model)
    assert_equal(state_of(model), before)


def test_an_optimizer_that_trains_both_of_what_was_one_is_refused(saved):
    path, model, _ = saved
    model.head.weight = nn.Parameter(torch.zeros(7, 4))
    refused("the file has groups of", path, model, torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.AdamW([model.head.weight, model.norm.weight, model.norm.bias])
    refused("has embed.weight of shape .* where the given optimizer has head.weight", path, model, optimizer)


@pytest.mark.parametrize(
    ("model", "how", "match"),
    [
        ("model.pt", {}, "model of type str"),
        (nn.Linear(2, 1), {"optimizer": "sgd"}, "optimizer of type str"),
        (nn.Linear(2, 1), {"step": -1}, "step=-1 is invalid. Allowed: an int >= 0, None"),
        (nn.Linear(2, 1), {"step": True}, "step=True"),
        (nn.Linear(2, 1), {"config": {"model": object()}}, "config.model is a object"),
        (nn.Linear(2, 1), {"config": {"scale": torch.ones(1)}}, "config.scale is a tensor"),
        (nn.Linear(2, 1, device="meta"), {}, "'weight' is on the meta device"),
        (nn.LazyLinear(1), {}, "'weight' has no shape yet"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, model, how, match):
    save_checkpoint(tmp_path / "a", nn.Linear(1, 1))
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(TPUCheckpointError, match=match):
        save_checkpoint(tmp_path / "a", model, **how)
    assert (tmp_path / "a").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_state_that_a_module_makes_up_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

    with pytest.raises(TPUCheckpointError, match="'_extra_state' is state that a module creates"):
        save_checkpoint(tmp_path / "a", Extra(1, 1))


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    model = nn.Module()
    model.register_buffer("x", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(TPUCheckpointError, match=r"cannot hold tensors of dtype torch.complex128"):
        save_checkpoint(tmp_path / "a", model)
    assert os.listdir(tmp_path) == []


def test_sparse_tensors_are_refused(tmp_path):
    model = nn.Module()
    model.register_buffer("x", torch.eye(3).to_sparse())
    with pytest.raises(TPUCheckpointError, match=r"layout torch.sparse_coo.*plain dense tensors"):
        save_checkpoint(tmp_path / "a", model)


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", nn.Linear(1, 1))
    before = (tmp_path / "a").read_bytes()
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(1))
    with pytest.raises(TPUCheckpointError, match=r"'__metadata__'.* rename"):
        save_checkpoint(tmp_path / "a", model)
    assert (tmp_path / "a").read_bytes() == before


def test_parameters_of_a_class_of_their_own_are_refused(tmp_path):
    """Their class may hold more than values, and say what copying them does."""

    class Scaled(nn.Parameter):
        pass

    model = nn.Linear(1, 1)
    save_checkpoint(tmp_path / "a", model)
    model.weight = Scaled(torch.ones(1, 1))
    with pytest.raises(TPUCheckpointError, match=r"'weight' is a .*Scaled .*plain dense tensors"):
        save_checkpoint(tmp_path / "a", model)
    refused(r"'weight' is a .*Scaled ", tmp_path / "a", model)


def test_an_optimizer_whose_settings_are_code_is_refused(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "schedule": lambda step: 1}])
    with pytest.raises(TPUCheckpointError, match=r"optimizer.param_groups.0.schedule is a function"):
        save_checkpoint(tmp_path / "a", model, optimizer)


def test_a_model_whose_names_are_the_optimizers(tmp_path):
    model = nn.Module()
    model.optimizer = nn.Module()
    model.optimizer.state = nn.ModuleDict({"0": nn.Module()})
    model.optimizer.state["0"].exp_avg = nn.Parameter(torch.ones(1))
    with pytest.raises(TPUCheckpointError, match=r"both have a tensor 'optimizer.state.0.exp_avg'"):
        save_checkpoint(tmp_path / "a", model, trained(model))


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(TPUCheckpointError, match=r"could not be written: .*No such file.*a folder that exists"):
        save_checkpoint(tmp_path / "none" / "a", nn.Linear(1, 1))


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    model = nn.Linear(1, 1)
    save_checkpoint(tmp_path / "a", model)
    before = (tmp_path / "a").read_bytes()

    def full(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kp_dynamo.api.checkpoint.file.save_file", full)
    with pytest.raises(TPUCheckpointError, match=r"No space left on device.*An earlier file there is unchanged"):
        save_checkpoint(tmp_path / "a", model)
    assert (tmp_path / "a").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


# Plain values.

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.integers() | st.text() | st.booleans()
TREES = st.recursive(LEAVES, lambda t: st.lists(t) | st.lists(t).map(tuple) | st.dictionaries(KEYS, t), max_leaves=10)


@settings(max_examples=50)
@given(TREES)
def test_plain_values_come_back_as_they_were(value):
    encoder = Encoder()
    assert_same_value(decode(json.loads(json.dumps(encoder.encode(value, "v"), allow_nan=False)), {}), value)


def assert_same_value(actual, expected):
    assert repr(actual) == repr(expected)


def test_one_tensor_in_two_places_is_stored_once():
    encoder, tensor = Encoder(), torch.ones(2)
    encoded = encoder.encode({"a": [tensor], "b": (tensor,)}, "o")
    assert list(encoder.tensors) == ["o.a.0"]
    back = decode(encoded, encoder.tensors)
    assert back["a"][0] is back["b"][0]


def test_two_tensors_of_one_path_are_refused():
    with pytest.raises(TPUCheckpointError, match=r"two tensors would have the name 'o.a.b'"):
        Encoder().encode({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "o")


def test_the_tests_see_what_a_load_does(saved):
    """`refused` must fail where something changes."""
    path, *owners = saved
    before = state_of(*owners)
    load_checkpoint(path, *owners)
    with pytest.raises(AssertionError):
        assert_equal(state_of(*owners), before)


def test_bytes_of_one_element_with_a_stride():
    assert checkpoint_file.bytes_of(torch.arange(3)[1::2]).tolist() == [1, *[0] * 7]
