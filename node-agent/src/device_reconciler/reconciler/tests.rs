//! Actions on devices: single situations, and random sequences that must converge to the claims.

use reprise_agent_kubernetes::{DeviceState, Source};

use super::*;

fn spec(uid: &str) -> DeviceSpec {
    DeviceSpec {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        kind: Kind::Device,
        bytes: None,
        reserve_bytes: None,
        engine: Engine::IoUring,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
    }
}

fn pool(uid: &str, paths: &[&str]) -> DesiredPool {
    let device = |path: &&str| DesiredDevice {
        path: (*path).to_owned(),
        description: Path::new(path).into(),
        presence: Presence::Present,
        spec: spec(uid),
    };
    DesiredPool {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        generation: 1,
        data: DataPolicy::Keep,
        devices: paths.iter().map(device).collect(),
        fault: None,
    }
}

/// Returns a pool with one file.
fn file(uid: &str, path: &str) -> DesiredPool {
    let mut wanted = pool(uid, &[path]);
    wanted.devices[0].spec.kind = Kind::File;
    wanted
}

fn claim(uid: &str, generation: i64) -> Claim {
    Claim {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        generation,
        source: Source::Devices { globs: vec!["/*".to_owned()], most: 1 },
        serials: Vec::new(),
        namespace: None,
        bytes: None,
        reserve_bytes: None,
        engine: Engine::IoUring,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
        max_read_latency: None,
        max_media_errors: None,
        min_spare_percent: None,
        data: DataPolicy::Keep,
    }
}

fn opened(index: u8) -> OpenDevice {
    OpenDevice {
        membership: Membership { uuid: [1; 16], index },
        engine: Engine::IoUring,
        fallback: None,
        direct: true,
    }
}

fn fault() -> DeviceFault {
    DeviceFault { reason: Reason::DeviceFailed, message: "broken".to_owned() }
}

/// Formats actions in short form.
fn short(actions: &[Action]) -> Vec<String> {
    let one = |action: &Action| match action {
        Action::Open { devices, .. } => {
            let devices: Vec<String> =
                devices.iter().map(|device| format!("{}={}", device.path, device.id.0)).collect();
            format!("open {}", devices.join(" "))
        }
        Action::Wipe(device) => format!("wipe {}", device.path),
        Action::Detach(id) => format!("close {}", id.0),
    };
    actions.iter().map(one).collect()
}

fn next_actions(reconciler: &mut DeviceReconciler) -> Vec<String> {
    short(&reconciler.next_actions(Retry::None))
}

fn state(reconciler: &DeviceReconciler, path: &str) -> Option<DeviceState> {
    reconciler.device_facts().into_iter().find(|(_, fact)| fact.path == path).map(|(_, fact)| fact.state)
}

/// Returns a reconciler with `/a` of pool `u` open under number 0.
fn with_one_open() -> DeviceReconciler {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
    assert!(!reconciler.is_attempted());
    reconciler.opened("/a", DeviceId(0), opened(0));
    assert!(reconciler.is_attempted());
    reconciler
}

#[test]
fn desired_device_is_opened_once() {
    let mut reconciler = with_one_open();
    assert!(next_actions(&mut reconciler).is_empty());
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Open));
    assert_eq!(reconciler.claim_facts()[0].generation, 1);
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    reconciler.set_desired(vec![newer]);
    assert!(next_actions(&mut reconciler).is_empty(), "the change does not concern the device");
    assert_eq!(reconciler.claim_facts()[0].generation, 2);
}

#[test]
fn reconciler_without_desired_pools_has_no_actions() {
    let mut reconciler = DeviceReconciler::default();
    assert!(reconciler.is_attempted() && next_actions(&mut reconciler).is_empty());
}

#[test]
fn unclaimed_device_is_closed_and_its_number_is_reused() {
    let mut reconciler = with_one_open();
    reconciler.set_desired(Vec::new());
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.set_desired(vec![pool("v", &["/b"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /b=1"], "the first number is still in use");
    reconciler.released(DeviceId(0));
    assert!(next_actions(&mut reconciler).is_empty());
    assert_eq!(state(&reconciler, "/a"), None);
    reconciler.opened("/b", DeviceId(1), opened(0));
    reconciler.set_desired(vec![pool("v", &["/b", "/c"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /c=0"]);
}

#[test]
fn changed_spec_reopens_the_device() {
    let mut reconciler = with_one_open();
    let mut other = pool("u", &["/a"]);
    other.devices[0].spec.engine = Engine::Plain;
    reconciler.set_desired(vec![other]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    assert!(!reconciler.is_attempted() && reconciler.claim_facts().is_empty(), "not applied yet");
    assert!(next_actions(&mut reconciler).is_empty(), "the core has not released it");
    reconciler.released(DeviceId(0));
    let actions = reconciler.next_actions(Retry::None);
    assert_eq!(short(&actions), ["open /a=0"]);
    let Action::Open { devices, .. } = &actions[0] else { panic!("expected an open action") };
    assert_eq!(devices[0].spec.engine, Engine::Plain);
}

#[test]
fn pool_of_the_same_name_with_another_uid_is_another_pool() {
    let mut reconciler = with_one_open();
    reconciler.set_desired(vec![pool("other", &["/a"])]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
}

#[test]
fn devices_of_one_pool_are_opened_together_and_later_ones_join() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a", "/b"]), pool("v", &["/c"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /a=0 /b=1", "open /c=2"]);
    reconciler.set_desired(vec![pool("u", &["/a", "/b", "/d"]), pool("v", &["/c"])]);
    assert!(next_actions(&mut reconciler).is_empty(), "the pool identity is not known yet");
    reconciler.opened("/a", DeviceId(0), opened(0));
    reconciler.refused("/b", Some(DeviceId(1)), fault());
    let actions = reconciler.next_actions(Retry::None);
    assert_eq!(short(&actions), ["open /d=1"]);
    let Action::Open { identity, .. } = &actions[0] else { panic!("expected an open action") };
    let stranger = Membership { uuid: [9; 16], index: 5 };
    assert!(identity.clone().enter(&"/d".into(), stranger).is_err(), "the pool identity is that of /a");
}

#[test]
fn options_for_opening_do_not_affect_open_devices_and_retry_refused_ones() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a", "/b"])]);
    next_actions(&mut reconciler);
    reconciler.opened("/a", DeviceId(0), opened(0));
    reconciler.refused("/b", Some(DeviceId(1)), fault());
    let mut other = pool("u", &["/a", "/b"]);
    for device in &mut other.devices {
        (device.spec.foreign, device.spec.fallback) = (ForeignSignatures::Wipe, FallbackEngine::Plain);
    }
    reconciler.set_desired(vec![other]);
    assert_eq!(next_actions(&mut reconciler), ["open /b=1"]);
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Open));
}

#[test]
fn device_waits_until_others_of_its_pool_are_closed_and_joins_them() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a", "/b"])]);
    next_actions(&mut reconciler);
    reconciler.opened("/a", DeviceId(0), opened(0));
    reconciler.refused("/b", Some(DeviceId(1)), fault());
    let mut other = pool("u", &["/a", "/b"]);
    other.devices.iter_mut().for_each(|device| device.spec.bytes = Some(1 << 30));
    reconciler.set_desired(vec![other]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    assert!(next_actions(&mut reconciler).is_empty(), "the identity is read from the closed device first");
    reconciler.released(DeviceId(0));
    assert_eq!(next_actions(&mut reconciler), ["open /a=0 /b=1"]);
}

#[test]
fn blank_device_joins_a_pool_whose_other_device_is_missing() {
    let mut reconciler = with_one_open();
    let mut both = pool("u", &["/a", "/b"]);
    both.devices[0].presence = Presence::Missing;
    reconciler.set_desired(vec![both]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.released(DeviceId(0));
    let actions = reconciler.next_actions(Retry::None);
    let [Action::Open { identity, devices }] = &actions[..] else {
        panic!("expected one open action: {actions:?}")
    };
    assert_eq!(devices[0].path, "/b");
    let mut identity = identity.clone();
    assert!(identity.enter(&"/c".into(), Membership { uuid: [9; 16], index: 7 }).is_err());
    assert!(
        identity.enter(&"/c".into(), Membership { uuid: [1; 16], index: 0 }).is_err(),
        "/a has that index"
    );
    assert!(identity.enter(&"/c".into(), Membership { uuid: [1; 16], index: 1 }).is_ok());
}

#[test]
fn claim_removed_while_its_device_is_opening_closes_it_afterwards() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    next_actions(&mut reconciler);
    reconciler.set_desired(Vec::new());
    assert!(next_actions(&mut reconciler).is_empty());
    reconciler.opened("/a", DeviceId(0), opened(0));
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
}

#[test]
fn refused_device_is_retried_periodically_and_when_its_claim_changes() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    next_actions(&mut reconciler);
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    assert!(reconciler.is_attempted(), "it was attempted");
    assert_eq!(
        (next_actions(&mut reconciler).len(), state(&reconciler, "/a")),
        (0, Some(DeviceState::Refused))
    );
    assert_eq!(short(&reconciler.next_actions(Retry::Refused)), ["open /a=0"]);
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    reconciler.set_desired(vec![newer]);
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
}

#[test]
fn failed_device_stays_faulted_until_its_claim_changes() {
    let mut reconciler = with_one_open();
    reconciler.lost(DeviceId(0), "write error", LossCause::Other);
    assert!(reconciler.next_actions(Retry::Refused).is_empty());
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Faulted));
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    reconciler.set_desired(vec![newer]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.released(DeviceId(0));
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
}

#[test]
fn device_that_rejects_writes_keeps_its_engine_and_the_reason_for_it_and_can_still_be_lost() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
    let fallback = DeviceFault { reason: Reason::EngineUnavailable, message: "no io_uring".to_owned() };
    let plain = OpenDevice { engine: Engine::Plain, fallback: Some(fallback.clone()), ..opened(0) };
    reconciler.opened("/a", DeviceId(0), plain);
    let fact = |reconciler: &DeviceReconciler| reconciler.device_facts().remove(0);
    let (id, open) = fact(&reconciler);
    assert_eq!((id, open.fault, open.fallback), (Some(DeviceId(0)), None, Some(fallback.clone())));
    for _ in 0..2 {
        reconciler.rejects_writes(DeviceId(0), "no space");
        assert!(reconciler.next_actions(Retry::Refused).is_empty(), "its blocks are still read");
        let (id, rejecting) = fact(&reconciler);
        assert_eq!((id, rejecting.state), (Some(DeviceId(0)), DeviceState::Faulted));
        assert!(rejecting.fault.expect("it rejects writes").message.contains("no space"));
        assert_eq!((rejecting.engine, rejecting.fallback), (Some(Engine::Plain), Some(fallback.clone())));
    }
    reconciler.lost(DeviceId(0), "read error", LossCause::Other);
    let (id, lost) = fact(&reconciler);
    assert!(lost.fault.expect("it failed").message.contains("read error"));
    assert_eq!((id, lost.engine, lost.fallback), (None, None, None));
    reconciler.set_desired(Vec::new());
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
}

#[test]
fn missing_device_is_faulted_and_opened_when_it_reappears() {
    let mut reconciler = with_one_open();
    let mut missing_pool = pool("u", &["/a"]);
    missing_pool.devices[0].presence = Presence::Missing;
    reconciler.set_desired(vec![missing_pool.clone()]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Faulted));
    reconciler.released(DeviceId(0));
    assert!(next_actions(&mut reconciler).is_empty());
    assert!(reconciler.retained_paths(&[claim("u", 1)]).contains("/a"), "its path is still selected");
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Faulted));
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
}

#[test]
fn removed_open_file_is_faulted_and_a_new_file_is_created() {
    let file = |presence: Presence| {
        let mut wanted = file("u", "/a");
        wanted.devices[0].presence = presence;
        vec![wanted]
    };
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(file(Presence::Missing));
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"], "the refused file is retried");
    reconciler.opened("/a", DeviceId(0), opened(0));
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.released(DeviceId(0));
    assert!(next_actions(&mut reconciler).is_empty(), "a blank file would hide the loss of blocks");
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Faulted));
    reconciler.set_desired(file(Presence::Present));
    assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
}

#[test]
fn wipe_closes_the_device_first_and_is_reported_until_the_claim_is_removed() {
    let mut reconciler = with_one_open();
    let mut wiped = pool("u", &["/a"]);
    wiped.data = DataPolicy::Wipe;
    reconciler.set_desired(vec![wiped]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.released(DeviceId(0));
    assert_eq!(next_actions(&mut reconciler), ["wipe /a"]);
    assert!(next_actions(&mut reconciler).is_empty(), "it is in progress");
    reconciler.wiped("/a");
    assert!(reconciler.next_actions(Retry::Refused).is_empty());
    assert_eq!((state(&reconciler, "/a"), reconciler.is_attempted()), (Some(DeviceState::Wiped), true));
    reconciler.set_desired(Vec::new());
    next_actions(&mut reconciler);
    assert_eq!(state(&reconciler, "/a"), None);
}

#[test]
fn devices_beyond_the_limit_of_numbers_are_refused() {
    let paths: Vec<String> = (0..=OPEN_DEVICES_MAX).map(|number| format!("/{number:02}")).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &paths)]);
    let actions = reconciler.next_actions(Retry::None);
    let Action::Open { devices, .. } = &actions[0] else { panic!("expected an open action") };
    assert_eq!((actions.len(), devices.len()), (1, usize::from(OPEN_DEVICES_MAX)));
    assert_eq!(state(&reconciler, paths[usize::from(OPEN_DEVICES_MAX)]), Some(DeviceState::Refused));
}

mod files;
mod persistence;
mod random;
