//! Additional settings of an agent in a Kubernetes cluster: state directory, write interval and pod
//! environment.
//!
//! All nodes share one configuration file. The pod's environment identifies the node and its address, and
//! the `CacheNode` lists its devices; a file that contains either is rejected.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use reprise_policy::Interval;
use serde::Deserialize;

use super::settings::{refuse, within};
use super::{Config, defaults};
use crate::error::AgentError;

/// Used only with `--in-cluster`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct KubernetesSection {
    /// Directory of the persisted spec.
    pub(crate) state_directory: PathBuf,
    /// Average interval between status writes.
    pub(crate) status_every: Interval,
}

/// Validated settings of an agent in a cluster.
#[derive(Clone, Debug)]
pub(crate) struct KubernetesSettings {
    pub(crate) state_directory: PathBuf,
    pub(crate) status_every: Duration,
}

/// Properties of the pod, from its environment.
#[derive(Clone, Debug)]
pub(crate) struct PodEnvironment {
    /// Name of the pod's node.
    pub(crate) node: String,
    /// IP address of the pod.
    pub(crate) ip: IpAddr,
    /// Name of the pod, if set.
    pub(crate) pod: Option<String>,
    /// `namespace/name` of its cluster, if set.
    pub(crate) cluster: Option<String>,
    /// Path of the file that maps pods to tenants, if set.
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

impl PodEnvironment {
    /// Reads the pod's environment.
    ///
    /// # Errors
    /// A variable is missing or invalid.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<PodEnvironment, AgentError> {
        let wanted = |name: &str, field: &str| {
            let allowed = format!("a value from {field} in the pod's environment");
            variable(name).filter(|value| !value.is_empty()).ok_or_else(|| refuse(name, "", &allowed))
        };
        let node = wanted("NODE_NAME", "spec.nodeName")?;
        let ip = wanted("POD_IP", "status.podIP")?;
        let ip = ip.parse().map_err(|error| refuse("POD_IP", &ip, "an IP address").with_source(error))?;
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let tenants_file = given("TENANTS_FILE").map(PathBuf::from);
        Ok(PodEnvironment { node, ip, pod: given("POD_NAME"), cluster: given("CLUSTER"), tenants_file })
    }

    /// Returns the address at which other processes reach a listener of this pod.
    pub(crate) fn reached_at(&self, listening: SocketAddr) -> SocketAddr {
        if listening.ip().is_unspecified() { SocketAddr::new(self.ip, listening.port()) } else { listening }
    }
}

impl Config {
    /// Completes the configuration with the pod's environment.
    ///
    /// # Errors
    /// The file sets the node name, the failure domain, devices or queue pairs, which the pod and the `CacheNode`
    /// define.
    pub(crate) fn placed(mut self, pod: &PodEnvironment) -> Result<Config, AgentError> {
        if !self.node.name.is_empty() && self.node.name != pod.node {
            return Err(refuse("node.name", &self.node.name, "no value, since NODE_NAME defines the node"));
        }
        if !self.node.failure_domain.is_empty() {
            return Err(refuse(
                "node.failure_domain",
                &self.node.failure_domain,
                "no value, since the node's CacheNode defines it",
            ));
        }
        if !self.pool.devices.is_empty() {
            let found = format!("{} devices", self.pool.devices.len());
            return Err(refuse(
                "pool.devices",
                &found,
                "no devices, since the node's CacheNode defines them",
            ));
        }
        if self.session.queue_pairs > 0 {
            return Err(refuse(
                "session.queue_pairs",
                &self.session.queue_pairs.to_string(),
                "0, since each GPUQueueAllocation of the node defines queue pairs for engines",
            ));
        }
        if !self.slack.profiles.is_empty() {
            let found = format!("{} files", self.slack.profiles.len());
            return Err(refuse("slack.profiles", &found, "no files, since SlackProfiles define them"));
        }
        self.node.name.clone_from(&pod.node);
        // With port 0, the address is known only after binding.
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

    fn pod(variables: &[(&str, &str)]) -> Result<PodEnvironment, AgentError> {
        let of = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        PodEnvironment::read(of)
    }

    const HERE: &[(&str, &str)] = &[("NODE_NAME", "node-1"), ("POD_IP", "10.1.2.3"), ("POD_NAME", "agent-x")];

    #[test]
    fn node_name_and_address_are_taken_from_the_pod() {
        let pod = pod(HERE).expect("a complete environment");
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
    fn missing_or_invalid_variables_are_named() {
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
    fn file_with_node_devices_or_queue_pairs_is_rejected() {
        let pod = pod(HERE).expect("a complete environment");
        for (text, words) in [
            ("[node]\nname = \"other\"", "node.name"),
            ("[[pool.devices]]\npath = \"/x\"\nbytes = \"64MiB\"", "CacheNode"),
            ("[session]\nextents = true\nqueue_pairs = 4", "GPUQueueAllocation"),
            ("[slack]\nprofiles = [\"/x\"]", "SlackProfiles"),
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
