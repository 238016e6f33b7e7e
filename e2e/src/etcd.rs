//! A real etcd on loopback with a new data folder, killed when it is dropped.
//!
//! The binary is built from etcd's Go module by `e2e/etcd/build.sh` into the cache folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use reprise_testkit::etcd::{Ports, is_healthy};
use reprise_testkit::http::{self, Request};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::config::LaunchOptions;
use crate::host::Host;
use crate::process::ChildProcess;
use crate::wait::{PATIENCE, wait_until};

/// Bound on a start, which takes some 300 ms on an idle machine.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// Attempts to find free ports: another process may take one between the probe and etcd's bind.
const ATTEMPTS_MAX: usize = 5;

/// An etcd that runs, or that was killed and can be started again with the same addresses.
#[derive(Debug)]
pub struct Etcd {
    folder: PathBuf,
    host: Host,
    started: LaunchOptions,
    ports: Ports,
    tls: Option<ServerTls>,
    running: Option<ChildProcess>,
}

/// PEM files of a server that accepts TLS connections only.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// The server's certificate.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// Authority of client certificates, which the server requires.
    pub client_authority: PathBuf,
}

/// Returns the path of the binary, which is built if it does not exist.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let script = crate::tree().join("e2e/etcd/build.sh");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash can be run");
        assert!(output.status.success(), "cannot build etcd");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

impl Etcd {
    /// Starts an etcd on a host, with its files in `folder`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_in(folder: &Path, host: &Host) -> Etcd {
        Etcd::start_with(folder, host, &LaunchOptions::default())
    }

    /// Starts an etcd on a host, with its files in `folder` and with launch options.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_with(folder: &Path, host: &Host, started: &LaunchOptions) -> Etcd {
        for _ in 0..ATTEMPTS_MAX {
            let mut etcd = Etcd {
                folder: folder.to_owned(),
                host: host.clone(),
                started: started.clone(),
                ports: Ports::free().expect("free ports"),
                tls: None,
                running: None,
            };
            if etcd.try_start() {
                return etcd;
            }
        }
        panic!("etcd does not start: {}", fs::read_to_string(folder.join("etcd.log")).unwrap_or_default());
    }

    /// Returns the URL for clients.
    pub fn endpoint(&self) -> String {
        format!("{}://{}", self.scheme(), self.address())
    }

    /// Returns `host:port` for clients.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host.address(), self.ports.client)
    }

    /// Sets the launch options that take effect at the next start.
    pub fn set_launch_options(&mut self, started: LaunchOptions) {
        self.started = started;
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(&mut self) {
        self.running.as_mut().expect("etcd runs").kill();
        self.running = None;
    }

    /// Deletes all data. The etcd must not be running.
    pub fn wipe(&self) {
        assert!(self.running.is_none(), "its files are in use");
        fs::remove_dir_all(self.folder.join("etcd")).expect("the test's folder can be removed");
    }

    /// Deletes the files of a running etcd. It continues with its open files; a restart begins with an empty
    /// store.
    ///
    /// # Panics
    /// If the files cannot be removed.
    pub fn lose_files(&self) {
        assert!(self.running.is_some(), "etcd must be running");
        let files = self.folder.join("etcd/member");
        // etcd may create a file meanwhile, and then removing the folder fails.
        wait_until("etcd's files to be deleted", PATIENCE, || {
            // The result is checked through `exists`.
            let _ = fs::remove_dir_all(&files);
            (!files.exists()).then_some(())
        });
    }

    /// Starts the killed etcd again with its addresses.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.try_start(), "etcd does not start again");
    }

    /// Starts the killed etcd again with its addresses, for TLS clients only.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart_with_tls(&mut self, tls: ServerTls) {
        self.tls = Some(tls);
        self.restart();
    }

    /// Enables authentication with the users `root` and `user`, which may access `/reprise/`, both with this
    /// password.
    ///
    /// # Panics
    /// If etcd refuses a request.
    pub fn admit_only(&self, user: &str, password: &str) {
        // `/reprise/` and the first key after this prefix, in base64.
        let permission =
            json!({ "permType": "READWRITE", "key": "L3JlcHJpc2Uv", "range_end": "L3JlcHJpc2Uw" });
        self.call("/v3/auth/role/add", &json!({ "name": user }).to_string());
        self.call("/v3/auth/role/grant", &json!({ "name": user, "perm": permission }).to_string());
        for name in ["root", user] {
            self.call("/v3/auth/user/add", &json!({ "name": name, "password": password }).to_string());
            self.call("/v3/auth/user/grant", &json!({ "user": name, "role": name }).to_string());
        }
        self.call("/v3/auth/enable", "{}");
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Sends SIGSTOP: connections stay open and nothing responds.
    pub fn pause(&self) {
        self.running.as_ref().expect("etcd runs").pause();
    }

    /// Sends SIGCONT to the stopped process.
    pub fn resume(&self) {
        self.running.as_ref().expect("etcd runs").signal(Signal::CONT);
    }

    /// Compacts all revisions but the newest: a watch from an older revision must read everything again.
    ///
    /// # Panics
    /// If etcd refuses a request.
    pub fn compact(&self) {
        let status = self.call("/v3/maintenance/status", "{}");
        let revision = status["header"]["revision"].as_str().expect("numbers of 64 bits are text").to_owned();
        let body = format!("{{\"revision\":\"{revision}\",\"physical\":true}}");
        self.call("/v3/kv/compaction", &body);
    }

    /// Calls etcd's JSON gateway.
    fn call(&self, path: &str, body: &str) -> Value {
        let request = Request::post(path).header("content-type", "application/json").body(body.to_owned());
        let answer = http::send(&self.address(), request.expect("a valid request"), PATIENCE);
        let answer = answer.unwrap_or_else(|error| panic!("{path}: {error:#}"));
        assert_eq!(answer.code, 200, "{path} {body}: {}", answer.body);
        serde_json::from_str(&answer.body).expect("JSON")
    }

    /// Starts the process. Returns `false` if it exits instead of becoming healthy.
    fn try_start(&mut self) -> bool {
        let Ports { client, peer, metrics } = self.ports;
        let at = |scheme, port| format!("{scheme}://{}:{port}", self.host.address());
        let (client, peer, health) = (at(self.scheme(), client), at("http", peer), at("http", metrics));
        let log = fs::File::options().create(true).append(true).open(self.folder.join("etcd.log"));
        let mut command = self.started.command(binary());
        command
            .args(&self.started.arguments)
            .args(["--name", "test", "--log-level", "error", "--data-dir"])
            .arg(self.folder.join("etcd"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}"), "--listen-metrics-urls", &health]);
        if let Some(tls) = &self.tls {
            command.arg("--cert-file").arg(&tls.certificate).arg("--key-file").arg(&tls.key);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&tls.client_authority);
        }
        let mut command = self.host.command(command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log file can be written"));
        let mut running = ChildProcess::spawn(command);
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if !running.is_alive() {
                return false;
            }
            if self.is_healthy() {
                self.running = Some(running);
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("etcd is not ready within {READY_WITHIN:?}");
    }

    fn is_healthy(&self) -> bool {
        is_healthy(&format!("{}:{}", self.host.address(), self.ports.metrics))
    }
}
