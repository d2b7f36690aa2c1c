"""A compiled module whose calls record no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule


class InferenceModule(OptimizedModule):
    """What `torch.compile` returns for a module, without gradients: in copies too, and inside another `torch.compile`.

    Dynamo replaces an OptimizedModule by the original module, but traces a subclass as it is.
    """

    @classmethod
    def of(cls, compiled: nn.Module) -> nn.Module:
        """`compiled`, as torch.compile returned it, changed in place."""
        object.__setattr__(compiled, "__class__", cls)
        compiled._disable_gradients()  # type: ignore[operator]
        return compiled

    def _initialize(self) -> None:
        super()._initialize()
        self._disable_gradients()

    def _disable_gradients(self) -> None:
        run, module = self.forward, self._orig_mod

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return run(*args, **kwargs)

        def original(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return module(*args, **kwargs)

        # Without the attributes of `run`, by which Dynamo would find the original forward.
        self.forward = forward
        self._torchdynamo_orig_callable = original  # what torch.compile(self) compiles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module; another compilation traces the original one."""
        if not torch.compiler.is_dynamo_compiling():
            return super().__call__(*args, **kwargs)
        with torch.no_grad():
            # By its dict: Dynamo cannot trace OptimizedModule.__getattr__.
            return self._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]  # it is a module
