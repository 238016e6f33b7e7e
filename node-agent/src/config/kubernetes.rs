//! What an agent in a cluster needs besides: where its state is kept, how often it writes, and what its pod tells it.
//!
//! The configuration file is the same on all nodes. Who the node is and where it is reached comes from the pod's environment, and what
//! is on its devices from its `CacheNode`; a file that says either is refused.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use reprise_policy::Interval;
use serde::Deserialize;

use super::settings::{refuse, within};
use super::{Config, defaults};
use crate::error::AgentError;

/// Only agents with `--in-cluster` look at it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct KubernetesSection {
    /// Where the last spec of the node is kept.
    pub(crate) state_directory: PathBuf,
    /// Statuses are written so far apart, over time.
    pub(crate) status_every: Interval,
}

/// The same, checked.
#[derive(Clone, Debug)]
pub(crate) struct KubernetesSettings {
    pub(crate) state_directory: PathBuf,
    pub(crate) status_every: Duration,
}

/// What a pod is told of itself.
#[derive(Clone, Debug)]
pub(crate) struct PodPlace {
    /// The node that it runs on.
    pub(crate) node: String,
    /// Its address.
    pub(crate) ip: IpAddr,
    /// Its name, where it is told.
    pub(crate) pod: Option<String>,
    /// `namespace/name` of its cluster, where it is told.
    pub(crate) cluster: Option<String>,
    /// The file that says which pods are which tenant's, where there is one.
    pub(crate) tenants_file: Option<PathBuf>,
}

impl Default for KubernetesSection {
    fn default() -> Self {
        KubernetesSection {
            state_directory: defaults::STATE_DIRECTORY.into(),
            status_every: defaults::STATUS_EVERY,
        }
    }
}

impl KubernetesSection {
    pub(super) fn validate(&self) -> Result<KubernetesSettings, AgentError> {
        let KubernetesSection { state_directory, status_every } = self;
        if !state_directory.is_absolute() {
            let found = state_directory.display().to_string();
            return Err(refuse("kubernetes.state_directory", &found, "an absolute path"));
        }
        let allowed = Duration::from_secs(1)..=Duration::from_secs(60);
        within("kubernetes.status_every", status_every.0, allowed)?;
        Ok(KubernetesSettings { state_directory: state_directory.clone(), status_every: status_every.0 })
    }
}

impl PodPlace {
    /// Reads what the pod is told.
    ///
    /// # Errors
    /// A variable is missing or wrong.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<PodPlace, AgentError> {
        let wanted = |name: &str, field: &str| {
            let allowed = format!("set from {field} in the pod's environment");
            variable(name).filter(|value| !value.is_empty()).ok_or_else(|| refuse(name, "", &allowed))
        };
        let node = wanted("NODE_NAME", "spec.nodeName")?;
        let ip = wanted("POD_IP", "status.podIP")?;
        let ip = ip.parse().map_err(|error| refuse("POD_IP", &ip, "an address").because(error))?;
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let tenants_file = given("TENANTS_FILE").map(PathBuf::from);
        Ok(PodPlace { node, ip, pod: given("POD_NAME"), cluster: given("CLUSTER"), tenants_file })
    }

    /// Where others reach what listens at an address.
    pub(crate) fn reached_at(&self, listening: SocketAddr) -> SocketAddr {
        if listening.ip().is_unspecified() { SocketAddr::new(self.ip, listening.port()) } else { listening }
    }
}

impl Config {
    /// The configuration of the agent of this pod.
    ///
    /// # Errors
    /// The file says what the pod or the `CacheNode` says.
    pub(crate) fn placed(mut self, pod: &PodPlace) -> Result<Config, AgentError> {
        if !self.node.name.is_empty() && self.node.name != pod.node {
            return Err(refuse("node.name", &self.node.name, "left out: the pod says which node it is on"));
        }
        if !self.pool.devices.is_empty() {
            let found = format!("{} devices", self.pool.devices.len());
            return Err(refuse(
                "pool.devices",
                &found,
                "left out: the node's CacheNode says which devices are used",
            ));
        }
        self.node.name.clone_from(&pod.node);
        // A listener of any port is known by the port that it gets, once it has one.
        let listen = self.peers.listen.parse::<SocketAddr>().ok().filter(|listen| listen.port() != 0);
        if let Some(listen) = listen.filter(|_| self.peers.advertise.is_empty()) {
            self.peers.advertise = pod.reached_at(listen).to_string();
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(variables: &[(&str, &str)]) -> Result<PodPlace, AgentError> {
        let of = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        PodPlace::read(of)
    }

    const HERE: &[(&str, &str)] = &[("NODE_NAME", "node-1"), ("POD_IP", "10.1.2.3"), ("POD_NAME", "agent-x")];

    #[test]
    fn a_pod_says_who_and_where_the_agent_is() {
        let pod = pod(HERE).expect("all is there");
        let config = Config::parse("[peers]\nlisten = \"0.0.0.0:7410\"").expect("parses");
        let settings = config.placed(&pod).expect("fits").validate().expect("valid");
        assert_eq!(settings.node.name, "node-1");
        assert_eq!(settings.peers.expect("peers").advertise.as_deref(), Some("10.1.2.3:7410"));
        let any: SocketAddr = "[::]:7411".parse().expect("an address");
        assert_eq!(pod.reached_at(any).to_string(), "10.1.2.3:7411");
        let own: SocketAddr = "127.0.0.1:7411".parse().expect("an address");
        assert_eq!(pod.reached_at(own), own);
    }

    #[test]
    fn what_is_missing_or_wrong_in_the_environment_is_named() {
        for (variables, words) in [
            (&[][..], ["NODE_NAME", "spec.nodeName"]),
            (&HERE[..1], ["POD_IP", "status.podIP"]),
            (&[("NODE_NAME", "n"), ("POD_IP", "here")][..], ["POD_IP", "here"]),
        ] {
            let error = pod(variables).expect_err("incomplete").chain();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn a_file_that_says_what_the_cluster_says_is_refused() {
        let pod = pod(HERE).expect("all is there");
        for (text, words) in [
            ("[node]\nname = \"other\"", "node.name"),
            ("[[pool.devices]]\npath = \"/x\"\nbytes = \"64MiB\"", "CacheNode"),
        ] {
            let error = Config::parse(text).expect("parses").placed(&pod).expect_err("refused").chain();
            assert!(error.contains(words), "{error}");
        }
        for (text, words) in
            [("state_directory = \"here\"", "absolute"), ("status_every = \"1ms\"", "status_every")]
        {
            let config = Config::parse(&format!("[kubernetes]\n{text}")).expect("parses");
            let error = config.validate().expect_err("refused").chain();
            assert!(error.contains(words), "{error}");
        }
    }
}
