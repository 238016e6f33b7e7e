//! A real etcd on one host: for the demo, for benchmarks and for tests. It is killed when dropped.
//!
//! `e2e/etcd/build.sh` builds the binary from etcd's Go module into the cache directory. Commands require it
//! ([`binary`]); tests run the script ([`built_binary`]).

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::cluster::cache_directory;
use crate::http::{self, Request};
use crate::process::{ChildProcess, LaunchOptions, append, read_log};
use crate::wait::{PATIENCE, wait_until};

/// Binary that the script builds, with the version of its go.mod.
const BINARY: &str = "etcd-v3.6.11";

/// Script that builds the binary, relative to the source tree.
const SCRIPT: &str = "e2e/etcd/build.sh";

/// Time limit of a start, which takes about 300 ms on an idle machine.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// Interval between checks for readiness.
const READY_PAUSE: Duration = Duration::from_millis(5);

/// Attempts to find ports: another process may take one before etcd binds it.
const ATTEMPTS_MAX: usize = 5;

/// Folder of the data, in the folder of an etcd.
pub const DATA: &str = "etcd.data";

/// Log, in the folder of an etcd.
pub const LOG: &str = "etcd.log";

/// Copy of the data, in the folder of an etcd.
const BACKUP: &str = "etcd.backup";

/// Where and how an etcd runs.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The program.
    pub program: PathBuf,
    /// Folder of its data and its log.
    pub folder: PathBuf,
    /// Address on which it listens.
    pub address: Ipv4Addr,
    /// Least severe level of its log.
    pub log_level: &'static str,
    /// How the process is launched.
    pub launch: LaunchOptions,
    /// Accept TLS clients only.
    pub tls: Option<ServerTls>,
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

/// An etcd that runs, or that was killed and can be started again with the same addresses.
#[derive(Debug)]
pub struct Etcd {
    setup: Setup,
    ports: Ports,
    running: Option<ChildProcess>,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    client: u16,
    peer: u16,
    /// Health and metrics, without TLS.
    metrics: u16,
}

/// Returns the path of the binary, which may not exist.
pub fn binary() -> PathBuf {
    cache_directory().join("bin").join(BINARY)
}

/// Returns the path of the binary, which is built if it does not exist. For tests in the source tree.
///
/// # Panics
/// If the script cannot build it.
pub fn built_binary() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // The tree of the running tests: several trees may share one target folder.
        let package = std::env::var_os("CARGO_MANIFEST_DIR");
        let package = PathBuf::from(package.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()));
        let script = package.ancestors().map(|folder| folder.join(SCRIPT)).find(|path| path.exists());
        let script = script.expect("the script is in the source tree");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash can be run");
        assert!(output.status.success(), "cannot build etcd");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

impl Setup {
    /// Returns the setup of an etcd on loopback.
    pub fn on_loopback(program: &Path, folder: &Path) -> Setup {
        Setup {
            program: program.to_owned(),
            folder: folder.to_owned(),
            address: Ipv4Addr::LOCALHOST,
            log_level: "warn",
            launch: LaunchOptions::default(),
            tls: None,
        }
    }
}

impl Ports {
    /// Returns ports that are free at the moment.
    fn free() -> std::io::Result<Ports> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let all = [bind()?, bind()?, bind()?];
        let port = |at: usize| -> std::io::Result<u16> { Ok(all[at].local_addr()?.port()) };
        Ok(Ports { client: port(0)?, peer: port(1)?, metrics: port(2)? })
    }
}

impl Etcd {
    /// Starts an etcd on loopback for a test, with new data in `folder`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_in(folder: &Path) -> Etcd {
        Etcd::start(Setup::on_loopback(built_binary(), folder))
    }

    /// Starts an etcd with new data.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(setup: Setup) -> Etcd {
        Etcd::try_start(setup, ChildProcess::try_spawn).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts an etcd with new data, and waits until it is healthy. `spawn` starts the process.
    ///
    /// # Errors
    /// It does not start.
    pub fn try_start(
        setup: Setup,
        mut spawn: impl FnMut(Command) -> anyhow::Result<ChildProcess>,
    ) -> anyhow::Result<Etcd> {
        let program = &setup.program;
        ensure!(program.is_file(), "{} is missing: build it with `make etcd` ({SCRIPT})", program.display());
        let ports = || Ports::free().context("no free port on loopback");
        let mut etcd = Etcd { ports: ports()?, setup, running: None };
        for _ in 0..ATTEMPTS_MAX {
            drop(fs::remove_dir_all(etcd.data()));
            if etcd.launch(&mut spawn)? {
                return Ok(etcd);
            }
            etcd.ports = ports()?;
        }
        bail!("etcd did not start; its log: {}", etcd.log())
    }

    /// Starts an etcd with the addresses of this one, which does not run, and with data in another folder.
    ///
    /// # Panics
    /// If it does not start.
    pub fn replace(&self, folder: &Path, launch: LaunchOptions) -> Etcd {
        let setup = Setup { folder: folder.to_owned(), launch, ..self.setup.clone() };
        let mut etcd = Etcd { setup, ports: self.ports, running: None };
        etcd.restart();
        etcd
    }

    /// Returns the URL for clients.
    pub fn endpoint(&self) -> String {
        let scheme = if self.setup.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address())
    }

    /// Returns `host:port` for clients.
    pub fn address(&self) -> String {
        format!("{}:{}", self.setup.address, self.ports.client)
    }

    /// Returns `host:port` of health and metrics.
    pub fn metrics(&self) -> String {
        format!("{}:{}", self.setup.address, self.ports.metrics)
    }

    /// Returns the running process.
    ///
    /// # Panics
    /// If it was killed.
    pub fn running(&mut self) -> &mut ChildProcess {
        self.running.as_mut().expect("etcd runs")
    }

    /// Sets the launch options that take effect at the next start.
    pub fn set_launch_options(&mut self, launch: LaunchOptions) {
        self.setup.launch = launch;
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(&mut self) {
        self.running().kill();
        self.running = None;
    }

    /// Sends SIGSTOP: connections stay open and nothing responds.
    pub fn pause(&self) {
        self.running.as_ref().expect("etcd runs").pause();
    }

    /// Sends SIGCONT to the stopped process.
    pub fn resume(&self) {
        self.running.as_ref().expect("etcd runs").signal(Signal::CONT);
    }

    /// Starts the killed etcd again with its addresses and data.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "the process is already running");
        let started = self.launch(&mut ChildProcess::try_spawn);
        assert!(started.is_ok_and(|started| started), "etcd does not start again: {}", self.log());
    }

    /// Starts the killed etcd again with its addresses, for TLS clients only.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart_with_tls(&mut self, tls: ServerTls) {
        self.setup.tls = Some(tls);
        self.restart();
    }

    /// Deletes all data. The etcd must not be running.
    pub fn wipe(&self) {
        assert!(self.running.is_none(), "its files are in use");
        fs::remove_dir_all(self.data()).expect("the test's folder can be removed");
    }

    /// Copies all data. The etcd must not be running.
    pub fn back_up(&self) {
        self.copy(&self.data(), &self.setup.folder.join(BACKUP));
    }

    /// Replaces all data by the copy. The etcd must not be running.
    pub fn restore(&self) {
        self.wipe();
        self.copy(&self.setup.folder.join(BACKUP), &self.data());
    }

    fn copy(&self, from: &Path, to: &Path) {
        assert!(self.running.is_none(), "its files are in use");
        let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp can be run");
        assert!(copied.success(), "the data can be copied");
    }

    /// Deletes the files of a running etcd. It continues with its open files; a restart begins with an empty
    /// store.
    ///
    /// # Panics
    /// If the files cannot be removed.
    pub fn lose_files(&self) {
        assert!(self.running.is_some(), "etcd must be running");
        let files = self.data().join("member");
        // etcd may create a file meanwhile, and then removing the folder fails.
        wait_until("etcd's files to be deleted", PATIENCE, || {
            // The result is checked through `exists`.
            let _ = fs::remove_dir_all(&files);
            (!files.exists()).then_some(())
        });
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
    fn launch(
        &mut self,
        spawn: &mut impl FnMut(Command) -> anyhow::Result<ChildProcess>,
    ) -> anyhow::Result<bool> {
        let mut child = spawn(self.command()?)?;
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if !child.is_alive() {
                return Ok(false);
            }
            if self.is_healthy() {
                self.running = Some(child);
                return Ok(true);
            }
            std::thread::sleep(READY_PAUSE);
        }
        bail!("etcd is not healthy within {READY_WITHIN:?}; its log: {}", self.log())
    }

    fn command(&self) -> anyhow::Result<Command> {
        let Setup { program, folder, address, log_level, launch, tls } = &self.setup;
        let at = |port| format!("http://{address}:{port}");
        let (client, peer, metrics) = (self.endpoint(), at(self.ports.peer), at(self.ports.metrics));
        let mut command = launch.command(program);
        command
            .args(["--name", "reprise", "--log-level", log_level, "--data-dir"])
            .arg(self.data())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("reprise={peer}"), "--listen-metrics-urls", &metrics])
            .args(&launch.arguments);
        if let Some(tls) = tls {
            command.arg("--cert-file").arg(&tls.certificate).arg("--key-file").arg(&tls.key);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&tls.client_authority);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(append(&folder.join(LOG))?);
        Ok(command)
    }

    fn is_healthy(&self) -> bool {
        http::get(&self.metrics(), "/health").is_ok_and(|body| body.contains("\"health\":\"true\""))
            // Another process may have taken this port; then this one exits soon.
            && TcpStream::connect(self.address()).is_ok()
    }

    fn data(&self) -> PathBuf {
        self.setup.folder.join(DATA)
    }

    fn log(&self) -> String {
        read_log(&self.setup.folder.join(LOG))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_has_the_version_that_the_script_builds() {
        // The tree in which the tests run; several trees may share one build folder.
        let package =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let module = Path::new(&package).join("../e2e/etcd/go.mod");
        let module = fs::read_to_string(module).expect("the file exists");
        let version = BINARY.strip_prefix("etcd-").expect("the name has this prefix");
        assert!(module.contains(&format!("require go.etcd.io/etcd/server/v3 {version}\n")), "{module}");
    }
}
