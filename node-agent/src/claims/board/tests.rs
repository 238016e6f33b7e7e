//! What is done about devices: one situation at a time, and random ones that must end where the claims say.

use reprise_agent_kubernetes::{DeviceState, Source};

use super::*;

fn recipe(uid: &str) -> Recipe {
    Recipe {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        kind: Kind::Device,
        bytes: None,
        engine: Engine::IoUring,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
    }
}

fn pool(uid: &str, paths: &[&str]) -> WantedPool {
    let place = |path: &&str| WantedPlace {
        path: (*path).to_owned(),
        at: PathBuf::from(path),
        presence: Presence::Here,
        recipe: recipe(uid),
    };
    WantedPool {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        generation: 1,
        data: Data::Kept,
        places: paths.iter().map(place).collect(),
        trouble: None,
    }
}

/// A pool of one file.
fn file(uid: &str, path: &str) -> WantedPool {
    let mut wanted = pool(uid, &[path]);
    wanted.places[0].recipe.kind = Kind::File;
    wanted
}

fn claim(uid: &str, generation: i64) -> Claim {
    Claim {
        pool: format!("pool-{uid}"),
        uid: uid.to_owned(),
        generation,
        source: Source::Devices { globs: vec!["/*".to_owned()], most: 1 },
        bytes: None,
        engine: Engine::IoUring,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
        max_read_latency: None,
        max_media_errors: None,
        min_spare_percent: None,
        data: Data::Kept,
    }
}

fn opened(index: u8) -> Opened {
    Opened {
        membership: Membership { uuid: [1; 16], index },
        engine: Engine::IoUring,
        fallback: None,
        direct: true,
    }
}

fn trouble() -> Trouble {
    Trouble { reason: Reason::DeviceFailed, message: "broken".to_owned() }
}

/// Actions in short: what is opened, wiped and closed.
fn short(actions: &[Action]) -> Vec<String> {
    let one = |action: &Action| match action {
        Action::Open { places, .. } => {
            let places: Vec<String> =
                places.iter().map(|place| format!("{}={}", place.path, place.id.0)).collect();
            format!("open {}", places.join(" "))
        }
        Action::Wipe(place) => format!("wipe {}", place.path),
        Action::Detach(id) => format!("close {}", id.0),
    };
    actions.iter().map(one).collect()
}

fn decide(board: &mut Board) -> Vec<String> {
    short(&board.decide(Retry::Nothing))
}

fn state(board: &Board, path: &str) -> Option<DeviceState> {
    board.devices().into_iter().find(|(_, fact)| fact.path == path).map(|(_, fact)| fact.state)
}

/// A board on which `/a` of pool `u` is open under number 0.
fn with_one_open() -> Board {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    assert_eq!(decide(&mut board), ["open /a=0"]);
    assert!(!board.is_settled());
    board.opened("/a", DeviceId(0), opened(0));
    assert!(board.is_settled());
    board
}

#[test]
fn what_is_wanted_is_opened_once_and_then_left_alone() {
    let mut board = with_one_open();
    assert!(decide(&mut board).is_empty());
    assert_eq!(state(&board, "/a"), Some(DeviceState::Open));
    assert_eq!(board.claims()[0].generation, 1);
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    board.want(vec![newer]);
    assert!(decide(&mut board).is_empty(), "nothing of it changes the device");
    assert_eq!(board.claims()[0].generation, 2);
}

#[test]
fn a_board_that_wants_nothing_is_settled_and_does_nothing() {
    let mut board = Board::default();
    assert!(board.is_settled() && decide(&mut board).is_empty());
}

#[test]
fn what_is_not_wanted_any_more_is_closed_and_its_number_given_again() {
    let mut board = with_one_open();
    board.want(Vec::new());
    assert_eq!(decide(&mut board), ["close 0"]);
    board.want(vec![pool("v", &["/b"])]);
    assert_eq!(decide(&mut board), ["open /b=1"], "the first number is still in use");
    board.released(DeviceId(0));
    assert!(decide(&mut board).is_empty());
    assert_eq!(state(&board, "/a"), None);
    board.opened("/b", DeviceId(1), opened(0));
    board.want(vec![pool("v", &["/b", "/c"])]);
    assert_eq!(decide(&mut board), ["open /c=0"]);
}

#[test]
fn a_claim_that_changes_how_a_device_is_opened_opens_it_again() {
    let mut board = with_one_open();
    let mut other = pool("u", &["/a"]);
    other.places[0].recipe.engine = Engine::Plain;
    board.want(vec![other]);
    assert_eq!(decide(&mut board), ["close 0"]);
    assert!(!board.is_settled() && board.claims().is_empty(), "not in effect yet");
    assert!(decide(&mut board).is_empty(), "the core still has it");
    board.released(DeviceId(0));
    let actions = board.decide(Retry::Nothing);
    assert_eq!(short(&actions), ["open /a=0"]);
    let Action::Open { places, .. } = &actions[0] else { panic!("it is opened") };
    assert_eq!(places[0].recipe.engine, Engine::Plain);
}

#[test]
fn a_pool_of_the_same_name_with_another_id_is_another_pool() {
    let mut board = with_one_open();
    board.want(vec![pool("other", &["/a"])]);
    assert_eq!(decide(&mut board), ["close 0"]);
}

#[test]
fn devices_of_one_pool_are_opened_together_and_later_ones_join_it() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a", "/b"]), pool("v", &["/c"])]);
    assert_eq!(decide(&mut board), ["open /a=0 /b=1", "open /c=2"]);
    board.want(vec![pool("u", &["/a", "/b", "/d"]), pool("v", &["/c"])]);
    assert!(decide(&mut board).is_empty(), "the identity of the pool is not known yet");
    board.opened("/a", DeviceId(0), opened(0));
    board.refused("/b", Some(DeviceId(1)), trouble());
    let actions = board.decide(Retry::Nothing);
    assert_eq!(short(&actions), ["open /d=1"]);
    let Action::Open { identity, .. } = &actions[0] else { panic!("it is opened") };
    let stranger = Membership { uuid: [9; 16], index: 5 };
    assert!(identity.clone().enter("/d".as_ref(), stranger).is_err(), "the pool's identity is that of /a");
}

#[test]
fn what_matters_only_while_a_device_is_opened_leaves_an_open_one_alone_and_tries_a_refused_one() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a", "/b"])]);
    decide(&mut board);
    board.opened("/a", DeviceId(0), opened(0));
    board.refused("/b", Some(DeviceId(1)), trouble());
    let mut other = pool("u", &["/a", "/b"]);
    for place in &mut other.places {
        (place.recipe.foreign, place.recipe.fallback) = (ForeignSignatures::Wipe, FallbackEngine::Plain);
    }
    board.want(vec![other]);
    assert_eq!(decide(&mut board), ["open /b=1"]);
    assert_eq!(state(&board, "/a"), Some(DeviceState::Open));
}

#[test]
fn a_device_waits_until_the_others_of_its_pool_are_closed_and_joins_them() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a", "/b"])]);
    decide(&mut board);
    board.opened("/a", DeviceId(0), opened(0));
    board.refused("/b", Some(DeviceId(1)), trouble());
    let mut other = pool("u", &["/a", "/b"]);
    other.places.iter_mut().for_each(|place| place.recipe.bytes = Some(1 << 30));
    board.want(vec![other]);
    assert_eq!(decide(&mut board), ["close 0"]);
    assert!(decide(&mut board).is_empty(), "what the closed one is will be read from it");
    board.released(DeviceId(0));
    assert_eq!(decide(&mut board), ["open /a=0 /b=1"]);
}

#[test]
fn a_fresh_device_joins_a_pool_whose_other_device_is_away() {
    let mut board = with_one_open();
    let mut both = pool("u", &["/a", "/b"]);
    both.places[0].presence = Presence::Gone;
    board.want(vec![both]);
    assert_eq!(decide(&mut board), ["close 0"]);
    board.released(DeviceId(0));
    let actions = board.decide(Retry::Nothing);
    let [Action::Open { identity, places }] = &actions[..] else { panic!("one is opened: {actions:?}") };
    assert_eq!(places[0].path, "/b");
    let mut identity = identity.clone();
    assert!(identity.enter("/c".as_ref(), Membership { uuid: [9; 16], index: 7 }).is_err());
    assert!(identity.enter("/c".as_ref(), Membership { uuid: [1; 16], index: 0 }).is_err(), "that is /a");
    assert!(identity.enter("/c".as_ref(), Membership { uuid: [1; 16], index: 1 }).is_ok());
}

#[test]
fn a_claim_that_went_while_its_device_was_opened_closes_it_then() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    decide(&mut board);
    board.want(Vec::new());
    assert!(decide(&mut board).is_empty());
    board.opened("/a", DeviceId(0), opened(0));
    assert_eq!(decide(&mut board), ["close 0"]);
}

#[test]
fn what_was_refused_is_tried_again_from_time_to_time_and_when_its_claim_changes() {
    let mut board = Board::default();
    board.want(vec![pool("u", &["/a"])]);
    decide(&mut board);
    board.refused("/a", Some(DeviceId(0)), trouble());
    assert!(board.is_settled(), "it was tried");
    assert_eq!((decide(&mut board).len(), state(&board, "/a")), (0, Some(DeviceState::Refused)));
    assert_eq!(short(&board.decide(Retry::Refused)), ["open /a=0"]);
    board.refused("/a", Some(DeviceId(0)), trouble());
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    board.want(vec![newer]);
    assert_eq!(decide(&mut board), ["open /a=0"]);
}

#[test]
fn a_device_that_failed_stays_so_until_its_claim_changes() {
    let mut board = with_one_open();
    board.lost(DeviceId(0), "write error", Loss::Other);
    assert!(board.decide(Retry::Refused).is_empty());
    assert_eq!(state(&board, "/a"), Some(DeviceState::Faulted));
    let mut newer = pool("u", &["/a"]);
    newer.generation = 2;
    board.want(vec![newer]);
    assert_eq!(decide(&mut board), ["close 0"]);
    board.released(DeviceId(0));
    assert_eq!(decide(&mut board), ["open /a=0"]);
}

#[test]
fn a_device_that_is_gone_is_faulted_and_opened_when_it_is_back() {
    let mut board = with_one_open();
    let mut gone = pool("u", &["/a"]);
    gone.places[0].presence = Presence::Gone;
    board.want(vec![gone.clone()]);
    assert_eq!(decide(&mut board), ["close 0"]);
    assert_eq!(state(&board, "/a"), Some(DeviceState::Faulted));
    board.released(DeviceId(0));
    assert!(decide(&mut board).is_empty());
    assert!(board.held(&[claim("u", 1)]).contains("/a"), "it is still looked for");
    assert_eq!(state(&board, "/a"), Some(DeviceState::Faulted));
    board.want(vec![pool("u", &["/a"])]);
    assert_eq!(decide(&mut board), ["open /a=0"]);
}

#[test]
fn a_file_that_is_gone_is_faulted_while_it_is_open_and_made_where_there_was_none() {
    let file = |presence: Presence| {
        let mut wanted = file("u", "/a");
        wanted.places[0].presence = presence;
        vec![wanted]
    };
    let mut board = Board::default();
    board.want(file(Presence::Gone));
    assert_eq!(decide(&mut board), ["open /a=0"], "what was refused before is tried again");
    board.opened("/a", DeviceId(0), opened(0));
    assert_eq!(decide(&mut board), ["close 0"]);
    board.released(DeviceId(0));
    assert!(decide(&mut board).is_empty(), "a blank one in its place would hide that blocks are lost");
    assert_eq!(state(&board, "/a"), Some(DeviceState::Faulted));
    board.want(file(Presence::Here));
    assert_eq!(decide(&mut board), ["open /a=0"]);
}

#[test]
fn a_wipe_closes_the_device_first_and_is_told_until_the_claim_goes() {
    let mut board = with_one_open();
    let mut wiped = pool("u", &["/a"]);
    wiped.data = Data::Wiped;
    board.want(vec![wiped]);
    assert_eq!(decide(&mut board), ["close 0"]);
    board.released(DeviceId(0));
    assert_eq!(decide(&mut board), ["wipe /a"]);
    assert!(decide(&mut board).is_empty(), "it is under way");
    board.wiped("/a");
    assert!(board.decide(Retry::Refused).is_empty());
    assert_eq!((state(&board, "/a"), board.is_settled()), (Some(DeviceState::Wiped), true));
    board.want(Vec::new());
    decide(&mut board);
    assert_eq!(state(&board, "/a"), None);
}

#[test]
fn more_devices_than_there_are_numbers_are_refused() {
    let paths: Vec<String> = (0..=NUMBERS).map(|number| format!("/{number:02}")).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let mut board = Board::default();
    board.want(vec![pool("u", &paths)]);
    let actions = board.decide(Retry::Nothing);
    let Action::Open { places, .. } = &actions[0] else { panic!("it is opened") };
    assert_eq!((actions.len(), places.len()), (1, usize::from(NUMBERS)));
    assert_eq!(state(&board, paths[usize::from(NUMBERS)]), Some(DeviceState::Refused));
}

mod files;
mod keeping;
mod random;
