//! Claims of devices by stable names: foreign data, removal and return, failures, conflicts.

use reprise_client::Source;
use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, LoadParams, PATIENCE};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;

use crate::in_cluster::node::{Node, condition, condition_message, device, device_claim, has_state, state};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn uses_a_blank_device_and_rejects_one_with_foreign_data(server: &ApiServer) {
    let node = Node::start(server, "foreign");
    node.env.require("a claimed device is not used");
    let foreign = node.add_device("nvme-foreign", b"XFSB");
    node.add_device("nvme-blank", b"");
    let claims = json!({ "claims": [device_claim("raw", "nvme-*")] });
    let status = node.apply_and_wait("both devices were checked", claims.clone(), |status| {
        state(status, "nvme-blank") == Some("Open") && state(status, "nvme-foreign") == Some("Refused")
    });
    let refused = device(&status, "nvme-foreign").expect("reported");
    assert_eq!(refused["reason"], "ForeignSignature", "{refused}");
    assert!(refused["message"].as_str().unwrap_or_default().contains("XFS"), "{refused}");
    assert_eq!(condition(&status, "DevicesReady"), ("False", "ForeignSignature"));
    assert_eq!(condition(&status, "Degraded"), ("True", "ForeignSignature"));
    assert!(condition_message(&status, "DevicesReady").contains("nvme-foreign"));
    assert!(
        std::fs::read(&foreign).expect("the device exists").starts_with(b"XFSB"),
        "the foreign data are intact"
    );
    node.agent.engine(small()).save_durably(&blocks());

    // The pool permits overwriting foreign data.
    node.env.require("overwriting foreign data on a device");
    let mut confirmed = claims;
    confirmed["claims"][0]["foreignSignatures"] = json!("Wipe");
    let status = node.apply_and_wait("both are used", confirmed, |status| {
        state(status, "nvme-blank") == Some("Open") && state(status, "nvme-foreign") == Some("Open")
    });
    assert_eq!(condition(&status, "DevicesReady"), ("True", "AsDesired"));
    let engine = node.agent.engine(small());
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_removed_device_is_faulted_and_returns_with_its_blocks(server: &ApiServer) {
    let node = Node::start(server, "unplugged");
    node.add_device("nvme-only", b"");
    let claims = json!({ "claims": [device_claim("raw", "nvme-only*")] });
    node.apply_and_wait("the device is open", claims, has_state("nvme-only", "Open"));
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    node.unlink_device("nvme-only");
    let status = node.wait_status("the device is faulted", has_state("nvme-only", "Faulted"));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "DeviceFailed"));
    assert_eq!(status["capacity"]["ssdTotal"], "0");
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnDram; 40]);
    node.link_device("nvme-only");
    node.wait_status("the device is open again", has_state("nvme-only", "Open"));
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_failed_device_is_faulted_and_engines_continue(server: &ApiServer) {
    let mut node = Node::start(server, "failing");
    node.env.require("the device rejects writes");
    let mut claims = node.open_pool();
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    // From now on the process cannot write beyond the first MiB of a file.
    let limit = |limit: Option<u64>, node: &mut Node<'_>| {
        let process = i32::try_from(node.agent.running().id()).ok().and_then(Pid::from_raw);
        prlimit(process, Resource::Fsize, Rlimit { current: limit, maximum: None })
            .expect("a child's limits can be set");
    };
    limit(Some(1 << 20), &mut node);
    let after: Vec<u64> = (100..120).collect();
    let committed = engine.save(&after).expect("there is room in memory");
    let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
    assert_eq!(outcome.durable, 0);
    let status = node.wait_status("the device is reported as faulted", has_state("/p1-file", "Faulted"));
    assert_eq!(condition(&status, "Degraded"), ("True", "DeviceFailed"));
    assert!(
        condition_message(&status, "DevicesReady").contains("no space"),
        "{}",
        condition_message(&status, "DevicesReady")
    );
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnDram; 40]);

    // The fault ends and the pool changes: the durable blocks are found again.
    limit(None, &mut node);
    claims["claims"][0]["generation"] = json!(2);
    node.apply_and_wait("the device is used again", claims, has_state("/p1-file", "Open"));
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_pool_with_max_devices_keeps_its_device_and_wipes_no_other(server: &ApiServer) {
    let mut node = Node::start(server, "fewer");
    node.env.allow("destroying the data of a device, as confirmed");
    let own = node.add_device("nvme-2", b"");
    let mut claims = json!({ "claims": [device_claim("raw", "nvme-*")] });
    claims["claims"][0]["maxDevices"] = json!(1);
    node.apply_and_wait("the device is open", claims.clone(), has_state("nvme-2", "Open"));
    node.agent.engine(small()).save_durably(&blocks());
    // Two more devices with earlier names: one with foreign data, and a blank one.
    let foreign = node.add_device("nvme-0", b"notes");
    node.add_device("nvme-1", b"");
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);

    claims["claims"][0]["wipe"] = json!(true);
    let status = node.apply_and_wait("the device is wiped", claims, has_state("nvme-2", "Wiped"));
    assert_eq!(
        status["devices"].as_array().map(Vec::len),
        Some(1),
        "no other device is reported: {status:#}"
    );
    assert!(std::fs::read(&own).expect("the device exists").iter().all(|byte| *byte == 0));
    assert!(std::fs::read(&foreign).expect("the device exists").starts_with(b"notes"));
}

pub(crate) fn a_device_that_two_pools_claim_belongs_to_the_first(server: &ApiServer) {
    let node = Node::start(server, "disputed");
    node.add_device("nvme-1", b"");
    node.add_device("nvme-2", b"");
    let claims = json!({
        "claims": [device_claim("narrow", "nvme-1"), device_claim("wide", "nvme-*"), device_claim("none", "scsi-*")]
    });
    let status = node.apply_and_wait("both are open", claims, |status| {
        state(status, "nvme-1") == Some("Open") && state(status, "nvme-2") == Some("Open")
    });
    let pool = |name: &str| device(&status, name).expect("reported")["pool"].clone();
    assert_eq!((pool("nvme-1"), pool("nvme-2")), (json!("narrow"), json!("wide")));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "Conflict"));
}
