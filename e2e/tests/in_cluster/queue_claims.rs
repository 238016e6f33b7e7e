//! Limits and profiles that come with the queue pairs of an allocation, for the engines that hold them.

use reprise_client::CommitOptions;
use reprise_e2e::content::{keys, small};
use reprise_e2e::{ApiServer, Engine, PATIENCE, wait_until};
use reprise_policy::session::LayerReport;
use reprise_policy::slack::{Computation, Phase};
use reprise_testkit::kv_function;
use reprise_testkit::rings::{RingLoad, RingPath, RingPathSettings};
use serde_json::{Value, json};

use crate::in_cluster::node::{Node, file_claim, has_state};
use crate::in_cluster::profiles::{content, digest, write_content};

/// Blocks of an engine's KV memory.
const SLOTS: usize = 4;

/// Usable microseconds of the profiles, 80 % of their slack.
const FIRST: (u32, u32) = (50, 40);
const SECOND: (u32, u32) = (60, 48);

fn open(engine: &Engine) -> RingPath {
    let settings = RingPathSettings { pairs: 1, depth: 64, timeout: PATIENCE, ..RingPathSettings::default() };
    RingPath::open(engine.client(), SLOTS, settings).expect("an allocation exists")
}

/// Saves a block with queue pairs, which are requested for it, and loads it.
fn save_and_load(path: &mut RingPath, number: u64) -> Result<(), String> {
    let key = keys(&[number])[0];
    let mut bytes = vec![0; small().object_bytes() as usize];
    for object in 0..small().objects() {
        kv_function::fill(&key.0, object, &mut bytes);
        path.object(0, object as usize).copy_in(&bytes).expect("KV memory is writable");
    }
    let saved = path.save(&[(0, key)], CommitOptions::default(), PATIENCE);
    saved.map_err(|error| format!("{error:#}"))?;
    assert_eq!(path.load(&[(1, key)]).map_err(|error| format!("{error:#}"))?, [RingLoad::Verified]);
    Ok(())
}

/// Returns the microseconds of slack that the engine gets for its next layer.
fn slack_micros(engine: &Engine) -> u32 {
    let computation = Some(Computation { phase: Phase::Decode, input_tokens: 9, prefix_tokens: 64 });
    let report = LayerReport { model: "llama".to_owned(), computation, previous_layer_micros: None };
    engine.client().report_layer(&report).expect("answered").slack_micros
}

pub(crate) fn engines_with_queue_pairs_have_the_memory_limit_and_profile_of_their_allocation(
    server: &ApiServer,
) {
    let node = Node::start(server, "limited");
    node.env.require("this NVMe controller is EMULATED");
    let mut claim = file_claim("p1");
    (claim["engine"], claim["fallbackEngine"]) = (json!("UserNvme"), json!("None"));
    let mut spec = json!({ "claims": [claim] });
    node.apply_and_wait("the pool is open", spec.clone(), has_state("/p1-file", "Open"));
    let status = node
        .wait_status("the controller is reported", |status| status["controllers"][0]["serial"].is_string());
    let serial = status["controllers"][0]["serial"].clone();

    let registered = || node.agent.admin().metric("reprise_agent_registered_memory_bytes", "") as u64;
    let digests = [FIRST, SECOND].map(|(micros, _)| digest(&content(micros)));
    for (digest, (micros, _)) in digests.iter().zip([FIRST, SECOND]) {
        write_content(&node, digest, &content(micros));
    }
    spec["profiles"] =
        json!([{ "name": "first", "digest": digests[0] }, { "name": "second", "digest": digests[1] }]);
    let claim = |limit: Option<u64>| {
        let mut claim = json!({
            "uid": format!("uid-{}", limit.unwrap_or_default()), "allocation": "chat/q", "depth": 64,
            "slackProfile": "second", "controllers": [{ "serial": serial, "queuePairs": 4 }],
        });
        if let Some(limit) = limit {
            claim["registeredMemory"] = json!(limit.to_string());
        }
        claim
    };
    let apply = |spec: &mut Value, limit: Option<u64>| {
        spec["queues"] = json!([claim(limit)]);
        node.apply_and_wait("the queue pairs are reserved", spec.clone(), |status| {
            let applied = &status["applied"];
            let is_kept =
                applied["queues"][0]["uid"] == claim(limit)["uid"] && applied["queues"][0]["kept"] == 4;
            is_kept && applied["profiles"].as_array().map(Vec::len) == Some(2)
        });
    };
    apply(&mut spec, None);
    let engine = node.agent.engine(small());
    let mut path = open(&engine);
    let memory_bytes = registered();
    assert!(memory_bytes > SLOTS as u64 * small().block_bytes(), "{memory_bytes}");
    assert_eq!(slack_micros(&engine), FIRST.1, "the first profile of the model by name");
    save_and_load(&mut path, 1).expect("there is no limit");
    assert_eq!(slack_micros(&engine), SECOND.1, "the profile of the allocation");
    path.close().expect("returned");
    assert_eq!(slack_micros(&engine), FIRST.1, "the engine holds no queue pairs of the allocation");
    drop(engine);

    apply(&mut spec, Some(memory_bytes - 1));
    let engine = node.agent.engine(small());
    let mut path = open(&engine);
    let refused = save_and_load(&mut path, 2).expect_err("the memory is larger than the limit");
    assert!(refused.contains("spec.registeredMemory") && refused.contains("chat/q allows"), "{refused}");
    drop((path, engine));

    apply(&mut spec, Some(2 * memory_bytes - 1));
    let engines = [node.agent.engine(small()), node.agent.engine(small())];
    let [mut first, mut second] = engines.each_ref().map(open);
    save_and_load(&mut first, 3).expect("within the limit");
    let refused = save_and_load(&mut second, 4).expect_err("both memories exceed the limit");
    assert!(refused.contains(&format!("{} would be in use", 2 * memory_bytes)), "{refused}");
    assert_eq!(slack_micros(&engines[1]), FIRST.1);
    first.close().expect("returned");
    save_and_load(&mut second, 5).expect("the memory of the other engine is no longer in use");
    drop((second, engines));
    wait_until("no memory is registered", PATIENCE, || (registered() == 0).then_some(()));
}
