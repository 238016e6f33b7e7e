"""What cannot work is refused where the connector is made, in words that say what is wrong and what to do."""

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
from stepped import HEAD_SIZE, HEADS, TOKENS, engine_config, kv_cache
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
    """A worker without others, in an environment that says nothing."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for name in ("PYTHONHASHSEED", "REPRISE_SOCKET", "REPRISE_TENANT", "REPRISE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def attention(**changes: Any) -> FullAttentionSpec:
    """Full attention, with changes."""
    described = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32, **changes}
    return FullAttentionSpec(**described)


def window() -> SlidingWindowSpec:
    """Attention to the last tokens only."""
    return SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, sliding_window=4 * TOKENS
    )


@dataclass(frozen=True)
class Refusal:
    """What is set, and what the refusal has to say."""

    words: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    """In ``kv_connector_extra_config``, beside the socket or in its place."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """In ``--kv-transfer-config`` itself."""
    engine: dict[str, Any] = field(default_factory=dict)
    """In the engine's other settings, ``part.name``."""
    cache: Callable[[], KVCacheConfig] = kv_cache


WHERE = "kv_connector_extra_config"

REFUSALS = {
    "an option with a slip": Refusal([WHERE, "no option 'sokcet'", "did you mean 'socket'"], {"sokcet": "/x"}),
    "an option of something else": Refusal([WHERE, "no option 'chunk_size'"], {"chunk_size": 256}),
    "an option like no other": Refusal([WHERE, "no option 'zzz'", "known are", "layerwise_loads"], {"zzz": 1}),
    "a time in words": Refusal(
        [WHERE, "match_budget_ms is '5 ms'", "a number of milliseconds"], {"match_budget_ms": "5 ms"}
    ),
    "no time at all": Refusal(["load_stall_ms is 0", "above 0 and at most 600000"], {"load_stall_ms": 0}),
    "a switch in words": Refusal(["layerwise_loads is 'yes'", "true or false"], {"layerwise_loads": "yes"}),
    "a socket that is a number": Refusal([WHERE, "socket is 7", "a string"], {"socket": 7}),
    "a socket that is no whole path": Refusal(
        [WHERE, "socket is 'run/agent.sock'", "give the whole path"], {"socket": "run/agent.sock"}
    ),
    "a socket that is a folder": Refusal(["/tmp is there and is no socket", "name the agent's"], {"socket": "/tmp"}),
    "a socket that is a file": Refusal(
        ["is there and is no socket", "[session] socket in its configuration"], {"socket": __file__}
    ),
    "a socket of too long a path": Refusal(["a path of 205 bytes", "use a shorter one"], {"socket": "/" + "x" * 204}),
    "hashes that no other process has": Refusal(
        ["'xxhash' differ between processes", "--prefix-caching-hash-algo sha256_cbor", "PYTHONHASHSEED"],
        engine={"cache_config.prefix_caching_hash_algo": "xxhash"},
    ),
    "hashes of CBOR that no other process has": Refusal(
        ["'xxhash_cbor' differ between processes", "sha256_cbor", "PYTHONHASHSEED"],
        engine={"cache_config.prefix_caching_hash_algo": "xxhash_cbor"},
    ),
    "requests that fail with a load": Refusal(
        ['Set "kv_load_failure_policy": "recompute"', "--kv-transfer-config"],
        transfer={"kv_load_failure_policy": "fail"},
    ),
    "no prefixes": Refusal(
        ["prefix caching is off", "remove --no-enable-prefix-caching", "leave the connector out"],
        engine={"cache_config.enable_prefix_caching": False},
    ),
    "steps that do not wait for each other": Refusal(
        ["--no-async-scheduling", "leave layerwise_loads out"],
        {"layerwise_loads": True},
        engine={"scheduler_config.async_scheduling": True},
    ),
    "several stages": Refusal(
        ["pipeline_parallel_size > 1", "set it to 1"], engine={"parallel_config.pipeline_parallel_size": 2}
    ),
    "a context in parts": Refusal(
        ["decode_context_parallel_size > 1", "set it to 1"], engine={"parallel_config.decode_context_parallel_size": 2}
    ),
    "blocks of too many tokens": Refusal(
        ["tokens_per_block 65536", "Set another --block-size"],
        cache=lambda: kv_cache(attention(block_size=65_536, num_kv_heads=1, head_size=1)),
    ),
    "elements of no kind": Refusal(
        ["KV cache dtype torch.int32", "use bfloat16"], cache=lambda: kv_cache(attention(dtype=torch.int32))
    ),
    "hashes of less than a block": Refusal(
        ["hashes are of 8 tokens and blocks of 32", "unset prefix_match_unit"],
        cache=lambda: dataclasses.replace(kv_cache(), hash_block_size=8),
    ),
    "two groups": Refusal(
        ["one group of full attention", "2 KV cache groups", "SlidingWindowSpec"],
        cache=lambda: kv_cache(attention(), window()),
    ),
    "a window": Refusal(["keeps full attention", "SlidingWindowSpec"], cache=lambda: kv_cache(window())),
}


def configured(weights: Path, refusal: Refusal) -> VllmConfig:
    """vLLM's configuration with what is to be refused."""
    transfer = connector(Path("/nonexistent/agent.sock"))
    transfer["kv_connector_extra_config"].update(refusal.extra)
    config = engine_config(weights, {**transfer, **refusal.transfer})
    for name, value in refusal.engine.items():
        part, setting = name.split(".")
        # As vLLM's checks would let it through elsewhere than on CPUs.
        object.__setattr__(getattr(config, part), setting, value)
    return config


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
@pytest.mark.parametrize("refusal", list(REFUSALS.values()), ids=list(REFUSALS))
def test_what_cannot_work_is_refused_by_both_sides_with_what_to_do(
    weights: Path, refusal: Refusal, role: KVConnectorRole
) -> None:
    # vLLM's configuration reads some of the options as well.
    with pytest.raises(ValueError) as refused:
        RepriseConnector(configured(weights, refusal), role, refusal.cache())
    missing = [words for words in refusal.words if words not in str(refused.value)]
    assert missing == [], str(refused.value)


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_what_can_work_is_not_refused(weights: Path, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = Refusal([], engine={"cache_config.prefix_caching_hash_algo": "xxhash"})
    RepriseConnector(configured(weights, Refusal([])), role, kv_cache()).shutdown()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    RepriseConnector(configured(weights, seeded), role, kv_cache()).shutdown()


ID_AT = 5
"""Where a greeting has its id: behind the length of the frame and a tag."""

ANSWER_WITHIN_S = 5.0


def number(value: int) -> bytes:
    """A number in Protocol Buffers' encoding."""
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def of_another_release(says: str) -> Callable[[bytes], bytes]:
    """How an agent of another release answers a greeting: ``Failure { kind: VERSION }`` (docs/PROTOCOL.md, part 1)."""

    def answer(hello: bytes) -> bytes:
        failure = b"\x08\x02\x12" + number(len(says)) + says.encode()
        response = b"\x08" + number(hello[ID_AT]) + b"\x12" + number(len(failure)) + failure
        return len(response).to_bytes(4, "little") + response

    return answer


@contextlib.contextmanager
def listens(path: Path, answer_to: Callable[[bytes], bytes]) -> Iterator[None]:
    """Somebody who listens at a path, and has one answer to every greeting."""
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
                # Until the other side has read it.
                session.recv(1)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        yield
    finally:
        # Wakes whoever waits for the next session.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        answering.join()


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_an_agent_of_another_release_is_named_with_what_it_says(
    weights: Path, role: KVConnectorRole, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    says = "the client speaks session protocol 1, this agent 9: use a client and an agent of one release"
    with listens(path, of_another_release(says)):
        config = engine_config(weights, connector(path))
        with pytest.raises(Version, match=f"do not speak the same protocol: {says}"):
            RepriseConnector(config, role, kv_cache())
        shape = geometry()
        with pytest.raises(Version, match=says):
            Client(path, shape.namespace, shape.layout)


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_the_socket_of_another_program_is_refused(weights: Path, role: KVConnectorRole, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with listens(path, lambda _: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"):
        with pytest.raises(Version, match=r"does not greet as an agent of Reprise does.*correct the socket path"):
            RepriseConnector(engine_config(weights, connector(path)), role, kv_cache())


@pytest.mark.parametrize("role", BOTH, ids=lambda role: role.name.lower())
def test_blocks_that_the_agent_has_no_room_for_are_refused_with_the_setting_that_says_so(
    weights: Path, role: KVConnectorRole, cluster: Cluster
) -> None:
    config = engine_config(weights, connector(cluster.agents[0].socket))
    # Blocks of 96 MiB, 4 layers of 24; a region of the arena has 64.
    large = kv_cache(attention(block_size=512, num_kv_heads=24, head_size=256))
    with pytest.raises(BadRequest, match=r"arena\.region_bytes"):
        RepriseConnector(config, role, large)


SHAPE = (4, 2, 16, 8)
"""Blocks, heads, tokens, content of the memory that fits."""


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (torch.zeros(4, 16, 2, 8).transpose(1, 2), "layer 1: a block is not contiguous"),
        (torch.zeros(4, 2, 8, 16).transpose(2, 3), "layer 1: a block is not contiguous"),
        (torch.zeros(SHAPE, dtype=torch.float64), "layer 1: elements of 64 bits.* 4 bytes"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), "layer 1: elements of 16 bits.* 4 bytes"),
        (torch.zeros(4, 2, 24, 8), r"layer 1: a block of shape \[2, 24, 8\] has 1536 bytes.* 1024"),
        (torch.zeros(3, 2, 16, 8), "layer 1: 3 blocks, but layer 0 has 4"),
        (torch.zeros(SHAPE, device="meta"), "b lies on meta: RepriseConnector works on host memory"),
    ],
)
def test_memory_that_is_not_what_the_blocks_are_is_refused_before_anything_is_copied(
    memory: torch.Tensor, words: str
) -> None:
    worker = WorkerSide(geometry=geometry(), options=Options(), session=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        worker.register({"a": torch.zeros(SHAPE), "b": memory})


def test_memory_of_missing_layers_is_refused_with_their_number() -> None:
    worker = WorkerSide(geometry=geometry(), options=Options(), session=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no KV cache for b \(1 layers are missing\)"):
        worker.register({"a": torch.zeros(SHAPE)})
