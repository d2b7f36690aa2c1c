"""Logs, counters and time limits: what the backend says about itself while it works."""

from kp_dynamo.telemetry.counters import TELEMETRY, snapshot

__all__ = ["TELEMETRY", "snapshot"]
