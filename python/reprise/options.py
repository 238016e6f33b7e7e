"""Options that the adapters of all engines have in common, and their validation."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from reprise import Layout, Namespace, Session

REFUSAL_WAIT_S = 1.0
"""Seconds that the construction of an adapter waits for a rejection by the agent. A live agent answers in milliseconds;
with a hanging agent, construction continues after this time."""

SOCKET_PATH_BYTES_MAX = 107
"""Maximum bytes of a Unix socket's path (unix(7): `sun_path` has 108 bytes, including the final NUL)."""


SOCKET_VARIABLE = "REPRISE_SOCKET"
"""Environment variable with the socket's path, used if the configuration does not set it. The webhook injects it into
pods in Kubernetes."""


TENANT_VARIABLE = "REPRISE_TENANT"
"""Environment variable with the tenant, used if the configuration does not set it. Pods that a CacheTenant selects get it."""

TOKEN_VARIABLE = "REPRISE_TOKEN_FILE"
"""Environment variable with the path of a service account token, by which agents authenticate such pods."""


@dataclass(frozen=True)
class SharedOptions:
    """Validated options of every adapter.

    Times are in milliseconds; names with `_us` are in microseconds.
    """

    where: ClassVar[str]
    """Name of the configuration in errors."""

    engine_options: ClassVar[tuple[str, ...]] = ()
    """Names in the same configuration that the engine itself reads; they are ignored here."""

    socket: str = "/run/reprise/agent.sock"
    """Unix socket of this node's agent. If not configured, `SOCKET_VARIABLE` overrides the default."""

    tenant: str = "default"
    """Tenant of the blocks; their bytes count against its quotas. If not configured, `TENANT_VARIABLE` overrides the
    default."""

    token_file: str = ""
    """File with a service account token of the audience `reprise.dev`, by which agents in Kubernetes authenticate this
    pod; read at each connection. Empty: no token. If not configured, `TOKEN_VARIABLE` overrides the default."""

    model_id: str = ""
    """Name of the model in keys; empty: the engine's name. Set it if nodes have the same model under different paths."""

    load_deadline_ms: float = 5000.0
    """Time after which the engine computes the missing part of a load."""

    load_stall_ms: float = 500.0
    """Time without progress and without an answer of the agent after which a load fails, so that its blocks are computed."""

    load_standstill_ms: float = 750.0
    """Time without progress after which a load fails although the agent answers: a device or another node hangs."""

    load_or_recompute: bool = True
    """Whether found blocks are computed where that is expected to be faster than their load, and waits for loads are
    limited. The rates are measured; before that, all found blocks are loaded."""

    recompute_wait_cap_ms: float = 1000.0
    """Largest time that a request waits for a load longer than computing the blocks that have arrived. The limit is
    ``min(cap, base + per_token * tokens)``."""

    recompute_wait_base_ms: float = 50.0
    """Part of that limit that is the same for all loads."""

    recompute_wait_per_token_us: float = 100.0
    """Part of that limit for each token of the load, in microseconds."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads the options from a configuration.

        Raises:
            ValueError: an unknown option, or a value of the wrong type or range.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in config.items():
            if name in cls.engine_options:
                continue
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"
                raise ValueError(f"{cls.where}: unknown option {name!r}: {hint}")
            values[name] = _checked(cls.where, name, value, type(known[name].default))
        for name, variable in (
            ("socket", SOCKET_VARIABLE),
            ("tenant", TENANT_VARIABLE),
            ("token_file", TOKEN_VARIABLE),
        ):
            if name not in values and (given := os.environ.get(variable)):
                values[name] = given
        options = cls(**values)
        _check_socket(cls.where, options.socket)
        return options

    def session(self, namespace: Namespace, layout: Layout, name: str) -> Session:
        """Opens a session; the agent may start later.

        Args:
            namespace: namespace of the blocks.
            layout: layout of the blocks.
            name: name in the agent's logs.

        Raises:
            Version, Forbidden, BadRequest: the agent permanently rejects these blocks; the message has the remedy.
        """
        session = Session(self.socket, namespace, layout, token_file=self.token_file or None, name=name)
        try:
            session.check(REFUSAL_WAIT_S)
        except BaseException:
            session.close()
            raise
        return session


def _checked(where: str, name: str, value: Any, kind: type) -> Any:
    unit = ("microseconds", "µs") if name.endswith("_us") else ("milliseconds", "ms")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 600_000:
            raise ValueError(f"{where}: invalid {name} {value}: expected above 0 and at most 600000 ({unit[1]})")
        return float(value)
    if kind is not float and isinstance(value, kind):
        return value
    wanted = {float: f"a number of {unit[0]}", str: "a string", bool: "true or false"}[kind]
    raise ValueError(f"{where}: invalid {name} {value!r}: expected {wanted}")


def _check_socket(where: str, socket: str) -> None:
    """Validates the path. The socket itself may not exist yet: the agent may start later."""
    path = Path(socket)
    if not path.is_absolute():
        raise ValueError(
            f"{where}: invalid socket {socket!r}: expected an absolute path, such as /run/reprise/agent.sock"
        )
    if len(socket.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"{where}: invalid socket: its path has {len(socket.encode())} bytes, the path of a Unix socket at most "
            f"{SOCKET_PATH_BYTES_MAX}: use a shorter path"
        )
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        raise ValueError(
            f"{where}: no permission to access {socket} ({error.strerror}): run the engine as a user that can access the "
            "folders of that path, or open them (chmod o+x)"
        ) from error
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(
            f"{where}: {socket} is not a socket: set the agent's socket ([session] socket in its configuration)"
        )
