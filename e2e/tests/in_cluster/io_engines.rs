//! The I/O engine of a device, and its fallback if the requested one is unavailable.

use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, TestEnv, tree};
use serde_json::json;

use crate::in_cluster::node::{Node, Setup, condition, device, file_claim, has_state, state};

/// Runs a command that may not set up io_uring, like a container with the runtime's seccomp profile.
const WITHOUT_IO_URING: &str = "e2e/without_io_uring.py";

pub(crate) fn an_unavailable_io_engine_keeps_a_pool_closed_without_a_fallback(server: &ApiServer) {
    let script = tree().join(WITHOUT_IO_URING).to_str().expect("UTF-8").to_owned();
    let setup = Setup { launcher: vec!["python3".to_owned(), script], ..Setup::of("no-rings") };
    let node = Node::launch(server, TestEnv::new(), &setup);
    node.env.require("a claimed device is not used");
    let mut claims = json!({ "claims": [file_claim("p1")] });
    claims["claims"][0]["engine"] = json!("IoUring");
    let status =
        node.apply_and_wait("the pool stays closed", claims.clone(), has_state("/p1-file", "Refused"));
    assert_eq!(condition(&status, "EngineFallback"), ("False", "EngineUnavailable"));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "EngineUnavailable"));
    let message = device(&status, "/p1-file").expect("reported")["message"].as_str().unwrap_or_default();
    assert!(message.contains("seccomp") && message.contains("fallbackEngine"), "{message}");
    assert!(node.is_ready(), "the node serves from memory");

    claims["claims"][0]["fallbackEngine"] = json!("Plain");
    let status = node.apply_and_wait(
        "the fallback engine opens the pool",
        claims.clone(),
        has_state("/p1-file", "Open"),
    );
    assert_eq!(condition(&status, "EngineFallback"), ("True", "EngineUnavailable"));
    assert_eq!(device(&status, "/p1-file").expect("reported")["engine"], "Plain");
    let engine = node.agent.engine(small());
    engine.save_durably(&(0..20).collect::<Vec<u64>>());
    node.apply_and_wait("the engine's session is reported", claims.clone(), |status| status["sessions"] == 1);
    drop(engine);

    // No release implements this one yet, so it is unavailable too.
    claims["claims"][0]["engine"] = json!("Gds");
    let status = node.apply_and_wait("the fallback is still used", claims, |status| {
        let is_open = state(status, "/p1-file") == Some("Open");
        is_open && condition(status, "EngineFallback").0 == "True" && status["sessions"] == 0
    });
    assert_eq!(device(&status, "/p1-file").expect("reported")["engine"], "Plain");
}
