//! Writers of the spec and of the status cannot write the other part. Conflicts about Reprise's own fields
//! are tested with the processes that own them (`operator/field_ownership.rs`, `in_cluster/api_server_faults.rs`).

use kube::api::PostParams;
use reprise_e2e::ApiServer;
use serde_json::json;

use crate::resources::objects::{api, create, minimal};

pub(crate) fn spec_and_status_are_written_separately(server: &ApiServer) {
    let name = "apart";
    let api = api(&server.admin(), "SSDPool", "");
    let mut sent = minimal("SSDPool", name);
    sent["status"] = json!({ "observedGeneration": 7 });
    let created = create(server, "", &sent);
    assert!(created.data["status"].is_null(), "a create does not write the status: {}", created.data);
    let generation = created.metadata.generation.expect("a generation");

    let mut both = created;
    both.data["spec"]["queueDepth"] = json!(32);
    both.data["status"] = json!({ "observedGeneration": generation });
    let stored = server.block_on(api.replace_status(name, &PostParams::default(), &both)).expect("a status");
    assert_eq!(stored.data["spec"]["queueDepth"], 128, "a status update does not write the spec");
    assert_eq!(stored.data["status"]["observedGeneration"], generation);
    assert_eq!(
        stored.metadata.generation,
        Some(generation),
        "a status update does not change the generation"
    );

    let mut both = stored;
    both.data["spec"]["queueDepth"] = json!(32);
    both.data["status"] = json!({ "observedGeneration": 99 });
    let stored = server.block_on(api.replace(name, &PostParams::default(), &both)).expect("a spec");
    assert_eq!(stored.data["spec"]["queueDepth"], 32);
    assert_eq!(stored.data["status"]["observedGeneration"], generation);
    assert_eq!(stored.metadata.generation, Some(generation + 1));
}
