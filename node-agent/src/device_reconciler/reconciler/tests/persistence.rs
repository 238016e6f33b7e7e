//! Which devices stay selected, which are wiped, and the states reported during retries.

use super::*;

fn wiped(uid: &str, paths: &[&str]) -> DesiredPool {
    DesiredPool { data: DataPolicy::Wipe, ..pool(uid, paths) }
}

fn holds(reconciler: &DeviceReconciler, path: &str) -> bool {
    reconciler.retained_paths(&[]).contains(path)
}

fn applied_claims(reconciler: &DeviceReconciler) -> usize {
    reconciler.claim_facts().len()
}

#[test]
fn device_to_wipe_stays_selected_so_that_no_other_is_wiped() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/b"])]);
    next_actions(&mut reconciler);
    assert!(holds(&reconciler, "/b"), "while it is opening");
    reconciler.opened("/b", DeviceId(0), opened(0));
    reconciler.set_desired(vec![wiped("u", &["/b"])]);
    assert_eq!(next_actions(&mut reconciler), ["close 0"]);
    assert!(holds(&reconciler, "/b"), "while it is closing");
    reconciler.released(DeviceId(0));
    assert!(holds(&reconciler, "/b"), "before the wipe");
    assert_eq!(next_actions(&mut reconciler), ["wipe /b"]);
    assert!(holds(&reconciler, "/b"), "during the wipe");
    reconciler.refused("/b", None, fault());
    assert!(holds(&reconciler, "/b"), "after a failed wipe");
    assert_eq!(short(&reconciler.next_actions(Retry::Refused)), ["wipe /b"]);
    reconciler.wiped("/b");
    assert!(holds(&reconciler, "/b"), "after the wipe");
}

#[test]
fn refused_device_is_deselected_unless_it_is_a_member_of_the_pool() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    next_actions(&mut reconciler);
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    assert!(!holds(&reconciler, "/a"));

    let mut reconciler = with_one_open();
    let mut other = pool("u", &["/a"]);
    other.devices[0].spec.engine = Engine::Plain;
    reconciler.set_desired(vec![other]);
    next_actions(&mut reconciler);
    reconciler.released(DeviceId(0));
    next_actions(&mut reconciler);
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    assert!(holds(&reconciler, "/a"), "it holds blocks");
}

#[test]
fn missing_device_stays_selected_until_its_claim_changes() {
    let mut reconciler = with_one_open();
    let mut missing_pool = pool("u", &["/a"]);
    missing_pool.devices[0].presence = Presence::Missing;
    reconciler.set_desired(vec![missing_pool]);
    next_actions(&mut reconciler);
    reconciler.released(DeviceId(0));
    assert!(reconciler.retained_paths(&[claim("u", 1)]).contains("/a"));
    for other in [vec![claim("u", 2)], vec![claim("v", 1)], Vec::new()] {
        assert!(!reconciler.retained_paths(&other).contains("/a"), "{other:?}");
    }
}

#[test]
fn wipe_request_has_the_pool_of_the_claim_also_after_a_restart() {
    let records = with_one_open().records().clone();
    let mut reconciler = DeviceReconciler::with_records(records);
    reconciler.set_desired(vec![wiped("u", &["/a", "/b"]), wiped("v", &["/c"])]);
    let actions = reconciler.next_actions(Retry::None);
    let wipes = actions.iter().map(|action| match action {
        Action::Wipe(WipeRequest { path, pool, is_member, .. }) => (path.as_str(), *pool, *is_member),
        other => panic!("expected a wipe, got {other:?}"),
    });
    let expected = [("/a", Some([1; 16]), true), ("/b", Some([1; 16]), false), ("/c", None, false)];
    assert_eq!(wipes.collect::<Vec<_>>(), expected);
    // One wipe is done; the other device still belongs to the same pool.
    reconciler.wiped("/a");
    reconciler.refused("/b", None, fault());
    let actions = reconciler.next_actions(Retry::Refused);
    let [Action::Wipe(again)] = &actions[..] else { panic!("expected one wipe: {actions:?}") };
    assert_eq!((again.path.as_str(), again.pool), ("/b", Some([1; 16])));
}

#[test]
fn after_a_restart_a_blank_device_joins_the_pool_of_a_late_device() {
    let records = with_one_open().records().clone();
    let mut reconciler = DeviceReconciler::with_records(records);
    reconciler.set_desired(vec![pool("u", &["/b"])]);
    let actions = reconciler.next_actions(Retry::None);
    let [Action::Open { identity, .. }] = &actions[..] else {
        panic!("expected one open action: {actions:?}")
    };
    let stranger = Membership { uuid: [9; 16], index: 5 };
    assert!(identity.clone().enter(&"/b".into(), stranger).is_err(), "the pool identity is that of /a");
}

#[test]
fn refused_device_is_reported_as_refused_during_retries() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    next_actions(&mut reconciler);
    assert_eq!(
        (state(&reconciler, "/a"), reconciler.is_attempted(), applied_claims(&reconciler)),
        (Some(DeviceState::Opening), false, 0)
    );
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    for _ in 0..2 {
        assert_eq!(short(&reconciler.next_actions(Retry::Refused)), ["open /a=0"]);
        let (_, fact) = reconciler.device_facts().remove(0);
        assert_eq!((fact.state, fact.fault), (DeviceState::Refused, Some(fault())));
        assert_eq!((reconciler.is_attempted(), applied_claims(&reconciler)), (true, 1));
        reconciler.refused("/a", Some(DeviceId(0)), fault());
    }
    let newer = DesiredPool { generation: 2, ..pool("u", &["/a"]) };
    reconciler.set_desired(vec![newer]);
    next_actions(&mut reconciler);
    assert_eq!(
        (state(&reconciler, "/a"), reconciler.is_attempted(), applied_claims(&reconciler)),
        (Some(DeviceState::Opening), false, 0)
    );
    reconciler.opened("/a", DeviceId(0), opened(0));
    assert_eq!((state(&reconciler, "/a"), applied_claims(&reconciler)), (Some(DeviceState::Open), 1));
}

#[test]
fn claim_that_changes_during_a_retry_is_not_applied_yet() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![pool("u", &["/a"])]);
    next_actions(&mut reconciler);
    reconciler.refused("/a", Some(DeviceId(0)), fault());
    reconciler.next_actions(Retry::Refused);
    reconciler.set_desired(vec![DesiredPool { generation: 2, ..wiped("u", &["/a"]) }]);
    assert!(next_actions(&mut reconciler).is_empty(), "the device is opening");
    assert_eq!((reconciler.is_attempted(), applied_claims(&reconciler)), (false, 0));
}

#[test]
fn wipe_in_progress_counts_as_attempted_but_not_as_applied() {
    let mut reconciler = DeviceReconciler::default();
    reconciler.set_desired(vec![wiped("u", &["/a"])]);
    assert_eq!(next_actions(&mut reconciler), ["wipe /a"]);
    assert_eq!((reconciler.is_attempted(), applied_claims(&reconciler)), (true, 0));
    reconciler.wiped("/a");
    assert_eq!(
        (reconciler.is_attempted(), applied_claims(&reconciler), state(&reconciler, "/a")),
        (true, 1, Some(DeviceState::Wiped))
    );
}

#[test]
fn device_with_a_failed_sync_is_reused_only_with_direct_io_or_after_a_wipe() {
    for (direct, again) in [(true, "open /a=0"), (false, "")] {
        let mut reconciler = DeviceReconciler::default();
        reconciler.set_desired(vec![pool("u", &["/a"])]);
        next_actions(&mut reconciler);
        reconciler.opened("/a", DeviceId(0), OpenDevice { direct, ..opened(0) });
        reconciler.lost(DeviceId(0), "sync error", LossCause::Sync);
        reconciler.set_desired(vec![DesiredPool { generation: 2, ..pool("u", &["/a"]) }]);
        assert_eq!(next_actions(&mut reconciler), ["close 0"]);
        reconciler.released(DeviceId(0));
        assert_eq!(short(&reconciler.next_actions(Retry::Refused)).concat(), again);
        let expected = if direct { DeviceState::Opening } else { DeviceState::Refused };
        assert_eq!(state(&reconciler, "/a"), Some(expected));
        if !direct {
            reconciler.set_desired(vec![wiped("u", &["/a"])]);
            assert_eq!(next_actions(&mut reconciler), ["wipe /a"]);
            reconciler.wiped("/a");
            reconciler.set_desired(vec![pool("u", &["/a"])]);
            assert_eq!(next_actions(&mut reconciler), ["open /a=0"]);
        }
    }
}
