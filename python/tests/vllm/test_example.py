"""vLLM's command in docs/vllm.md: vLLM accepts it, and an engine with its configuration finds saved blocks."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import readme
from engine import Engine, connector
from engine_checks import prompt, serve_and_save, serve_from_reprise
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from reprise.vllm import RepriseConnector


def without_id(config: KVTransferConfig) -> dict[str, Any]:
    """Returns a configuration without its random id."""
    return {name: value for name, value in asdict(config).items() if name != "engine_id"}


def understood(model: Path) -> EngineArgs:
    """Returns the command's arguments as parsed by vLLM, with another model."""
    program, verb, _, *options = shlex.split(readme.vllm_command())
    assert (program, verb) == ("vllm", "serve")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *options]))


def test_vllm_parses_the_command_of_the_guide(weights: Path) -> None:
    shown = understood(weights)
    transfer = shown.kv_transfer_config
    assert transfer is not None
    assert KVConnectorFactory.get_connector_class(transfer) is RepriseConnector
    assert (transfer.kv_role, transfer.kv_load_failure_policy) == ("kv_both", "recompute")
    assert transfer.kv_connector_extra_config == {"socket": readme.SOCKET}
    assert shown.prefix_caching_hash_algo == readme.vllm_hash_algorithm() == "sha256_cbor"
    # Equal to the configuration of the engines in all these tests, which load each block that is found.
    transfer.kv_connector_extra_config["load_or_recompute"] = False
    assert without_id(transfer) == without_id(KVTransferConfig(**connector(Path(readme.SOCKET))))


def test_engine_with_the_guides_configuration_finds_its_saved_blocks(plain: Engine, other: Engine) -> None:
    tokens = prompt(300)
    expected = plain.generate([tokens])["tokens"]
    assert serve_and_save(other, tokens)["tokens"] == expected
    assert serve_from_reprise(other, tokens)["tokens"] == expected
