//! Which engine drives a device, where the wanted one cannot be had.

use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, World, tree};
use serde_json::json;

use crate::node::{Node, Setup, condition, device, file_claim, state};

/// Becomes the command that follows, without the right to set up io_uring: as a container with the runtime's seccomp profile.
const WITHOUT_IO_URING: &str = "e2e/without_io_uring.py";

pub(crate) fn an_engine_that_cannot_be_had_keeps_a_pool_closed_unless_another_may_do(server: &ApiServer) {
    let script = tree().join(WITHOUT_IO_URING).to_str().expect("UTF-8").to_owned();
    let setup = Setup { launcher: vec!["python3".to_owned(), script], ..Setup::of("no-rings") };
    let node = Node::launch(server, World::new(), &setup);
    node.world.require("a device of a claim is not used");
    let mut claims = json!({ "claims": [file_claim("p1")] });
    claims["claims"][0]["engine"] = json!("IoUring");
    let status = node.bring("the pool stays closed", claims.clone(), |status| {
        state(status, "/p1-file") == Some("Refused")
    });
    assert_eq!(condition(&status, "EngineFallback"), ("False", "EngineUnavailable"));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "EngineUnavailable"));
    let message = device(&status, "/p1-file").expect("there")["message"].as_str().unwrap_or_default();
    assert!(message.contains("seccomp") && message.contains("fallbackEngine"), "{message}");
    assert!(node.is_ready(), "the node serves from memory");

    claims["claims"][0]["fallbackEngine"] = json!("Plain");
    let status = node
        .bring("another engine does it", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    assert_eq!(condition(&status, "EngineFallback"), ("True", "EngineUnavailable"));
    assert_eq!(device(&status, "/p1-file").expect("there")["engine"], "Plain");
    let engine = node.agent.engine(small());
    engine.save_durably(&(0..20).collect::<Vec<u64>>());
    node.bring("its session is told", claims.clone(), |status| status["sessions"] == 1);
    drop(engine);

    // One that no release has yet is nowhere to be had either.
    claims["claims"][0]["engine"] = json!("Gds");
    let status = node.bring("still", claims, |status| {
        let is_open = state(status, "/p1-file") == Some("Open");
        is_open && condition(status, "EngineFallback").0 == "True" && status["sessions"] == 0
    });
    assert_eq!(device(&status, "/p1-file").expect("there")["engine"], "Plain");
}
