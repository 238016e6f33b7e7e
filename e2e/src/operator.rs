//! The operator of a test: a process that talks to an API server by a kubeconfig.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::admin::Admin;
use crate::interposer::Interposer;
use crate::kubernetes::{ApiServer, User};
use crate::process::{Refused, Running, Starting, binary};

/// An operator that runs. Killed when dropped.
#[derive(Debug)]
pub struct Operator {
    running: Running,
    admin: Admin,
}

/// What it is started with.
#[derive(Clone, Debug)]
pub struct OperatorFiles {
    kubeconfig: PathBuf,
    log: PathBuf,
    name: String,
    namespace: String,
    options: Vec<String>,
}

impl OperatorFiles {
    /// One of this name, with its lease in a namespace; it may do everything.
    pub(crate) fn new(folder: &Path, server: &ApiServer, name: &str, namespace: &str) -> OperatorFiles {
        OperatorFiles {
            kubeconfig: server.kubeconfig(&User::ADMIN),
            log: folder.join(format!("{name}.log")),
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            options: Vec::new(),
        }
    }

    /// With the control plane of a cluster (`namespace/name`) at an address: nothing here resolves names of services.
    #[must_use]
    pub fn control_plane(mut self, cluster: &str, address: &str) -> OperatorFiles {
        self.options.push(format!("--control-plane-address={cluster}={address}"));
        self
    }

    /// For which a deletion goes on when nothing was heard of sessions for so many seconds.
    #[must_use]
    pub fn unused_for(mut self, seconds: u64) -> OperatorFiles {
        self.options.push(format!("--unused-seconds={seconds}"));
        self
    }

    /// That reaches the API server through something in between.
    #[must_use]
    pub fn through(mut self, interposer: &Interposer) -> OperatorFiles {
        self.kubeconfig = interposer.kubeconfig().to_owned();
        self
    }

    /// As this user, who may do what has been granted.
    #[must_use]
    pub fn as_user(mut self, server: &ApiServer, user: &User<'_>) -> OperatorFiles {
        self.kubeconfig = server.kubeconfig(user);
        self
    }

    /// Where it logs.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// A command of its binary.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary("reprise-operator"));
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command.env("POD_NAME", &self.name).env("POD_NAMESPACE", &self.namespace);
        command
    }

    /// Starts it.
    ///
    /// # Errors
    /// It ended instead of becoming ready.
    pub fn start(&self) -> Result<Operator, Refused> {
        let mut command = self.command(&["run", "--admin-listen", "127.0.0.1:0"]);
        command.args(&self.options);
        let (running, ready) = Starting::spawn(command, &self.log).ready()?;
        let admin = Admin::at(ready["admin"].as_str().expect("the ready line names its port"));
        Ok(Operator { running, admin })
    }
}

impl Operator {
    /// Its admin port.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Whether it has not ended.
    pub fn is_alive(&mut self) -> bool {
        self.running.is_alive()
    }

    /// SIGKILL.
    pub fn kill(mut self) {
        self.running.kill();
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(mut self) -> ExitStatus {
        self.running.terminate()
    }

    /// All samples of a metric, by their labels as they are served.
    ///
    /// # Panics
    /// When it serves no metrics.
    pub fn samples(&self, name: &str) -> BTreeMap<String, f64> {
        let (code, text) = self.admin.get("/metrics").expect("the metrics are served");
        assert_eq!(code, 200);
        let sample = |line: &str| {
            let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
            Some((labels.to_owned(), value.parse().ok()?))
        };
        text.lines().filter_map(sample).collect()
    }

    /// The sum of all samples of a metric whose labels have these words.
    ///
    /// # Panics
    /// When it serves no metrics.
    pub fn metric(&self, name: &str, words: &str) -> f64 {
        self.admin.metric(name, words)
    }
}
