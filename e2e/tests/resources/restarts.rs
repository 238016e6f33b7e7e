//! The harness itself: an API server that is killed, or hangs, is one for its clients too.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, PostParams};
use reprise_e2e::World;
use serde_json::json;

/// Far beyond what an answer takes, on a busy machine.
const SILENCE: Duration = Duration::from_secs(1);

pub(crate) fn a_killed_server_comes_back_with_what_it_stored() {
    let world = World::new();
    let mut server = world.api_server();
    let spaces: Api<Namespace> = Api::all(server.admin());
    let space = serde_json::from_value(json!({ "metadata": { "name": "kept" } })).expect("a namespace");
    server.block_on(spaces.create(&PostParams::default(), &space)).expect("it is stored");
    let look = || async { tokio::time::timeout(SILENCE, spaces.get("kept")).await };

    server.pause();
    assert!(server.block_on(look()).is_err(), "a server that is stopped answers nothing");
    server.resume();
    server.block_on(spaces.get("kept")).expect("it goes on as if nothing had been");

    server.kill();
    assert!(!server.block_on(look()).is_ok_and(|answer| answer.is_ok()), "nobody answers");
    server.restart();
    server.block_on(spaces.get("kept")).expect("etcd has it");

    server.kill();
    server.etcd().kill();
    server.etcd().restart();
    server.restart();
    server.block_on(spaces.get("kept")).expect("etcd's folder has it");
}
