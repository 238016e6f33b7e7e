"""The part of Kubernetes' API that an agent in a cluster uses, for one ``CacheNode``: list, watch, and writes of its status.

It validates nothing and knows no permissions; the tests of ``e2e`` use the real API server.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster import MIB, Agent, binaries, quoted

API_VERSION, KIND = "reprise.dev/v1alpha1", "CacheNode"
NODES = f"/apis/{API_VERSION}/cachenodes"
REPORTED_WITHIN_S = 60.0


class ApiServer:
    """API server on loopback with the ``CacheNode`` of one node."""

    def __init__(self, node: str, spec: dict[str, Any]) -> None:
        """Starts the server."""
        self.node = node
        self._object: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": node, "uid": "uid-1", "generation": 1, "resourceVersion": "1"},
            "spec": {"nodeName": node, **spec},
        }
        self._changed = threading.Condition()
        self._ended = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig file for this server."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": address}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        return path

    def wait_status(self, holds: Any) -> dict[str, Any]:
        """Waits until the node's status satisfies a predicate, and returns it."""
        deadline = time.monotonic() + REPORTED_WITHIN_S
        with self._changed:
            while not holds(self._object.get("status", {})):
                left = deadline - time.monotonic()
                assert left > 0, f"the status stays {json.dumps(self._object.get('status'), indent=1)}"
                self._changed.wait(left)
            return dict(self._object["status"])

    def stop(self) -> None:
        """Ends the server and its watches."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if path != NODES:
                    self._answer(404, {"kind": "Status", "code": 404, "message": "not found"})
                elif "watch=true" in query:
                    self._watch()
                else:
                    with server._changed:
                        items = [dict(server._object)]
                    meta = {"resourceVersion": "1"}
                    self._answer(
                        200, {"apiVersion": API_VERSION, "kind": f"{KIND}List", "metadata": meta, "items": items}
                    )

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._changed:
                    server._object["status"] = body["status"]
                    stored = dict(server._object)
                    server._changed.notify_all()
                self._answer(200, stored)

            def _watch(self) -> None:
                # The object does not change, so a watch has no event.
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with server._changed:
                    server._changed.wait_for(lambda: server._ended)
                self.wfile.write(b"0\r\n\r\n")

            def _answer(self, code: int, body: dict[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        return Handler


def write_profile(home: Path, content: dict[str, Any]) -> str:
    """Writes a slack profile next to an agent's configuration, as the kubelet does. Returns its digest."""
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    home.mkdir(parents=True, exist_ok=True)
    (home / f"profile-{digest}.json").write_text(text)
    return f"sha256:{digest}"


def agent_of(home: Path, server: ApiServer) -> Agent:
    """Starts an agent of the server's node, without devices."""
    home.mkdir(parents=True, exist_ok=True)
    socket, config = home / "agent.sock", home / "agent.toml"
    config.write_text(
        f'[session]\nsocket = {quoted(socket)}\n[arena]\nbytes = "{16 * MIB}"\nregion_bytes = "{8 * MIB}"\n'
        '[peers]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n[tls]\nplain = true\n'
        f'[kubernetes]\nstate_directory = {quoted(home / "state")}\nstatus_every = "1s"\n'
    )
    (home / "root").mkdir()
    program = [str(binaries() / "reprise-agent"), "--config", str(config), "--in-cluster"]
    places = ["--kubeconfig", str(server.kubeconfig(home / "kubeconfig")), "--node-root", str(home / "root")]
    environment = ["env", f"NODE_NAME={server.node}", "POD_IP=127.0.0.1", "POD_NAME=reprise-agent-x"]
    agent = Agent([*environment, *program, *places], home / "agent.log", socket=socket)
    agent.start()
    return agent
