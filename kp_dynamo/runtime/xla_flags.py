"""Flags of the TPU compiler that were tried, by chip."""

MEASURED_FLAGS: dict[str, tuple[str, ...]] = {"v4": (), "v5e": (), "v5p": (), "v6e": (), "v7": ()}
