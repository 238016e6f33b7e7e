"""What the configuration of every engine's adapter may say, and how it is read."""

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
"""How long the construction of an adapter waits for an agent that is there to refuse it. Who answers at all does so in
milliseconds; one that hangs is waited for no longer."""

SOCKET_PATH_BYTES_MAX = 107
"""Of a unix socket's path (unix(7): `sun_path` has 108 bytes with its end)."""


SOCKET_VARIABLE = "REPRISE_SOCKET"
"""Environment variable with the socket's path, for engines whose configuration names none: pods in Kubernetes are given it."""


TENANT_VARIABLE = "REPRISE_TENANT"
"""Environment variable with the tenant, likewise: pods that a CacheTenant names are given it."""

TOKEN_VARIABLE = "REPRISE_TOKEN_FILE"
"""Environment variable with the path of a service account's token, by which agents know such pods."""


@dataclass(frozen=True)
class SharedOptions:
    """Options that every adapter has, checked.

    Times are milliseconds.
    """

    where: ClassVar[str]
    """What the configuration is called in errors."""

    not_ours: ClassVar[tuple[str, ...]] = ()
    """Names that the engine reads itself from the same configuration."""

    socket: str = "/run/reprise/agent.sock"
    """The unix socket of this node's agent. Where nothing is configured, `SOCKET_VARIABLE` goes before this."""

    tenant: str = "default"
    """Whose blocks these are: their bytes count against this tenant's quotas. Where nothing is configured, `TENANT_VARIABLE` goes before this."""

    token_file: str = ""
    """File with a service account's token of the audience `reprise.dev`, which shows agents in Kubernetes whose pod this is; read at each
    connection. Empty: none. Where nothing is configured, `TOKEN_VARIABLE` goes before this."""

    model_id: str = ""
    """Name of the model in keys; empty: the engine's. Set it where nodes have the same model under different paths."""

    load_deadline_ms: float = 5000.0
    """After which the missing part of a load is computed."""

    load_stall_ms: float = 500.0
    """After which a load is given up and computed whose agent makes no progress and does not answer."""

    load_standstill_ms: float = 750.0
    """After which a load is given up and computed of which nothing comes although the agent answers: another node hangs, or a device."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads the options.

        Raises:
            ValueError: an unknown option, or a value of the wrong type or range, in words.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in config.items():
            if name in cls.not_ours:
                continue
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
                raise ValueError(f"{cls.where}: there is no option {name!r}{hint}")
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
        """A session with the agent, which may come later.

        Args:
            namespace: of the blocks.
            layout: of the blocks.
            name: for the agent's logs.

        Raises:
            Version, Forbidden, BadRequest: the agent is there and will never keep these blocks, and what to do.
        """
        session = Session(
            self.socket, namespace, layout, tenant=self.tenant, token_file=self.token_file or None, name=name
        )
        try:
            session.check(REFUSAL_WAIT_S)
        except BaseException:
            session.close()
            raise
        return session


def _checked(where: str, name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 600_000:
            raise ValueError(f"{where}: {name} is {value}; it must be above 0 and at most 600000 (ms)")
        return float(value)
    if kind is not float and isinstance(value, kind):
        return value
    wanted = {float: "a number of milliseconds", str: "a string", bool: "true or false"}[kind]
    raise ValueError(f"{where}: {name} is {value!r}; it must be {wanted}")


def _check_socket(where: str, socket: str) -> None:
    """A socket that is not there yet is fine: the agent may come later."""
    path = Path(socket)
    if not path.is_absolute():
        raise ValueError(f"{where}: socket is {socket!r}; give the whole path, such as /run/reprise/agent.sock")
    if len(socket.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"{where}: socket is a path of {len(socket.encode())} bytes, and a unix socket's has {SOCKET_PATH_BYTES_MAX} at "
            "the most: use a shorter one"
        )
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        raise ValueError(
            f"{where}: this user may not look at {socket} ({error.strerror}): run the engine as a user whom the folders of that "
            "path admit, or open them (chmod o+x)"
        ) from error
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(
            f"{where}: {socket} is there and is no socket: name the agent's ([session] socket in its configuration)"
        )
