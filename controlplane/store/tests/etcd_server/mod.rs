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
    ports: Ports,
    folder: PathBuf,
    setup: Setup,
}

/// How a server is started.
#[derive(Clone, Default)]
pub(crate) struct Setup {
    /// Its certificate and key, and the authority of the client certificates that it asks for.
    pub(crate) tls: Option<ServerTls>,
    /// More arguments.
    pub(crate) arguments: Vec<String>,
}

/// Files in PEM.
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
    /// Health, without TLS.
    metrics: u16,
}

/// The binary, built when it is not there yet.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // Where the tests run, not where they were compiled: one folder of build results may serve several trees.
        let here =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let script = Path::new(&here)
            .ancestors()
            .map(|folder| folder.join("e2e/etcd/build.sh"))
            .find(|path| path.exists());
        let script = script.expect("the script is in this repository");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash is there");
        assert!(output.status.success(), "etcd cannot be built");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

/// Ports that nobody has just now.
fn free_ports() -> Ports {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = |listener: &TcpListener| listener.local_addr().expect("bound").port();
    let all = (bind(), bind(), bind());
    Ports { client: port(&all.0), peer: port(&all.1), metrics: port(&all.2) }
}

impl Server {
    /// Starts one with its data in `folder`.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn start(folder: &Path) -> Server {
        Server::start_with(folder, &Setup::default())
    }

    /// Starts one that is set up in another way.
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
            "etcd does not start: {}",
            std::fs::read_to_string(folder.join("etcd.log")).unwrap_or_default()
        );
    }

    /// How to reach it.
    pub(crate) fn settings(&self, prefix: &str) -> EtcdSettings {
        EtcdSettings {
            endpoints: vec![self.setup.client_url(self.ports)],
            prefix: prefix.to_owned(),
            user: None,
            tls: None,
        }
    }

    /// SIGKILL.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("one's own child");
        self.child.wait().expect("it ends");
    }

    /// SIGSTOP: it keeps its connections and answers nothing. Killing it still works.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn pause(&self) {
        self.signal("STOP");
        // The signal is on its way: whoever asks at once may still be answered.
        let give_up = Instant::now() + Duration::from_secs(10);
        while !self.has_stopped() {
            assert!(Instant::now() < give_up, "a process does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether all of its threads stand still (proc_pid_stat(5)).
    fn has_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs");
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.is_empty() || rest.starts_with('T'))
        })
    }

    /// SIGCONT.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(sent.expect("kill is there").success(), "SIG{name} reaches one's own child");
    }

    /// Removes all that it has stored. Only while it does not run.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.folder.join("etcd")).expect("one's own folder");
    }

    /// Copies all that it has stored. Only while it does not run.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn back_up(&self) {
        copy(&self.folder.join("etcd"), &self.folder.join("backup"));
    }

    /// Puts the copy in the place of all that it has stored. Only while it does not run.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn restore(&self) {
        self.wipe();
        copy(&self.folder.join("backup"), &self.folder.join("etcd"));
    }

    /// Starts another one under the same addresses, with its data in another folder.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn replace(&self, folder: &Path, arguments: Vec<String>) -> Server {
        let setup = Setup { arguments, ..self.setup.clone() };
        let child = spawn(folder, self.ports, &setup);
        let mut server = Server { child, ports: self.ports, folder: folder.to_owned(), setup };
        assert!(server.is_ready(), "another etcd starts");
        server
    }

    /// Starts it again with its data and under its addresses.
    #[allow(dead_code, reason = "each test program uses a part of this module")]
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.folder, self.ports, &self.setup);
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
        let connect = |port| TcpStream::connect(("127.0.0.1", port));
        // Somebody else may have one of the ports by now: then this one has not all of them, and ends soon.
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
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp is everywhere");
    assert!(copied.success(), "one's own folder");
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
    command.spawn().expect("etcd can be run")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
