"""The key of a stored capture: each part alone is a miss, and nothing of it belongs to one process."""

import ctypes
import itertools
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from kp_dynamo.cache import native_kernels
from kp_dynamo.cache.identity import Uncacheable, number_of
from kp_dynamo.cache.lasting_key import key_text, lasting_text
from kp_dynamo.cache.torch_tables import torch_functions
from kp_dynamo.capture.capture import read_capture
from kp_dynamo.compat import own_source
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.disk_cache import enable, library
from kp_dynamo.disk_cache.enable import DiskCache
from kp_dynamo.graph.step_share import StepShare
from kp_dynamo.session import process_parts, stored_captures
from kp_dynamo.session.compile_plan import plan_for
from tests.graphs import trace_inference

X = torch.arange(12.0).reshape(3, 4)


def key_of(function, *inputs, share=None, **options) -> str:
    """The key of the first capture of `function`."""
    found = []

    def backend(gm, inputs):
        chosen = CompileOptions.from_dict(options)
        capture = read_capture(gm, inputs, with_modules=chosen.reads_modules, lasting=True)
        plan = plan_for(capture, chosen, *([share] if share else []))
        found.append(stored_captures._key(plan))
        return gm.forward

    process_parts._fixed_parts.cache_clear()
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    process_parts._fixed_parts.cache_clear()
    return found[0]


def scaled(x):
    return x.softmax(1) * 2


OTHER_CAPTURES = {
    "a constant": lambda: key_of(lambda x: x.softmax(1) * 3, X),
    "its type": lambda: key_of(lambda x: x.softmax(1) * 2.0, X),
    "an axis": lambda: key_of(lambda x: x.softmax(0) * 2, X),
    "the dtype": lambda: key_of(scaled, X.double()),
    "the shape": lambda: key_of(scaled, X[:2].clone()),
    "the strides": lambda: key_of(scaled, X.t().contiguous().t()),
    "the offset": lambda: key_of(scaled, torch.arange(13.0)[1:].reshape(3, 4)),
    "requires_grad": lambda: key_of(scaled, X.clone().requires_grad_()),
    "no leaf": lambda: key_of(scaled, X.clone().requires_grad_() * 1),
    "a parameter": lambda: key_of(scaled, nn.Parameter(X)),
    "the device": lambda: key_of(scaled, X.to("xla")),
    "an option": lambda: key_of(scaled, X, precision="float32"),
    "the level": lambda: key_of(scaled, X, level="conservative"),
    "a disabled pass": lambda: key_of(scaled, X, disable_passes=["fold_views"]),
    "the share of the memory": lambda: key_of(scaled, X, share=StepShare(fraction=0.5)),
}


# Dynamo looks at the gradient of an input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.quick("a constant", "requires_grad", "an option")
@pytest.mark.parametrize("name", OTHER_CAPTURES)
def test_another_capture(name):
    assert OTHER_CAPTURES[name]() != key_of(scaled, X)


def test_the_same_capture():
    assert key_of(scaled, X) == key_of(scaled, X.clone()) == key_of(lambda y: y.softmax(1) * 2, X)


def _no_grad():
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def _deterministic():
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def _default_dtype():
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def _matmul_precision():
    torch.set_float32_matmul_precision("medium")
    return lambda: torch.set_float32_matmul_precision("highest")


def _attribute(owner, name, value):
    def change():
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def _variable(name, value):
    def change():
        before = os.environ.get(name)
        os.environ[name] = value
        return lambda: os.environ.pop(name) if before is None else os.environ.update({name: before})

    return change


def _autocast():
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def _sdp():
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    return lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def _mkldnn():
    torch._C._set_mkldnn_enabled(False)
    return lambda: torch._C._set_mkldnn_enabled(True)


PROCESS = {
    "grad mode": _no_grad,
    "autocast": _autocast,
    "deterministic algorithms": _deterministic,
    "the default dtype": _default_dtype,
    "the matmul precision": _matmul_precision,
    "reductions of attention": _sdp,
    "oneDNN": _mkldnn,
    "a setting of functorch": _attribute(torch._functorch.config, "activation_memory_budget", 0.5),
    "filled memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "einsum": _attribute(torch.backends.opt_einsum, "enabled", False),
    "XLA_FLAGS": _variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "LIBTPU_INIT_ARGS": _variable("LIBTPU_INIT_ARGS", "--xla_tpu_something=1"),
    "the plugin": _attribute(enable, "_in_front", DiskCache("", __file__, Path(), 0)),
    "python": _attribute(sys, "version", "3.99"),
    "torch": _attribute(torch.version, "git_version", "another"),
    "a version": _attribute(process_parts, "version_of", lambda name: "99"),
    "a file of this package": _attribute(own_source, "source_digest", lambda: "another"),
    "the chip": _attribute(process_parts.chips, "chip_name", lambda: "v5e"),
    "the number of devices": _attribute(process_parts.xla, "num_devices", lambda: 99),
}


@pytest.mark.quick("grad mode", "XLA_FLAGS", "a file of this package")
@pytest.mark.parametrize("name", PROCESS)
def test_another_process(name):
    before = key_of(scaled, X)
    undo = PROCESS[name]()
    try:
        changed = key_of(scaled, X)
    finally:
        undo()
    assert changed != before
    assert key_of(scaled, X) == before


def test_a_plugin_that_was_installed_again(tmp_path, monkeypatch):
    """On a new machine, its file has another date."""
    plugin = tmp_path / "plugin.so"
    monkeypatch.setattr(enable, "_in_front", DiskCache("", str(plugin), Path(), 0))
    parts = []
    for time in (1, 2):
        plugin.write_bytes(b"plugin")
        os.utime(plugin, (time, time))
        parts.append(process_parts._plugin())
    assert parts[0] == parts[1]


@pytest.mark.quick("KP_TPU_LOG")
@pytest.mark.parametrize(
    "name", ["KP_TPU_LOG", "TORCH_LOGS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "KP_TPU_CACHE_DIR", "HOME"]
)
def test_variables_that_change_no_compilation(name, monkeypatch):
    before = key_of(scaled, X)
    monkeypatch.setenv(name, "+kp_dynamo")
    assert key_of(scaled, X) == before


def test_no_number_of_this_process():
    """Functions are numbered in the order of their first use, which differs between processes."""
    key = key_of(lambda x: torch.nn.functional.gelu(torch.nn.functional.dropout(x, 0.1)) + torch.sin(x), X)
    assert "torch.nn.functional.dropout(" in key
    assert f"#{number_of(torch.nn.functional.dropout)}" not in key


def test_every_source_file_counts(tmp_path, monkeypatch):
    """A file that changes, is renamed or is new."""
    package = tmp_path / "kp_dynamo"
    (package / "session").mkdir(parents=True)
    monkeypatch.setattr(own_source, "ROOT", package)
    one, digests = package / "one.py", []
    for change in (lambda: one.write_text("1"), lambda: one.write_text("2"), lambda: one.rename(package / "two.py"),
                   lambda: (package / "session" / "more.py").touch()):  # fmt: skip
        change()
        digests.append(own_source.source_digest())
    assert all(a != b for a, b in itertools.combinations(digests, 2))


def test_source_that_changed_after_the_process_had_started(monkeypatch):
    monkeypatch.setattr(own_source, "IMPORTED_AT", 0.0)
    assert refusal(scaled, X) == "the source of kp_dynamo, which changed after the process had started"


def refusal(function, *inputs) -> str:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        key_of(function, *inputs)
    assert isinstance(raised.value.inner_exception, Uncacheable)
    return str(raised.value.inner_exception)


def test_a_function_that_only_claims_to_be_of_torch():
    graph = trace_inference(lambda x: x + 1, X)

    def gelu(x):
        return x

    gelu.__module__, gelu.__qualname__ = "torch.nn.functional", "gelu"
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.target = gelu
    assert lasting_text(graph, with_modules=False).refusal == "the function torch.nn.functional.gelu"


def test_a_function_of_torch_that_was_replaced(monkeypatch):
    """It is at its name, and its code is in a file of the user."""

    def softmax(x):
        return x

    softmax.__module__, softmax.__qualname__ = "torch.nn.functional", "softmax"
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    graph = trace_inference(lambda x: x + 1, X)
    next(node for node in graph.graph.nodes if node.op == "call_function").target = softmax
    assert "the function" in lasting_text(graph, with_modules=False).refusal


def test_an_operator_of_the_user():
    with torch.library._scoped_library("kp_test_key", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        assert refusal(lambda x: torch.ops.kp_test_key.twice(x), X) == "it has no key"


def test_an_address_in_the_key():
    with pytest.raises(Uncacheable, match="its key has an address: at 0x7f"):
        key_text("graph", (("passes", "Pass(<function f at 0x7f0012345678>)"),))


def test_only_known_functions_are_registered():
    found = torch_functions()
    assert found.replaced == ()
    assert found.digest == torch_functions().digest


def _other(x, eps=None):
    return x * 0


@pytest.mark.parametrize(
    "table",
    [torch._decomp.decomposition_table, torch.ops.aten.logit.default.py_kernels],
    ids=["decomposition", "kernel"],
)
def test_a_function_that_somebody_put_in_the_place_of_torchs(table, monkeypatch):
    op = torch.ops.aten.logit.default
    key = op if table is torch._decomp.decomposition_table else torch._C.DispatchKey.CompositeImplicitAutograd
    before = torch_functions()
    monkeypatch.setitem(table, key, _other)
    assert len(torch_functions().replaced) == 1
    monkeypatch.setitem(table, key, torch._refs.sinh)  # of torch, but not this one
    found = torch_functions()
    assert found.replaced == ()
    assert found.digest != before.digest


LOGIT = torch.ops.aten.logit.default


@pytest.mark.parametrize(
    "functions",
    [(torch.ops.aten.relu.default, torch.ops.aten.sigmoid.default), (torch.sin, torch.cos)],
    ids=["operators", "functions in C++"],
)
def test_functions_of_torch_without_python_code(functions, monkeypatch):
    digests = []
    for function in functions:
        monkeypatch.setitem(torch._decomp.decomposition_table, LOGIT, function)
        digests.append(torch_functions().digest)
        assert torch_functions().replaced == ()
    assert digests[0] != digests[1]


@pytest.mark.parametrize("function", [partial(torch._refs.sinh, eps=0.1), str.upper], ids=["arguments", "no library"])
def test_functions_whose_place_does_not_say_what_they_do(function, monkeypatch):
    monkeypatch.setitem(torch._decomp.decomposition_table, LOGIT, function)
    assert torch_functions().replaced == ("post_autograd aten.logit.default",)


def test_an_object_without_a_hash_and_a_packet_in_the_table(monkeypatch):
    class Scaled:
        __hash__ = None

        def __call__(self, x, eps=None):
            return x * 0

    monkeypatch.setitem(torch._decomp.decomposition_table, torch.ops.aten.logit, Scaled())
    assert torch_functions().replaced == ("post_autograd aten.logit",)


@pytest.mark.parametrize("namespace", ["xla", "prims"])
def test_an_operator_in_a_namespace_that_others_share(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("kp_test_scale(Tensor x) -> Tensor")
    library.impl("kp_test_scale", lambda x: x * 2, "CompositeImplicitAutograd")
    try:
        op = getattr(torch.ops, namespace).kp_test_scale
        assert "is a user-defined operator" in refusal(lambda x: op(x) + 1, X)
    finally:
        library._destroy()


def test_a_kernel_of_an_extension_in_c():
    """`TORCH_LIBRARY_IMPL(aten, AutogradCPU, m)`; a process without the extension must not load what it computes."""
    kernel = torch._C._dispatch_library("IMPL", "aten", "AutogradCPU", "csrc/mine.cpp", 7)
    kernel.impl_t_t("silu", "AutogradCPU", "")
    native_kernels._foreign_kernels.cache_clear()  # as if a library had been loaded
    try:
        assert torch_functions().replaced == ("csrc/mine.cpp",)
    finally:
        del kernel
        native_kernels._foreign_kernels.cache_clear()
    assert torch_functions().replaced == ()


def test_a_library_that_is_loaded_counts(tmp_path):
    before = native_kernels._num_loaded_libraries()
    ctypes.CDLL(str(shutil.copy(library.library_path(), tmp_path / "library.so")))
    assert native_kernels._num_loaded_libraries() == before + 1
