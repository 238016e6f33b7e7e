//! When files may be created, and when they must exist.

use std::path::PathBuf;

use super::*;

/// Returns how the next attempt treats a missing file.
fn missing(reconciler: &mut DeviceReconciler, wanted: DesiredPool) -> IfMissing {
    reconciler.set_desired(vec![wanted]);
    let actions = reconciler.next_actions(Retry::Refused);
    let [Action::Open { devices, .. }] = &actions[..] else {
        panic!("expected one open action: {actions:?}")
    };
    devices[0].missing
}

fn file_claim(uid: &str, path: &str) -> Claim {
    Claim { source: Source::File(PathBuf::from(path)), ..claim(uid, 1) }
}

/// Returns the records of an agent that had the file of pool `u` open.
fn records() -> DeviceRecords {
    let mut reconciler = DeviceReconciler::default();
    assert_eq!(missing(&mut reconciler, file("u", "/a")), IfMissing::Create, "it was never opened");
    reconciler.opened("/a", DeviceId(0), opened(0));
    reconciler.records().clone()
}

#[test]
fn after_a_restart_the_file_of_a_claim_must_exist() {
    let mut reconciler = DeviceReconciler::with_records(records());
    reconciler.release_unclaimed(&[file_claim("u", "/a")]);
    assert_eq!(missing(&mut reconciler, file("u", "/a")), IfMissing::Fail);
    reconciler.refused("/a", Some(DeviceId(0)), missing_file_fault());
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Refused));
    assert!(reconciler.is_attempted() && next_actions(&mut reconciler).is_empty());
    // It is retried periodically, after its path failed to resolve, and when the pool changes.
    let mut missing_pool = file("u", "/a");
    missing_pool.devices[0].presence = Presence::Missing;
    assert_eq!(missing(&mut reconciler, missing_pool), IfMissing::Fail);
    reconciler.refused("/a", Some(DeviceId(0)), missing_file_fault());
    let newer = DesiredPool { generation: 2, ..file("u", "/a") };
    assert_eq!(missing(&mut reconciler, newer), IfMissing::Fail);
    // The file is restored.
    reconciler.opened("/a", DeviceId(0), opened(0));
    assert_eq!(state(&reconciler, "/a"), Some(DeviceState::Open));
}

#[test]
fn file_that_disappears_while_open_is_not_recreated_when_its_pool_changes() {
    let mut reconciler = DeviceReconciler::with_records(records());
    missing(&mut reconciler, file("u", "/a"));
    reconciler.opened("/a", DeviceId(0), opened(0));
    let mut missing_pool = file("u", "/a");
    missing_pool.devices[0].presence = Presence::Missing;
    reconciler.set_desired(vec![missing_pool]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    reconciler.released(DeviceId(0));
    let (_, fact) = reconciler.device_facts().remove(0);
    assert_eq!((fact.state, fact.fault), (DeviceState::Faulted, Some(missing_file_fault())));
    let newer = DesiredPool { generation: 2, ..file("u", "/a") };
    assert!(!reconciler.retained_paths(&[Claim { generation: 2, ..file_claim("u", "/a") }]).contains("/a"));
    assert_eq!(missing(&mut reconciler, newer), IfMissing::Fail);
}

#[test]
fn pool_with_another_uid_or_path_starts_with_a_blank_file() {
    for wanted in [file("v", "/a"), file("u", "/b")] {
        assert_eq!(missing(&mut DeviceReconciler::with_records(records()), wanted), IfMissing::Create);
    }
}

#[test]
fn node_that_was_removed_from_the_pool_starts_with_a_blank_file() {
    for others in [Vec::new(), vec![file_claim("v", "/a")], vec![file_claim("u", "/b")]] {
        let mut reconciler = DeviceReconciler::with_records(records());
        reconciler.release_unclaimed(&others);
        reconciler.release_unclaimed(&[file_claim("u", "/a")]);
        assert_eq!(missing(&mut reconciler, file("u", "/a")), IfMissing::Create, "{others:?}");
    }
}

#[test]
fn wiped_file_is_recreated() {
    let mut reconciler = DeviceReconciler::with_records(records());
    reconciler.set_desired(vec![DesiredPool { data: DataPolicy::Wipe, ..file("u", "/a") }]);
    assert_eq!(next_actions(&mut reconciler), ["wipe /a"]);
    reconciler.refused("/a", None, fault());
    assert_eq!(
        missing(&mut DeviceReconciler::with_records(reconciler.records().clone()), file("u", "/a")),
        IfMissing::Fail,
        "it was not wiped"
    );
    let again = reconciler.next_actions(Retry::Refused);
    let [Action::Wipe(device)] = &again[..] else { panic!("expected a wipe: {again:?}") };
    assert!(device.is_expected, "a missing file does not count as wiped");
    // The agent may stop before the file is removed.
    reconciler.erased("/a");
    let mut after = DeviceReconciler::with_records(reconciler.records().clone());
    after.set_desired(vec![DesiredPool { data: DataPolicy::Wipe, ..file("u", "/a") }]);
    let after = after.next_actions(Retry::None);
    let [Action::Wipe(device)] = &after[..] else { panic!("expected another wipe: {after:?}") };
    assert!(!device.is_expected, "it may have been removed since");
    reconciler.wiped("/a");
    assert_eq!(missing(&mut reconciler, file("u", "/a")), IfMissing::Create);
}

#[test]
fn no_file_is_created_in_place_of_a_device_even_if_its_size_is_known() {
    let mut wanted = pool("u", &["/dev/disk/by-id/x"]);
    wanted.devices[0].spec.bytes = Some(1 << 30);
    assert_eq!(missing(&mut DeviceReconciler::default(), wanted), IfMissing::Fail);
}
