"""Custom operators (`torch.ops.kp`), registered once when this package is imported."""

from kp_dynamo.ops import at_true_sizes as _at_true_sizes  # noqa: F401  # registers the operator
from kp_dynamo.ops import attention as _attention  # noqa: F401  # registers the operators
from kp_dynamo.ops import check_indices as _check_indices  # noqa: F401  # registers the operator
from kp_dynamo.ops import contract as _contract  # noqa: F401  # registers the operator
from kp_dynamo.ops import flash_attention as _flash_attention  # noqa: F401  # registers the operators
from kp_dynamo.ops import linear_cross_entropy as _linear_cross_entropy  # noqa: F401  # registers the operators
from kp_dynamo.ops import optimization_barrier as _optimization_barrier  # noqa: F401  # registers the operator
from kp_dynamo.ops import recurrent as _recurrent  # noqa: F401  # registers the operators
from kp_dynamo.ops import shard_batch as _shard_batch  # noqa: F401  # registers the operator
from kp_dynamo.ops.linear_act import ACTIVATIONS

__all__ = ["ACTIVATIONS"]
