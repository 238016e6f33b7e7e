"""KV events: what an engine's saves have put into Reprise, in vLLM's words.

vLLM publishes these with its own events (``--kv-events-config``). Hashes are Reprise's block keys, 16 bytes, as in the
stream that its control plane publishes: there a subscriber learns on which node and in which tier a block is, and when
it is gone; here, which tokens it has. Both say ``"ownership": "reprise"``.
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
"""As in the control plane's stream (docs/PROTOCOL.md, part 4)."""

KEY_BYTES = 16


@dataclass
class KvEvents:
    """Events of saves, told when all of a save is in Reprise."""

    geometry: Geometry
    _planned: dict[int, BlockStored] = field(default_factory=dict)
    _told: list[KVCacheEvent] = field(default_factory=list)

    def plan(
        self, save_id: int, request: Request, first: int, hashes: Sequence[bytes], parent: Sequence[bytes]
    ) -> None:
        """Notes a save of blocks that follow each other.

        Args:
            save_id: names the save.
            request: whose blocks these are.
            first: of the blocks, counted from the begin of the request.
            hashes: of the blocks, as they are saved.
            parent: the hash of the block before, if there is one.
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
        """A save has ended; what was kept in part is left to the control plane's stream."""
        event = self._planned.pop(save_id, None)
        if event is not None and whole:
            self._told.append(event)

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        told, self._told = self._told, []
        return told

    def _extra_keys(self, request: Request, first: int, count: int) -> Iterator[tuple[Any, ...] | None]:
        """What vLLM's hash of each block covers besides its tokens: adapter, inputs of other kinds, salt."""
        tokens = self.geometry.block_tokens
        feature = 0
        for block in range(first, first + count):
            keys, feature = generate_block_hash_extra_keys(request, block * tokens, (block + 1) * tokens, feature)
            yield keys

    def _keys(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        """Keys of the first rank's blocks: those of other ranks come and go with them."""
        packed = block_keys(self.geometry.namespaces[0], hashes)
        return (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
