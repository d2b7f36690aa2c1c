"""ATen graph -> XLA program -> callable. Only this package and `compat` import torch_xla."""

from kp_dynamo.lowering.base import Executable, Lowering, LoweringSpec, PortableProgram
from kp_dynamo.lowering.donation import DONORS
from kp_dynamo.lowering.new_state import divide_new_state
from kp_dynamo.lowering.placed_tensors import current_mesh, device_spread, named_meshes, on_their_mesh
from kp_dynamo.lowering.random_state import with_one_seed
from kp_dynamo.lowering.registry import get_lowering
from kp_dynamo.lowering.spmd import is_spmd
from kp_dynamo.lowering.stored import StoredProgram
from kp_dynamo.lowering.tensor_shardings import shardings

__all__ = [
    "DONORS",
    "Executable",
    "Lowering",
    "LoweringSpec",
    "PortableProgram",
    "StoredProgram",
    "current_mesh",
    "device_spread",
    "divide_new_state",
    "get_lowering",
    "is_spmd",
    "named_meshes",
    "on_their_mesh",
    "shardings",
    "with_one_seed",
]
