//! Simulates the agents of all nodes: they apply the spec of their CacheNode and report the result.
//!
//! They open or wipe the devices of claims, keep profiles, and create and release queues. They report only
//! changes, unless a test requests a repetition, so that they never keep an operator from becoming idle.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::{TestCluster, sha256};

/// UUID of the GPU on every node.
pub(crate) const GPU: &str = "GPU-0";
/// Product name of the GPU.
pub(crate) const PRODUCT: &str = "NVIDIA H200";
/// Queue pairs of each node's controller, half of which may be granted.
const PAIRS: u32 = 32;

/// Simulated agents of all nodes.
#[derive(Default)]
pub(crate) struct Agents {
    /// Number of engine sessions by node.
    pub(crate) sessions: BTreeMap<String, u32>,
    /// Wiped devices, by the pool's UID and the node.
    pub(crate) wiped: BTreeSet<(String, String)>,
    /// Last report by node, with the UID of its CacheNode.
    reported: BTreeMap<String, (Option<String>, Value)>,
}

impl Agents {
    /// Lets each agent apply its CacheNode and report changes. Returns whether there was a new report.
    pub(crate) fn sync(&mut self, k8s: &TestCluster) -> bool {
        let tenants = tenants_digest(k8s);
        let mut has_reported = false;
        for node in k8s.list("CacheNode").iter().filter(|node| node.metadata.deletion_timestamp.is_none()) {
            let name = node.name_any();
            let status = self.status(node, tenants.as_deref());
            let now = (node.uid(), status);
            if self.reported.get(&name) != Some(&now) && write_status(k8s, &name, &now.1) {
                self.reported.insert(name, now);
                has_reported = true;
            }
        }
        has_reported
    }

    /// Repeats [`Self::sync`] until a condition has this status and reason.
    pub(crate) fn sync_until(&mut self, k8s: &TestCluster, object: (&str, &str), wanted: [&str; 3]) {
        wait_until(&format!("{object:?} has condition {wanted:?}"), PATIENCE, || {
            self.sync(k8s);
            k8s.has_condition(object, wanted).then_some(())
        });
    }

    /// Repeats the reports of agents with sessions, as real agents do periodically.
    pub(crate) fn report_again(&mut self, k8s: &TestCluster) {
        self.reported.retain(|node, _| self.sessions.get(node).is_none_or(|sessions| *sessions == 0));
        self.sync(k8s);
    }

    fn status(&mut self, node: &DynamicObject, tenants: Option<&str>) -> Value {
        let (name, spec) = (node.name_any(), &node.data["spec"]);
        let claims = spec["claims"].as_array().cloned().unwrap_or_default();
        for claim in claims.iter().filter(|claim| claim["wipe"] == true) {
            let uid = claim["uid"].as_str().expect("claims have a UID").to_owned();
            self.wiped.insert((uid, name.clone()));
        }
        let pools: Vec<Value> = claims
            .iter()
            .map(|claim| json!({ "pool": claim["pool"], "uid": claim["uid"], "generation": claim["generation"] }))
            .collect();
        let raw = claims.iter().find(|claim| claim["file"].is_null());
        let controller = |claim: &Value| {
            json!({
                "serial": format!("S-{name}"), "pciAddress": "0000:01:00.0", "pool": claim["pool"], "queuePairs": PAIRS,
                "queuePairsLent": 0,
            })
        };
        let queues: Vec<Value> = spec["queues"].as_array().into_iter().flatten().map(applied_queue).collect();
        json!({
            "observedGeneration": node.metadata.generation,
            "agent": { "version": "0.1.0" },
            "capacity": { "dramTotal": "64Mi", "dramUsed": "0", "ssdTotal": "64Mi", "ssdUsed": "1Mi" },
            "sessions": self.sessions.get(&name).copied().unwrap_or_default(),
            "gpus": [{ "uuid": GPU, "product": PRODUCT }],
            "controllers": raw.map(controller).into_iter().collect::<Vec<_>>(),
            "devices": claims.iter().map(|claim| device(claim, &name)).collect::<Vec<_>>(),
            "applied": applied(spec, &pools, &queues, tenants),
        })
    }
}

/// Builds the `applied` section of a status, without fields that the spec does not set.
fn applied(spec: &Value, pools: &[Value], queues: &[Value], tenants: Option<&str>) -> Value {
    let profiles = spec["profiles"].as_array().cloned().unwrap_or_default();
    let mut applied = json!({ "pools": pools, "queues": queues, "profiles": profiles });
    if let Some(digest) = spec["configurationDigest"].as_str() {
        applied["configurationDigest"] = json!(digest);
    }
    if let Some(digest) = tenants {
        applied["tenantsDigest"] = json!(digest);
    }
    applied
}

/// Writes a status. Returns false if the CacheNode no longer exists.
fn write_status(k8s: &TestCluster, node: &str, status: &Value) -> bool {
    let now = Timestamp::now();
    let mut status = status.clone();
    // A time in the future, so that the agent does not count as silent on a slow machine.
    status["lastUpdated"] = json!((now + SignedDuration::from_hours(1)).to_string());
    status["conditions"] = json!([{
        "type": "AgentReady", "status": "True", "reason": "AsDesired", "lastTransitionTime": now.to_string(),
        "observedGeneration": status["observedGeneration"],
    }]);
    let body = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node }, "status": status,
    });
    let (api, params) = (k8s.api("CacheNode"), PatchParams::apply("reprise-agent").force());
    match k8s.server.block_on(api.patch_status(node, &params, &Patch::Apply(&body))) {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.is_not_found() => false,
        Err(error) => panic!("cannot apply the status of {node}: {error}"),
    }
}

fn device(claim: &Value, node: &str) -> Value {
    let path = claim["file"].as_str().map_or_else(|| format!("/dev/disk/by-id/nvme-S-{node}"), str::to_owned);
    let size = claim["size"].as_str().unwrap_or("64Mi");
    match claim["wipe"] == true {
        true => json!({ "path": path, "pool": claim["pool"], "state": "Wiped" }),
        false => json!({
            "path": path, "pool": claim["pool"], "state": "Open", "size": size, "used": "1Mi", "engine": claim["engine"],
        }),
    }
}

/// Builds the report for an allocation of an agent that creates all its queues.
fn applied_queue(claim: &Value) -> Value {
    let shares = claim["controllers"].as_array().into_iter().flatten();
    let pairs: u64 = shares.filter_map(|share| share["queuePairs"].as_u64()).sum();
    json!({ "uid": claim["uid"], "queuePairs": pairs, "kept": pairs })
}

/// Digest that agents report for the file that maps pods to tenants.
fn tenants_digest(k8s: &TestCluster) -> Option<String> {
    let file = k8s.get("ConfigMap", "c-agent-tenants")?;
    let text = file.data["data"]["_tenants.json"].as_str()?.to_owned();
    Some(sha256(text.as_bytes()))
}
