"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    """Options of the connector, checked.

    Times are milliseconds.
    """

    socket: str = "/run/reprise/agent.sock"
    """The unix socket of this node's agent."""

    tenant: str = "default"
    """Whose blocks these are: their bytes count against this tenant's quotas."""

    model_id: str = ""
    """Name of the model in keys; empty: vLLM's. Set it where nodes have the same model under different paths."""

    weights_digest: str = ""
    """Digest of the weights in keys; empty: the revision of the hub, or a sample of the files' bytes."""

    match_budget_ms: float = 5.0
    """How long one step of the scheduler waits for answers, over all requests. Beyond it: asked again in the next step."""

    match_deadline_ms: float = 250.0
    """After which a request goes on without an answer."""

    load_deadline_ms: float = 5000.0
    """After which the missing part of a load is computed."""

    load_stall_ms: float = 500.0
    """After which a load that makes no progress is given up and computed."""

    save_decode_blocks: bool = True
    """Whether blocks of generated tokens are saved, as conversations want it."""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Options:
        """Reads the options.

        Raises:
            ValueError: an unknown option, or a value of the wrong type or range, in words.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra_config.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
                raise ValueError(f"kv_connector_extra_config: there is no option {name!r}{hint}")
            values[name] = _checked(name, value, type(known[name].default))
        return cls(**values)


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 600_000:
            raise ValueError(
                f"kv_connector_extra_config: {name} is {value}; it must be above 0 and at most 600000 (ms)"
            )
        return float(value)
    if kind is not float and isinstance(value, kind):
        return value
    wanted = {float: "a number of milliseconds", str: "a string", bool: "true or false"}[kind]
    raise ValueError(f"kv_connector_extra_config: {name} is {value!r}; it must be {wanted}")
