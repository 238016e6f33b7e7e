//! The admission policy of the chart: an agent, whoever has its token, writes the `CacheNode` of its own node only.

use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, PATIENCE, wait_until};
use serde_json::json;

use crate::objects::{api, create, dynamic, minimal, refusal};
use crate::rights::{allow, install_policy};

const AGENT: PodAccount<'_> = PodAccount { namespace: "reprise-agents", name: "reprise-agent" };
/// Agents of a cluster in Kubernetes' own namespace.
const SYSTEM_AGENT: PodAccount<'_> = PodAccount { namespace: "kube-system", name: "system-agent" };
const COLLECTOR: PodAccount<'_> = PodAccount { namespace: "kube-system", name: "generic-garbage-collector" };
const OPERATOR: PodAccount<'_> = PodAccount { namespace: "reprise-system", name: "reprise-operator" };

/// All that could be done to a CacheNode: far more than an agent needs, since the policy must not rely on it.
const EVERYTHING: [&str; 6] = ["get", "list", "create", "update", "patch", "delete"];

/// Somebody who writes CacheNodes.
struct Writer<'a> {
    server: &'a ApiServer,
    nodes: Api<DynamicObject>,
}

impl<'a> Writer<'a> {
    fn new(server: &'a ApiServer, client: &Client) -> Writer<'a> {
        Writer { server, nodes: api(client, "CacheNode", "") }
    }

    /// Why the node's object is not made.
    fn create(&self, node: &str) -> Option<(u16, String)> {
        let object = dynamic(&minimal("CacheNode", node));
        refusal(self.server.block_on(self.nodes.create(&PostParams::default(), &object)))
    }

    /// Why the node's object, which is there, is not changed.
    fn update(&self, node: &str) -> Option<(u16, String)> {
        let change = Patch::Merge(json!({ "spec": { "mode": "Cordoned" } }));
        refusal(self.server.block_on(self.nodes.patch(node, &PatchParams::default(), &change)))
    }

    /// Why the node's status, which is there, is not changed.
    fn report(&self, node: &str) -> Option<(u16, String)> {
        let change = Patch::Merge(json!({ "status": { "observedGeneration": 1 } }));
        refusal(self.server.block_on(self.nodes.patch_status(node, &PatchParams::default(), &change)))
    }

    /// Why the node's object is not removed.
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
    let confined = |refused: Option<(u16, String)>, words: &str| {
        let (code, said) = refused.expect("it is another node's");
        assert_eq!(code, 403, "{said}");
        assert!(said.contains(words), "no '{words}' in: {said}");
    };

    let other = "runs on node near and may write the CacheNode of that name only, not far";
    confined(near.report("far"), other);
    confined(near.update("far"), other);
    confined(near.delete("far"), other);
    confined(near.create("made-up"), "not made-up");
    confined(system.report("far"), other);
    confined(system.delete("far"), other);

    let nameless = "the caller's token names no node";
    confined(nowhere.create("near"), nameless);
    confined(nowhere.report("far"), nameless);

    assert_eq!(near.create("near"), None);
    assert_eq!(near.update("near"), None);
    assert_eq!(near.report("near"), None);

    // Who may write any is not confined, with a node or without.
    assert_eq!(operator.update("near"), None);
    assert_eq!(operator.report("far"), None);
    assert_eq!(near.delete("near"), None);
    assert_eq!(operator.delete("far"), None);

    // What belongs to a node that is gone goes with it.
    create(server, "", &minimal("CacheNode", "gone"));
    assert_eq!(collector.delete("gone"), None);
}
