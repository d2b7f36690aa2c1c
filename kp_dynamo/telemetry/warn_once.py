"""Log a warning once per process, however often its reason occurs."""

from __future__ import annotations

import logging

_logged: set[tuple[str, tuple[object, ...]]] = set()


def warn_once(logger: logging.Logger, text: str, *args: object) -> None:
    """`logger.warning(text, *args)`, unless the process has logged the same text with the same arguments."""
    if (text, args) not in _logged:
        _logged.add((text, args))
        logger.warning(text, *args)
