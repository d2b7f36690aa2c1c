"""Training steps that were published with their configuration: models of MaxText on slices of Cloud TPU.

Sources:
* AI-Hypercomputer/tpu-recipes at c8cfe2f6, training/trillium: seconds of a step in the README of each recipe.
* AI-Hypercomputer/maxtext at e591f30c, src/maxtext/configs/tpu: TFLOP/s of a chip in the README of each generation,
  options in the script of each model, sizes in configs/base.yml and by `global_parameter_scale`.

Left out, because a part of the configuration is not published: Llama-2-7B and Llama-2-70B on v5p (the mesh), and the
models of 22B and 52B on v4 (with today's defaults for heads and MLP, they have 26B and 65B parameters). Left out for
other reasons: GPT-3, Gemma 3 and Mixtral, which have other layers than the models below; slices that are joined over
the network of the data center; MaxText's 128B on v5e (q, k and v on the host, on a mesh of 16 x 16); slices of v5p of
more than 256 chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal

RECIPES, MAXTEXT = "tpu-recipes", "maxtext"

Checkpoint = Literal["blocks", "attention"]


@dataclass(frozen=True)
class Sizes:
    """A Llama: `layers` of attention and a gated MLP.

    Attributes:
        width: Of the hidden states.
        mlp: Of the MLP.
        heads: Heads of queries.
        key_heads: Heads of keys and values.
        layers: How many.
        vocabulary: Rows of the embedding and of the head, which are two matrices.
    """

    width: int
    mlp: int
    heads: int
    key_heads: int
    layers: int
    vocabulary: int

    head_width = 128

    @property
    def num_parameters(self) -> int:
        return 2 * self.vocabulary * self.width + self.layers * self._matmul_parameters

    @property
    def _matmul_parameters(self) -> int:
        heads = 2 * self.heads + 2 * self.key_heads
        return self.width * (3 * self.mlp + heads * self.head_width)

    def step_flops(self, batch: int, length: int) -> float:
        """FLOPs of a training step as MaxText counted them for these tables: attention in full, nothing recomputed."""
        weights = 2 * (self.layers * self._matmul_parameters + self.vocabulary * self.width)
        attention = 4 * length * self.heads * self.head_width * self.layers
        return 3.0 * batch * length * (weights + attention)


@dataclass(frozen=True)
class PublishedRun:
    """One run.

    Attributes:
        model: Its name.
        sizes: Its sizes.
        target: The generation.
        chips: Chips of the slice.
        batch: Sequences of a chip; a fraction if several chips share the work of one.
        length: Tokens of a sequence.
        recomputed: What the run recomputed in the backward, in its own words.
        source: Where it was published.
        step_s: Seconds of a step, if published.
        tflops: TFLOP/s of a chip, if published.
        tensor: Chips that share a layer's matmuls.
        checkpoint: The mode of ours that is nearest to `recomputed`.
        flags: LIBTPU_INIT_ARGS of the run that decide which program the compiler makes; those that only order
            collectives are left out.
    """

    model: str
    sizes: Sizes
    target: str
    chips: int
    batch: int
    length: int
    recomputed: str
    source: str
    step_s: float | None = None
    tflops: float | None = None
    tensor: int = 1
    checkpoint: Checkpoint = "blocks"
    flags: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.target}-{self.chips}"

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        if self.step_s is not None:
            return self.step_s
        assert self.tflops is not None, "a run has one of the two"
        return self.sizes.step_flops(self.batch, self.length) / self.tflops / 1e12


def scaled(scale: int) -> Sizes:
    """MaxText's model of about `scale` billion parameters: `global_parameter_scale`, a power of two."""
    base, rest = divmod(int(log2(scale)), 3)
    heads = 2 ** (base + (rest > 0))
    return Sizes(2048 * 2 ** (base + (rest > 1)), 7168 * heads, 16 * heads, 16 * heads, 16 * 2**base, 32000)


LLAMA_8B = Sizes(4096, 14336, 32, 8, 32, 128256)
LLAMA_70B = Sizes(8192, 28672, 64, 8, 80, 128256)
_OFFLOADED = "all but q, k, v and the attention's result, which the host keeps"
_QKV_OFFLOADED = "all but q, k and v, which the host keeps"


_NO_COLLECTIVE_MATMULS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"


def _recipe(
    model: str, sizes: Sizes, chips: int, batch: int, step_s: float, recomputed: str, flags: str = ""
) -> PublishedRun:
    return PublishedRun(model, sizes, "v6e", chips, batch, 8192, recomputed, RECIPES, step_s, flags=flags)


def _scaled(scale: int, target: str, chips: int, batch: int, tflops: float, tensor: int = 1) -> PublishedRun:
    recomputed = "full" if target == "v5e" else "minimal"
    checkpoint: Checkpoint = "blocks" if target == "v5e" else "attention"
    model, sizes = f"MaxText {scale}B", scaled(scale)
    return PublishedRun(model, sizes, target, chips, batch, 2048, recomputed, MAXTEXT, None, tflops, tensor, checkpoint)


RUNS = (
    _scaled(16, "v5e", 256, 6, 120),
    _scaled(32, "v5e", 256, 4, 132),
    _scaled(64, "v5e", 256, 2, 118),
    _recipe("Llama 3.1 8B", LLAMA_8B, 8, 3, 3.443, _OFFLOADED, _NO_COLLECTIVE_MATMULS),
    _recipe("Llama 3.1 8B", LLAMA_8B, 16, 3, 3.393, _OFFLOADED, _NO_COLLECTIVE_MATMULS),
    _recipe("Llama 3.1 8B", LLAMA_8B, 32, 3, 3.495, _OFFLOADED, _NO_COLLECTIVE_MATMULS),
    _recipe("Llama 3.1 8B", LLAMA_8B, 64, 5, 5.652, _OFFLOADED),
    _recipe("Llama 3.1 8B", LLAMA_8B, 128, 4, 4.602, _OFFLOADED),
    _recipe("Llama 3.1 8B", LLAMA_8B, 256, 4, 4.546, _OFFLOADED),
    _recipe("Llama 3.1 70B", LLAMA_70B, 32, 2, 17.790, _QKV_OFFLOADED, _NO_COLLECTIVE_MATMULS),
    _recipe("Llama 3.1 70B", LLAMA_70B, 64, 2, 18.688, _QKV_OFFLOADED),
    _recipe("Llama 3.1 70B", LLAMA_70B, 128, 4, 34.786, _QKV_OFFLOADED),
    _recipe("Llama 3.1 70B", LLAMA_70B, 256, 5, 42.656, _QKV_OFFLOADED),
    _recipe("Mistral 7B", Sizes(4096, 14336, 32, 8, 32, 32000), 8, 6, 6.320, _OFFLOADED, _NO_COLLECTIVE_MATMULS),
    # Its settings say a batch of 3; its log counts 2097152 tokens a step, which is 2.
    PublishedRun(
        "Llama 2 70B", Sizes(8192, 28672, 64, 8, 80, 32000), "v6e", 256, 2, 4096, _QKV_OFFLOADED, RECIPES, 9.052
    ),
    _scaled(32, "v5p", 64, 6, 328, tensor=4),
    _scaled(64, "v5p", 64, 3, 323, tensor=4),
    _scaled(128, "v5p", 128, 1, 315, tensor=8),
    _scaled(128, "v5p", 256, 1, 316, tensor=8),
)
