"""The passes, in the order of `build_pipeline`. A file is a pass, but for `base.py`; a folder holds parts of passes.

`flash_attention.py` is not in `PASSES`: users name it in `extra_passes`.

`kp_dynamo/pipeline/build.py` selects and constructs them from the options; `passes/base.py` defines what a pass is.
"""

from kp_dynamo.passes.base import GraphPass
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.check_indices import CheckIndices
from kp_dynamo.passes.divide_heads import DivideHeads
from kp_dynamo.passes.exchange_gradients import ExchangeGradients
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.gate_weight_gradients import GateWeightGradients
from kp_dynamo.passes.gather_weights import GatherWeights
from kp_dynamo.passes.mask_padding import MaskPadding
from kp_dynamo.passes.recompute_activations import RecomputeActivations
from kp_dynamo.passes.recompute_attention import RecomputeAttention
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from kp_dynamo.passes.recompute_to_budget import RecomputeToBudget
from kp_dynamo.passes.recompute_to_share import RecomputeToShare
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from kp_dynamo.passes.rewrite_patch_convolution import RewritePatchConvolution
from kp_dynamo.passes.rewrite_stem_convolution import RewriteStemConvolution

PASSES: tuple[type[GraphPass], ...] = (
    FoldConstants,  # constant tensors become numbers
    CheckIndices,  # indices out of range raise; with the option of that name
    RewriteAttention,  # scores, mask, softmax and values become one kp::attention
    MaskPadding,  # ops that mix along a padded dimension see no padding
    FuseLinearCrossEntropy,  # a matmul and the cross entropy of its logits become one kp::linear_cross_entropy
    FuseLinearActivation,  # a matmul and its activation become one kp::linear_act
    RewritePatchConvolution,  # a convolution of patches becomes a matmul
    RewriteStemConvolution,  # the rows of a strided kernel over few channels become channels
    CastBf16,  # matmuls run in bfloat16, sensitive ops in float32
    FoldViews,  # a matmul between views becomes one kp::contract
    FoldCasts,  # the matrix unit rounds the arguments of a program itself
    DivideHeads,  # attention computes the heads of each chip side by side; on a mesh that divides heads
    RecomputeActivations,  # the backward recomputes activations from their saved pre-activation
    RecomputeCasts,  # the backward recomputes casts instead of saving their results
    RecomputeAttention,  # the backward recomputes the scores of attention
    RecomputeBlocks,  # the backward recomputes the insides of residual blocks
    RecomputeToShare,  # the backward recomputes until a share of the bytes is saved
    RecomputeToBudget,  # the backward recomputes until its peak fits the budget
    ExchangeGradients,  # chips along the batch sum gradients by an all-to-all; with the option reduce_scatter
    GatherWeights,  # chips that are all along the batch gather the weights of matmuls
    GateRecomputation,  # recomputation waits for the gradient that needs it; runs on backward graphs
    GateWeightGradients,  # a backward goes on when the weight gradients of a layer are there; runs on backward graphs
)
