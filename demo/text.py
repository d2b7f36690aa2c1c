"""The demo's text: sources of the running interpreter's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Large, hand-written modules that every CPython of the last years ships; none holds generated tables.
MODULES = (
    "argparse", "ast", "collections/__init__", "concurrent/futures/_base", "configparser", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "doctest", "enum", "fractions", "functools", "gettext",
    "heapq", "inspect", "json/decoder", "json/encoder", "logging/__init__", "logging/handlers", "mailbox", "optparse",
    "os", "pathlib", "pdb", "pickle", "pickletools", "platform", "random", "selectors", "shutil", "smtplib", "socket",
    "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "traceback", "turtle",
    "typing", "unittest/case", "unittest/mock", "urllib/parse", "urllib/request", "uuid", "weakref", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes never trained on, each int64 [N]; `num_files` of the list were found."""

    train: Tensor
    held_out: Tensor
    num_files: int


def read_corpus() -> Corpus:
    """Reads `MODULES` in their order; the last tenth of *each* file is held out, so both halves are alike."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for name in MODULES if (path := library / f"{name}.py").is_file()]
    if not paths:
        raise FileNotFoundError(
            f"The demo learns from Python's own sources and found none of {len(MODULES)} modules in {library}; "
            "run it with an interpreter that ships its standard library as .py files."
        )
    texts = [path.read_bytes() for path in paths]
    cuts = [len(text) * 9 // 10 for text in texts]
    train = b"".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    held_out = b"".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    return Corpus(_to_tensor(train), _to_tensor(held_out), len(paths))


def _to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_at(text: Tensor, step: int, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets [B, T] of one step: random windows that only `step` decides.

    A generator of its own makes the batches of every run and of every backend the same.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context - 1, (num_rows, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
