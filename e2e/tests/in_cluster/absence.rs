//! An API server that is away or refuses, somebody else who writes the status, and an agent that leaves.

use kube::api::{Patch, PatchParams};
use reprise_client::Source;
use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, Loading, World, wait_until};
use serde_json::json;

use crate::node::{self, Node, Setup, TOLD_WITHIN, condition, file_claim, state, words};
use crate::objects::{api, object};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn an_agent_goes_on_and_starts_again_without_the_api_server() {
    let world = World::new();
    let mut server = world.api_server();
    node::install(&server);
    let node_world = World::new();
    // The rest of the test needs the server for itself.
    let mut agent = {
        let node = Node::launch(&server, node_world, &Setup::of("alone"));
        node.world.allow("cannot be watched");
        // A server that has just started has not read the rights yet.
        node.world.allow("is forbidden: User");
        let claims = json!({ "claims": [file_claim("p1")] });
        node.bring("the pool is open", claims, |status| state(status, "/p1-file") == Some("Open"));
        let Node { agent, world, .. } = node;
        (agent, world)
    };
    let engine = agent.0.engine(small());
    engine.save_durably(&blocks());
    server.kill();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnDram; 40]);
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
    drop(engine);

    agent.0.kill();
    agent.0.start();
    let is_ready = |agent: &reprise_e2e::Agent| agent.admin().get("/readyz").expect("an answer").0 == 200;
    wait_until("the agent is ready by what it has kept", TOLD_WITHIN, || is_ready(&agent.0).then_some(()));
    let engine = agent.0.engine(small());
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);

    server.restart();
    let (agent, world) = agent;
    let node = Node::again(&server, world, agent, "alone");
    node.bring("the server is followed again", json!({ "mode": "Cordoned" }), |status| {
        condition(status, "Cordoned").0 == "True" && status["devices"].is_null()
    });
}

pub(crate) fn an_agent_with_the_token_of_another_node_is_refused_in_words_and_serves(server: &ApiServer) {
    let setup = Setup { token_of: "thief", ..Setup::of("victim") };
    let node = Node::launch(server, World::new(), &setup);
    node.world.require("the API server refuses the status of this node");
    node.world.require("runs on node thief and may write the CacheNode of that name only, not victim");
    node.want(json!({ "claims": [file_claim("p1")] }));
    node.wait_ready();
    node.agent.engine(small()).save_durably(&blocks());
    let log = || std::fs::read_to_string(&node.agent.files().log).expect("a log");
    wait_until("the refusal is logged", TOLD_WITHIN, || log().contains("not victim").then_some(()));
    assert!(node.status().is_null(), "nothing is written");
}

pub(crate) fn an_agent_that_is_told_to_stop_says_that_it_leaves(server: &ApiServer) {
    let mut node = Node::start(server, "leaving");
    node.wait_status("it serves", |status| condition(status, "AgentReady").0 == "True");
    node.agent.stop();
    assert_eq!(condition(&node.status(), "AgentReady"), ("False", "AgentGone"));
    node.agent.start();
    node.wait_ready();
    node.wait_status("it serves again", |status| condition(status, "AgentReady").0 == "True");
}

pub(crate) fn what_somebody_forces_into_a_status_is_put_back_and_he_is_named(server: &ApiServer) {
    let node = Node::start(server, "contested");
    node.world.require("it is put back");
    let status = node.wait_status("it serves", |status| condition(status, "AgentReady").0 == "True");
    let total = status["capacity"]["dramTotal"].clone();
    let mut mine = object("CacheNode", "contested", &json!({}));
    mine.as_object_mut().expect("an object").remove("spec");
    mine["status"] =
        json!({ "capacity": { "dramTotal": "1Pi", "dramUsed": "0", "ssdTotal": "0", "ssdUsed": "0" } });
    let objects = api(&server.admin(), "CacheNode", "");
    let params = PatchParams::apply("kubectl-edit").force();
    let forced = server.block_on(objects.patch_status("contested", &params, &Patch::Apply(&mine)));
    forced.expect("by force everything is taken");
    // Something to say, so that the agent writes.
    node.want(json!({ "mode": "Cordoned" }));
    node.wait_status("it is put back and said", |status| {
        let said = words(status, "StatusContested");
        status["capacity"]["dramTotal"] == total
            && said.contains("kubectl-edit")
            && said.contains("status.capacity.dramTotal")
    });
}
