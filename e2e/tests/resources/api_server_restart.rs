//! The harness itself: the effects of a paused or killed API server on its clients.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, PostParams};
use reprise_e2e::TestEnv;
use serde_json::json;

/// Far longer than a response takes on a busy machine.
const SILENCE: Duration = Duration::from_secs(1);

pub(crate) fn a_killed_server_returns_with_its_data() {
    let env = TestEnv::new();
    let mut server = env.api_server();
    let spaces: Api<Namespace> = Api::all(server.admin());
    let space = serde_json::from_value(json!({ "metadata": { "name": "kept" } })).expect("a namespace");
    server.block_on(spaces.create(&PostParams::default(), &space)).expect("the namespace is created");
    let get = || async { tokio::time::timeout(SILENCE, spaces.get("kept")).await };

    server.pause();
    assert!(server.block_on(get()).is_err(), "a paused server does not respond");
    server.resume();
    server.block_on(spaces.get("kept")).expect("the resumed server responds");

    server.kill();
    assert!(
        !server.block_on(get()).is_ok_and(|response| response.is_ok()),
        "a killed server does not respond"
    );
    server.restart();
    server.block_on(spaces.get("kept")).expect("etcd has the data");

    server.kill();
    server.etcd().kill();
    server.etcd().restart();
    server.restart();
    server.block_on(spaces.get("kept")).expect("etcd's folder has the data");
}
