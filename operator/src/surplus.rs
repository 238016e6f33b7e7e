//! What somebody has added to an object of which each field is ours.
//!
//! An apply puts back what somebody has changed or removed. It leaves what is added: an entry of a map, or an item of a list that is merged by a key,
//! is of whoever wrote it. But a subject more in a binding is a right, an entry more in a file is a setting, and a claim more is a device.
//!
//! What is there beyond the wanted is found by comparing the two: entries of `data`; items of lists, which are the same ones by what names them; and
//! lists where none is wanted. Other fields that are not wanted are the API server's own defaults, which cannot be told from additions, and stay.
//!
//! It is taken away by a merge patch with the version that was looked at, which writes nothing else.

use std::fmt::Debug;

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::child::held_by;
use crate::put_back::Taken;

/// Entries of a ConfigMap.
const DATA: &str = "data";

/// What names an item of a list, the first that the wanted items have.
const NAMES: [&str; 2] = ["pool", "name"];

/// Whether something is there that is not wanted.
pub(crate) fn is_in(live: &Value, wanted: &Value) -> bool {
    patch(live, wanted).is_some()
}

/// Takes it away from an object as it was read, and says who may have written it; `None`: there is nothing of the kind.
///
/// # Errors
/// The API server did not do it; somebody may have written the object meanwhile.
pub(crate) async fn remove<K>(
    api: &Api<K>,
    read: &K,
    wanted: &Value,
) -> Result<Option<(K, Taken)>, kube::Error>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    let live = serde_json::to_value(read).map_err(kube::Error::SerdeError)?;
    let Some(mut patch) = patch(&live, wanted) else { return Ok(None) };
    let mut fields = Vec::new();
    paths(&patch, "", &mut fields);
    patch["metadata"] = json!({ "resourceVersion": read.resource_version() });
    let params =
        PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let others = read.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
    let mut others: Vec<&str> = others.filter(|manager| *manager != OPERATOR_FIELD_MANAGER).collect();
    others.dedup();
    let taken = Taken::added(&others, &fields.join(", "));
    let written = api.patch(&read.name_any(), &params, &Patch::Merge(&patch)).await?;
    Ok(Some((written, taken)))
}

/// What makes of the one what is wanted of it, if it has more.
fn patch(live: &Value, wanted: &Value) -> Option<Value> {
    let (live, wanted) = (live.as_object()?, wanted.as_object()?);
    let ours = |key: &String| !["apiVersion", "kind", "metadata"].contains(&key.as_str());
    let mut all = Map::new();
    for (key, wanted) in wanted.iter().filter(|(key, _)| ours(key)) {
        let Some(live) = live.get(key) else { continue };
        let kept = if key == DATA { entries(live, wanted) } else { trimmed(live, wanted) };
        all.extend(difference(live, &kept).map(|patch| (key.clone(), patch)));
    }
    (!all.is_empty()).then_some(Value::Object(all))
}

/// Of a map those entries that are wanted.
fn entries(live: &Value, wanted: &Value) -> Value {
    let all = live.as_object().into_iter().flatten();
    let kept = all.filter(|(key, _)| wanted.get(key.as_str()).is_some());
    Value::Object(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
}

fn trimmed(live: &Value, wanted: &Value) -> Value {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            let kept = live.iter().filter_map(|(key, live)| match wanted.get(key) {
                Some(wanted) => Some((key.clone(), trimmed(live, wanted))),
                None if live.as_array().is_some_and(|items| !items.is_empty()) => None,
                None => Some((key.clone(), live.clone())),
            });
            Value::Object(kept.collect())
        }
        (Value::Array(live), Value::Array(wanted)) => {
            let kept = live
                .iter()
                .filter_map(|item| Some(trimmed(item, wanted.iter().find(|one| is_same(item, one))?)));
            Value::Array(kept.collect())
        }
        _ => live.clone(),
    }
}

/// Whether an item of a list is the wanted one, as it is or changed.
fn is_same(live: &Value, wanted: &Value) -> bool {
    match NAMES.into_iter().find(|name| wanted.get(name).is_some()) {
        Some(name) => live.get(name) == wanted.get(name),
        None => held_by(live, wanted),
    }
}

/// A merge patch from one to the other, which has nothing that the first has not.
fn difference(before: &Value, after: &Value) -> Option<Value> {
    match (before, after) {
        _ if before == after => None,
        (Value::Object(before), Value::Object(after)) => {
            let changed = before.iter().filter_map(|(key, before)| {
                let patch = match after.get(key) {
                    Some(after) => difference(before, after)?,
                    None => Value::Null,
                };
                Some((key.clone(), patch))
            });
            Some(Value::Object(changed.collect()))
        }
        _ => Some(after.clone()),
    }
}

/// The paths of a merge patch.
fn paths(patch: &Value, at: &str, all: &mut Vec<String>) {
    match patch {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, patch)| paths(patch, &format!("{at}.{key}"), all));
        }
        _ => all.push(at.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patched(live: &Value, wanted: &Value) -> (Option<Value>, Vec<String>) {
        let (patch, mut all) = (patch(live, wanted), Vec::new());
        paths(patch.as_ref().unwrap_or(&json!({})), "", &mut all);
        (patch, all)
    }

    #[test]
    fn an_entry_more_goes_and_what_is_wanted_stays_however_it_is_written() {
        let wanted = json!({ "metadata": { "name": "a" }, "data": { "k": "v", "l": "w" } });
        let live = json!({ "metadata": { "name": "a", "labels": { "x": "y" } }, "data": { "k": "other", "m": "mine" } });
        let (patch, paths) = patched(&live, &wanted);
        assert_eq!(patch, Some(json!({ "data": { "m": null } })));
        assert_eq!(paths, [".data.m"]);
        assert!(is_in(&live, &wanted) && !is_in(&wanted, &wanted));
    }

    #[test]
    fn an_item_more_goes_and_one_of_ours_that_has_more_in_it_loses_that_only() {
        let claim = |pool: &str, globs: &[&str]| json!({ "pool": pool, "uid": "u", "globs": globs });
        let wanted = json!({ "spec": { "claims": [claim("a", &["1"]), claim("b", &[])] } });
        let more = json!({ "spec": { "mode": "Active", "claims": [claim("x", &["9"]), claim("a", &["1", "2"]), claim("b", &[])] } });
        let (patch, paths) = patched(&more, &wanted);
        assert_eq!(patch, Some(wanted.clone()), "in the order in which they are there");
        assert_eq!(paths, [".spec.claims"]);
        let changed = json!({ "spec": { "claims": [{ "pool": "a", "uid": "other", "globs": [] }] } });
        assert!(!is_in(&changed, &wanted), "that is put back by an apply");
    }

    #[test]
    fn a_subject_more_or_a_list_where_none_is_wanted_goes_and_defaults_stay() {
        let subject = |name: &str| json!({ "kind": "ServiceAccount", "name": name, "namespace": "n" });
        let wanted = json!({ "subjects": [subject("agent")], "roleRef": { "name": "r" } });
        let live = json!({ "subjects": [subject("agent"), subject("me")], "roleRef": { "name": "r", "apiGroup": "g" } });
        assert_eq!(patched(&live, &wanted).0, Some(json!({ "subjects": [subject("agent")] })));

        let policy = json!({ "spec": { "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": "e" } }] } });
        let mut live = policy.clone();
        live["spec"]["failurePolicy"] = json!("Fail");
        live["spec"]["mutations"][0]["added"] = json!("by the server");
        assert!(!is_in(&live, &policy), "{live}");
        live["spec"]["matchConditions"] = json!([{ "name": "never", "expression": "false" }]);
        assert_eq!(patched(&live, &policy).0, Some(json!({ "spec": { "matchConditions": null } })));
    }
}
