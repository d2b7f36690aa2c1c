"""Logs, counters and time limits of the backend."""

from kp_dynamo.telemetry.counters import TELEMETRY, snapshot

__all__ = ["TELEMETRY", "snapshot"]
