//! Which files are made, and which have to be there.

use super::*;

/// What is done on the next try where a file is not there.
fn missing(board: &mut Board, wanted: WantedPool) -> Missing {
    board.want(vec![wanted]);
    let actions = board.decide(Retry::Refused);
    let [Action::Open { places, .. }] = &actions[..] else { panic!("one is opened: {actions:?}") };
    places[0].missing
}

fn file_claim(uid: &str, path: &str) -> Claim {
    Claim { source: Source::File(PathBuf::from(path)), ..claim(uid, 1) }
}

/// What an agent that had the file of pool `u` open knows when it starts again.
fn known() -> Known {
    let mut board = Board::default();
    assert_eq!(missing(&mut board, file("u", "/a")), Missing::Create, "nobody has had it");
    board.opened("/a", DeviceId(0), opened(0));
    board.known().clone()
}

#[test]
fn after_a_restart_a_file_that_the_claim_had_has_to_be_there() {
    let mut board = Board::knowing(known());
    board.let_go(&[file_claim("u", "/a")]);
    assert_eq!(missing(&mut board, file("u", "/a")), Missing::Fail);
    board.refused("/a", Some(DeviceId(0)), missing_file());
    assert_eq!(state(&board, "/a"), Some(DeviceState::Refused));
    assert!(board.is_settled() && decide(&mut board).is_empty());
    // It is tried again from time to time, when its name is missed as well, and when the pool changes.
    let mut gone = file("u", "/a");
    gone.places[0].presence = Presence::Gone;
    assert_eq!(missing(&mut board, gone), Missing::Fail);
    board.refused("/a", Some(DeviceId(0)), missing_file());
    let newer = WantedPool { generation: 2, ..file("u", "/a") };
    assert_eq!(missing(&mut board, newer), Missing::Fail);
    // It is back.
    board.opened("/a", DeviceId(0), opened(0));
    assert_eq!(state(&board, "/a"), Some(DeviceState::Open));
}

#[test]
fn a_file_that_went_while_it_was_open_is_not_made_anew_when_its_pool_changes() {
    let mut board = Board::knowing(known());
    missing(&mut board, file("u", "/a"));
    board.opened("/a", DeviceId(0), opened(0));
    let mut gone = file("u", "/a");
    gone.places[0].presence = Presence::Gone;
    board.want(vec![gone]);
    assert_eq!(decide(&mut board), ["close 0"]);
    board.released(DeviceId(0));
    let (_, fact) = board.devices().remove(0);
    assert_eq!((fact.state, fact.trouble), (DeviceState::Faulted, Some(missing_file())));
    let newer = WantedPool { generation: 2, ..file("u", "/a") };
    assert!(!board.held(&[Claim { generation: 2, ..file_claim("u", "/a") }]).contains("/a"));
    assert_eq!(missing(&mut board, newer), Missing::Fail);
}

#[test]
fn a_pool_with_another_id_and_a_file_at_another_path_begin_anew() {
    for wanted in [file("v", "/a"), file("u", "/b")] {
        assert_eq!(missing(&mut Board::knowing(known()), wanted), Missing::Create);
    }
}

#[test]
fn a_node_that_was_taken_out_of_the_pool_begins_anew() {
    for others in [Vec::new(), vec![file_claim("v", "/a")], vec![file_claim("u", "/b")]] {
        let mut board = Board::knowing(known());
        board.let_go(&others);
        board.let_go(&[file_claim("u", "/a")]);
        assert_eq!(missing(&mut board, file("u", "/a")), Missing::Create, "{others:?}");
    }
}

#[test]
fn a_file_that_was_wiped_is_made_again() {
    let mut board = Board::knowing(known());
    board.want(vec![WantedPool { data: Data::Wiped, ..file("u", "/a") }]);
    assert_eq!(decide(&mut board), ["wipe /a"]);
    board.refused("/a", None, trouble());
    assert_eq!(
        missing(&mut Board::knowing(board.known().clone()), file("u", "/a")),
        Missing::Fail,
        "it was not"
    );
    let again = board.decide(Retry::Refused);
    let [Action::Wipe(place)] = &again[..] else { panic!("it is wiped: {again:?}") };
    assert!(place.is_expected, "one that is not there was not wiped");
    // The agent may end before the file has gone.
    board.erased("/a");
    let mut after = Board::knowing(board.known().clone());
    after.want(vec![WantedPool { data: Data::Wiped, ..file("u", "/a") }]);
    let after = after.decide(Retry::Nothing);
    let [Action::Wipe(place)] = &after[..] else { panic!("it is wiped again: {after:?}") };
    assert!(!place.is_expected, "it may have gone since");
    board.wiped("/a");
    assert_eq!(missing(&mut board, file("u", "/a")), Missing::Create);
}

#[test]
fn no_file_is_made_in_place_of_a_device_also_where_its_size_is_known() {
    let mut wanted = pool("u", &["/dev/disk/by-id/x"]);
    wanted.places[0].recipe.bytes = Some(1 << 30);
    assert_eq!(missing(&mut Board::default(), wanted), Missing::Fail);
}
