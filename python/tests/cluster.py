"""A real cluster on loopback for tests: one member of the control plane and some agents, each a process of its own.

The binaries are those of ``$REPRISE_BIN``, by default the debug build in the cache folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

READY_WITHIN_S = 60.0
MIB = 1 << 20


def binaries() -> Path:
    """Where the binaries of Reprise are."""
    cache = os.environ.get("REPRISE_CACHE", str(Path.home() / ".cache/reprise"))
    target = os.environ.get("CARGO_TARGET_DIR", f"{cache}/target")
    return Path(os.environ.get("REPRISE_BIN", f"{target}/debug"))


def quoted(path: Path) -> str:
    """A path as a TOML string."""
    return json.dumps(str(path))


@dataclass
class Process:
    """A process that says in a line of JSON that it is ready."""

    command: list[str]
    log: Path
    ready: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        with self.log.open("a") as log:
            self.child = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log)
        assert self.child.stdout is not None
        os.set_blocking(self.child.stdout.fileno(), False)
        give_up = time.monotonic() + READY_WITHIN_S
        said = b""
        while b"\n" not in said:
            if self.child.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{self.command[0]} does not start:\n{self.log.read_text()}")
            said += self.child.stdout.read() or b""
            time.sleep(0.01)
        self.ready = json.loads(said.splitlines()[0])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.child is not None
        self.child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            assert self.child.stdout is not None
            self.child.stdout.close()
            self.child = None

    def restart(self) -> None:
        """Starts it again on what it left behind."""
        self.kill()
        self.start()


@dataclass
class Agent(Process):
    """A node's agent."""

    socket: Path = Path()
    pool: Path = Path()


class Cluster:
    """Member and agents under one folder."""

    def __init__(
        self, home: Path, agents: int = 1, arena: int = 256 * MIB, pool: int = 512 * MIB, publish: bool = False
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        events = '[events]\npublish = "127.0.0.1:0"\nreplay = "127.0.0.1:0"\n' if publish else ""
        config = home / "controlplane.toml"
        config.write_text(
            'listen = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\n'
            f'[store]\nkind = "embedded"\npath = {quoted(home / "controlplane.redb")}\n' + events
        )
        self.member = Process(
            [str(binaries() / "reprise-controlplane"), "--config", str(config)], home / "controlplane.log"
        )
        self.member.start()
        self.agents: list[Agent] = []
        for number in range(agents):
            self.agents.append(self._agent(home / f"node-{number}", arena, pool))

    def _agent(self, home: Path, arena: int, pool: int) -> Agent:
        home.mkdir(parents=True, exist_ok=True)
        socket, device, config = home / "agent.sock", home / "pool", home / "agent.toml"
        config.write_text(
            f'[node]\nname = "{home.name}"\n[session]\nsocket = {quoted(socket)}\n'
            f'[arena]\nbytes = "{arena}"\nregion_bytes = "{min(arena, 64 * MIB)}"\n'
            f'[pool]\ndevices = [{{ path = {quoted(device)}, bytes = "{pool}" }}]\n'
            "[cache]\narena_session_permille = 1000\n"
            '[peers]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
            f'[controlplane]\naddress = "{self.member.ready["grpc"]}"\n'
            # Blocks stay where tests look for them: what is moved to another node is on this one's NVMe no more.
            '[placement]\nbandwidth = "0"\n'
        )
        agent = Agent(
            [str(binaries() / "reprise-agent"), "--config", str(config)],
            home / "agent.log",
            socket=socket,
            pool=device,
        )
        agent.start()
        return agent

    def stop(self) -> None:
        """Ends every process."""
        for process in [*self.agents, self.member]:
            process.kill()
