"""The state of the backend in one process: its caches, and the compilation of a capture with them."""

from kp_dynamo.session.compile_module import compile_module
from kp_dynamo.session.session import SESSION, Session

__all__ = ["SESSION", "Session", "compile_module"]
