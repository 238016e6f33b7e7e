//! An API server that is down or refuses writes, another writer of the status, and an agent that stops.

use kube::api::{Patch, PatchParams};
use reprise_client::Source;
use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, LoadParams, TestEnv, wait_until};
use serde_json::json;

use crate::in_cluster::node::{
    self, Node, REPORTED_WITHIN, Setup, condition, condition_message, file_claim, has_state,
};
use crate::resources::objects::{api, object};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn an_agent_continues_and_restarts_without_the_api_server() {
    let env = TestEnv::new();
    let mut server = env.api_server();
    node::install(&server);
    let node_env = TestEnv::new();
    // The block ends the borrow of the server, which is killed below.
    let mut agent = {
        let node = Node::launch(&server, node_env, &Setup::of("alone"));
        node.env.allow("cannot watch the CacheNode");
        // A server that has just started may not have loaded the roles yet.
        node.env.allow("is forbidden: User");
        let claims = json!({ "claims": [file_claim("p1")] });
        node.apply_and_wait("the pool is open", claims, has_state("/p1-file", "Open"));
        let Node { agent, env, .. } = node;
        (agent, env)
    };
    let engine = agent.0.engine(small());
    engine.save_durably(&blocks());
    server.kill();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnDram; 40]);
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
    drop(engine);

    agent.0.kill();
    agent.0.start();
    let is_ready = |agent: &reprise_e2e::Agent| agent.admin().get("/readyz").expect("a response").0 == 200;
    wait_until("the agent is ready with its persisted spec", REPORTED_WITHIN, || {
        is_ready(&agent.0).then_some(())
    });
    let engine = agent.0.engine(small());
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);

    server.restart();
    let (agent, env) = agent;
    let node = Node::with_running_agent(&server, env, agent, "alone");
    node.apply_and_wait("the agent watches the server again", json!({ "mode": "Cordoned" }), |status| {
        condition(status, "Cordoned").0 == "True" && status["devices"].is_null()
    });
}

pub(crate) fn an_agent_with_another_nodes_token_is_rejected_by_the_api_server_and_serves(server: &ApiServer) {
    let setup = Setup { token_of: "thief", ..Setup::of("victim") };
    let node = Node::launch(server, TestEnv::new(), &setup);
    node.env.require("the API server rejects the status of this node");
    node.env.require("runs on node thief and may write the CacheNode of that name only, not victim");
    node.apply_spec(json!({ "claims": [file_claim("p1")] }));
    node.wait_ready();
    node.agent.engine(small()).save_durably(&blocks());
    let log = || std::fs::read_to_string(&node.agent.files().log).expect("a log");
    wait_until("the refusal is logged", REPORTED_WITHIN, || log().contains("not victim").then_some(()));
    assert!(node.status().is_null(), "nothing is written");
}

pub(crate) fn a_stopping_agent_reports_that_it_is_gone(server: &ApiServer) {
    let mut node = Node::start(server, "leaving");
    node.wait_status("the agent is ready", |status| condition(status, "AgentReady").0 == "True");
    node.agent.stop();
    assert_eq!(condition(&node.status(), "AgentReady"), ("False", "AgentGone"));
    node.agent.start();
    node.wait_ready();
    node.wait_status("the agent is ready again", |status| condition(status, "AgentReady").0 == "True");
}

pub(crate) fn the_agent_restores_its_status_fields_and_names_the_other_writer(server: &ApiServer) {
    let node = Node::start(server, "contested");
    node.env.require("overwrote changes by another writer to the status");
    let status = node.wait_status("the agent is ready", |status| condition(status, "AgentReady").0 == "True");
    let total = status["capacity"]["dramTotal"].clone();
    let mut forged = object("CacheNode", "contested", &json!({}));
    forged.as_object_mut().expect("an object").remove("spec");
    forged["status"] =
        json!({ "capacity": { "dramTotal": "1Pi", "dramUsed": "0", "ssdTotal": "0", "ssdUsed": "0" } });
    let objects = api(&server.admin(), "CacheNode", "");
    let params = PatchParams::apply("kubectl-edit").force();
    let forced = server.block_on(objects.patch_status("contested", &params, &Patch::Apply(&forged)));
    forced.expect("a forced apply is accepted");
    // A change of the spec makes the agent write its status.
    node.apply_spec(json!({ "mode": "Cordoned" }));
    node.wait_status("the fields are restored and the writer is named", |status| {
        let message = condition_message(status, "StatusContested");
        status["capacity"]["dramTotal"] == total
            && message.contains("kubectl-edit")
            && message.contains("status.capacity.dramTotal")
    });
}
