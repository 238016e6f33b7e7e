//! Claims of devices by their stable names: whose they are, that they come and go, that they fail.

use reprise_client::Source;
use reprise_e2e::content::small;
use reprise_e2e::{ApiServer, Loading, PATIENCE};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;

use crate::node::{Node, condition, device, device_claim, file_claim, state, words};

fn blocks() -> Vec<u64> {
    (0..40).collect()
}

pub(crate) fn a_device_with_somebody_elses_data_is_left_alone_and_one_that_is_blank_is_used(
    server: &ApiServer,
) {
    let node = Node::start(server, "foreign");
    node.world.require("a device of a claim is not used");
    let theirs = node.add_device("nvme-theirs", b"XFSB");
    node.add_device("nvme-blank", b"");
    let claims = json!({ "claims": [device_claim("raw", "nvme-*")] });
    let status = node.bring("both devices were looked at", claims.clone(), |status| {
        state(status, "nvme-blank") == Some("Open") && state(status, "nvme-theirs") == Some("Refused")
    });
    let told = device(&status, "nvme-theirs").expect("there");
    assert_eq!(told["reason"], "ForeignSignature", "{told}");
    assert!(told["message"].as_str().unwrap_or_default().contains("XFS"), "{told}");
    assert_eq!(condition(&status, "DevicesReady"), ("False", "ForeignSignature"));
    assert_eq!(condition(&status, "Degraded"), ("True", "ForeignSignature"));
    assert!(words(&status, "DevicesReady").contains("nvme-theirs"));
    assert!(std::fs::read(&theirs).expect("it is there").starts_with(b"XFSB"), "nobody has written to it");
    node.agent.engine(small()).save_durably(&blocks());

    // The pool says that it may be overwritten.
    node.world.require("overwriting what is on a device");
    let mut confirmed = claims;
    confirmed["claims"][0]["foreignSignatures"] = json!("Wipe");
    let status = node.bring("both are used", confirmed, |status| {
        state(status, "nvme-blank") == Some("Open") && state(status, "nvme-theirs") == Some("Open")
    });
    assert_eq!(condition(&status, "DevicesReady"), ("True", "AsDesired"));
    let engine = node.agent.engine(small());
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_device_that_goes_away_is_faulted_and_comes_back_with_its_blocks(server: &ApiServer) {
    let node = Node::start(server, "unplugged");
    node.add_device("nvme-only", b"");
    let claims = json!({ "claims": [device_claim("raw", "nvme-only*")] });
    node.bring("it is open", claims, |status| state(status, "nvme-only") == Some("Open"));
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    node.unlink_device("nvme-only");
    let status = node.wait_status("it is missed", |status| state(status, "nvme-only") == Some("Faulted"));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "DeviceFailed"));
    assert_eq!(status["capacity"]["ssdTotal"], "0");
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnDram; 40]);
    node.link_device("nvme-only");
    node.wait_status("it is back", |status| state(status, "nvme-only") == Some("Open"));
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_device_that_fails_is_faulted_and_engines_go_on(server: &ApiServer) {
    let mut node = Node::start(server, "failing");
    node.world.require("device lost");
    let mut claims = json!({ "claims": [file_claim("p1")] });
    node.bring("the pool is open", claims.clone(), |status| state(status, "/p1-file") == Some("Open"));
    let engine = node.agent.engine(small());
    engine.save_durably(&blocks());
    // From now on the disk takes no more of the agent's files than their first MiB.
    let limit = |limit: Option<u64>, node: &mut Node<'_>| {
        let process = i32::try_from(node.agent.running().id()).ok().and_then(Pid::from_raw);
        prlimit(process, Resource::Fsize, Rlimit { current: limit, maximum: None }).expect("one's own child");
    };
    limit(Some(1 << 20), &mut node);
    let after: Vec<u64> = (100..120).collect();
    let committed = engine.save(&after).expect("there is room in memory");
    let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    assert_eq!(outcome.durable, 0);
    let status = node.wait_status("the device is told to have failed", |status| {
        state(status, "/p1-file") == Some("Faulted")
    });
    assert_eq!(condition(&status, "Degraded"), ("True", "DeviceFailed"));
    assert!(words(&status, "DevicesReady").contains("no space"), "{}", words(&status, "DevicesReady"));
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnDram; 40]);

    // It is mended, and the pool changed: what was durable is there.
    limit(None, &mut node);
    claims["claims"][0]["generation"] = json!(2);
    node.bring("the device is used again", claims, |status| state(status, "/p1-file") == Some("Open"));
    engine.trim();
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);
}

pub(crate) fn a_pool_of_fewer_devices_than_match_keeps_its_own_and_its_wipe_destroys_no_other(
    server: &ApiServer,
) {
    let mut node = Node::start(server, "fewer");
    node.world.allow("destroying the data of a device, as was confirmed");
    let own = node.add_device("nvme-2", b"");
    let mut claims = json!({ "claims": [device_claim("raw", "nvme-*")] });
    claims["claims"][0]["maxDevices"] = json!(1);
    node.bring("it is open", claims.clone(), |status| state(status, "nvme-2") == Some("Open"));
    node.agent.engine(small()).save_durably(&blocks());
    // Two more with earlier names: one with somebody's notes, and a blank one.
    let theirs = node.add_device("nvme-0", b"notes");
    node.add_device("nvme-1", b"");
    node.agent.kill();
    node.agent.start();
    node.wait_ready();
    let engine = node.agent.engine(small());
    assert_eq!(engine.load_all(&blocks(), &Loading::LOCAL), vec![Source::OwnNvme; 40]);

    claims["claims"][0]["wipe"] = json!(true);
    let status = node.bring("it is wiped", claims, |status| state(status, "nvme-2") == Some("Wiped"));
    assert_eq!(status["devices"].as_array().map(Vec::len), Some(1), "no other was touched: {status:#}");
    assert!(std::fs::read(&own).expect("it is there").iter().all(|byte| *byte == 0));
    assert!(std::fs::read(&theirs).expect("it is there").starts_with(b"notes"));
}

pub(crate) fn devices_that_two_pools_want_go_to_the_first(server: &ApiServer) {
    let node = Node::start(server, "disputed");
    node.add_device("nvme-1", b"");
    node.add_device("nvme-2", b"");
    let claims = json!({
        "claims": [device_claim("narrow", "nvme-1"), device_claim("wide", "nvme-*"), device_claim("none", "scsi-*")]
    });
    let status = node.bring("both are open", claims, |status| {
        state(status, "nvme-1") == Some("Open") && state(status, "nvme-2") == Some("Open")
    });
    let pool = |name: &str| device(&status, name).expect("there")["pool"].clone();
    assert_eq!((pool("nvme-1"), pool("nvme-2")), (json!("narrow"), json!("wide")));
    assert_eq!(condition(&status, "DevicesReady"), ("False", "Conflict"));
}
