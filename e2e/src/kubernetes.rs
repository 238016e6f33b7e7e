//! A real Kubernetes. [`ApiServer`] is its API server alone, over an etcd of its own: all that has to do with resources, validation,
//! rights and admission, and nothing that runs pods. [`Cluster`] is all of it, with nodes and pods.
//!
//! The binaries ([`programs`]) are built from Go modules into the cache folder. Certificates ([`certificates`]) are made anew for every server; who talks to it is a [`User`] with one of these, or a pod's service account
//! ([`accounts`]). Rights are checked as in a cluster (RBAC, the node authorizer, NodeRestriction).
//!
//! Invariants:
//! * the server and its etcd end with their handle;
//! * clients belong to the server's own runtime and are used within [`ApiServer::block_on`]; no call lasts longer than
//!   [`PATIENCE`] without a byte of an answer.
//!
//! Deliberately absent from the API server alone: controllers and the scheduler. Nothing makes default service accounts, removes orphans or empties a
//! namespace that is deleted; a test does what it needs of that.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kube::config::AuthInfo;
use kube::{Client, Config};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::etcd::Etcd;
use crate::host::Host;
use crate::process::Running;
use crate::wait::PATIENCE;
use certificates::{Authority, Issued};

pub mod accounts;
pub mod certificates;
mod cgroups;
pub mod cluster;
pub mod engines;
pub mod fleet;
pub mod image;
pub mod lab;
pub mod leftovers;
pub mod loop_device;
pub mod machine;
pub mod node;
pub mod programs;
pub mod release;
pub mod requests;
mod schemas;
mod users;
mod volumes;

pub use accounts::PodAccount;
pub use certificates::User;
pub use cluster::Cluster;
pub use engines::Engines;
pub use fleet::Fleet;
pub use image::Image;
pub use node::Node;
pub use release::Release;
pub use requests::Workers;
pub use schemas::Schemas;

/// A start takes some 3 s on a machine that does nothing else.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// Between two looks whether it is ready: a look is a TLS handshake as long as nobody listens.
const PAUSE: Duration = Duration::from_millis(50);

/// Attempts to find a port: another process may take one between our look and the server's.
const ATTEMPTS_MAX: usize = 5;

/// Who issues the tokens of service accounts.
const ISSUER: &str = "https://kubernetes.default.svc";

/// Addresses of services. Only a [`Cluster`]'s nodes route them.
const SERVICES: &str = "10.96.0.0/16";

/// The first of them is the API server's own, for pods.
const OWN_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// Names of that service.
const OWN_NAMES: [&str; 3] = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"];

/// A server that runs, or was killed and can be started again under the same address, with all that it had stored.
#[derive(Debug)]
pub struct ApiServer {
    folder: PathBuf,
    address: Ipv4Addr,
    port: u16,
    authority: Authority,
    running: Option<Running>,
    etcd: Etcd,
    runtime: Runtime,
}

impl ApiServer {
    /// Starts one that listens at an address, and its etcd on loopback, with its files in `folder`.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_in(folder: &Path, address: Ipv4Addr) -> ApiServer {
        fs::create_dir_all(folder).expect("a folder can be made");
        let etcd = Etcd::start_in(folder, &Host::LOOPBACK);
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

    /// Where it is reached.
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.address, self.port)
    }

    /// What it stores in.
    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    /// Runs what talks to it.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// A client of who may do everything.
    ///
    /// # Panics
    /// When its certificate cannot be written.
    pub fn admin(&self) -> Client {
        self.client(&User::ADMIN)
    }

    /// A client of a user, who may do what has been granted.
    ///
    /// # Panics
    /// When its certificate cannot be written.
    pub fn client(&self, user: &User<'_>) -> Client {
        self.connect(self.credentials(user))
    }

    fn credentials(&self, user: &User<'_>) -> AuthInfo {
        let Issued { certificate, key } = self.authority.user(user);
        let path = |path: PathBuf| Some(path.to_str().expect("folders of tests are UTF-8").to_owned());
        let (client_certificate, client_key) = (path(certificate), path(key));
        AuthInfo { client_certificate, client_key, ..AuthInfo::default() }
    }

    /// The certificate by which its own is verified.
    pub(crate) fn certificate_authority(&self) -> PathBuf {
        self.authority.file("ca.crt")
    }

    /// With what requests of somebody else are passed on: it waits for as long as they do, and tries nothing twice.
    pub(crate) fn passing(&self) -> Config {
        let mut config = self.config(self.credentials(&User::ADMIN));
        (config.read_timeout, config.default_retry) = (None, false);
        config
    }

    /// A file by which programs talk to it as a user, who may do what has been granted.
    ///
    /// # Panics
    /// When it cannot be written.
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
        fs::write(&file, config.to_string()).expect("one's own folder takes files");
        file
    }

    /// A client of whose token it is.
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
        let _inside = self.runtime.enter();
        Client::try_from(self.config(auth_info)).expect("its own certificates are valid")
    }

    /// SIGKILL. The etcd goes on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        self.running.as_mut().expect("the API server runs").kill();
        self.running = None;
    }

    /// Starts the killed one again under its address.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "one process at a time");
        assert!(self.try_start(), "the API server does not start again");
    }

    /// SIGSTOP: it keeps its connections and answers nothing.
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.running.as_ref().expect("the API server runs").pause();
    }

    /// SIGCONT.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resume(&self) {
        self.running.as_ref().expect("the API server runs").signal(Signal::CONT);
    }

    /// False when it ends instead.
    fn try_start(&mut self) -> bool {
        let mut running = Running::spawn(self.command());
        let admin = self.admin();
        let give_up = Instant::now() + READY_WITHIN;
        while Instant::now() < give_up {
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
        // Pods reach the server through the address that it advertises, which must not be loopback: there are none then.
        set("advertise-address", &address);
        set("endpoint-reconciler-type", if self.address.is_loopback() { "none" } else { "lease" });
        let Issued { certificate, key } = self.authority.user(&users::TO_KUBELETS);
        set("kubelet-client-certificate", &certificate.display().to_string());
        set("kubelet-client-key", &key.display().to_string());
        set("kubelet-certificate-authority", &file("ca.crt"));
        set("kubelet-preferred-address-types", "InternalIP");
        // As everywhere: what a namespace lets its pods do is decided by its labels.
        set("allow-privileged", "true");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log file can be written"));
        command
    }
}

/// Where a server with its files in `folder` logs, and its etcd.
pub(crate) fn logs_in(folder: &Path) -> [PathBuf; 2] {
    [log_in(folder), folder.join("etcd.log")]
}

fn log_in(folder: &Path) -> PathBuf {
    folder.join("apiserver.log")
}

/// A port that nobody has just now.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port()
}

/// Whether it has everything that it needs and has done what it does at its start.
async fn is_ready(admin: &Client) -> bool {
    let look = http::Request::get("/readyz").body(Vec::new()).expect("a request");
    tokio::time::timeout(PATIENCE, admin.request_text(look)).await.is_ok_and(|answer| answer.is_ok())
}
