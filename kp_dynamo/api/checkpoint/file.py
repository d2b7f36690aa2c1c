"""One safetensors file with a digest over its contents."""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Mapping

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kp_dynamo.api.checkpoint.atomic_file import opened, replacing
from kp_dynamo.cache.tensor_bytes import tensor_bytes
from kp_dynamo.exceptions import TPUCheckpointError

Path = str | os.PathLike[str]

FORMAT = "kp_tpu.format"
FORMAT_VERSION = "1"
DIGEST = "kp_tpu.digest"

_RESERVED = "__metadata__"  # the key in safetensors' header that is not a tensor name

_UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors and metadata; an existing file at `path` is replaced atomically, or TPUCheckpointError raised.

    Do not modify the tensors meanwhile: the file would not match its digest.
    """
    _require_path(path)
    if _RESERVED in tensors:
        raise TPUCheckpointError(f"safetensors reserves the name {_RESERVED!r}. Try: rename that tensor.")
    dense = _separate(tensors)
    stamped = {**metadata, FORMAT: FORMAT_VERSION}
    stamped[DIGEST] = _digest(dense, stamped)
    try:
        with replacing(path) as scratch:
            save_file(dense, scratch, metadata=stamped)
    except KeyError as cause:  # safetensors 0.8 raises KeyError for an unsupported dtype
        raise TPUCheckpointError(
            f"safetensors cannot hold tensors of dtype {cause}. Try: convert them first."
        ) from cause
    except (OSError, SafetensorError) as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} could not be written: {cause}. An earlier file there is unchanged. "
            "Try: a file in a folder that exists, on a disk with enough space."
        ) from cause


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a file of `write_file`; any other raises TPUCheckpointError. The tensors are memory-mapped."""
    _require_path(path)
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK) as handle:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("it is not a regular file")
            # By its descriptor, because safetensors opens it twice and it may be replaced meanwhile.
            with safe_open(f"/proc/self/fd/{handle}", framework="pt") as file:
                metadata = file.metadata() or {}
                _require_ours(path, metadata)
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except _UNREADABLE as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} cannot be read as a checkpoint: {cause}. Allowed: an intact file of save_checkpoint "
            "or TPUBackend.save_model. Other files are never unpickled."
        ) from cause
    if not hmac.compare_digest(metadata.get(DIGEST, "").encode(), _digest(tensors, metadata).encode()):
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} was altered: the digest of its tensors and metadata does not match. "
            "Try: another copy of the file."
        )
    return tensors, metadata


def _require_path(path: object) -> None:
    name = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise TPUCheckpointError(f"path={path!r} is invalid. Allowed: the name of a file as str or os.PathLike.")


def _require_ours(path: Path, metadata: Mapping[str, str]) -> None:
    version = metadata.get(FORMAT)
    if version is None:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} is a safetensors file of another program. Allowed: a file of save_checkpoint or "
            "TPUBackend.save_model. Try: safetensors.torch.load_model, for weights alone."
        )
    if version != FORMAT_VERSION:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} has format {version!r}; this version of kp_tpu reads {FORMAT_VERSION!r}. "
            "Try: load it with the version that wrote it."
        )


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, each contiguous and in its own storage, as safetensors requires."""
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
    """XXH3 of names, dtypes, shapes, bytes and metadata. It detects damage, not forgery."""
    names = sorted(tensors)
    header = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    texts = sorted((key, text) for key, text in metadata.items() if key != DIGEST)
    running = xxhash.xxh3_128(json.dumps([header, texts]).encode())
    for name in names:
        running.update(bytes_of(tensors[name]).numpy().data)
    return f"xxh3_128:{running.hexdigest()}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in their order: uint8[num_bytes]."""
    return tensor_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
