//! The operator of a test: a process that connects to an API server by a kubeconfig.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};

use crate::admin::Admin;
use crate::fault_proxy::FaultProxy;
use crate::kubernetes::{ApiServer, User};
use crate::process::{ChildProcess, StartError, StartingProcess, binary};

/// A running operator. It is killed when dropped.
#[derive(Debug)]
pub struct Operator {
    running: ChildProcess,
    admin: Admin,
}

/// Admin ports of the operators that a test has started.
#[derive(Clone, Debug, Default)]
pub struct StartedOperators(Arc<Mutex<Vec<Admin>>>);

impl StartedOperators {
    fn add(&self, admin: Admin) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(admin);
    }

    /// Returns the number of reconciles and writes of all that still run.
    pub fn activity(&self) -> f64 {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let counters = ["reprise_operator_reconciles_total", "reprise_operator_writes_total"];
        let running = all.iter().filter(|admin| admin.get("/healthz").is_ok());
        running.map(|admin| counters.map(|name| admin.metric(name, "")).iter().sum::<f64>()).sum()
    }
}

/// Kubeconfig, log and options of an operator.
#[derive(Clone, Debug)]
pub struct OperatorFiles {
    kubeconfig: PathBuf,
    log: PathBuf,
    name: String,
    namespace: String,
    options: Vec<String>,
    is_admin_plain: bool,
    started: StartedOperators,
}

impl OperatorFiles {
    /// Creates an operator of this name with all permissions, and with its lease in a namespace. Starts are added to
    /// `started`.
    pub fn new(
        folder: &Path,
        server: &ApiServer,
        (name, namespace): (&str, &str),
        started: StartedOperators,
    ) -> OperatorFiles {
        OperatorFiles {
            kubeconfig: server.kubeconfig(&User::ADMIN),
            log: folder.join(format!("{name}.log")),
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            options: Vec::new(),
            is_admin_plain: true,
            started,
        }
    }

    /// Serves metrics with TLS and for bearer tokens, as in Kubernetes.
    #[must_use]
    pub fn with_tls(mut self) -> OperatorFiles {
        self.is_admin_plain = false;
        self
    }

    /// Sets the control plane address of a cluster (`namespace/name`), since service names are not resolved
    /// here. Its members have no certificates.
    #[must_use]
    pub fn control_plane(mut self, cluster: &str, address: &str) -> OperatorFiles {
        self.options.push(format!("--control-plane-address={cluster}=plain://{address}"));
        self
    }

    /// Sets the seconds without known sessions after which a deletion proceeds.
    #[must_use]
    pub fn unused_for(mut self, seconds: u64) -> OperatorFiles {
        self.options.push(format!("--unused-seconds={seconds}"));
        self
    }

    /// Connects to the API server through a proxy.
    #[must_use]
    pub fn via_proxy(mut self, proxy: &FaultProxy) -> OperatorFiles {
        self.kubeconfig = proxy.kubeconfig().to_owned();
        self
    }

    /// Authenticates as this user, with the permissions granted to it.
    #[must_use]
    pub fn as_user(mut self, server: &ApiServer, user: &User<'_>) -> OperatorFiles {
        self.kubeconfig = server.kubeconfig(user);
        self
    }

    /// Returns the path of the log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns a command of the operator's binary.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary("reprise-operator"));
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command.env("POD_NAME", &self.name).env("POD_NAMESPACE", &self.namespace);
        command
    }

    /// Starts the operator and waits until it is ready.
    ///
    /// # Errors
    /// The operator exited instead of becoming ready.
    pub fn start(&self) -> Result<Operator, StartError> {
        let mut command = self.command(&["run", "--admin-listen", "127.0.0.1:0"]);
        if self.is_admin_plain {
            command.arg("--admin-plain");
        }
        command.args(&self.options);
        let (running, ready) = StartingProcess::spawn(command, &self.log).ready()?;
        let admin = Admin::at(ready["admin"].as_str().expect("the ready line names its port"));
        if self.is_admin_plain {
            self.started.add(admin.clone());
        }
        Ok(Operator { running, admin })
    }
}

impl Operator {
    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.running.id()
    }

    /// Returns the operator's admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Returns whether the process is still running.
    pub fn is_alive(&mut self) -> bool {
        self.running.is_alive()
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub fn kill(mut self) {
        self.running.kill();
    }

    /// Sends SIGTERM and waits for the process to exit.
    pub fn terminate(mut self) -> ExitStatus {
        self.running.terminate()
    }

    /// Returns all samples of a metric by their labels.
    ///
    /// # Panics
    /// If the operator serves no metrics.
    pub fn samples(&self, name: &str) -> BTreeMap<String, f64> {
        let (code, text) = self.admin.get("/metrics").expect("the metrics are served");
        assert_eq!(code, 200);
        let sample = |line: &str| {
            let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
            Some((labels.to_owned(), value.parse().ok()?))
        };
        text.lines().filter_map(sample).collect()
    }

    /// Returns the sum of all samples of a metric whose line contains `words`; 0 without such samples.
    ///
    /// # Panics
    /// If the operator serves no metrics.
    pub fn metric(&self, name: &str, words: &str) -> f64 {
        self.admin.metric(name, words)
    }
}
