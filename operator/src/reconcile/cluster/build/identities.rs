//! ConfigMap with the assignment of pods to tenants: one file for agents, which authorize sessions by it, and
//! an entry per namespace and service account for the admission policy. It is separate from the agents'
//! configuration, so that a new namespace restarts no agent.

use reprise_crds::KVCacheCluster;
use serde_json::{Map, Value, json};

use super::metadata::{config_map, metadata};
use super::pods::Volumes;
use crate::framework::child::Child;
use crate::reconcile::cluster::dereference::ClusterInputs;
use crate::reconcile::names::{ClusterNames, Component};
use crate::reconcile::tenant::pods;

/// Entry with the file for agents. A leading underscore is invalid in names of namespaces and service
/// accounts, so it cannot collide.
const FILE_ENTRY: &str = "_tenants.json";
/// Name of the file in agents' pods.
const FILE: &str = "tenants.json";
/// Directory of the file in agents' pods.
const FOLDER: &str = "/etc/reprise-tenants";

pub(super) fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Child {
    let names = &inputs.agent_config.names;
    let entries = inputs.bindings.entries().map(|(name, tenant)| (name.to_owned(), json!(tenant)));
    let mut data: Map<String, Value> = entries.collect();
    data.insert(FILE_ENTRY.to_owned(), json!(pods::file(&inputs.bindings)));
    config_map(metadata(cluster, names, Component::Agent, &names.tenants()), &Value::Object(data))
}

/// Adds the volume to agents' pods.
pub(super) fn add_volume(volumes: &mut Volumes, names: &ClusterNames) {
    let items = json!([{ "key": FILE_ENTRY, "path": FILE }]);
    let source = json!({ "configMap": { "name": names.tenants(), "items": items } });
    volumes.add("tenants", source, FOLDER);
}

/// Environment variable with the file's path.
pub(super) fn variable() -> Value {
    json!({ "name": "TENANTS_FILE", "value": format!("{FOLDER}/{FILE}") })
}
