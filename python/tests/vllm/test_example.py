"""What python/README.md shows of vLLM: the command is one that vLLM understands, and an engine that is configured like it finds blocks."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import readme
from engine import Engine, connector
from serving import prompt, see, see_again
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from reprise.vllm import RepriseConnector


def without_id(config: KVTransferConfig) -> dict[str, Any]:
    """A configuration without what is random in it."""
    return {name: value for name, value in asdict(config).items() if name != "engine_id"}


def understood(model: Path) -> EngineArgs:
    """The command as vLLM reads it, with another model."""
    program, verb, _, *options = shlex.split(readme.vllm_command())
    assert (program, verb) == ("vllm", "serve")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *options]))


def test_vllm_understands_the_command_as_it_is_meant(weights: Path) -> None:
    shown = understood(weights)
    transfer = shown.kv_transfer_config
    assert transfer is not None
    assert KVConnectorFactory.get_connector_class(transfer) is RepriseConnector
    assert (transfer.kv_role, transfer.kv_load_failure_policy) == ("kv_both", "recompute")
    assert transfer.kv_connector_extra_config == {"socket": readme.SOCKET}
    assert shown.prefix_caching_hash_algo == readme.vllm_hash_algorithm() == "sha256_cbor"
    # What the engines of all these tests have.
    assert without_id(transfer) == without_id(KVTransferConfig(**connector(Path(readme.SOCKET))))


def test_an_engine_with_that_configuration_finds_what_it_has_saved(plain: Engine, other: Engine) -> None:
    tokens = prompt(300)
    expected = plain.generate([tokens])["tokens"]
    assert see(other, tokens)["tokens"] == expected
    assert see_again(other, tokens)["tokens"] == expected
