//! Which devices keep their place, what is destroyed, and what is told while the same is tried again.

use super::*;

fn wiped(uid: &str, paths: &[&str]) -> WantedPool {
    WantedPool { data: Data::Wiped, ..pool(uid, paths) }
}

fn holds(board: &Board, path: &str) -> bool {
    board.held(&[]).contains(path)
}

fn followed(board: &Board) -> usize {
    board.claims().len()
}

#[test]
fn a_device_keeps_its_place_until_it_is_wiped_and_after_so_that_no_other_is_wiped_in_its_place() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/b"])]);
    decide(&mut board);
    assert!(holds(&board, "/b"), "while it is opened");
    board.opened("/b", DeviceId(0), opened(0));
    board.want(vec![wiped("u", &["/b"])]);
    assert_eq!(decide(&mut board), ["close 0"]);
    assert!(holds(&board, "/b"), "while it is closed");
    board.released(DeviceId(0));
    assert!(holds(&board, "/b"), "before anything is done with it");
    assert_eq!(decide(&mut board), ["wipe /b"]);
    assert!(holds(&board, "/b"), "while it is wiped");
    board.refused("/b", None, trouble());
    assert!(holds(&board, "/b"), "when that has failed");
    assert_eq!(short(&board.decide(Retry::Refused)), ["wipe /b"]);
    board.wiped("/b");
    assert!(holds(&board, "/b"), "when it is done");
}

#[test]
fn a_device_that_was_refused_makes_room_for_another_unless_it_was_one_of_the_pool() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    decide(&mut board);
    board.refused("/a", Some(DeviceId(0)), trouble());
    assert!(!holds(&board, "/a"));

    let mut board = with_one_open();
    let mut other = pool("u", &["/a"]);
    other.places[0].recipe.engine = Engine::Plain;
    board.want(vec![other]);
    decide(&mut board);
    board.released(DeviceId(0));
    decide(&mut board);
    board.refused("/a", Some(DeviceId(0)), trouble());
    assert!(holds(&board, "/a"), "its blocks are there");
}

#[test]
fn a_device_that_is_gone_keeps_its_place_until_its_claim_changes() {
    let mut board = with_one_open();
    let mut gone = pool("u", &["/a"]);
    gone.places[0].presence = Presence::Gone;
    board.want(vec![gone]);
    decide(&mut board);
    board.released(DeviceId(0));
    assert!(board.held(&[claim("u", 1)]).contains("/a"));
    for other in [vec![claim("u", 2)], vec![claim("v", 1)], Vec::new()] {
        assert!(!board.held(&other).contains("/a"), "{other:?}");
    }
}

#[test]
fn a_wipe_names_the_pool_that_the_claim_had_also_after_a_restart() {
    let known = with_one_open().known().clone();
    let mut board = Board::knowing(known);
    board.want(vec![wiped("u", &["/a", "/b"]), wiped("v", &["/c"])]);
    let actions = board.decide(Retry::Nothing);
    let wipes = actions.iter().map(|action| match action {
        Action::Wipe(ToWipe { path, pool, is_member, .. }) => (path.as_str(), *pool, *is_member),
        other => panic!("{other:?} is no wipe"),
    });
    let expected = [("/a", Some([1; 16]), true), ("/b", Some([1; 16]), false), ("/c", None, false)];
    assert_eq!(wipes.collect::<Vec<_>>(), expected);
    // One of them is done: the other is still of no other pool.
    board.wiped("/a");
    board.refused("/b", None, trouble());
    let actions = board.decide(Retry::Refused);
    let [Action::Wipe(again)] = &actions[..] else { panic!("one is wiped again: {actions:?}") };
    assert_eq!((again.path.as_str(), again.pool), ("/b", Some([1; 16])));
}

#[test]
fn after_a_restart_a_fresh_device_joins_the_pool_whose_device_is_late() {
    let known = with_one_open().known().clone();
    let mut board = Board::knowing(known);
    board.want(vec![pool("u", &["/b"])]);
    let actions = board.decide(Retry::Nothing);
    let [Action::Open { identity, .. }] = &actions[..] else { panic!("one is opened: {actions:?}") };
    let stranger = Membership { uuid: [9; 16], index: 5 };
    assert!(identity.clone().enter("/b".as_ref(), stranger).is_err(), "the pool is that of /a");
}

#[test]
fn what_was_refused_is_told_so_while_the_same_is_tried_again() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    decide(&mut board);
    assert_eq!(
        (state(&board, "/a"), board.is_settled(), followed(&board)),
        (Some(DeviceState::Opening), false, 0)
    );
    board.refused("/a", Some(DeviceId(0)), trouble());
    for _ in 0..2 {
        assert_eq!(short(&board.decide(Retry::Refused)), ["open /a=0"]);
        let (_, fact) = board.devices().remove(0);
        assert_eq!((fact.state, fact.trouble), (DeviceState::Refused, Some(trouble())));
        assert_eq!((board.is_settled(), followed(&board)), (true, 1));
        board.refused("/a", Some(DeviceId(0)), trouble());
    }
    let newer = WantedPool { generation: 2, ..pool("u", &["/a"]) };
    board.want(vec![newer]);
    decide(&mut board);
    assert_eq!(
        (state(&board, "/a"), board.is_settled(), followed(&board)),
        (Some(DeviceState::Opening), false, 0)
    );
    board.opened("/a", DeviceId(0), opened(0));
    assert_eq!((state(&board, "/a"), followed(&board)), (Some(DeviceState::Open), 1));
}

#[test]
fn a_claim_that_changes_while_a_refused_device_is_tried_again_is_not_followed_yet() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    decide(&mut board);
    board.refused("/a", Some(DeviceId(0)), trouble());
    board.decide(Retry::Refused);
    board.want(vec![WantedPool { generation: 2, ..wiped("u", &["/a"]) }]);
    assert!(decide(&mut board).is_empty(), "it is being opened");
    assert_eq!((board.is_settled(), followed(&board)), (false, 0));
}

#[test]
fn nobody_waits_until_a_device_is_erased_but_it_is_not_wiped_before() {
    let mut board = Board::default();
    board.want(vec![wiped("u", &["/a"])]);
    assert_eq!(decide(&mut board), ["wipe /a"]);
    assert_eq!((board.is_settled(), followed(&board)), (true, 0));
    board.wiped("/a");
    assert_eq!(
        (board.is_settled(), followed(&board), state(&board, "/a")),
        (true, 1, Some(DeviceState::Wiped))
    );
}

#[test]
fn a_device_whose_sync_has_failed_is_used_again_only_without_a_page_cache_or_wiped() {
    for (direct, again) in [(true, "open /a=0"), (false, "")] {
        let mut board = Board::default();
        board.want(vec![pool("u", &["/a"])]);
        decide(&mut board);
        board.opened("/a", DeviceId(0), Opened { direct, ..opened(0) });
        board.lost(DeviceId(0), "sync error", Loss::Sync);
        board.want(vec![WantedPool { generation: 2, ..pool("u", &["/a"]) }]);
        assert_eq!(decide(&mut board), ["close 0"]);
        board.released(DeviceId(0));
        assert_eq!(short(&board.decide(Retry::Refused)).concat(), again);
        let expected = if direct { DeviceState::Opening } else { DeviceState::Refused };
        assert_eq!(state(&board, "/a"), Some(expected));
        if !direct {
            board.want(vec![wiped("u", &["/a"])]);
            assert_eq!(decide(&mut board), ["wipe /a"]);
            board.wiped("/a");
            board.want(vec![pool("u", &["/a"])]);
            assert_eq!(decide(&mut board), ["open /a=0"]);
        }
    }
}
