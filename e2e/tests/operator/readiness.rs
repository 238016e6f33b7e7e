//! What a node says among its own conditions of its cache.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};

const AGENT_READY: &str = "reprise.dev/AgentReady";

/// What a node says, if it says anything.
fn said(lab: &Lab, node: &str) -> Option<Value> {
    let found = lab.get("Node", node).expect("the lab has it");
    let conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|one| one["type"] == AGENT_READY)
}

fn wait_said(lab: &Lab, node: &str, status: &str, reason: &str) -> Value {
    wait_until(&format!("{node} to say {status} {reason}"), PATIENCE, || {
        said(lab, node).filter(|one| one["status"] == status && one["reason"] == reason)
    })
}

#[test]
fn a_node_says_whether_its_cache_serves_until_no_cluster_has_it() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    for node in ["n1", "n2"] {
        wait_until("the CacheNode comes", PATIENCE, || lab.get("CacheNode", node));
    }
    lab.agent_reports("n1", "Open");
    wait_said(&lab, "n1", "True", "AsDesired");
    settle(&lab);
    let ready = wait_said(&lab, "n1", "True", "AsDesired");
    // Reports that say the same are not told.
    lab.agent_reports("n1", "Open");
    std::thread::sleep(SETTLED);
    assert_eq!(said(&lab, "n1"), Some(ready));
    assert_eq!(said(&lab, "n2"), None, "its agent has a minute for its first report");

    // It goes silent a little later, and no event tells of that.
    lab.agent_says("n1", "Open", |status| {
        status["lastUpdated"] = json!((Timestamp::now() - SignedDuration::from_secs(55)).to_string());
    });
    wait_said(&lab, "n1", "False", "NotReported");
    lab.agent_reports("n1", "Open");
    wait_said(&lab, "n1", "True", "AsDesired");

    lab.delete("KVCacheCluster", "c");
    for node in ["n1", "n2"] {
        wait_until("the CacheNode goes", PATIENCE, || lab.get("CacheNode", node).is_none().then_some(()));
        assert_eq!(said(&lab, node), None, "it went before");
    }
    operator.kill();
}
