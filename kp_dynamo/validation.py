"""`validate_tpu_configuration` and `validate_tpu_model` under their documented path."""

from kp_dynamo.api.validation import validate_tpu_configuration, validate_tpu_model

__all__ = ["validate_tpu_configuration", "validate_tpu_model"]
