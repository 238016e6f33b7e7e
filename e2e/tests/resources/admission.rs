//! The chart's admission policy: an agent's token permits writes to the `CacheNode` of its own node only.

use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, PATIENCE, wait_until};
use serde_json::json;

use crate::resources::objects::{api, create, dynamic, minimal, refusal};
use crate::resources::rights::{allow, install_policy};

const AGENT: PodAccount<'_> = PodAccount { namespace: "reprise-agents", name: "reprise-agent" };
/// Account of agents in Kubernetes' own namespace.
const SYSTEM_AGENT: PodAccount<'_> = PodAccount { namespace: "kube-system", name: "system-agent" };
const COLLECTOR: PodAccount<'_> = PodAccount { namespace: "kube-system", name: "generic-garbage-collector" };
const OPERATOR: PodAccount<'_> = PodAccount { namespace: "reprise-system", name: "reprise-operator" };

/// All verbs on CacheNodes: more than an agent gets, since the policy must not rely on the roles.
const EVERYTHING: [&str; 6] = ["get", "list", "create", "update", "patch", "delete"];

/// A client that writes CacheNodes.
struct Writer<'a> {
    server: &'a ApiServer,
    nodes: Api<DynamicObject>,
}

impl<'a> Writer<'a> {
    fn new(server: &'a ApiServer, client: &Client) -> Writer<'a> {
        Writer { server, nodes: api(client, "CacheNode", "") }
    }

    /// Creates the object of a node. Returns the error, if any.
    fn create(&self, node: &str) -> Option<(u16, String)> {
        let object = dynamic(&minimal("CacheNode", node));
        refusal(self.server.block_on(self.nodes.create(&PostParams::default(), &object)))
    }

    /// Updates the existing object of a node. Returns the error, if any.
    fn update(&self, node: &str) -> Option<(u16, String)> {
        let change = Patch::Merge(json!({ "spec": { "mode": "Cordoned" } }));
        refusal(self.server.block_on(self.nodes.patch(node, &PatchParams::default(), &change)))
    }

    /// Updates the status of an existing object. Returns the error, if any.
    fn report(&self, node: &str) -> Option<(u16, String)> {
        let change = Patch::Merge(json!({ "status": { "observedGeneration": 1 } }));
        refusal(self.server.block_on(self.nodes.patch_status(node, &PatchParams::default(), &change)))
    }

    /// Deletes the object of a node. Returns the error, if any.
    fn delete(&self, node: &str) -> Option<(u16, String)> {
        refusal(self.server.block_on(self.nodes.delete(node, &DeleteParams::default())))
    }
}

pub(crate) fn an_agent_writes_the_cache_node_of_its_own_node_only(server: &ApiServer) {
    install_policy(server);
    allow(server, AGENT, &EVERYTHING);
    allow(server, OPERATOR, &[&EVERYTHING[..], &["write-any"]].concat());
    let near = Writer::new(server, &server.client_on_node(AGENT, "near"));
    let nowhere = Writer::new(server, &server.client_on_no_node(AGENT));
    let operator = Writer::new(server, &server.client_on_no_node(OPERATOR));
    for account in [SYSTEM_AGENT, COLLECTOR] {
        allow(server, account, &EVERYTHING);
    }
    let system = Writer::new(server, &server.client_on_node(SYSTEM_AGENT, "near"));
    let collector = Writer::new(server, &server.client_on_no_node(COLLECTOR));
    create(server, "", &minimal("CacheNode", "far"));

    wait_until("the policy is in effect", PATIENCE, || {
        near.report("far").filter(|(_, words)| words.contains("reprise-confine-agents"))
    });
    let assert_confined = |refused: Option<(u16, String)>, words: &str| {
        let (code, message) = refused.expect("the write must be rejected");
        assert_eq!(code, 403, "{message}");
        assert!(message.contains(words), "no '{words}' in: {message}");
    };

    let other = "runs on node near and may write the CacheNode of that name only, not far";
    assert_confined(near.report("far"), other);
    assert_confined(near.update("far"), other);
    assert_confined(near.delete("far"), other);
    assert_confined(near.create("made-up"), "not made-up");
    assert_confined(system.report("far"), other);
    assert_confined(system.delete("far"), other);

    let nameless = "the caller's token names no node";
    assert_confined(nowhere.create("near"), nameless);
    assert_confined(nowhere.report("far"), nameless);

    assert_eq!(near.create("near"), None);
    assert_eq!(near.update("near"), None);
    assert_eq!(near.report("near"), None);

    // An account with the right `write-any` is not confined, with or without a node.
    assert_eq!(operator.update("near"), None);
    assert_eq!(operator.report("far"), None);
    assert_eq!(near.delete("near"), None);
    assert_eq!(operator.delete("far"), None);

    // The garbage collector may delete the object of a deleted node.
    create(server, "", &minimal("CacheNode", "gone"));
    assert_eq!(collector.delete("gone"), None);
}
