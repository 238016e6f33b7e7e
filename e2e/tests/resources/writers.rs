//! The writers of spec and status do not write each other's. What Reprise does when somebody else writes its own fields is tested with the processes that
//! do it (`operator/put_back.rs`, `in_cluster/absence.rs`).

use kube::api::PostParams;
use reprise_e2e::ApiServer;
use serde_json::json;

use crate::objects::{api, create, minimal};

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
