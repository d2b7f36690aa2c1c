"""A call of a repeated child module as one node of Dynamo's graph.

While Dynamo traces a model, it follows the forward of the first of several equal children, to learn what its results
are like. It takes this call and all others as calls of `call_block`. The backend drops the nodes of the forward that
was followed, and compiles the forward of the children by itself: Dynamo then captures it once, and its guards decide
at each call whether another child may run the same program.

Dynamo only follows a call, as without this module, where a node is not surely right: if an argument is not a tensor, a
constant, or a nested tuple, list or dict of these, a result is not a tensor, None, or a nested tuple or list of these,
a size varies, an argument is written to, or the forward changes Python objects.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from kp_dynamo.blocks.call_changes import Before, ChildrenDiffer, reads_changes
from kp_dynamo.blocks.call_results import Modes, TensorLike, call_key, is_like, results_like, tensors_in
from kp_dynamo.blocks.child_modules import floats_in, has_inner_hooks
from kp_dynamo.blocks.node_effects import Effects
from kp_dynamo.compat.dynamo_trace import backend_of_trace

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

FOLLOW, CALL, INLINE = range(3)
_SINGLE = (torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device)
_numbers: Iterator[int] = count()
_forwards: weakref.WeakValueDictionary[int, BlockForward] = weakref.WeakValueDictionary()


class BlockGroup:
    """Equal children of a model, whose forward is compiled once.

    Attributes:
        name: The module path of the children, for messages.
        compile: Compiles a function, for calls outside of a compiled model.
        is_asked_for: Whether the user asked for it: then a graph that cannot be divided at the calls causes a warning.
        run: The forward, compiled so: `run(child, *args, **kwargs)`.
        refusal: Why the next trace follows every call; "" if it does not.
        results: For each trace, what the results of the calls that it followed are like.
        work: What the operators of a followed call do, by what the call was given; only where nobody asked.
        before: What a call might change, by the number of the child, as it was when the trace began to follow it.
    """

    def __init__(self, name: str, compile_forward: Compile, *, is_asked_for: bool = True) -> None:
        self.name, self.refusal = name, ""
        self.compile, self.is_asked_for = compile_forward, is_asked_for
        self.run = self.compiled()
        self.results: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.work: dict[Any, list[Effects]] = {}
        self.before: dict[int, Before] = {}
        self._compiled: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()

    def compiled(self) -> Callable[..., Any]:
        """The forward, compiled anew."""
        return self.compile(self._forward())

    def compiled_for(self, owner: object, key: Any, compile_forward: Compile) -> Callable[..., Any]:
        """The forward, compiled once for an owner (a session) and a key (options, and what the call is given)."""
        found = self._compiled.setdefault(owner, {})
        if key not in found:
            found[key] = compile_forward(self._forward())
        return found[key]

    def learned(self) -> dict[Any, Any]:
        """The results in this trace."""
        return self.results.setdefault(TracingContext.get(), {})

    @staticmethod
    def _forward() -> Callable[..., Any]:
        """The forward of a child, as a function with code of its own: Dynamo counts recompilations by code."""

        def block(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(child).forward(child, *args, **kwargs)

        return types.FunctionType(block.__code__.replace(co_name=f"block_{next(_numbers)}"), block.__globals__)


class BlockForward:
    """The forward of a child, in place of its method: copies and pickles of the child have the method again."""

    def __init__(self, child: nn.Module, group: BlockGroup) -> None:
        self.child, self.group, self.number = child, group, next(_numbers)
        self.__wrapped__ = types.MethodType(type(child).forward, child)  # for inspect.signature
        self._run: Callable[..., Any] | None = None
        _forwards[self.number] = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A call outside of a compiled model. Dynamo has no guards on hooks: a child with some has its own programs."""
        if self._run is None:
            self._run = self.group.compiled() if has_inner_hooks(self.child) else self.group.run
        return self._run(self.child, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.child, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            return type(self.child).forward(self.child, *args, **kwargs) if is_traced else self.run(*args, **kwargs)
        # Dynamo traces this for each child: a loop is cheaper than the calls of `_is_plain`.
        for value in (*args, *kwargs.values()):
            if not isinstance(value, _SINGLE) and not _is_plain(value):
                return type(self.child).forward(self.child, *args, **kwargs)
        on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        modes = torch.is_grad_enabled(), on("cpu"), dtype("cpu"), on("xla"), dtype("xla")
        choice = choose(self.number, modes, args, kwargs)[0]
        if choice != CALL:
            result = type(self.child).forward(self.child, *args, **kwargs)
            if choice == INLINE or not _is_plain(result) or not learn(self.number, modes, args, kwargs, result)[0]:
                return result
        return call_block(self.number, modes, *args, **kwargs)


# After a graph break in a child, it runs as it is and calls the compiled child, and is not captured by itself.
skip_code(BlockForward.__call__.__code__)
skip_code(BlockForward.run.__code__)


def _is_plain(value: Any) -> bool:
    """Whether a value may be an argument of a node; Dynamo traces this function too."""
    if type(value) in (tuple, list):
        return all([_is_plain(v) for v in value])  # noqa: C419 - Dynamo breaks at some generators
    if type(value) is dict:
        return all([_is_plain(v) for v in value.values()])  # noqa: C419
    return isinstance(value, _SINGLE)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def choose(number: int, modes: Modes, args: Any, kwargs: Any) -> tuple[int]:
    """What to do with a call: FOLLOW, CALL or INLINE, as a constant of the trace."""
    forward = _forwards[number]
    is_alone = not has_inner_hooks(forward.child) and not reads_changes(forward.child)
    key = call_key(forward.child, modes, args, kwargs) if is_alone else None
    if key is None or forward.group.refusal or not getattr(backend_of_trace(), "takes_block_calls", False):
        return (INLINE,)
    if key in forward.group.learned():
        return (CALL,)
    forward.group.before[number] = Before(args, kwargs)
    return (FOLLOW,)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def learn(number: int, modes: Modes, args: Any, kwargs: Any, result: Any) -> tuple[bool]:
    """Note what the results of a call that was followed are like; whether it may become a node."""
    forward = _forwards[number]
    before = forward.group.before.pop(number, None)
    template = results_like((args, kwargs), result)
    if before is None or before.has_changed(args, kwargs) or template is None:
        return (False,)
    forward.group.learned()[call_key(forward.child, modes, args, kwargs)] = template
    return (True,)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def call_block(number: int, modes: Modes, *args: Any, **kwargs: Any) -> Any:
    """Fake results of a call. In a divided graph, `bound_call` stands in its place."""
    forward = _forwards[number]
    template = forward.group.learned()[call_key(forward.child, modes, args, kwargs)]
    device = tensors_in((args, kwargs))[0].device
    return pytree.tree_map(lambda like: like.fake(device) if isinstance(like, TensorLike) else like, template)


def group_of(node: fx.Node) -> BlockGroup:
    """The group of the child that a node calls."""
    return _forwards[cast(int, node.args[0])].group


def program_key(node: fx.Node) -> Any:
    """What surely makes the program of a call another one; Dynamo makes only few for one function."""
    return result_key(node), floats_in(_forwards[cast(int, node.args[0])].child)


def result_key(node: fx.Node) -> Any:
    """What decides the form of the results of the call that a node is."""
    return _key_of(node, node.args[2:], dict(node.kwargs))


def followed_key(node: fx.Node) -> Any:
    """The same for a call that is followed, by its node of `choose`."""
    return _key_of(node, *node.args[2:])


def _key_of(node: fx.Node, args: Any, kwargs: Any) -> Any:
    fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
    return call_key(_forwards[cast(int, node.args[0])].child, cast(Any, node.args[1]), *fakes)


def bound_call(node: fx.Node, run: Callable[..., Any]) -> Callable[..., Any]:
    """The callable for a call node: `run` on its child.

    Raises:
        ChildrenDiffer: When called, if the results are not like those of the child that Dynamo followed.
    """
    forward = _forwards[cast(int, node.args[0])]
    # torch 2.9 never frees a compiled function that runs another one; the model must not stay with it.
    child, name = weakref.ref(forward.child), forward.group.name
    template = forward.group.learned()[result_key(node)]

    def call_block(_: int, __: bool, *args: Any, **kwargs: Any) -> Any:
        result = run(child(), *args, **kwargs)
        if not is_like(result, template):
            raise ChildrenDiffer(
                f"a call of one of {name} returned something else than the call that torch.compile followed. Allowed: "
                "equal modules, whose results have equal structure, shapes and dtypes. Try: torch.compile(model, "
                "backend='kp_tpu')."
            )
        return result

    return call_block
