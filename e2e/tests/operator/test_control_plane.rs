//! A real control-plane process with real agents, to compare its state with the resources.

use std::collections::BTreeMap;
use std::process::Command;

use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

/// A control plane and its agents. Fields drop in this order, so the agents end first.
pub(crate) struct TestControlPlane {
    pub(crate) agents: Vec<Agent>,
    pub(crate) members: ControlPlane,
}

impl TestControlPlane {
    /// Starts a control plane with a persistent store, and waits until these nodes have registered.
    pub(crate) fn new(k8s: &TestCluster, nodes: &[&str]) -> TestControlPlane {
        let members = k8s.env.control_plane(Store::Embedded);
        for words in
            ["node is silent", "the control plane is unreachable", "cannot register with the control plane"]
        {
            k8s.env.allow(words);
        }
        let agent = |node: &&str| {
            let control_plane = vec![members.address().to_owned()];
            let agent = k8s.env.agent(&AgentConfig { control_plane, ..AgentConfig::named(node) });
            wait_until("the node has registered", PATIENCE, || members.offers(node)?.then_some(()));
            agent
        };
        TestControlPlane { agents: nodes.iter().map(agent).collect(), members }
    }

    /// Modes of nodes by name.
    pub(crate) fn modes(&self) -> BTreeMap<String, String> {
        let nodes = self.members.admin().json("/nodes");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let nodes = nodes.as_array().expect("a list of nodes");
        nodes.iter().map(|node| (text(&node["name"]), text(&node["mode"]))).collect()
    }

    /// Reservations and limits of tenants, by name.
    pub(crate) fn budgets(&self) -> BTreeMap<String, Value> {
        let listed = self.reprise(&["tenant", "list"]);
        let tenants = listed["tenants"].as_array().expect("a list");
        let budget = |tenant: &Value| {
            let name = tenant["name"].as_str().expect("a name").to_owned();
            (name, json!({ "reserved": tenant["reserved"], "limit": tenant["limit"] }))
        };
        tenants.iter().map(budget).collect()
    }

    /// Runs the CLI against the control plane and returns its JSON output.
    pub(crate) fn reprise(&self, arguments: &[&str]) -> Value {
        let mut command = Command::new(binary("reprise"));
        command.arg("--json").args(arguments).args(["--controlplane", self.members.address()]);
        let output = command.output().expect("reprise can be run");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// Kills the control plane with SIGKILL and starts it again with the same store.
    pub(crate) fn restart(&mut self) {
        self.members.kill();
        self.members.restart();
    }

    /// Removes all budgets and sets all nodes back to active.
    pub(crate) fn clear(&self) {
        for tenant in self.budgets().keys() {
            self.reprise(&["tenant", "remove", tenant]);
        }
        for node in self.modes().keys() {
            self.reprise(&["uncordon", node]);
        }
    }
}
