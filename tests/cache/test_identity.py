"""What a callable is, not what it is called: programs of operators, functions and passes that are defined again."""

import dataclasses
import functools
import gc
import logging
import operator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx

from kp_dynamo import clear_cache
from kp_dynamo.cache.identity import Uncacheable, identity_of, number_of
from kp_dynamo.passes.base import PassReport
from tests.spine import compiled, counted

X = torch.tensor([1.0, 2.0])


@pytest.fixture(autouse=True)
def _empty_cache():
    clear_cache()


def fresh(fn, **options):
    torch._dynamo.reset()
    return compiled(fn, **options)


def custom_op(factor: float, gradient: float = 1.0, composite: bool = False) -> None:
    """Define `notebook::scaled`, as a cell that is run again does."""

    @torch.library.custom_op("notebook::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * factor

    scaled.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, grad: grad * gradient)


def defined_op(factor: float, key: str = "CPU") -> torch.library.Library:
    library = torch.library.Library("notebook", "FRAGMENT")
    library.define("times(Tensor x) -> Tensor")
    library.impl("times", lambda x: x * factor, key)
    if key != "CompositeImplicitAutograd":
        torch.library.register_fake("notebook::times", torch.empty_like, lib=library)
    return library


def test_a_custom_operator_that_is_defined_again_runs_as_it_is_now():
    for factor in (2.0, 3.0, 2.0):
        custom_op(factor)
        assert torch.equal(fresh(lambda x: torch.ops.notebook.scaled(x) + 1)(X), X * factor + 1)


def test_a_gradient_of_a_custom_operator_that_is_registered_again_is_used():
    for gradient in (5.0, 7.0):
        custom_op(2.0, gradient)
        x = X.clone().requires_grad_()
        fresh(lambda x: torch.ops.notebook.scaled(x) + 1)(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), gradient))


def test_a_gradient_that_is_registered_again_for_the_same_operator_counts():
    custom_op(2.0)
    [definition] = [d for name, d in torch._library.custom_ops.OPDEFS.items() if name == "notebook::scaled"]
    for gradient in (5.0, 7.0):
        definition.register_autograd(lambda ctx, grad, gradient=gradient: grad * gradient)
        x = X.clone().requires_grad_()
        fresh(lambda x: torch.ops.notebook.scaled(x) + 1)(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), gradient))


@pytest.mark.parametrize("key", ["CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd"])
def test_a_library_s_operator_that_is_defined_again_runs_as_it_is_now(key):
    for factor in (2.0, 3.0):
        library = defined_op(factor, key)
        assert torch.equal(fresh(lambda x: torch.ops.notebook.times(x) + 1)(X), X * factor + 1)
        library._destroy()


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel.*:UserWarning")
def test_a_kernel_for_xla_that_is_registered_again_runs_as_it_is_now():
    library = defined_op(2.0)
    for factor in (5.0, 7.0):
        kernels = torch.library.Library("notebook", "IMPL")
        kernels.impl("times", lambda x, factor=factor: x * factor, "XLA")
        x = X.to("xla")
        assert torch.equal(fresh(lambda x: torch.ops.notebook.times(x) + 1)(x).cpu(), X * factor + 1)
        kernels._destroy()
    library._destroy()


def functions(factor: float) -> tuple:
    """A function that Dynamo does not look into, and one with a gradient of its own."""

    @torch._dynamo.allow_in_graph
    def opaque(x):
        return x * factor

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * factor * 10

    return opaque, Scaled


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_functions_of_python_that_are_defined_again_run_as_they_are_now():
    for factor in (2.0, 3.0):
        opaque, scaled = functions(factor)
        x = X.clone().requires_grad_()
        y = fresh(lambda x, opaque=opaque: opaque(x) + 1)(x)
        assert torch.equal(y, X * factor + 1)
        z = fresh(lambda x, scaled=scaled: scaled.apply(x))(x)
        z.sum().backward()
        assert torch.equal(z, X * factor)
        assert torch.equal(x.grad, torch.full((2,), factor * 10))


def adding(number: float, held: object = None) -> object:
    """A pass class, defined again at each call: equal names, equal reprs."""

    @dataclass(frozen=True)
    class AddNumber:
        held: object = dataclasses.field(default=None, repr=False)

        @property
        def name(self) -> str:
            return "add_number"

        def __call__(self, gm: fx.GraphModule) -> PassReport:
            [node] = [n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default]
            with gm.graph.inserting_after(node):
                made = gm.graph.call_function(torch.ops.aten.add.Tensor, (node, number + float((held or [0])[0])))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
            return PassReport(self.name, 1)

    AddNumber.__qualname__ = "AddNumber"
    return AddNumber


def test_a_pass_class_that_is_defined_again_is_another_pass():
    for number in (10.0, 20.0):
        one = adding(number)()
        assert repr(one) == "AddNumber()"
        torch.testing.assert_close(fresh(torch.sin, extra_passes=[one])(X), X.sin() + number)


def test_what_a_pass_reads_counts_and_equal_passes_share():
    held = [1.0]
    make = adding(10.0, held)
    for number in (1.0, 2.0):
        held[0] = number
        torch.testing.assert_close(fresh(torch.sin, extra_passes=[make()])(X), X.sin() + 10 + number)
    with counted() as counts:
        fresh(torch.sin, extra_passes=[make()])(X)
    assert (counts.aot_traces, counts.capture_hits) == (0, 1)


def test_a_pass_that_reads_a_value_without_identity_is_not_shared():
    held = [torch.tensor(1.0)]
    make = adding(10.0, held)
    for number in (1.0, 2.0):
        held[0] = held[0].fill_(number)
        torch.testing.assert_close(
            fresh(torch.sin, extra_passes=[adding(10.0, [float(held[0])])()])(X), X.sin() + 10 + number
        )
    with pytest.raises(Uncacheable, match="it reads a tensor"):
        identity_of(make())


def replaced(cls: type, **members: object) -> type:
    for name, member in members.items():
        setattr(cls, name, member)
    return cls


def test_differences_that_distinguish_two_callables():
    def adder(number):
        return lambda x: x + number

    same = adder(1)
    assert identity_of(same) == identity_of(same)
    assert identity_of(same) != identity_of(adder(1))  # another object: right, if not shared
    assert identity_of(functools.partial(operator.add, 1)) != identity_of(functools.partial(operator.add, 2))
    holder = type("Holder", (), {})()
    holder.x = 1
    before = identity_of(holder)
    holder.x = 2
    assert identity_of(holder) != before
    make = adding(1.0)
    before = identity_of(make())
    assert identity_of(make()) == before
    replaced(make, __call__=lambda self, gm: PassReport("add_number", 0))
    assert identity_of(make()) != before
    assert identity_of(True) != identity_of(1)
    assert identity_of([1, 2]) != identity_of((1, 2))


def test_code_that_is_exchanged_in_place_counts():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    before = identity_of(one)
    one.__code__ = two.__code__
    assert identity_of(one) != before


def test_no_number_is_given_twice():
    numbers = set()
    for _ in range(50):
        numbers.add(number_of(lambda: None))  # freed at once: its id comes again
    gc.collect()
    assert len(numbers) == 50


def test_a_value_that_refers_to_itself_has_an_identity():
    def recursive(n):
        return recursive(n - 1) if n else 0

    assert identity_of(recursive) == identity_of(recursive)


def test_a_logger_is_its_name():
    logger = logging.getLogger(__name__)
    before = identity_of(lambda: logger.info("here"))
    assert ("logger", __name__) in before[1][1]


def test_a_callable_that_reads_too_much_has_no_identity():
    with pytest.raises(Uncacheable, match="more than 2000 values"):
        identity_of(list(range(3000)))
