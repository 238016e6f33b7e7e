//! The condition of a Kubernetes node that reports whether its cache agent is ready.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

const AGENT_READY: &str = "reprise.dev/AgentReady";

/// The condition of a node, if it has one.
fn agent_ready(k8s: &TestCluster, node: &str) -> Option<Value> {
    let found = k8s.get("Node", node).expect("the node exists");
    let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|one| one["type"] == AGENT_READY)
}

fn wait_agent_ready(k8s: &TestCluster, node: &str, status: &str, reason: &str) -> Value {
    wait_until(&format!("{node} has condition {status} {reason}"), PATIENCE, || {
        agent_ready(k8s, node).filter(|one| one["status"] == status && one["reason"] == reason)
    })
}

#[test]
fn node_condition_follows_agent_until_cluster_is_deleted() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    for node in ["n1", "n2"] {
        wait_until("the CacheNode is created", PATIENCE, || k8s.get("CacheNode", node));
    }
    k8s.agent_reports("n1", "Open");
    wait_agent_ready(&k8s, "n1", "True", "AsDesired");
    k8s.settle();
    let ready = wait_agent_ready(&k8s, "n1", "True", "AsDesired");
    // An unchanged report does not change the condition.
    k8s.agent_reports("n1", "Open");
    k8s.settle();
    assert_eq!(agent_ready(&k8s, "n1"), Some(ready));
    assert_eq!(agent_ready(&k8s, "n2"), None, "an agent has a minute for its first report");

    // The agent becomes silent a few seconds later, without an event of the API server.
    k8s.agent_reports_with("n1", "Open", |status| {
        status["lastUpdated"] = json!((Timestamp::now() - SignedDuration::from_secs(55)).to_string());
    });
    wait_agent_ready(&k8s, "n1", "False", "NotReported");
    k8s.agent_reports("n1", "Open");
    wait_agent_ready(&k8s, "n1", "True", "AsDesired");

    k8s.delete("KVCacheCluster", "c");
    for node in ["n1", "n2"] {
        wait_until("the CacheNode is deleted", PATIENCE, || {
            k8s.get("CacheNode", node).is_none().then_some(())
        });
        assert_eq!(agent_ready(&k8s, node), None, "the condition is removed before the CacheNode");
    }
}
