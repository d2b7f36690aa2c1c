"""Other libraries: one file each, imported only when you call its function. See docs/with-other-libraries.md."""

from kp_dynamo.integrations.accelerate import disable_accelerate, enable_accelerate

__all__ = ["disable_accelerate", "enable_accelerate"]
