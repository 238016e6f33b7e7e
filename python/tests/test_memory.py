"""Requirements on an engine's memory, and the errors if it does not meet them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from conftest import HEAD_DIM, HEADS, LAYERS, TOKENS, tensors

from reprise import KvMemory, Layout, Namespace, TenantKeys, block_keys


class DeviceTensor:
    """A tensor on a device, like PyTorch's; its memory must never be requested."""

    def __init__(self, kind: int, number: int) -> None:
        """Creates a tensor on the device with DLPack's kind and number."""
        self._device = (kind, number)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns kind and number of the device."""
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        """Fails: must not be called."""
        raise AssertionError("the memory of a device was requested")


class MetaTensor(DeviceTensor):
    """A tensor without memory, like PyTorch's on its device "meta"."""

    def __init__(self) -> None:
        """Creates a tensor without a device."""
        super().__init__(0, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Fails like PyTorch's meta tensors."""
        raise ValueError("meta tensors have no memory")


def refused(layers: list[Any], layout: Layout, words: str, kind: type[Exception] = ValueError) -> None:
    """Checks that the memory is rejected with this message."""
    with pytest.raises(kind, match=words):
        KvMemory(layers, layout)


def test_layout_computes_sizes_and_rejects_invalid_dimensions() -> None:
    layout = Layout(layers=32, parts=2, kv_heads=8, head_dim=128, dtype="bf16", tokens_per_block=16)
    assert (layout.object_bytes, layout.layer_bytes, layout.block_bytes) == (32 << 10, 64 << 10, 2 << 20)
    assert (layout.dtype, layout.tp_rank, layout.tp_size) == ("bf16", 0, 1)
    assert layout == Layout(layers=32, kv_heads=8, head_dim=128, dtype="bf16", tokens_per_block=16)
    assert len({layout, layout}) == 1
    assert "head_dim=128" in repr(layout)
    good = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "fp32", "tokens_per_block": 1}
    for change, words in [
        ({"dtype": "float32"}, 'invalid dtype "float32": expected one of bf16'),
        ({"parts": 3}, "invalid parts 3"),
        ({"layers": 0}, "'layers' must be at least 1"),
        ({"tp_rank": 1}, "tp_rank must be below tp_size"),
        ({"layers": 961}, "exceed the limit of 960"),
    ]:
        with pytest.raises(ValueError, match=words):
            Layout(**{**good, **change})


def test_every_field_of_a_namespace_changes_its_digest_and_keys(layout: Layout) -> None:
    fields = {
        "model": "m",
        "revision": "r",
        "layout": layout,
        "hash_algorithm": "a",
        "hash_seed": "s",
        "engine_format": "f",
    }
    base = Namespace(**fields)
    assert len(base.digest) == 32
    assert base == Namespace(**fields)
    assert base.layout == layout
    others = [Namespace(**{**fields, name: "x"}) for name in fields if name != "layout"]
    assert len({base.digest, *(other.digest for other in others)}) == len(fields)
    hashes = [b"one", b"two"]
    keys = block_keys(base, hashes)
    assert len(keys) == 32
    assert keys[:16] == block_keys(base, hashes[:1])
    assert len({keys, block_keys(base, hashes, group=1), block_keys(base, hashes, shard=1)}) == 3
    assert keys != block_keys(others[0], hashes)
    assert block_keys(base, []) == b""
    with pytest.raises(TypeError, match="invalid hash one: expected bytes"):
        block_keys(base, ["one"])


def test_keys_of_a_tenant_need_the_salt_that_its_session_learns(layout: Layout) -> None:
    def namespace(tenant: TenantKeys | None) -> Namespace:
        return Namespace(
            model="m",
            revision="r",
            layout=layout,
            hash_algorithm="a",
            hash_seed="s",
            engine_format="f",
            tenant=tenant,
        )

    default, hashes = namespace(None), [b"one"]
    assert default == namespace(TenantKeys("default"))
    assert block_keys(default, hashes) == block_keys(namespace(TenantKeys("default")), hashes)
    own = TenantKeys("team-a")
    assert own.tenant == "team-a"
    assert namespace(own).digest == default.digest
    assert namespace(own) != default
    assert block_keys(namespace(own), hashes) == block_keys(namespace(own), hashes)
    assert len({block_keys(namespace(tenant), hashes) for tenant in (None, own, TenantKeys("team-a"))}) == 3
    with pytest.raises(ValueError, match='invalid tenant "A b"'):
        TenantKeys("A b")


def test_memory_has_the_blocks_of_its_tensors_and_keeps_them_alive(layout: Layout) -> None:
    layers = tensors(5)
    kept = weakref.ref(layers[0])
    memory = KvMemory(layers, layout)
    assert (memory.blocks, memory.layout) == (5, layout)
    del layers
    gc.collect()
    assert kept() is not None
    del memory
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("dtype", ["float32", "uint32", "int32"])
def test_accepts_integer_elements_of_the_right_size(layout: Layout, dtype: str) -> None:
    assert KvMemory([layer.view(dtype) for layer in tensors(2)], layout).blocks == 2


def test_accepts_half_precision_and_bytes() -> None:
    for dtype, numpy in [("fp16", np.float16), ("bf16", np.uint16), ("int8", np.uint8), ("fp8", np.int8)]:
        layout = Layout(layers=1, parts=1, kv_heads=1, head_dim=8, dtype=dtype, tokens_per_block=4)
        assert KvMemory([np.zeros((3, 32), numpy)], layout).blocks == 3


@pytest.mark.parametrize(("dtype", "numpy"), [("bf16", np.float16), ("int8", np.bool_), ("fp8", np.bool_)])
def test_rejects_elements_of_another_kind_with_the_same_size(dtype: str, numpy: type) -> None:
    layout = Layout(layers=1, parts=1, kv_heads=1, head_dim=8, dtype=dtype, tokens_per_block=4)
    refused([np.zeros((3, 32), numpy)], layout, "layer 0: the elements have another kind")


def test_blocks_may_have_gaps_and_layers_may_alternate_in_one_allocation(layout: Layout) -> None:
    together = np.zeros((6, LAYERS, 2, HEADS, TOKENS, HEAD_DIM), np.float32)
    assert KvMemory([together[:, layer] for layer in range(LAYERS)], layout).blocks == 6
    padded = [np.zeros((6, 3, HEADS, TOKENS, HEAD_DIM), np.float32)[:, :2] for _ in range(LAYERS)]
    assert KvMemory(padded, layout).blocks == 6


def test_rejects_layers_that_share_bytes(layout: Layout) -> None:
    layers = tensors(4)
    refused(
        [layers[0], layers[1], layers[0], layers[2]], layout, "layer 2: the blocks share memory with those of layer 0"
    )
    long = np.zeros((9, 2, HEADS, TOKENS, HEAD_DIM), np.float32)
    refused([long[:4], long[4:8], long[3:7], layers[0]], layout, "layer 2: the blocks share memory")


def test_rejects_shapes_that_do_not_match_and_reports_both_numbers(layout: Layout) -> None:
    layers = tensors(4)
    refused(layers[:3], layout, "3 tensors, but the layout has 4 layers")
    refused([*layers[:3], layers[3][:3]], layout, "layer 3: 3 blocks, but layer 0 has 4")
    refused(
        [*layers[:2], np.zeros((4, 7), np.float32), layers[3]],
        layout,
        r"layer 2: a block of shape \[7\] has 28 bytes.* 16384",
    )
    refused([layers[0].astype(np.float64)], layout, "layer 0: elements of 64 bits.* 4 bytes")
    refused([layers[0][:0]], layout, r"layer 0: shape \[0, .*has no blocks")
    refused([np.array(1, np.float32)], layout, r"layer 0: shape \[\] has no blocks")


def test_rejects_blocks_that_are_not_contiguous(layout: Layout) -> None:
    turned = np.zeros((4, 2, TOKENS, HEADS, HEAD_DIM), np.float32).swapaxes(2, 3)
    refused([turned], layout, "layer 0: a block is not contiguous")
    blocks_last = np.zeros((2, HEADS, TOKENS, HEAD_DIM, 4), np.float32).transpose(4, 0, 1, 2, 3)
    refused([blocks_last], layout, "layer 0: a block is not contiguous")
    backwards = np.zeros((4, 2, HEADS, TOKENS, HEAD_DIM), np.float32)[::-1]
    refused([backwards], layout, "layer 0: a shape with negative numbers")
    same = np.broadcast_to(np.zeros((1, 2, HEADS, TOKENS, HEAD_DIM), np.float32), (4, 2, HEADS, TOKENS, HEAD_DIM))
    same.flags.writeable = True
    refused([same], layout, "layer 0: the blocks overlap")


def test_rejects_memory_that_is_read_only_or_on_a_device(layout: Layout) -> None:
    readonly = tensors(4)[0]
    readonly.flags.writeable = False
    refused([readonly], layout, "layer 0: the tensor is read-only")
    first = tensors(4)[0]
    refused([first, DeviceTensor(2, 1)], layout, "layer 1: the tensor is on CUDA device 1: expected host memory")
    refused([DeviceTensor(10, 0)], layout, "layer 0: the tensor is on ROCm device 0")
    refused([MetaTensor()], layout, "layer 0: cannot read the tensor's device: .*meta")
    refused([[1, 2, 3]], layout, "layer 0: .*list.* is not a tensor", TypeError)
