//! A control plane that is a real process, with real nodes: what the operator has told it.

use std::collections::BTreeMap;
use std::process::Command;

use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::Lab;

/// In the order in which it ends.
pub(crate) struct Plane {
    pub(crate) agents: Vec<Agent>,
    pub(crate) members: ControlPlane,
}

impl Plane {
    /// One that remembers what it was told, and has heard of these nodes.
    pub(crate) fn new(lab: &Lab, nodes: &[&str]) -> Plane {
        let members = lab.world.control_plane(Store::Embedded);
        for words in [
            "node is silent",
            "the control plane is gone",
            "cannot register with the control plane",
            "registration lost",
        ] {
            lab.world.allow(words);
        }
        let agent = |node: &&str| {
            let control_plane = vec![members.address().to_owned()];
            let agent = lab.world.agent(&AgentConfig { control_plane, ..AgentConfig::named(node) });
            wait_until("the node is known", PATIENCE, || members.offers(node)?.then_some(()));
            agent
        };
        Plane { agents: nodes.iter().map(agent).collect(), members }
    }

    /// What nodes are for, by name.
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

    /// What a person does at the control plane.
    pub(crate) fn reprise(&self, arguments: &[&str]) -> Value {
        let mut command = Command::new(binary("reprise"));
        command.arg("--json").args(arguments).args(["--controlplane", self.members.address()]);
        let output = command.output().expect("reprise can be run");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// SIGKILL, and another one with the same store.
    pub(crate) fn start_anew(&mut self) {
        self.members.kill();
        self.members.restart();
    }

    /// Nothing is left of what it was told.
    pub(crate) fn clear(&self) {
        for tenant in self.budgets().keys() {
            self.reprise(&["tenant", "remove", tenant]);
        }
        for node in self.modes().keys() {
            self.reprise(&["uncordon", node]);
        }
    }
}
