"""The connector rejects unsupported configurations on construction; the error has the cause and the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from engine import connector
from stepped_engine import HEAD_SIZE, HEADS, TOKENS, engine_config, kv_cache
from test_scheduler import geometry
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from reprise import BadRequest, Client, Version
from reprise.vllm import RepriseConnector
from reprise.vllm.options import Options
from reprise.vllm.worker import WorkerSide

BOTH = [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up a single worker and an environment without Reprise's variables."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for name in ("PYTHONHASHSEED", "REPRISE_SOCKET", "REPRISE_TENANT", "REPRISE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def attention(**changes: Any) -> FullAttentionSpec:
    """Returns full attention with changes."""
    described = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32, **changes}
    return FullAttentionSpec(**described)


def window() -> SlidingWindowSpec:
    """Returns sliding-window attention."""
    return SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, sliding_window=4 * TOKENS
    )


@dataclass(frozen=True)
class Refusal:
    """An unsupported configuration, and texts that its error must contain."""

    words: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    """Changes of ``kv_connector_extra_config``."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """Changes of ``--kv-transfer-config``."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Changes of other engine settings, by ``part.name``."""
    cache: Callable[[], KVCacheConfig] = kv_cache


WHERE = "kv_connector_extra_config"

REFUSALS = {
    "misspelled option": Refusal([WHERE, "unknown option 'sokcet'", "did you mean 'socket'"], {"sokcet": "/x"}),
    "foreign option": Refusal([WHERE, "unknown option 'chunk_size'"], {"chunk_size": 256}),
    "unrecognisable option": Refusal([WHERE, "unknown option 'zzz'", "expected one of", "layerwise_loads"], {"zzz": 1}),
    "time as text": Refusal(
        [WHERE, "invalid match_budget_ms '5 ms'", "a number of milliseconds"], {"match_budget_ms": "5 ms"}
    ),
    "zero time": Refusal(["invalid load_stall_ms 0", "above 0 and at most 600000"], {"load_stall_ms": 0}),
    "switch as text": Refusal(["invalid layerwise_loads 'yes'", "true or false"], {"layerwise_loads": "yes"}),
    "socket as number": Refusal([WHERE, "invalid socket 7", "a string"], {"socket": 7}),
    "relative socket path": Refusal(
        [WHERE, "invalid socket 'run/agent.sock'", "expected an absolute path"], {"socket": "run/agent.sock"}
    ),
    "socket is a folder": Refusal(["/tmp is not a socket", "set the agent's socket"], {"socket": "/tmp"}),
    "socket is a file": Refusal(["is not a socket", "[session] socket in its configuration"], {"socket": __file__}),
    "socket path too long": Refusal(["its path has 205 bytes", "use a shorter path"], {"socket": "/" + "x" * 204}),
    "hashes with a random seed": Refusal(
        ["'xxhash' differ between processes", "--prefix-caching-hash-algo sha256_cbor", "PYTHONHASHSEED"],
        engine={"cache_config.prefix_caching_hash_algo": "xxhash"},
    ),
    "CBOR hashes with a random seed": Refusal(
        ["'xxhash_cbor' differ between processes", "sha256_cbor", "PYTHONHASHSEED"],
        engine={"cache_config.prefix_caching_hash_algo": "xxhash_cbor"},
    ),
    "load failures that fail requests": Refusal(
        ['Set "kv_load_failure_policy": "recompute"', "--kv-transfer-config"],
        transfer={"kv_load_failure_policy": "fail"},
    ),
    "no prefix caching": Refusal(
        ["needs vLLM's prefix caching", "remove --no-enable-prefix-caching", "without the connector"],
        engine={"cache_config.enable_prefix_caching": False},
    ),
    "layer-wise loads with asynchronous scheduling": Refusal(
        ["--no-async-scheduling", "remove layerwise_loads"],
        {"layerwise_loads": True},
        engine={"scheduler_config.async_scheduling": True},
    ),
    "pipeline parallelism": Refusal(
        ["pipeline_parallel_size > 1", "set it to 1"], engine={"parallel_config.pipeline_parallel_size": 2}
    ),
    "context parallelism": Refusal(
        ["decode_context_parallel_size > 1", "set it to 1"], engine={"parallel_config.decode_context_parallel_size": 2}
    ),
    "too many tokens per block": Refusal(
        ["tokens_per_block 65536", "Set another --block-size"],
        cache=lambda: kv_cache(attention(block_size=65_536, num_kv_heads=1, head_size=1)),
    ),
    "unsupported dtype": Refusal(
        ["KV cache dtype torch.int32", "use bfloat16"], cache=lambda: kv_cache(attention(dtype=torch.int32))
    ),
    "several hashes per block": Refusal(
        ["hashes cover 8 tokens and blocks have 32", "unset prefix_match_unit"],
        cache=lambda: dataclasses.replace(kv_cache(), hash_block_size=8),
    ),
    "two groups": Refusal(
        ["one group of full attention", "2 KV cache groups", "SlidingWindowSpec"],
        cache=lambda: kv_cache(attention(), window()),
    ),
    "sliding window": Refusal(["supports full attention", "SlidingWindowSpec"], cache=lambda: kv_cache(window())),
}


def configured(weights: Path, refusal: Refusal) -> VllmConfig:
    """Returns vLLM's configuration with the unsupported settings."""
    transfer = connector(Path("/nonexistent/agent.sock"))
    transfer["kv_connector_extra_config"].update(refusal.extra)
    config = engine_config(weights, {**transfer, **refusal.transfer})
    for name, value in refusal.engine.items():
        part, setting = name.split(".")
        # Set directly: vLLM's own checks would reject some of these on CPUs, but not on other hardware.
        object.__setattr__(getattr(config, part), setting, value)
    return config


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
@pytest.mark.parametrize("refusal", list(REFUSALS.values()), ids=list(REFUSALS))
def test_both_sides_reject_unsupported_configurations_with_a_remedy(
    weights: Path, refusal: Refusal, role: KVConnectorRole
) -> None:
    # The whole construction is inside, because vLLM's configuration also validates some of the options.
    with pytest.raises(ValueError) as refused:
        RepriseConnector(configured(weights, refusal), role, refusal.cache())
    missing = [words for words in refusal.words if words not in str(refused.value)]
    assert missing == [], str(refused.value)


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_accepts_supported_configurations(
    weights: Path, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded = Refusal([], engine={"cache_config.prefix_caching_hash_algo": "xxhash"})
    RepriseConnector(configured(weights, Refusal([])), role, kv_cache()).shutdown()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    RepriseConnector(configured(weights, seeded), role, kv_cache()).shutdown()


ID_AT = 5
"""Offset of a greeting's id, after the length of the frame and a tag."""

ANSWER_WITHIN_S = 5.0


def number(value: int) -> bytes:
    """Returns a number as a Protocol Buffers varint."""
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def of_another_release(message: str) -> Callable[[bytes], bytes]:
    """Returns the answer of an agent of another release: ``Failure { kind: VERSION }`` (docs/PROTOCOL.md, part 1)."""

    def answer(hello: bytes) -> bytes:
        failure = b"\x08\x02\x12" + number(len(message)) + message.encode()
        response = b"\x08" + number(hello[ID_AT]) + b"\x12" + number(len(failure)) + failure
        return len(response).to_bytes(4, "little") + response

    return answer


@contextlib.contextmanager
def listens(path: Path, answer_to: Callable[[bytes], bytes]) -> Iterator[None]:
    """Listens on a socket and gives one answer to every greeting."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        while True:
            try:
                session, _ = listener.accept()
            except OSError:
                return
            with session, contextlib.suppress(OSError):
                session.settimeout(ANSWER_WITHIN_S)
                hello = session.recv(1 << 16)
                if len(hello) <= ID_AT:
                    continue
                session.sendall(answer_to(hello))
                # Wait until the peer has read the answer.
                session.recv(1)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        yield
    finally:
        # Wakes the thread that waits in accept.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        answering.join()


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_error_includes_the_message_of_an_agent_of_another_release(
    weights: Path, role: KVConnectorRole, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    message = "the client speaks session protocol 1, this agent 9: use a client and an agent of one release"
    with listens(path, of_another_release(message)):
        config = engine_config(weights, connector(path))
        with pytest.raises(Version, match=f"do not speak the same protocol: {message}"):
            RepriseConnector(config, role, kv_cache())
        shape = geometry()
        with pytest.raises(Version, match=message):
            Client(path, shape.namespace, shape.layout)


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_rejects_the_socket_of_another_program(weights: Path, role: KVConnectorRole, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with listens(path, lambda _: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"):
        with pytest.raises(Version, match=r"does not greet as an agent of Reprise does.*correct the socket path"):
            RepriseConnector(engine_config(weights, connector(path)), role, kv_cache())


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_rejects_blocks_larger_than_an_arena_region_and_names_the_setting(
    weights: Path, role: KVConnectorRole, cluster: Cluster
) -> None:
    config = engine_config(weights, connector(cluster.agents[0].socket))
    # Blocks of 96 MiB (4 layers of 24 MiB) do not fit into an arena region of 64 MiB.
    large = kv_cache(attention(block_size=512, num_kv_heads=24, head_size=256))
    with pytest.raises(BadRequest, match=r"arena\.region_bytes"):
        RepriseConnector(config, role, large)


SHAPE = (4, 2, 16, 8)
"""Shape of valid memory: blocks, heads, tokens, content."""


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (torch.zeros(4, 16, 2, 8).transpose(1, 2), "layer 1: a block is not contiguous"),
        (torch.zeros(4, 2, 8, 16).transpose(2, 3), "layer 1: a block is not contiguous"),
        (torch.zeros(SHAPE, dtype=torch.float64), "layer 1: elements of 64 bits.* 4 bytes"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), "layer 1: elements of 16 bits.* 4 bytes"),
        (torch.zeros(4, 2, 24, 8), r"layer 1: a block of shape \[2, 24, 8\] has 1536 bytes.* 1024"),
        (torch.zeros(3, 2, 16, 8), "layer 1: 3 blocks, but layer 0 has 4"),
        (torch.zeros(SHAPE, device="meta"), "b is on meta: RepriseConnector supports host memory only"),
    ],
)
def test_rejects_memory_that_does_not_match_the_geometry(memory: torch.Tensor, words: str) -> None:
    worker = WorkerSide(geometry=geometry(), options=Options(), session=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        worker.register({"a": torch.zeros(SHAPE), "b": memory})


def test_rejects_memory_with_missing_layers_and_reports_their_number() -> None:
    worker = WorkerSide(geometry=geometry(), options=Options(), session=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no KV cache for b \(1 layers are missing\)"):
        worker.register({"a": torch.zeros(SHAPE)})
