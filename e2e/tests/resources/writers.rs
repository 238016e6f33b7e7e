//! Several writers of one object: who writes what another owns is told, and nobody undoes another's work by accident.

use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Error, ResourceExt};
use reprise_crds::{AGENT_FIELD_MANAGER, OPERATOR_FIELD_MANAGER};
use reprise_e2e::ApiServer;
use serde_json::{Value, json};

use crate::objects::{api, create, minimal, refusal};

/// Somebody with `kubectl apply --server-side`.
const USER: &str = "somebody";

fn applied(
    server: &ApiServer,
    api: &Api<DynamicObject>,
    object: &Value,
    parameters: &PatchParams,
) -> Result<DynamicObject, Error> {
    let name = object["metadata"]["name"].as_str().expect("a name");
    server.block_on(api.patch(name, parameters, &Patch::Apply(object)))
}

pub(crate) fn two_managers_of_one_field_conflict_and_the_other_is_named(server: &ApiServer) {
    let api = api(&server.admin(), "SSDPool", "");
    let with_depth = |depth: u32| {
        let mut pool = minimal("SSDPool", "disputed");
        pool["spec"]["queueDepth"] = json!(depth);
        pool
    };
    let (user, operator) = (PatchParams::apply(USER), PatchParams::apply(OPERATOR_FIELD_MANAGER));
    applied(server, &api, &with_depth(64), &user).expect("nobody else has written it");

    let refused = refusal(applied(server, &api, &with_depth(32), &operator)).expect("it is the user's");
    assert_eq!(refused.0, 409, "{}", refused.1);
    assert!(refused.1.contains(&format!("conflict with \"{USER}\"")), "{}", refused.1);
    assert!(refused.1.contains(".spec.queueDepth"), "{}", refused.1);
    assert_eq!(server.block_on(api.get("disputed")).expect("stored").data["spec"]["queueDepth"], 64);

    // The same value is no conflict: both own it, and neither changes it alone.
    applied(server, &api, &with_depth(64), &operator).expect("they agree");
    let refused =
        refusal(applied(server, &api, &with_depth(16), &user)).expect("it is the operator's as well");
    assert_eq!(refused.0, 409, "{}", refused.1);
    assert!(refused.1.contains(&format!("conflict with \"{OPERATOR_FIELD_MANAGER}\"")), "{}", refused.1);

    // Who insists has it alone.
    let forced = applied(server, &api, &with_depth(16), &user.force()).expect("it is taken over");
    assert_eq!(forced.data["spec"]["queueDepth"], 16);
    let owners = |object: &DynamicObject| {
        let owns = |fields: &Value| !fields["f:spec"]["f:queueDepth"].is_null();
        let managers = object.managed_fields().iter();
        let managers = managers.filter(|one| one.fields_v1.as_ref().is_some_and(|fields| owns(&fields.0)));
        managers.filter_map(|one| one.manager.clone()).collect::<Vec<_>>()
    };
    assert_eq!(owners(&forced), [USER]);
}

pub(crate) fn two_writers_of_conditions_keep_each_others(server: &ApiServer) {
    let name = "two-writers";
    let api = api(&server.admin(), "CacheNode", "");
    create(server, "", &minimal("CacheNode", name));
    let condition = |kind: &str| {
        let mut object = minimal("CacheNode", name);
        object.as_object_mut().expect("an object").remove("spec");
        object["status"] = json!({ "conditions": [{
            "type": kind, "status": "True", "reason": "AsWanted", "lastTransitionTime": "2026-11-22T00:00:00Z",
        }] });
        object
    };
    for (manager, kind) in [(AGENT_FIELD_MANAGER, "AgentReady"), (OPERATOR_FIELD_MANAGER, "Accepted")] {
        let patch = Patch::Apply(condition(kind));
        let written = server.block_on(api.patch_status(name, &PatchParams::apply(manager), &patch));
        written.expect("each writes its own condition");
    }
    let stored = server.block_on(api.get(name)).expect("stored").data;
    let conditions = stored["status"]["conditions"].as_array().expect("conditions").iter();
    let kinds: Vec<&Value> = conditions.map(|one| &one["type"]).collect();
    assert_eq!(kinds, ["AgentReady", "Accepted"]);
}

pub(crate) fn spec_and_status_are_written_apart(server: &ApiServer) {
    let name = "apart";
    let api = api(&server.admin(), "SSDPool", "");
    let mut sent = minimal("SSDPool", name);
    sent["status"] = json!({ "observedGeneration": 7 });
    let created = create(server, "", &sent);
    assert!(created.data["status"].is_null(), "a status is not written with the spec: {}", created.data);
    let generation = created.metadata.generation.expect("a generation");

    let mut both = created;
    both.data["spec"]["queueDepth"] = json!(32);
    both.data["status"] = json!({ "observedGeneration": generation });
    let stored = server.block_on(api.replace_status(name, &PostParams::default(), &both)).expect("a status");
    assert_eq!(stored.data["spec"]["queueDepth"], 128, "a spec is not written with the status");
    assert_eq!(stored.data["status"]["observedGeneration"], generation);
    assert_eq!(stored.metadata.generation, Some(generation), "a status is no new generation");

    let mut both = stored;
    both.data["spec"]["queueDepth"] = json!(32);
    both.data["status"] = json!({ "observedGeneration": 99 });
    let stored = server.block_on(api.replace(name, &PostParams::default(), &both)).expect("a spec");
    assert_eq!(stored.data["spec"]["queueDepth"], 32);
    assert_eq!(stored.data["status"]["observedGeneration"], generation);
    assert_eq!(stored.metadata.generation, Some(generation + 1));
}
