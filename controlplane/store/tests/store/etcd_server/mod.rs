//! A real etcd on loopback with a new data folder; killed on drop.
//!
//! `e2e/etcd/build.sh` builds the binary from etcd's Go module into the cache folder.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use reprise_controlplane_store::EtcdSettings;

/// Time limit for a start, which takes about 300 ms.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Attempts to find free ports, because another process may take one before etcd binds it.
const ATTEMPTS_MAX: usize = 5;

/// A running etcd server.
pub(crate) struct Server {
    child: Child,
    ports: Ports,
    folder: PathBuf,
    setup: Setup,
}

/// Options for starting a server.
#[derive(Clone, Default)]
pub(crate) struct Setup {
    /// Its certificate and key, and the authority of client certificates.
    pub(crate) tls: Option<ServerTls>,
    /// Additional command-line arguments.
    pub(crate) arguments: Vec<String>,
}

/// Certificate files in PEM.
#[derive(Clone)]
pub(crate) struct ServerTls {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) client_authority: PathBuf,
}

impl Setup {
    fn client_url(&self, ports: Ports) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", ports.client)
    }
}

#[derive(Clone, Copy)]
struct Ports {
    client: u16,
    peer: u16,
    /// Health endpoint, without TLS.
    metrics: u16,
}

/// Path of the binary, which is built if missing.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // Read the run-time variable: one target folder may serve several source trees.
        let here =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let script = Path::new(&here)
            .ancestors()
            .map(|folder| folder.join("e2e/etcd/build.sh"))
            .find(|path| path.exists());
        let script = script.expect("the script exists in this repository");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash exists");
        assert!(output.status.success(), "cannot build etcd");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

/// Ports that are free at the moment.
fn free_ports() -> Ports {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = |listener: &TcpListener| listener.local_addr().expect("bound").port();
    let all = (bind(), bind(), bind());
    Ports { client: port(&all.0), peer: port(&all.1), metrics: port(&all.2) }
}

impl Server {
    /// Starts a server with its data in `folder`.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn start(folder: &Path) -> Server {
        Server::start_with(folder, &Setup::default())
    }

    /// Starts a server with options.
    pub(crate) fn start_with(folder: &Path, setup: &Setup) -> Server {
        for _ in 0..ATTEMPTS_MAX {
            let ports = free_ports();
            let child = spawn(folder, ports, setup);
            let mut server = Server { child, ports, folder: folder.to_owned(), setup: setup.clone() };
            if server.is_ready() {
                return server;
            }
        }
        panic!(
            "etcd failed to start: {}",
            std::fs::read_to_string(folder.join("etcd.log")).unwrap_or_default()
        );
    }

    /// Settings to connect to this server.
    pub(crate) fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: vec![self.setup.client_url(self.ports)],
            prefix: prefix.to_owned(),
            user: None,
            tls: None,
        }
    }

    /// Kills the server with SIGKILL.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("own child process");
        self.child.wait().expect("the process ends");
    }

    /// Stops the server with SIGSTOP: it keeps connections but does not answer. It can still be killed.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn pause(&self) {
        self.signal("STOP");
        // Delivery is asynchronous: the server may still answer until all threads have stopped.
        let give_up = Instant::now() + Duration::from_secs(10);
        while !self.has_stopped() {
            assert!(Instant::now() < give_up, "the process does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether all its threads have stopped (proc_pid_stat(5)).
    fn has_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the process runs");
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.is_empty() || rest.starts_with('T'))
        })
    }

    /// Continues the server with SIGCONT.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(sent.expect("kill exists").success(), "cannot send SIG{name}");
    }

    /// Deletes all data. The server must not be running.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.folder.join("etcd")).expect("own folder");
    }

    /// Copies all data. The server must not be running.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn back_up(&self) {
        copy(&self.folder.join("etcd"), &self.folder.join("backup"));
    }

    /// Replaces all data by the copy. The server must not be running.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn restore(&self) {
        self.wipe();
        copy(&self.folder.join("backup"), &self.folder.join("etcd"));
    }

    /// Starts another server at the same addresses, with data in another folder.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn replace(&self, folder: &Path, arguments: Vec<String>) -> Server {
        let setup = Setup { arguments, ..self.setup.clone() };
        let child = spawn(folder, self.ports, &setup);
        let mut server = Server { child, ports: self.ports, folder: folder.to_owned(), setup };
        assert!(server.is_ready(), "another etcd failed to start");
        server
    }

    /// Restarts the server with its data and addresses.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.folder, self.ports, &self.setup);
        assert!(self.is_ready(), "etcd failed to restart");
    }

    /// Waits until the server answers; false if it exits instead.
    fn is_ready(&mut self) -> bool {
        let give_up = Instant::now() + READY_WITHIN;
        while Instant::now() < give_up {
            if self.child.try_wait().expect("own child process").is_some() {
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
        let connect = |port| TcpStream::connect(("127.0.0.1", port));
        // Another process may have taken one of the ports; then this server exits soon.
        let (Ok(mut stream), Ok(_)) = (connect(self.ports.metrics), connect(self.ports.client)) else {
            return false;
        };
        let mut answer = String::new();
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.contains("\"health\":\"true\"")
    }
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp exists");
    assert!(copied.success(), "cannot copy the data");
}

fn spawn(folder: &Path, ports: Ports, setup: &Setup) -> Child {
    let client = setup.client_url(ports);
    let peer = format!("http://127.0.0.1:{}", ports.peer);
    let metrics = format!("http://127.0.0.1:{}", ports.metrics);
    let log = std::fs::File::create(folder.join("etcd.log")).expect("a log");
    let mut command = Command::new(binary());
    command
        .args(["--name", "test", "--data-dir"])
        .arg(folder.join("etcd"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("test={peer}"), "--log-level", "warn"])
        .args(["--listen-metrics-urls", &metrics])
        .args(&setup.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    if let Some(tls) = &setup.tls {
        command.arg("--cert-file").arg(&tls.certificate).arg("--key-file").arg(&tls.key);
        command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&tls.client_authority);
    }
    command.spawn().expect("cannot run etcd")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
