//! A real etcd on loopback, with a fresh data folder, ended when it is dropped.
//!
//! The binary is built from etcd's Go module by `e2e/etcd/build.sh` into the cache folder.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use reprise_controlplane_store::EtcdSettings;

/// A start takes some 300 ms.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Attempts to find ports: another process may take one between our look and etcd's.
const ATTEMPTS_MAX: usize = 5;

/// A running server.
pub(crate) struct Server {
    child: Child,
    client: u16,
    peer: u16,
    folder: PathBuf,
}

/// The binary, built when it is not there yet.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let script =
            here.ancestors().map(|folder| folder.join("e2e/etcd/build.sh")).find(|path| path.exists());
        let script = script.expect("the script is in this repository");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash is there");
        assert!(output.status.success(), "etcd cannot be built");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

/// Two ports that nobody has just now.
fn free_ports() -> (u16, u16) {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = |listener: &TcpListener| listener.local_addr().expect("bound").port();
    let both = (bind(), bind());
    (port(&both.0), port(&both.1))
}

impl Server {
    /// Starts one with its data in `folder`.
    pub(crate) fn start(folder: &Path) -> Server {
        for _ in 0..ATTEMPTS_MAX {
            let (client, peer) = free_ports();
            let child = spawn(folder, client, peer);
            let mut server = Server { child, client, peer, folder: folder.to_owned() };
            if server.is_ready() {
                return server;
            }
        }
        panic!(
            "etcd does not start: {}",
            std::fs::read_to_string(folder.join("etcd.log")).unwrap_or_default()
        );
    }

    /// How to reach it.
    pub(crate) fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: vec![format!("http://127.0.0.1:{}", self.client)],
            prefix: prefix.to_owned(),
            user: None,
        }
    }

    /// SIGKILL.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("one's own child");
        self.child.wait().expect("it ends");
    }

    /// Starts it again with its data and under its addresses.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.folder, self.client, self.peer);
        assert!(self.is_ready(), "etcd starts again");
    }

    /// Waits until it answers; false when it ends instead.
    fn is_ready(&mut self) -> bool {
        let give_up = Instant::now() + READY_WITHIN;
        while Instant::now() < give_up {
            if self.child.try_wait().expect("one's own child").is_some() {
                return false;
            }
            if self.is_healthy() {
                return true;
            }
            std::thread::yield_now();
        }
        panic!("etcd is not ready within {READY_WITHIN:?}");
    }

    fn is_healthy(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.client)) else { return false };
        let mut answer = String::new();
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.contains("\"health\":\"true\"")
    }
}

fn spawn(folder: &Path, client: u16, peer: u16) -> Child {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let log = std::fs::File::create(folder.join("etcd.log")).expect("a log");
    let mut command = Command::new(binary());
    command
        .args(["--name", "test", "--data-dir"])
        .arg(folder.join("etcd"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}"), "--log-level", "warn"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    command.spawn().expect("etcd can be run")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
