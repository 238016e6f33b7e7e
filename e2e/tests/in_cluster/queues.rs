//! Queue pairs of the node's controllers, kept for GPUs as the spec says and without a restart.

use reprise_e2e::{ApiServer, NvmeController};
use serde_json::{Value, json};

use crate::node::{Node, device_claim};

fn claim(uid: &str, isolation: &str, pairs: u32) -> Value {
    json!({
        "uid": uid, "allocation": format!("chat/{uid}"), "isolation": isolation,
        "controllers": [{ "serial": "S1", "queuePairs": pairs }],
    })
}

/// What is told of an allocation: how many pairs are kept for it, and why none.
fn told<'a>(status: &'a Value, uid: &str) -> Option<(u64, &'a str)> {
    let queues = status["applied"]["queues"].as_array()?;
    let found = queues.iter().find(|queues| queues["uid"] == uid)?;
    assert_eq!(found["queuePairs"], 0, "no agent makes queues");
    Some((found["kept"].as_u64()?, found["refused"].as_str().unwrap_or_default()))
}

pub(crate) fn queue_pairs_are_kept_while_the_spec_says_so_and_not_for_two_that_cannot_both_be(
    server: &ApiServer,
) {
    let mut node = Node::start(server, "lending");
    node.world.require("queue pairs cannot be kept for a GPU");
    node.add_device("nvme-a", b"");
    NvmeController { number: 0, serial: "S1", pairs: 17, device: "nvme-a-device" }.show(&node.root());
    let claims = json!([device_claim("raw", "nvme-a")]);
    let spec = |queues: &[Value]| json!({ "claims": claims, "queues": queues });
    let (a, own) = (claim("a", "TrustedShared", 8), claim("own", "ExclusiveController", 4));
    let status = node.bring("a has what it was granted", spec(std::slice::from_ref(&a)), |status| {
        told(status, "a") == Some((8, ""))
    });
    let controller = json!([{
        "serial": "S1", "pciAddress": "0000:00:00.0", "pool": "raw", "queuePairs": 17, "queuePairsLent": 0,
    }]);
    assert_eq!(status["controllers"], controller);
    let status = node.bring("own is refused", spec(&[a, own.clone()]), |status| {
        told(status, "own").is_some_and(|(kept, _)| kept == 0)
    });
    assert_eq!(told(&status, "a"), Some((8, "")));
    let why = told(&status, "own").expect("checked above").1;
    assert_eq!(why, "chat/a has controller S1, which is to be shared with nobody");
    node.bring("a has let go of it", spec(&[own]), |status| {
        told(status, "own") == Some((4, "")) && told(status, "a").is_none()
    });
    // It ends with the agent, and comes back with it.
    node.agent.stop();
    assert_eq!(told(&node.status(), "own"), None);
    node.agent.start();
    node.wait_ready();
    node.wait_status("it is kept again", |status| told(status, "own") == Some((4, "")));
    node.bring("nothing is granted", spec(&[]), |status| status["applied"]["queues"].is_null());
}
