"""KV events for the blocks that an engine has saved to Reprise, in vLLM's format.

vLLM publishes these with its own events (``--kv-events-config``). Hashes are Reprise's block keys of 16 bytes, as in the
event stream of the control plane. These events have the tokens of a block. The control plane's events have its node and
tier, and its removal. Both have ``"ownership": "reprise"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from reprise import block_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from reprise.vllm.geometry import Geometry

OWNERSHIP = "reprise"
"""Owner in events, equal to that in the control plane's stream (docs/PROTOCOL.md, part 4)."""

KEY_BYTES = 16


@dataclass
class KvEvents:
    """Events of saves, published when all blocks of a save are in Reprise."""

    geometry: Geometry
    _planned: dict[int, BlockStored] = field(default_factory=dict)
    _ready: list[KVCacheEvent] = field(default_factory=list)

    def plan(
        self, save_id: int, request: Request, first: int, hashes: Sequence[bytes], parent: Sequence[bytes]
    ) -> None:
        """Records a pending save of consecutive blocks.

        Args:
            save_id: id of the save.
            request: request of the blocks.
            first: index of the first block in the request.
            hashes: hashes of the blocks, as saved.
            parent: hash of the block before the first one, if it exists.
        """
        tokens = self.geometry.block_tokens
        lora = request.lora_request
        self._planned[save_id] = BlockStored(
            block_hashes=list(self._keys(hashes)),
            parent_block_hash=next(self._keys(parent), None),
            token_ids=list(request.all_token_ids[first * tokens : (first + len(hashes)) * tokens]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(self._extra_keys(request, first, len(hashes))),
            group_idx=0,
            session_id=request.session_id,
            medium="CPU",
            locality="LOCAL",
            ownership=OWNERSHIP,
        )

    def ended(self, save_id: int, whole: bool) -> None:
        """Publishes the event of an ended save if it is complete; partial saves appear only in the control plane's stream."""
        event = self._planned.pop(save_id, None)
        if event is not None and whole:
            self._ready.append(event)

    def take(self) -> list[KVCacheEvent]:
        """Returns the events since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _extra_keys(self, request: Request, first: int, count: int) -> Iterator[tuple[Any, ...] | None]:
        """Yields the inputs of vLLM's block hash besides the tokens: adapter, multimodal inputs and salt."""
        tokens = self.geometry.block_tokens
        feature = 0
        for block in range(first, first + count):
            keys, feature = generate_block_hash_extra_keys(request, block * tokens, (block + 1) * tokens, feature)
            yield keys

    def _keys(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        """Yields the keys of the first rank's blocks; those of other ranks are saved with them.

        Parts of a block are evicted one by one. So a key of the first rank does not imply that a match finds the block.
        """
        packed = block_keys(self.geometry.namespaces[0], hashes)
        return (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
