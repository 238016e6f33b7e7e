//! Tests of the registration with one member.

use super::*;

const FIRST: Granted =
    Granted { node: NodeId(3), epoch: Epoch(10), heartbeat_every: Duration::from_millis(250) };
const SECOND: Granted = Granted { epoch: Epoch(11), ..FIRST };

fn at(seconds: u64) -> Tick {
    Tick(0).after(Duration::from_secs(seconds))
}

fn granted(granted: Granted, domain: &str) -> Input {
    Input::Granted { granted, domain: domain.to_owned() }
}

fn heartbeat(of: Granted, result: Heartbeat) -> Input {
    Input::Heartbeat { epoch: of.epoch, result }
}

/// A registrar in domain `a`, registered since `at(0)`.
fn registered() -> Registrar {
    let mut registrar = Registrar::new("a".to_owned());
    let outputs = registrar.on(at(0), granted(FIRST, "a"));
    assert_eq!(outputs, [Output::Registered(FIRST), Output::UpChanged]);
    assert!(registrar.is_up());
    registrar
}

/// The length of the pause before the next registration, for the lowest random number.
fn pause(outputs: &[Output]) -> Duration {
    let pause = outputs.iter().find_map(|output| match output {
        Output::Register(pause) => Some(pause.draw(0)),
        _ => None,
    });
    pause.expect("the registrar registers")
}

#[test]
fn registers_until_the_member_grants_it() {
    let mut registrar = Registrar::new(String::new());
    let [first, _, third] = [(); 3].map(|()| pause(&registrar.on(at(0), Input::Refused)));
    assert!(first > Duration::ZERO && third > first);
    assert_eq!((registrar.granted(), registrar.is_up()), (None, false));
    registrar.on(at(1), granted(FIRST, ""));
    assert_eq!(registrar.granted(), Some(FIRST));
    registrar.on(at(9), Input::Fenced(FIRST.epoch));
    assert_eq!(pause(&registrar.on(at(9), Input::Refused)), first, "a success resets the pauses");
}

#[test]
fn failing_heartbeats_keep_the_registration() {
    let mut registrar = registered();
    assert_eq!(registrar.on(at(1), heartbeat(FIRST, Heartbeat::Failed)), [Output::UpChanged]);
    assert_eq!(registrar.on(at(1), heartbeat(FIRST, Heartbeat::Failed)), []);
    assert_eq!((registrar.granted(), registrar.is_up()), (Some(FIRST), false));
    assert_eq!(registrar.on(at(2), heartbeat(FIRST, Heartbeat::Answered)), [Output::UpChanged]);
    assert!(registrar.is_up());
}

#[test]
fn lost_registration_is_renewed_at_once_if_it_was_stable_and_with_growing_pauses_otherwise() {
    let mut registrar = registered();
    let outputs = registrar.on(at(5), heartbeat(FIRST, Heartbeat::Unknown));
    assert_eq!(outputs[0], Output::Lost(FIRST, RegistrationEnd::Unknown));
    assert_eq!((pause(&outputs), registrar.granted(), registrar.is_up()), (Duration::ZERO, None, false));
    let mut pauses = Vec::new();
    for second in 6..9 {
        registrar.on(at(second), granted(SECOND, "a"));
        pauses.push(pause(&registrar.on(at(second), Input::Fenced(SECOND.epoch))));
    }
    assert!(pauses[0] > Duration::ZERO && pauses.is_sorted() && pauses[2] > pauses[0], "{pauses:?}");
}

#[test]
fn results_of_another_registration_have_no_effect() {
    let mut registrar = registered();
    for result in [Heartbeat::Answered, Heartbeat::Failed, Heartbeat::Unknown] {
        assert_eq!(registrar.on(at(1), heartbeat(SECOND, result)), []);
    }
    assert_eq!(registrar.on(at(1), Input::Fenced(SECOND.epoch)), []);
    assert_eq!(registrar.granted(), Some(FIRST));
}

#[test]
fn changed_domain_is_registered_while_the_link_stays_up() {
    let mut registrar = registered();
    let outputs = registrar.on(at(1), Input::Domain("b".to_owned()));
    assert_eq!(outputs, [Output::Replacing(FIRST), Output::Register(Pause::NONE)]);
    assert_eq!((registrar.granted(), registrar.is_up()), (Some(FIRST), true));
    assert_eq!(registrar.on(at(1), Input::Domain("b".to_owned())), [], "it is requested already");
    assert_eq!(registrar.on(at(2), granted(SECOND, "b")), [Output::Registered(SECOND)]);
    let outputs = registrar.on(at(20), Input::Domain("c".to_owned()));
    assert_eq!(outputs[1], Output::Register(Pause::within(REPLACED_WITHIN)), "stable nodes spread");
}

#[test]
fn domain_that_changed_during_the_call_is_registered_next() {
    let mut registrar = Registrar::new("a".to_owned());
    assert_eq!(registrar.on(at(0), Input::Domain("b".to_owned())), []);
    let outputs = registrar.on(at(1), granted(FIRST, "a"));
    assert!(outputs.contains(&Output::Replacing(FIRST)), "{outputs:?}");
    assert_eq!(registrar.on(at(2), granted(SECOND, "b")), [Output::Registered(SECOND)]);
}

#[test]
fn registration_that_ends_during_its_replacement_waits_for_that() {
    let ending = || {
        let mut registrar = registered();
        registrar.on(at(1), Input::Domain("b".to_owned()));
        let outputs = registrar.on(at(2), heartbeat(FIRST, Heartbeat::Unknown));
        assert_eq!(outputs, [Output::AwaitReplacement]);
        assert_eq!(registrar.granted(), Some(FIRST));
        registrar
    };
    let mut in_time = ending();
    assert_eq!(in_time.on(at(3), granted(SECOND, "b")), [Output::Registered(SECOND)]);
    assert_eq!(in_time.on(at(4), Input::Overdue), [], "the replacement has arrived");
    let mut late = ending();
    assert!(matches!(late.on(at(3), Input::Refused)[..], [Output::Register(_)]), "it is retried meanwhile");
    let outputs = late.on(at(4), Input::Overdue);
    assert_eq!(outputs[0], Output::Lost(FIRST, RegistrationEnd::Unknown));
    assert_eq!(late.granted(), None);
}
