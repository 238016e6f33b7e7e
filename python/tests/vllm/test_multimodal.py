"""Tests that images and the adapter's name of a prompt change vLLM's block hashes, and so keys."""

from __future__ import annotations

from typing import Any

import pytest
from test_scheduler import TOKENS, geometry
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from reprise import block_keys

BLOCKS = 4
IMAGE_AT = TOKENS + 3
"""Position of the first image: in the second block, with its end in the third."""


def keys(algorithm: str, *identifiers: str, offset: int = IMAGE_AT, adapter: str | None = None) -> list[bytes]:
    """Returns keys of the blocks of a prompt with these images; the placeholder tokens of all images are equal."""
    hash_blocks = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_blocks)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset + number, length=TOKENS),
        )
        for number, identifier in enumerate(identifiers)
    ]
    request: Any = Request(
        request_id="r",
        prompt_token_ids=[5] * (BLOCKS * TOKENS + 1),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=None if adapter is None else LoRARequest(adapter, 1, "/adapters/of/both"),
        block_hasher=get_request_block_hasher(TOKENS, hash_blocks),
    )
    packed = block_keys(geometry().namespace, request.block_hashes)
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_prompts_share_blocks_up_to_the_first_image_that_differs(algorithm: str) -> None:
    of_cat, of_dog, of_none = keys(algorithm, "cat"), keys(algorithm, "dog"), keys(algorithm)
    assert of_cat == keys(algorithm, "cat")
    assert len(of_cat) == BLOCKS
    for other in (of_dog, of_none):
        assert other[0] == of_cat[0], "before the image"
        # In the image and after it, because every prefix contains it.
        assert not set(other[1:]) & set(of_cat[1:])
    assert not set(of_dog[1:]) & set(of_none[1:])


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_same_image_at_another_position_is_another_prefix(algorithm: str) -> None:
    here, there = keys(algorithm, "cat"), keys(algorithm, "cat", offset=IMAGE_AT + 1)
    assert here[0] == there[0]
    assert not set(here[1:]) & set(there[1:])


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_names_of_adapters_do_not_share_a_block(algorithm: str) -> None:
    law, medicine, none = (set(keys(algorithm, adapter=name)) for name in ("law", "medicine", None))
    assert law == set(keys(algorithm, adapter="law"))
    assert len(law | medicine | none) == 3 * BLOCKS
