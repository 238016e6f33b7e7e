//! Removes entries that another writer added to an object that the operator owns exclusively.
//!
//! An apply restores changed and removed fields, but leaves added ones: an entry of a map, or an item of a
//! list that is merged by a key, belongs to its writer. Yet an additional subject in a binding is a right, an
//! additional entry in a file is a setting, and an additional claim is a device.
//!
//! Extra fields are found by comparing the live object with the desired one:
//! * entries of `data`;
//! * items of lists, matched by the field that names them;
//! * non-empty lists where the desired object has none.
//!
//! Other fields cannot be distinguished from defaults that the API server sets, and are kept.
//!
//! The removal is a merge patch with the resource version that was read. It changes no other field.

use std::fmt::Debug;

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::framework::child::contains_desired;
use crate::framework::field_ownership::restore::ForeignWrite;

/// Path of the entries of a ConfigMap.
const DATA: &str = ".data";

/// Fields that identify an item of a list. The first one that the desired items have is used.
const NAMES: [&str; 2] = ["pool", "name"];

/// Returns whether the live object has extra fields.
pub(crate) fn has_any(live: &Value, desired: &Value) -> bool {
    removal(live, desired, "", &mut Vec::new()).is_some()
}

/// Removes extra fields from an object as it was read. Returns the patched object and the possible writers,
/// or `None` if there are no extra fields.
///
/// # Errors
/// The API server rejected the patch, for example because another writer modified the object (409).
pub(crate) async fn remove<K>(
    api: &Api<K>,
    read: &K,
    desired: &Value,
) -> Result<Option<(K, ForeignWrite)>, kube::Error>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    let live = serde_json::to_value(read).map_err(kube::Error::SerdeError)?;
    let mut fields = Vec::new();
    let Some(mut patch) = removal(&live, desired, "", &mut fields) else { return Ok(None) };
    patch["metadata"] = json!({ "resourceVersion": read.resource_version() });
    let params =
        PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let others = read.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
    let mut others: Vec<&str> = others.filter(|manager| *manager != OPERATOR_FIELD_MANAGER).collect();
    others.dedup();
    let by = if others.is_empty() { "an unknown writer".to_owned() } else { others.join(" or ") };
    let foreign = ForeignWrite { by, fields: fields.join(", ") };
    let written = api.patch(&read.name_any(), &params, &Patch::Merge(&patch)).await?;
    Ok(Some((written, foreign)))
}

/// Builds a merge patch that removes the extra fields, or returns `None` if none exist. Adds the paths of
/// these fields to `paths`.
fn removal(live: &Value, desired: &Value, at: &str, paths: &mut Vec<String>) -> Option<Value> {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => {
            let of_field = |(key, live): (&String, &Value)| {
                let path = format!("{at}.{key}");
                let patch = match desired.get(key) {
                    _ if path == ".metadata" => None,
                    Some(desired) => removal(live, desired, &path, paths),
                    None if at == DATA || live.as_array().is_some_and(|items| !items.is_empty()) => {
                        paths.push(path);
                        Some(Value::Null)
                    }
                    None => None,
                };
                Some((key.clone(), patch?))
            };
            let patch: Map<String, Value> = live.iter().filter_map(of_field).collect();
            (!patch.is_empty()).then_some(Value::Object(patch))
        }
        (Value::Array(live), Value::Array(items)) => {
            let is_extra = |item: &Value| {
                let same = items.iter().find(|one| is_same(item, one));
                same.is_none_or(|same| removal(item, same, at, &mut Vec::new()).is_some())
            };
            live.iter().any(is_extra).then(|| {
                paths.push(at.to_owned());
                desired.clone()
            })
        }
        // An apply restores another value.
        _ => None,
    }
}

/// Returns whether an item of a list corresponds to the desired item, possibly with changes.
fn is_same(live: &Value, desired: &Value) -> bool {
    match NAMES.into_iter().find(|name| desired.get(name).is_some()) {
        Some(name) => live.get(name) == desired.get(name),
        None => contains_desired(live, desired),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patched(live: &Value, desired: &Value) -> (Option<Value>, Vec<String>) {
        let mut paths = Vec::new();
        (removal(live, desired, "", &mut paths), paths)
    }

    #[test]
    fn removes_extra_data_entry_and_keeps_desired_entries_with_any_value() {
        let desired = json!({ "metadata": { "name": "a" }, "data": { "k": "v", "l": "w" } });
        let live = json!({ "metadata": { "name": "a", "labels": { "x": "y" } }, "data": { "k": "other", "m": "mine" } });
        let (patch, paths) = patched(&live, &desired);
        assert_eq!(patch, Some(json!({ "data": { "m": null } })));
        assert_eq!(paths, [".data.m"]);
        assert!(has_any(&live, &desired) && !has_any(&desired, &desired));
    }

    #[test]
    fn removes_extra_list_item_and_extra_content_of_desired_items() {
        let claim = |pool: &str, globs: &[&str]| json!({ "pool": pool, "uid": "u", "globs": globs });
        let desired = json!({ "spec": { "claims": [claim("a", &["1"]), claim("b", &[])] } });
        let more = json!({ "spec": { "mode": "Active", "claims": [claim("x", &["9"]), claim("a", &["1", "2"]), claim("b", &[])] } });
        let (patch, paths) = patched(&more, &desired);
        assert_eq!(patch, Some(desired.clone()));
        assert_eq!(paths, [".spec.claims"]);
        let changed = json!({ "spec": { "claims": [{ "pool": "a", "uid": "other", "globs": [] }] } });
        assert!(!has_any(&changed, &desired), "an apply restores it");
    }

    #[test]
    fn removes_extra_subject_and_undesired_list_but_keeps_defaults() {
        let subject = |name: &str| json!({ "kind": "ServiceAccount", "name": name, "namespace": "n" });
        let desired = json!({ "subjects": [subject("agent")], "roleRef": { "name": "r" } });
        let live = json!({ "subjects": [subject("agent"), subject("me")], "roleRef": { "name": "r", "apiGroup": "g" } });
        assert_eq!(patched(&live, &desired).0, Some(json!({ "subjects": [subject("agent")] })));

        let policy = json!({ "spec": { "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": "e" } }] } });
        let mut live = policy.clone();
        live["spec"]["failurePolicy"] = json!("Fail");
        live["spec"]["mutations"][0]["added"] = json!("by the server");
        assert!(!has_any(&live, &policy), "{live}");
        live["spec"]["matchConditions"] = json!([{ "name": "never", "expression": "false" }]);
        assert_eq!(patched(&live, &policy).0, Some(json!({ "spec": { "matchConditions": null } })));
    }
}
