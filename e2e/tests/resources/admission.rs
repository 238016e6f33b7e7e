//! The admission policy of the chart: an agent, whoever has its token, writes the `CacheNode` of its own node only.

use std::fs;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use reprise_e2e::kubernetes::PodAccount;
use reprise_e2e::{ApiServer, PATIENCE, tree, wait_until};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::objects::{api, create, dynamic, minimal, refusal};

const POLICY: &str = "charts/reprise/files/confine-agents.yaml";

const AGENT: PodAccount<'_> = PodAccount { namespace: "reprise-agents", name: "reprise-agent" };
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
}

/// As the chart does, from the chart's file.
fn install_policy(server: &ApiServer) {
    let text = fs::read_to_string(tree().join(POLICY)).expect("the policy is in the tree");
    let documents: Vec<Value> = serde_yaml_ng::Deserializer::from_str(&text)
        .map(|one| Value::deserialize(one).expect("the policy is YAML"))
        .collect();
    assert_eq!(documents.len(), 2, "a policy and its binding");
    apply::<ValidatingAdmissionPolicy>(server, &documents[0]);
    apply::<ValidatingAdmissionPolicyBinding>(server, &documents[1]);
}

/// Grants an account verbs on CacheNodes and their statuses.
fn allow(server: &ApiServer, account: PodAccount<'_>, verbs: &[&str]) {
    let name = format!("{}-cachenodes", account.name);
    let rights = "rbac.authorization.k8s.io";
    apply::<ClusterRole>(
        server,
        &json!({
            "apiVersion": format!("{rights}/v1"), "kind": "ClusterRole", "metadata": { "name": name },
            "rules": [{ "apiGroups": ["reprise.dev"], "resources": ["cachenodes", "cachenodes/status"], "verbs": verbs }],
        }),
    );
    apply::<ClusterRoleBinding>(
        server,
        &json!({
            "apiVersion": format!("{rights}/v1"), "kind": "ClusterRoleBinding", "metadata": { "name": name },
            "roleRef": { "apiGroup": rights, "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": account.name, "namespace": account.namespace }],
        }),
    );
}

fn apply<K>(server: &ApiServer, object: &Value)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let name = object["metadata"]["name"].as_str().expect("a name");
    let api: Api<K> = Api::all(server.admin());
    let applied = server.block_on(api.patch(name, &PatchParams::apply("reprise-e2e"), &Patch::Apply(object)));
    applied.unwrap_or_else(|error| panic!("{object} is not taken: {error}"));
}
