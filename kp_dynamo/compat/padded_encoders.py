"""Let Dynamo trace `nn.TransformerEncoder` with a padding mask for kp_tpu, without nested tensors.

In evaluation mode, torch 2.9 packs the rows of a batch on the CPU into a nested tensor if all padding comes last. It
reads that from the values of the mask, where Dynamo breaks the graph, and Dynamo cannot trace nested tensors either.
Here, the rows stay padded. The results are those of eager, also at padded positions, where unpacking leaves 0.

Two further graph breaks of these modules are avoided:

* they compare a mask with a causal one. That only selects a kernel: the mask is applied in both cases;
* the fused operators of their layers have no fake kernel for sizes that vary. Then their formulas are traced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable, UserFunctionVariable
from torch.nn.modules import transformer

from kp_dynamo.compat.dynamo_trace import backend_of_frame
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.ops.encoder_layer import native_multi_head_attention, transformer_encoder_layer


@functools.cache
def install() -> None:
    """Patch how Dynamo calls functions, before a trace for the backend or for `aot`."""
    if earlier_version() is not None:
        return
    call_function, call_operator = UserFunctionVariable.call_function, TorchInGraphFunctionVariable.call_function

    @functools.wraps(call_function)
    def called(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ours = _FUNCTIONS.get(self.fn)
        if ours is None or not _is_for_us():
            return call_function(self, tx, args, kwargs)
        return call_function(UserFunctionVariable(ours), tx, [*self.self_args(), *args], kwargs)

    @functools.wraps(call_operator)
    def called_operator(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        formula = _FORMULAS.get(self.value) if isinstance(self.value, type(torch.lstm)) else None
        if formula is None or not any(map(_varies, args)) or not _is_for_us():
            return call_operator(self, tx, args, kwargs)
        return call_function(UserFunctionVariable(formula), tx, args, kwargs)

    UserFunctionVariable.call_function = called  # type: ignore[method-assign]
    TorchInGraphFunctionVariable.call_function = called_operator  # type: ignore[method-assign, assignment]


def _is_for_us() -> bool:
    return bool(getattr(backend_of_frame(), "traces_padded_encoders", False))


def _varies(arg: Any) -> bool:
    """Whether an argument is a tensor with a size that varies."""
    value = arg.proxy.node.meta.get("example_value") if isinstance(arg, TensorVariable) else None
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """`nn.TransformerEncoder.forward` of torch 2.9, on padded rows: [B, S, D] -> [B, S, D]."""
    padding = F._canonical_mask(
        mask=src_key_padding_mask, mask_name="src_key_padding_mask", other_type=F._none_or_dtype(mask),
        other_name="mask", target_type=src.dtype,
    )  # fmt: skip
    mask = F._canonical_mask(
        mask=mask, mask_name="mask", other_type=None, other_name="", target_type=src.dtype, check_other=False
    )
    dropped = None
    if padding is not None and _packs_rows(encoder, src, mask):
        padding, dropped = _unpacked(padding, getattr(encoder, "mask_check", True))
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=mask, is_causal=is_causal is True, src_key_padding_mask=padding)
    if dropped is not None:
        output = output.masked_fill(dropped.unsqueeze(-1), 0.0)
    return output if encoder.norm is None else encoder.norm(output)


def _packs_rows(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None) -> bool:
    """Whether eager uses nested tensors, if the values of the padding mask allow it."""
    first: Any = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training or mask is not None:
        return False
    if src.dim() != 3 or src.device.type != "cpu" or torch.is_autocast_enabled():
        return False
    attention = first.self_attn
    tensors = (
        src, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias,
        first.norm1.weight, first.norm1.bias, first.norm2.weight, first.norm2.bias, first.linear1.weight,
        first.linear1.bias, first.linear2.weight, first.linear2.bias,
    )  # fmt: skip
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return torch.backends.mha.get_fastpath_enabled() and not needs_gradients


def _unpacked(padding: Tensor, is_checked: bool) -> tuple[Tensor, Tensor]:
    """The mask of the keys, and the positions that packing drops: all after the length of a row.

    Args:
        padding: [B, S], added to the scores: eager takes each number but 0 for padding.
        is_checked: Whether eager packs only if all padding comes last; otherwise it packs the first positions of a row,
            as many as are not padding.
    """
    is_padding = padding != 0
    lengths = (~is_padding).sum(1, keepdim=True)
    dropped = torch.arange(padding.shape[1], device=padding.device) >= lengths
    if is_checked:
        dropped = dropped & (dropped == is_padding).all()
    else:
        padding = torch.zeros_like(padding)
    return padding.masked_fill(dropped, -torch.inf), dropped


def _is_said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`_detect_is_causal_mask` of torch 2.9 without the comparison."""
    return is_causal is True


_FUNCTIONS: dict[Any, Any] = {
    nn.TransformerEncoder.forward: _encode,
    transformer._detect_is_causal_mask: _is_said_to_be_causal,
}

_FORMULAS: dict[Any, Any] = {
    torch._transformer_encoder_layer_fwd: transformer_encoder_layer,
    torch._native_multi_head_attention: native_multi_head_attention,
}
