"""Layouts for blocks whose inner byte order is specific to the engine.

Reprise stores pages and chunks unchanged, as equal pieces with a fixed number of bytes per token, each with a checksum.
The byte order inside a piece is part of the namespace.
"""

from __future__ import annotations

from reprise._native import Layout

HEAD_BYTES_MAX = 65_535
"""Maximum bytes of one token and head in a piece: the fields of a layout have 16 bits."""

HEADS_MAX = 1024
"""Maximum number of heads, more than any model has."""


def layout(*, pieces: int, piece_bytes: int, tokens: int, tp_rank: int = 0, tp_size: int = 1) -> Layout:
    """Returns a layout of blocks with the given number of pieces.

    Raises:
        ValueError: no layout has pieces of this size.
    """
    if piece_bytes == 0 or piece_bytes % tokens:
        raise ValueError(f"invalid piece of {piece_bytes} bytes: expected a multiple of {tokens} tokens")
    token_bytes = piece_bytes // tokens
    for heads in range(1, HEADS_MAX + 1):
        if token_bytes % heads == 0 and token_bytes // heads <= HEAD_BYTES_MAX:
            break
    else:
        raise ValueError(f"cannot split the {token_bytes} bytes of a token in a piece into at most {HEADS_MAX} heads")
    try:
        return Layout(
            layers=pieces,
            parts=1,
            kv_heads=heads,
            head_dim=token_bytes // heads,
            dtype="int8",
            tokens_per_block=tokens,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
    except OverflowError as error:
        raise ValueError(f"{pieces} pieces of {tokens} tokens exceed the limits of a layout: {error}") from error
