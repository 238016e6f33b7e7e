"""Real cluster on loopback for tests: one control plane member and several agents, each in its own process.

The binaries are in ``$REPRISE_BIN``; by default, the debug build in the cache folder is used.
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

SESSIONS = {
    "": "",
    "files": "extents = true\n",
    "queues": "extents = true\nqueue_pairs = 12\nqueue_pairs_per_session = 4\nqueue_depth = 64\n",
}
"""What agents lend to engines, as lines of their configuration's section ``session``."""


def binaries() -> Path:
    """Returns the folder of Reprise's binaries."""
    cache = os.environ.get("REPRISE_CACHE", str(Path.home() / ".cache/reprise"))
    target = os.environ.get("CARGO_TARGET_DIR", f"{cache}/target")
    return Path(os.environ.get("REPRISE_BIN", f"{target}/debug"))


def quoted(path: Path) -> str:
    """Returns a path as a TOML string."""
    return json.dumps(str(path))


@dataclass
class Process:
    """Process that prints a line of JSON when it is ready."""

    command: list[str]
    log: Path
    ready: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it is ready."""
        with self.log.open("a") as log:
            self.child = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log)
        assert self.child.stdout is not None
        os.set_blocking(self.child.stdout.fileno(), False)
        deadline = time.monotonic() + READY_WITHIN_S
        output = b""
        while b"\n" not in output:
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.command[0]} did not start:\n{self.log.read_text()}")
            output += self.child.stdout.read() or b""
            time.sleep(0.01)
        self.ready = json.loads(output.splitlines()[0])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.child is not None
        self.child.send_signal(number)

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            assert self.child.stdout is not None
            self.child.stdout.close()
            self.child = None

    def restart(self) -> None:
        """Kills the process and starts it with the same files."""
        self.kill()
        self.start()


SALTED_TENANT = "team-a"
"""Tenant besides the default one, with a salt on each agent."""


@dataclass
class Agent(Process):
    """Agent of a node."""

    socket: Path = Path()
    pool: Path = Path()


class Cluster:
    """Control plane member and agents in one folder."""

    def __init__(
        self,
        home: Path,
        agents: int = 1,
        arena: int = 256 * MIB,
        pool: int = 512 * MIB,
        publish: bool = False,
        lends: str = "",
    ) -> None:
        """Starts a cluster. ``lends`` is what its agents lend to engines: "queues" of an NVMe controller that they emulate,
        or "files"; empty: nothing."""
        self.lends = lends
        home.mkdir(parents=True, exist_ok=True)
        events = '[events]\npublish = "127.0.0.1:0"\nreplay = "127.0.0.1:0"\n' if publish else ""
        config = home / "controlplane.toml"
        config.write_text(
            'listen = "127.0.0.1:0"\nadmin = "127.0.0.1:0"\ntls.plain = true\n'
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
        kind = "emulated" if self.lends == "queues" else "path"
        socket, device, config = home / "agent.sock", home / "pool", home / "agent.toml"
        salts = home / "salts"
        salts.mkdir(exist_ok=True)
        salt = salts / SALTED_TENANT
        salt.touch(mode=0o600)
        salt.write_text("5a" * 32)
        config.write_text(
            f'[node]\nname = "{home.name}"\n[session]\nsocket = {quoted(socket)}\nsalts = {quoted(salts)}\n'
            f"{SESSIONS[self.lends]}"
            f'[arena]\nbytes = "{arena}"\nregion_bytes = "{min(arena, 64 * MIB)}"\n'
            f'[pool]\nreserve_bytes = "1MiB"\ndevices = [{{ {kind} = {quoted(device)}, bytes = "{pool}" }}]\n'
            "[cache]\narena_session_permille = 1000\n"
            '[peers]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
            f'[tls]\nplain = true\n[controlplane]\naddress = "{self.member.ready["grpc"]}"\n'
            # No placement, which would move blocks to the NVMe of another node.
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
        """Kills every process."""
        for process in [*self.agents, self.member]:
            process.kill()
