"""Which dimension of a parameter the words of tensor parallelism divide, such as "colwise".

The words are those of PyTorch's `parallelize_module` and of transformers' plans. "colwise" divides the outputs of a
matmul and "rowwise" its inputs; a column matmul and the row matmul that reads it need one reduction together.
Several words of transformers differ only in how activations travel between devices ("colwise_rep", "local_rowwise",
"gather"). Here XLA inserts the communication that the shardings of the parameters need, so these words divide their
parameters as the plain ones do.
"""

from __future__ import annotations

import difflib
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from kp_dynamo.exceptions import TPUConfigurationError

_Part = Literal["outputs", "inputs", "experts", "nothing"]

WORDS: dict[str, _Part] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "replicate": "nothing",
    "colwise_rep": "outputs",
    "rowwise_rep": "inputs",
    "local_colwise": "outputs",
    "local_rowwise": "inputs",
    "local_packed_rowwise": "inputs",
    "grouped_gemm": "experts",
    "local": "nothing",
    "gather": "nothing",
    "ep_router": "nothing",
}
"""What each word divides."""

UNSUPPORTED = {
    "sequence_parallel": "it divides activations along the sequence, and only parameters and the batch are divided",
}
"""The words of transformers that are refused, and why."""


def check_word(word: str, pattern: str) -> None:
    """Raise unless `word`, given for the modules of `pattern`, is supported."""
    if word in WORDS:
        return
    why = UNSUPPORTED.get(word)
    nearest = difflib.get_close_matches(word, WORDS, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest and why is None else ""
    raise TPUConfigurationError(
        f"sharding={{{pattern!r}: {word!r}}} is {'unsupported' if why else 'invalid'}: {why or 'the word is unknown'}. "
        f"Allowed: {', '.join(WORDS)}, or a tuple with a mesh axis or None for each dimension.{hint}"
    )


def divided_dim(word: str, module: nn.Module, name: str, tensor: torch.Tensor, is_named: bool) -> int | None:
    """The dimension of the parameter `name` of `module` that a word divides, or None.

    nn.Linear has weights [out, in], the Conv1D of transformers and embeddings have [in, out]: an embedding is a matmul
    with one-hot rows, so "rowwise" divides its vocabulary. A bias is added to the outputs: "rowwise" leaves it whole.
    A parameter of another module must be named itself (`is_named`); it is [..., out, in] as in transformers' experts.
    Those of convolutions are not, so no word applies to them.

    Raises:
        TPUConfigurationError: The word has no meaning for this module.
    """
    part = WORDS[word]
    if part == "nothing" or not tensor.dim():
        return None
    if part == "experts":
        return 0
    inputs = input_dim(module)
    if inputs is not None:
        if name == "bias":
            return 0 if part == "outputs" else None
        return inputs if part == "inputs" else 1 - inputs
    if not is_named or isinstance(module, _ConvNd):
        kind = type(module).__name__
        raise TPUConfigurationError(
            f"sharding={word!r} has no meaning for a {kind}. Allowed: Linear, Embedding, EmbeddingBag, and Conv1D of "
            f"transformers. Try: a tuple for its parameter {name!r}, with a mesh axis or None for each dimension."
        )
    return max(tensor.dim() - (2 if part == "outputs" else 1), 0)


def input_dim(module: nn.Module) -> int | None:
    """The dimension of the inputs in the weight of a matmul, which has another one; None for other modules."""
    if isinstance(module, nn.Linear):
        return 1
    return 0 if isinstance(module, nn.Embedding | nn.EmbeddingBag) or _is_conv1d(module) else None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2; transformers is not imported for this."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    return ("transformers.pytorch_utils", "Conv1D") in kinds
