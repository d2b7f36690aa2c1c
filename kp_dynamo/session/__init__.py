"""The state of the backend in one process: its caches, whether a capture is divided, and its compilation."""

from kp_dynamo.session.compile_module import compile_module
from kp_dynamo.session.session import SESSION, Session

__all__ = ["SESSION", "Session", "compile_module"]
