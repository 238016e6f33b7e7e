//! Whose pods are whose, as a ConfigMap: one file for the agents, which check sessions by it, and an entry for each namespace and service
//! account, which the policy that changes pods looks up. It is apart from the agents' configuration, so that a new namespace restarts nobody.

use reprise_crds::KVCacheCluster;
use serde_json::{Map, Value, json};

use super::{config_map, metadata};
use crate::child::Child;
use crate::cluster::dereference::Found;
use crate::names::Component;
use crate::tenant::pods;

/// The file among the entries: no namespace and no service account has such a name.
const FILE_ENTRY: &str = "_tenants.json";
/// What it is called in agents' pods.
const FILE: &str = "tenants.json";
/// Where it is there.
const FOLDER: &str = "/etc/reprise-tenants";
/// The volume.
const VOLUME: &str = "tenants";

pub(super) fn build(cluster: &KVCacheCluster, found: &Found) -> Child {
    let names = &found.referred.names;
    let entries = found.bindings.entries().map(|(name, tenant)| (name.to_owned(), json!(tenant)));
    let mut data: Map<String, Value> = entries.collect();
    data.insert(FILE_ENTRY.to_owned(), json!(pods::file(&found.bindings)));
    config_map(metadata(cluster, names, Component::Agent, &names.tenants()), &Value::Object(data))
}

/// The volume of agents' pods.
pub(super) fn volume(found: &Found) -> Value {
    let items = json!([{ "key": FILE_ENTRY, "path": FILE }]);
    json!({ "name": VOLUME, "configMap": { "name": found.referred.names.tenants(), "items": items } })
}

/// Where it is mounted.
pub(super) fn mount() -> Value {
    json!({ "name": VOLUME, "mountPath": FOLDER, "readOnly": true })
}

/// How agents learn of it: an agent of another version may not know it, and then says nothing of it.
pub(super) fn variable() -> Value {
    json!({ "name": "TENANTS_FILE", "value": format!("{FOLDER}/{FILE}") })
}
