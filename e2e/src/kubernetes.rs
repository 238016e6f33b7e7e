//! A real Kubernetes. [`ApiServer`] is its API server alone, over its own etcd: for everything about
//! resources, validation, authorization and admission that needs no running pods. [`Cluster`] is a whole
//! cluster with nodes and pods.
//!
//! The binaries ([`programs`]) are built from Go modules into the cache folder. Each server has new
//! certificates ([`certificates`]). A client is a [`User`] with such a certificate, or a pod's service
//! account ([`accounts`]). Requests are authorized as in a cluster (RBAC, the node authorizer,
//! NodeRestriction).
//!
//! Invariants:
//! * the server and its etcd end with their handle;
//! * clients belong to the server's own runtime and are used within [`ApiServer::block_on`]; no call lasts
//!   longer than [`PATIENCE`] without a byte of a response.
//!
//! Deliberately absent from the API server alone: controllers and the scheduler. Default service accounts are
//! not created, orphans are not deleted, and a deleted namespace is not emptied. Tests do that themselves
//! where they need it.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kube::config::AuthInfo;
use kube::{Client, Config};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::Etcd;
use crate::host::Host;
use crate::process::{ChildProcess, LaunchOptions};
use crate::test_env::start_etcd;
use crate::wait::PATIENCE;
use certificates::{Authority, Issued};

pub mod accounts;
pub mod certificates;
mod cgroups;
pub mod check_pods;
pub mod cluster;
pub mod fleet;
pub mod image;
pub mod lab;
pub mod leftovers;
pub mod loop_device;
pub mod node;
pub mod node_init;
pub mod programs;
pub mod release;
mod schemas;
mod users;
mod volumes;

pub use accounts::PodAccount;
pub use certificates::User;
pub use check_pods::{Engines, Workers};
pub use cluster::Cluster;
pub use fleet::Fleet;
pub use image::Image;
pub use node::Node;
pub use release::Release;
pub use schemas::Schemas;

/// Bound on a start, which takes some 3 s on an idle machine.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// Interval between readiness probes. Each is a TLS handshake while the server does not listen yet.
const PAUSE: Duration = Duration::from_millis(50);

/// Attempts to find a free port: another process may take it between the probe and the server's bind.
const ATTEMPTS_MAX: usize = 5;

/// Issuer of service account tokens.
const ISSUER: &str = "https://kubernetes.default.svc";

/// Address range of services. Only a [`Cluster`]'s nodes route it.
const SERVICES: &str = "10.96.0.0/16";

/// Address of the service `kubernetes`, under which pods reach the API server.
const OWN_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// Names of the service `kubernetes`.
const OWN_NAMES: [&str; 3] = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"];

/// An API server that runs, or that was killed and can be started again with the same address and data.
#[derive(Debug)]
pub struct ApiServer {
    folder: PathBuf,
    address: Ipv4Addr,
    port: u16,
    authority: Authority,
    running: Option<ChildProcess>,
    etcd: Etcd,
    runtime: Runtime,
}

impl ApiServer {
    /// Starts a server on an address, and its etcd on loopback, with the files in `folder`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_in(folder: &Path, address: Ipv4Addr) -> ApiServer {
        fs::create_dir_all(folder).expect("a folder can be made");
        let etcd = start_etcd(folder, &Host::LOOPBACK, &LaunchOptions::default());
        let authority = Authority::new(folder);
        let addresses = [address, OWN_SERVICE].map(IpAddr::from);
        authority.server("server", &addresses, &OWN_NAMES);
        authority.accounts_key();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let mut server = ApiServer {
            folder: folder.to_owned(),
            address,
            port: 0,
            authority,
            running: None,
            etcd,
            runtime: runtime.expect("threads can be started"),
        };
        for _ in 0..ATTEMPTS_MAX {
            server.port = free_port();
            if server.try_start() {
                return server;
            }
        }
        panic!("the API server does not start: {}", crate::logs::read(&log_in(folder)));
    }

    /// Returns the server's URL.
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.address, self.port)
    }

    /// Returns the server's etcd.
    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    /// Returns the URL of the server's etcd.
    pub fn store_endpoint(&self) -> String {
        self.etcd.endpoint()
    }

    /// Returns the logs of the server and of its etcd.
    pub fn logs(&self) -> [PathBuf; 2] {
        logs_in(&self.folder)
    }

    /// Runs a future on the server's runtime, to which its clients belong.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Returns a client with all permissions.
    ///
    /// # Panics
    /// If its certificate cannot be written.
    pub fn admin(&self) -> Client {
        self.client(&User::ADMIN)
    }

    /// Returns a client of a user, with the permissions granted to it.
    ///
    /// # Panics
    /// If its certificate cannot be written.
    pub fn client(&self, user: &User<'_>) -> Client {
        self.connect(self.credentials(user))
    }

    fn credentials(&self, user: &User<'_>) -> AuthInfo {
        let Issued { certificate, key } = self.authority.user(user);
        let path = |path: PathBuf| Some(path.to_str().expect("folders of tests are UTF-8").to_owned());
        let (client_certificate, client_key) = (path(certificate), path(key));
        AuthInfo { client_certificate, client_key, ..AuthInfo::default() }
    }

    /// Returns the authority of the server's certificate.
    pub(crate) fn certificate_authority(&self) -> PathBuf {
        self.authority.file("ca.crt")
    }

    /// Returns the configuration of a proxy's client: no read timeout and no retries, so both are left to its
    /// clients.
    pub(crate) fn proxy_config(&self) -> Config {
        let mut config = self.config(self.credentials(&User::ADMIN));
        (config.read_timeout, config.default_retry) = (None, false);
        config
    }

    /// Writes a kubeconfig for a user, with the permissions granted to it.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn kubeconfig(&self, user: &User<'_>) -> PathBuf {
        let Issued { certificate, key } = self.authority.user(user);
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{ "name": "test", "cluster": {
                "server": self.url(), "certificate-authority": self.authority.file("ca.crt"),
            } }],
            "users": [{ "name": user.name, "user": { "client-certificate": certificate, "client-key": key } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": user.name } }],
        });
        // JSON is YAML.
        let file = certificate.with_extension("kubeconfig");
        fs::write(&file, config.to_string()).expect("the test's folder is writable");
        file
    }

    /// Returns a client that authenticates with a token.
    pub fn client_with_token(&self, token: String) -> Client {
        self.connect(AuthInfo { token: Some(token.into()), ..AuthInfo::default() })
    }

    fn config(&self, auth_info: AuthInfo) -> Config {
        let mut config = Config::new(self.url().parse().expect("an address"));
        config.root_cert = Some(vec![self.authority.der()]);
        config.read_timeout = Some(PATIENCE);
        config.auth_info = auth_info;
        config
    }

    fn connect(&self, auth_info: AuthInfo) -> Client {
        let _entered = self.runtime.enter();
        Client::try_from(self.config(auth_info)).expect("its own certificates are valid")
    }

    /// Sends SIGKILL to the server. Its etcd continues.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill(&mut self) {
        self.running.as_mut().expect("the API server runs").kill();
        self.running = None;
    }

    /// Starts the killed server again with its address.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "the process is already running");
        assert!(self.try_start(), "the API server does not start again");
    }

    /// Sends SIGSTOP: connections stay open and nothing responds.
    ///
    /// # Panics
    /// If it does not run.
    pub fn pause(&self) {
        self.running.as_ref().expect("the API server runs").pause();
    }

    /// Sends SIGCONT to the stopped process.
    ///
    /// # Panics
    /// If it does not run.
    pub fn resume(&self) {
        self.running.as_ref().expect("the API server runs").signal(Signal::CONT);
    }

    /// Starts the process. Returns `false` if it exits instead of becoming ready.
    fn try_start(&mut self) -> bool {
        let mut running = ChildProcess::spawn(self.command());
        let admin = self.admin();
        let deadline = Instant::now() + READY_WITHIN;
        while Instant::now() < deadline {
            if !running.is_alive() {
                return false;
            }
            if self.block_on(is_ready(&admin)) {
                self.running = Some(running);
                return true;
            }
            std::thread::sleep(PAUSE);
        }
        panic!(
            "the API server is not ready within {READY_WITHIN:?}: {}",
            crate::logs::read(&log_in(&self.folder))
        );
    }

    fn command(&self) -> Command {
        let log = File::options().create(true).append(true).open(log_in(&self.folder));
        let mut command = Command::new(programs::kubernetes("kube-apiserver"));
        let mut set = |flag: &str, value: &str| {
            command.arg(format!("--{flag}={value}"));
        };
        let address = self.address.to_string();
        let file = |name: &str| self.authority.file(name).display().to_string();
        set("etcd-servers", &self.etcd.endpoint());
        set("bind-address", &address);
        set("secure-port", &self.port.to_string());
        set("tls-cert-file", &file("server.crt"));
        set("tls-private-key-file", &file("server.key"));
        set("client-ca-file", &file("ca.crt"));
        set("service-account-issuer", ISSUER);
        set("service-account-signing-key-file", &file("accounts.key"));
        set("service-account-key-file", &file("accounts.pub"));
        set("authorization-mode", "Node,RBAC");
        set("enable-admission-plugins", "NodeRestriction");
        set("service-cluster-ip-range", SERVICES);
        // Pods reach the server through the advertised address, which must not be loopback; with loopback
        // there are no pods.
        set("advertise-address", &address);
        set("endpoint-reconciler-type", if self.address.is_loopback() { "none" } else { "lease" });
        let Issued { certificate, key } = self.authority.user(&users::TO_KUBELETS);
        set("kubelet-client-certificate", &certificate.display().to_string());
        set("kubelet-client-key", &key.display().to_string());
        set("kubelet-certificate-authority", &file("ca.crt"));
        set("kubelet-preferred-address-types", "InternalIP");
        // The labels of a namespace decide what its pods may do, as in any cluster.
        set("allow-privileged", "true");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log file can be written"));
        command
    }
}

/// Returns the logs of a server with its files in `folder`, and of its etcd.
pub(crate) fn logs_in(folder: &Path) -> [PathBuf; 2] {
    [log_in(folder), folder.join("etcd.log")]
}

fn log_in(folder: &Path) -> PathBuf {
    folder.join("apiserver.log")
}

/// Returns a port that is free at the moment.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port()
}

/// Returns whether the server has finished its startup.
async fn is_ready(admin: &Client) -> bool {
    let request = http::Request::get("/readyz").body(Vec::new()).expect("a request");
    tokio::time::timeout(PATIENCE, admin.request_text(request)).await.is_ok_and(|answer| answer.is_ok())
}
