"""Weights are identified by their contents, independent of their path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reprise import weights

LARGE, SMALL = 1 << 20, 64
"""Sizes of tensors in bytes."""


def write(folder: Path, tensors: dict[str, bytes]) -> Path:
    """Writes a safetensors file and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    described, end = {}, 0
    for name, content in tensors.items():
        described[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [end, end + len(content)]}
        end += len(content)
    header = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(tensors.values()))
    return folder


def tensors(**changes: bytes) -> dict[str, bytes]:
    """Returns large tensors with small ones in between."""
    flat = {
        f"{layer}.{kind}": bytes([layer]) * size for layer in range(6) for kind, size in (("a", LARGE), ("b", SMALL))
    }
    return {**flat, **changes}


def digest(folder: Path) -> str:
    """Returns the digest of a folder's weights."""
    return weights.sample(weights.files(folder))


def test_equal_weights_in_different_folders_have_equal_digests(tmp_path: Path) -> None:
    assert digest(write(tmp_path / "one", tensors())) == digest(write(tmp_path / "two", tensors()))


@pytest.mark.parametrize("layer", range(6))
def test_change_of_one_small_tensor_changes_the_digest(tmp_path: Path, layer: int) -> None:
    changed = tensors(**{f"{layer}.b": b"\xff" * SMALL})
    assert digest(write(tmp_path / "one", tensors())) != digest(write(tmp_path / "two", changed))


def test_rename_of_a_tensor_changes_the_digest(tmp_path: Path) -> None:
    flat = tensors()
    renamed = {name.replace("0.a", "0.c"): content for name, content in flat.items()}
    assert digest(write(tmp_path / "one", flat)) != digest(write(tmp_path / "two", renamed))


def test_files_of_other_formats_are_distinguished_by_pieces(tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(bytes(LARGE))
    two.write_bytes(bytes(LARGE - 1) + b"\1")
    assert weights.sample([one]) != weights.sample([two])
    assert weights.files(one) == [one]
    assert weights.files(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "content",
    [
        b"short",
        (1 << 60).to_bytes(8, "little") + bytes(100),
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (10).to_bytes(8, "little") + b'{"a": 1.0}',
    ],
)
def test_rejects_invalid_safetensors_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"invalid safetensors file.*set weights_digest"):
        digest(tmp_path)


def test_recognises_a_hub_snapshot_by_its_path() -> None:
    commit = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    hub = "/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots"
    assert weights.hub_snapshot(f"{hub}/{commit}") == ("meta-llama/Llama-3.1-8B", commit)
    assert weights.hub_snapshot(f"/cache/models--gpt2/snapshots/{commit}") == ("gpt2", commit)
    for folder in (f"{hub}/main", f"{hub}/{commit}/model", f"/cache/datasets--a--b/snapshots/{commit}", "gpt2", ""):
        assert weights.hub_snapshot(folder) is None
