"""What tells weights apart: a commit of the hub, or a sample of the files' bytes.

Weights that are files are told apart by their sizes and pieces of their bytes: of every tensor of a safetensors file a piece from its
middle, and evenly spaced ones of every file. So a training that has changed a single tensor is another model.

Cost: a read of 4 KiB a tensor, on :data:`THREADS` threads. 723 tensors (70B, dense): 0.1 s from a disk that takes 0.1 ms a read,
once an engine's process. 92,000 tensors (a mixture of 256 experts in 163 files): 0.6 s; 6 s where a read takes 1 ms.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 4096

PIECES_OF_A_FILE = 64
"""Evenly spaced ones: enough that two trainings of one architecture differ, whatever the file's format."""

HEADER_BYTES_MAX = 100 << 20
"""Of a safetensors file, by its reference implementation."""

THREADS = 16

PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
"""Files of weights; the first kind that there is counts."""


def files(place: Path) -> list[Path]:
    """Files of weights in a folder, or the file itself."""
    if place.is_file():
        return [place]
    found = (sorted(place.glob(pattern)) for pattern in PATTERNS)
    return next((some for some in found if some), [])


def sample(weights: Sequence[Path]) -> str:
    """A digest over files' names, sizes and pieces.

    Raises:
        ValueError: a file that is not what its name says.
        OSError: a file that cannot be read.
    """
    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="reprise-weights") as pool:
        digests = list(pool.map(_sample_file, weights))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def hub_snapshot(folder: str) -> tuple[str, str] | None:
    """Repository and commit of a snapshot in the hub's cache (``models--<owner>--<name>/snapshots/<commit>``)."""
    parts = Path(folder).parts[-3:]
    if len(parts) != 3 or parts[1] != "snapshots" or not re.fullmatch("[0-9a-f]{40}", parts[2]):
        return None
    kind, _, repository = parts[0].partition("--")
    return (repository.replace("--", "/"), parts[2]) if kind == "models" and repository else None


def downloaded(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a snapshot that was already fetched from the hub; None: there is none, or this is not a repository's name."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _sample_file(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name}:{size}".encode())
    with file.open("rb") as content:
        if file.suffix == ".safetensors":
            for piece in _pieces_of_tensors(content, size, file):
                digest.update(piece)
        for number in range(PIECES_OF_A_FILE):
            content.seek(size * number // PIECES_OF_A_FILE)
            digest.update(content.read(PIECE_BYTES))
    return digest.digest()


def _pieces_of_tensors(content: BinaryIO, size: int, file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and a piece from the middle of each tensor; small tensors whole.

    The format: eight bytes with the header's length, little-endian; the header, a JSON object whose entries have the begin and the end of
    their tensor (``data_offsets``) behind it.
    """
    header_bytes = int.from_bytes(content.read(8), "little")
    if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, size - 8):
        raise ValueError(
            f"{file} is no safetensors file: its header would have {header_bytes} bytes. Set weights_digest"
        )
    header = content.read(header_bytes)
    yield header
    try:
        described = json.loads(header)
        tensors = sorted(tuple(entry["data_offsets"]) for name, entry in described.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file ({error}): set weights_digest") from error
    for begin, end in tensors:
        middle = max(begin, (begin + end - PIECE_BYTES) // 2)
        content.seek(8 + header_bytes + middle)
        yield content.read(min(PIECE_BYTES, end - middle))
