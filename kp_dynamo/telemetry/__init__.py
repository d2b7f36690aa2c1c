"""Logs, counters and time limits of the backend."""

from kp_dynamo.telemetry.counters import TELEMETRY, snapshot
from kp_dynamo.telemetry.prometheus import prometheus_text

__all__ = ["TELEMETRY", "prometheus_text", "snapshot"]
