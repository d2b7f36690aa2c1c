"""One safetensors file with a digest over all that is in it."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import stat
from collections.abc import Iterator, Mapping

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kp_dynamo.api.checkpoint.atomic_file import replacing
from kp_dynamo.exceptions import TPUCheckpointError

FORMAT = "kp_tpu.format"
FORMAT_VERSION = "1"
DIGEST = "kp_tpu.digest"

_RESERVED = "__metadata__"  # the key of safetensors' header beside the names of the tensors

_UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors and texts; the file that was at `path` is replaced as a whole, or stays.

    Nothing may write to the tensors meanwhile: what is read back would not be what was digested.

    Raises:
        TPUCheckpointError: safetensors has no such dtype or name, or the file cannot be written.
    """
    _require_path(path)
    if _RESERVED in tensors:
        raise TPUCheckpointError(f"{_RESERVED!r} is a name that safetensors keeps for itself; rename that tensor")
    dense = _separate(tensors)
    stamped = {**metadata, FORMAT: FORMAT_VERSION}
    stamped[DIGEST] = _digest(dense, stamped)
    try:
        with replacing(path) as scratch:
            save_file(dense, scratch, metadata=stamped)
    except KeyError as cause:  # how safetensors 0.8 says that it has no such dtype
        raise TPUCheckpointError(f"safetensors cannot hold tensors of dtype {cause}; convert them first") from cause
    except (OSError, SafetensorError) as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} could not be written: {cause}. What was there before is unchanged. "
            "Give a file in a folder that exists, with room for it."
        ) from cause


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What `write_file` wrote. The tensors are mapped from the file: copy what is kept.

    Raises:
        TPUCheckpointError: There is no such file, it is not one of ours, or not as it was written.
    """
    _require_path(path)
    try:
        with _opened(path) as name, safe_open(name, framework="pt") as file:
            metadata = file.metadata() or {}
            _require_ours(path, metadata)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except _UNREADABLE as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} cannot be read as a checkpoint: {cause}. Allowed: a whole safetensors file that "
            "save_model wrote; nothing else is ever unpickled or guessed at."
        ) from cause
    if not hmac.compare_digest(metadata.get(DIGEST, "").encode(), _digest(tensors, metadata).encode()):
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} is not as it was written: the digest over its tensors and metadata differs. "
            "Load another copy of it."
        )
    return tensors, metadata


def _require_path(path: object) -> None:
    name = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise TPUCheckpointError(f"the path is {path!r}; give the name of a file as str or os.PathLike")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name for the file as it is now: safetensors opens it twice, and it may be replaced in between."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def _require_ours(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    version = metadata.get(FORMAT)
    if version is None:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} is a safetensors file of another program. Allowed: what save_model wrote. "
            "For weights alone, use safetensors.torch.load_model."
        )
    if version != FORMAT_VERSION:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} has format {version!r}; this version of kp_tpu reads {FORMAT_VERSION!r}. "
            "Load it with the version that wrote it."
        )


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, each contiguous in a storage of its own, as safetensors wants them."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        is_whole = plain.is_contiguous() and storage.nbytes() == plain.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        separate[name] = plain if is_whole else plain.clone(memory_format=torch.contiguous_format)
    return separate


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """XXH3 of names, dtypes, shapes, bytes and metadata: against damage; who means to forge one can."""
    names = sorted(tensors)
    header = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    texts = sorted((key, text) for key, text in metadata.items() if key != DIGEST)
    running = xxhash.xxh3_128(json.dumps([header, texts]).encode())
    for name in names:
        running.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return f"xxh3_128:{running.hexdigest()}"
