"""Layouts of bytes whose inner order is the engine's own.

Reprise keeps pages and chunks as they are: as equal pieces, each with a checksum, of so many bytes for each token. What order the
bytes have inside is for the namespace to say.
"""

from __future__ import annotations

from reprise._native import Layout

HEAD_BYTES_MAX = 65_535
"""Of a piece, for one token and one of the layout's heads (a layout's numbers have 16 bits)."""

HEADS_MAX = 1024
"""More than any model has."""


def layout(*, pieces: int, piece_bytes: int, tokens: int, tp_rank: int = 0, tp_size: int = 1) -> Layout:
    """The layout of blocks of so many pieces.

    Raises:
        ValueError: bytes that cannot be divided so, in words.
    """
    if piece_bytes == 0 or piece_bytes % tokens:
        raise ValueError(f"{piece_bytes} bytes are no multiple of {tokens} tokens")
    token_bytes = piece_bytes // tokens
    for heads in range(1, HEADS_MAX + 1):
        if token_bytes % heads == 0 and token_bytes // heads <= HEAD_BYTES_MAX:
            break
    else:
        raise ValueError(f"a token has {token_bytes} bytes in a piece")
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
        raise ValueError(f"{pieces} pieces of {tokens} tokens are too many: {error}") from error
