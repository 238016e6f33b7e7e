//! Queue pairs of the node's controllers, reserved for GPUs as the spec requests and without a restart.

use reprise_e2e::{ApiServer, NvmeController};
use serde_json::{Value, json};

use crate::in_cluster::node::{Node, device_claim};

fn claim(uid: &str, isolation: &str, pairs: u32) -> Value {
    json!({
        "uid": uid, "allocation": format!("chat/{uid}"), "isolation": isolation,
        "controllers": [{ "serial": "S1", "queuePairs": pairs }],
    })
}

/// Returns an allocation's report: the number of reserved pairs, and the reason if it was rejected.
fn reported<'a>(status: &'a Value, uid: &str) -> Option<(u64, &'a str)> {
    let queues = status["applied"]["queues"].as_array()?;
    let found = queues.iter().find(|queues| queues["uid"] == uid)?;
    assert_eq!(found["queuePairs"], 0, "no engine has queue pairs of a controller of the kernel");
    let unavailable = found["unavailable"].as_str().unwrap_or_default();
    assert!(unavailable.contains("does not drive controller S1"), "{found}");
    Some((found["kept"].as_u64()?, found["refused"].as_str().unwrap_or_default()))
}

pub(crate) fn queue_pairs_are_reserved_as_specified_and_conflicts_are_rejected(server: &ApiServer) {
    let mut node = Node::start(server, "lending");
    node.env.require("cannot reserve queue pairs for a GPU");
    node.add_device("nvme-a", b"");
    NvmeController { number: 0, serial: "S1", pairs: 17, device: "nvme-a-device" }.create_under(&node.root());
    let claims = json!([device_claim("raw", "nvme-a")]);
    let spec = |queues: &[Value]| json!({ "claims": claims, "queues": queues });
    let (a, own) = (claim("a", "TrustedShared", 8), claim("own", "ExclusiveController", 4));
    let status = node.apply_and_wait("a has its queue pairs", spec(std::slice::from_ref(&a)), |status| {
        reported(status, "a") == Some((8, ""))
    });
    let controller = json!([{
        "serial": "S1", "pciAddress": "0000:00:00.0", "pool": "raw", "queuePairs": 17, "queuePairsLent": 0,
    }]);
    assert_eq!(status["controllers"], controller);
    let status = node.apply_and_wait("own is rejected", spec(&[a, own.clone()]), |status| {
        reported(status, "own").is_some_and(|(kept, _)| kept == 0)
    });
    assert_eq!(reported(&status, "a"), Some((8, "")));
    let why = reported(&status, "own").expect("checked above").1;
    assert_eq!(why, "chat/a has queue pairs of controller S1, which cannot be shared");
    node.apply_and_wait("a has released the controller", spec(&[own]), |status| {
        reported(status, "own") == Some((4, "")) && reported(status, "a").is_none()
    });
    // The reservation ends with the agent, and is restored at its next start.
    node.agent.stop();
    assert_eq!(reported(&node.status(), "own"), None);
    node.agent.start();
    node.wait_ready();
    node.wait_status("the pairs are reserved again", |status| reported(status, "own") == Some((4, "")));
    node.apply_and_wait("no allocation is left", spec(&[]), |status| status["applied"]["queues"].is_null());
}
