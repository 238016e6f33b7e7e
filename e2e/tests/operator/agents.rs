//! Plays the agents of all nodes: they do what their CacheNodes say, and tell it.
//!
//! Devices of claims are open, or wiped where the claim says so; profiles are kept, queues made and given back. What has been told is told
//! again only if something is new, or if it is asked for: so nothing here keeps an operator from coming to rest.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, sha256};

/// What GPU every node has.
pub(crate) const GPU: &str = "GPU-0";
/// And what that is.
pub(crate) const PRODUCT: &str = "NVIDIA H200";
/// Queue pairs of each node's controller, of which half may be lent.
const PAIRS: u32 = 32;

/// The agents.
#[derive(Default)]
pub(crate) struct Agents {
    /// Sessions of engines, by node.
    pub(crate) sessions: BTreeMap<String, u32>,
    /// Pools whose devices were wiped, with their nodes, by the pools' unique ids.
    pub(crate) wiped: BTreeSet<(String, String)>,
    /// What was told last, by node, and the unique id of the CacheNode that it was told in.
    told: BTreeMap<String, (Option<String>, Value)>,
}

impl Agents {
    /// Each does what is wanted of it by now; what is new is told. Whether there was something.
    pub(crate) fn obey(&mut self, lab: &Lab) -> bool {
        let tenants = tenants_digest(lab);
        let mut has_told = false;
        for node in lab.list("CacheNode").iter().filter(|node| node.metadata.deletion_timestamp.is_none()) {
            let name = node.name_any();
            let status = self.status(node, tenants.as_deref());
            let now = (node.uid(), status);
            if self.told.get(&name) != Some(&now) && tell(lab, &name, &now.1) {
                self.told.insert(name, now);
                has_told = true;
            }
        }
        has_told
    }

    /// Does so until a condition says this.
    pub(crate) fn obey_until(&mut self, lab: &Lab, object: (&str, &str), wanted: [&str; 3]) {
        wait_until(&format!("{object:?} says {wanted:?}"), PATIENCE, || {
            self.obey(lab);
            lab.says(object, wanted).then_some(())
        });
    }

    /// All of it is told again, as agents with sessions do from time to time.
    pub(crate) fn repeat(&mut self, lab: &Lab) {
        self.told.retain(|node, _| self.sessions.get(node).is_none_or(|sessions| *sessions == 0));
        self.obey(lab);
    }

    fn status(&mut self, node: &DynamicObject, tenants: Option<&str>) -> Value {
        let (name, spec) = (node.name_any(), &node.data["spec"]);
        let claims = spec["claims"].as_array().cloned().unwrap_or_default();
        for claim in claims.iter().filter(|claim| claim["wipe"] == true) {
            let uid = claim["uid"].as_str().expect("claims have one").to_owned();
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
        let queues: Vec<Value> = spec["queues"].as_array().into_iter().flatten().map(made_of).collect();
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

/// What an agent has put into effect. What there is not it does not name.
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

/// Writes a status, if the node is there still.
fn tell(lab: &Lab, node: &str, status: &Value) -> bool {
    let now = Timestamp::now();
    let mut status = status.clone();
    // However slow the machine is, the agent does not go silent while the test looks.
    status["lastUpdated"] = json!((now + SignedDuration::from_hours(1)).to_string());
    status["conditions"] = json!([{
        "type": "AgentReady", "status": "True", "reason": "AsDesired", "lastTransitionTime": now.to_string(),
        "observedGeneration": status["observedGeneration"],
    }]);
    let body = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node }, "status": status,
    });
    let (api, params) = (lab.api("CacheNode"), PatchParams::apply("reprise-agent").force());
    match lab.server.block_on(api.patch_status(node, &params, &Patch::Apply(&body))) {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.is_not_found() => false,
        Err(error) => panic!("the status of {node} is not taken: {error}"),
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

/// What an agent has of an allocation that it is told of, as one that makes queues.
fn made_of(claim: &Value) -> Value {
    let shares = claim["controllers"].as_array().into_iter().flatten();
    let pairs: u64 = shares.filter_map(|share| share["queuePairs"].as_u64()).sum();
    json!({ "uid": claim["uid"], "queuePairs": pairs, "kept": pairs })
}

/// What agents say of the file by which they know whose pods are whose.
fn tenants_digest(lab: &Lab) -> Option<String> {
    let file = lab.get("ConfigMap", "c-agent-tenants")?;
    let text = file.data["data"]["_tenants.json"].as_str()?.to_owned();
    Some(sha256(text.as_bytes()))
}
