//! A stand-in for Kubernetes' API server, since the real one does not fit a virtual machine: it serves the `CacheNode` of one
//! node to the node's agent, which lists and watches it, and applies its status.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use reprise_crds::{GROUP, VERSION};
use serde_json::{Value, json};

/// Time after which a watch without a change ends; the agent starts another one.
const WATCH: Duration = Duration::from_secs(60);

/// The server and its object; see the module. Its threads end with the process.
pub(crate) struct CacheNode {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    object: Mutex<Value>,
    changed: Condvar,
}

impl CacheNode {
    /// Serves the object of a node, with a spec.
    pub(crate) fn serve(node: &str, spec: &Value) -> io::Result<CacheNode> {
        let object = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "CacheNode",
            "metadata": { "name": node, "uid": "node-uid", "generation": 1, "resourceVersion": "1" },
            "spec": spec,
        });
        let shared = Arc::new(Shared { object: Mutex::new(object), changed: Condvar::new() });
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let served = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&served);
                // An error ends the connection, as the agent may have ended.
                std::thread::spawn(move || drop(shared.answer(&stream)));
            }
        });
        Ok(CacheNode { address, shared })
    }

    /// Writes the configuration of a client without credentials, and next to it an authority: clients refuse a machine that
    /// has none, although this server does not use it.
    pub(crate) fn write_kubeconfig(&self, path: &Path) -> io::Result<()> {
        let authority = path.with_extension("pem");
        let issued = rcgen::generate_simple_self_signed([String::from("localhost")]);
        fs::write(&authority, issued.map_err(io::Error::other)?.cert.pem())?;
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "vm",
            "clusters": [{ "name": "vm", "cluster": {
                "server": format!("http://{}", self.address), "certificate-authority": authority,
            } }],
            "users": [{ "name": "agent", "user": {} }],
            "contexts": [{ "name": "vm", "context": { "cluster": "vm", "user": "agent" } }],
        });
        fs::write(path, config.to_string())
    }

    /// Replaces the spec of the object.
    pub(crate) fn replace_spec(&self, spec: Value) {
        let mut object = self.shared.lock();
        let generation = object["metadata"]["generation"].as_i64().unwrap_or_default() + 1;
        object["metadata"]["generation"] = json!(generation);
        object["metadata"]["resourceVersion"] = json!(generation.to_string());
        object["spec"] = spec;
        drop(object);
        self.shared.changed.notify_all();
    }

    /// Returns the status that the agent has applied.
    pub(crate) fn status(&self) -> Value {
        self.shared.lock()["status"].clone()
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Value> {
        self.object.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one request, and ends the connection.
    fn answer(&self, stream: &TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        let (mut first, mut length) = (String::new(), 0);
        reader.read_line(&mut first)?;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            match line.trim_end().split_once(": ") {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.parse().unwrap_or(0);
                }
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let is_watch = first.contains("watch=true");
        let (code, answer) = match first.split(' ').next() {
            Some("GET") if is_watch => (200, self.await_change(&first)),
            Some("GET") if first.contains("/cachenodes") => (200, self.list()),
            Some("PATCH") if first.contains("/status") => (200, self.apply_status(&body)),
            _ => (404, json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404 })),
        };
        // Without a length, the end of the connection ends the answer.
        let mut stream = stream;
        let head =
            format!("HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n");
        let end = if is_watch { "\n" } else { "" };
        let answer = if answer.is_null() { String::new() } else { format!("{answer}{end}") };
        stream.write_all((head + &answer).as_bytes())
    }

    fn list(&self) -> Value {
        let object = self.lock();
        json!({
            "apiVersion": object["apiVersion"], "kind": "CacheNodeList",
            "metadata": { "resourceVersion": object["metadata"]["resourceVersion"] }, "items": [*object],
        })
    }

    /// Waits until the object has another version than a watch names; returns nothing after a while without a change.
    fn await_change(&self, request: &str) -> Value {
        let known = |object: &mut Value| {
            let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
            request.split(['&', '?', ' ']).any(|word| word == format!("resourceVersion={version}"))
        };
        let waited = self.changed.wait_timeout_while(self.lock(), WATCH, known);
        let (object, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        match timeout.timed_out() {
            true => Value::Null,
            false => json!({ "type": "MODIFIED", "object": *object }),
        }
    }

    fn apply_status(&self, body: &[u8]) -> Value {
        let applied: Value = serde_json::from_slice(body).unwrap_or_default();
        let mut object = self.lock();
        object["status"] = applied["status"].clone();
        object.clone()
    }
}
