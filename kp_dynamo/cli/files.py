"""The files that commands write."""

from __future__ import annotations

import datetime
from pathlib import Path

from kp_dynamo.exceptions import TPUConfigurationError


def check_folder(path: str) -> None:
    """Refuse a file whose folder does not exist.

    Raises:
        TPUConfigurationError: As said.
    """
    if not Path(path).resolve().parent.is_dir():
        raise TPUConfigurationError(f"{path} cannot be written: its folder does not exist; name a file in a folder")


def today() -> str:
    """The date of a page, such as "2026-03-01"."""
    return datetime.date.today().isoformat()


def write(path: str, text: str) -> None:
    """Write a file in UTF-8.

    Raises:
        TPUConfigurationError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as cause:
        raise TPUConfigurationError(f"{path} cannot be written: {cause.strerror}; name a file in a folder") from cause
