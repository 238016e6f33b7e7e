//! Start, identity, limits and end of a controller.

use std::time::Duration;

use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection, Storage};
use reprise_nvme::spec::{Command, IDENTIFY, Status};
use reprise_nvme::{DataFormat, DriverSettings, NvmeError};

use crate::bench_rig::{Rig, emulation, run, settings};

#[test]
fn a_controller_states_its_identity_and_namespaces() {
    let namespaces = vec![Storage::memory(1 << 20), Storage::memory(0), Storage::memory(3 << 20)];
    let mut rig = Rig::new(Emulation { namespaces, serial: "S42".into(), ..emulation() });
    assert_eq!(rig.controller.identity().serial, "S42");
    assert_eq!(rig.controller.version().to_string(), "2.0.0");
    let sizes: Vec<_> = rig.controller.namespaces().iter().map(|one| (one.id, one.bytes())).collect();
    assert_eq!(sizes, [(1, 1 << 20), (3, 3 << 20)], "an empty namespace is not used");
    assert_eq!(rig.controller.health().expect("a log page").spare_percent, Some(100));
}

#[test]
fn the_driver_uses_as_many_queues_as_it_is_granted() {
    let mut rig = Rig::new(Emulation { queue_pairs: 3, ..emulation() });
    assert_eq!(rig.controller.granted(), 3);
    let mut queues: Vec<_> = (0..3).map(|_| rig.controller.create_queue_pair(8).expect("granted")).collect();
    let none = rig.controller.create_queue_pair(8);
    assert!(matches!(none, Err(NvmeError::NoQueue { granted: 3 })), "{none:?}");
    let gone = queues.pop().expect("three");
    let number = gone.id();
    assert!(rig.controller.delete_queue_pair(gone).expect("confirmed").unfinished.is_empty());
    assert_eq!(rig.controller.create_queue_pair(8).expect("free again").id(), number);
}

#[test]
fn fewer_queues_are_requested_than_offered() {
    let limits = DriverSettings { queue_pairs: 5, ..settings() };
    let rig = Rig::with(emulation(), limits).expect("it starts");
    assert_eq!(rig.controller.granted(), 5);
}

#[test]
fn data_is_described_as_the_controller_requires() {
    assert_eq!(Rig::new(emulation()).controller.data_format(), DataFormat::Sgl);
    let rig = Rig::new(Emulation { sgl: false, ..emulation() });
    assert_eq!(rig.controller.data_format(), DataFormat::Prp);
}

#[test]
fn a_queue_is_not_longer_than_the_controller_supports() {
    let mut rig = Rig::new(Emulation { entries_max: 64, ..emulation() });
    assert_eq!(rig.controller.create_queue_pair(4096).expect("clamped").entries(), 64);
}

#[test]
fn a_rejected_command_of_the_start_names_command_and_status() {
    let on = Selection { queue: Some(0), opcode: Some(IDENTIFY), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Status(Status::INTERNAL) }];
    let failed = Rig::with(Emulation { faults, ..emulation() }, settings());
    let text = failed.err().expect("no start").to_string();
    assert_eq!(text, "the controller rejects Identify Controller: internal error (type 0, code 0x06)");
}

#[test]
fn a_controller_that_does_not_answer_ends_the_start_by_its_deadline() {
    let on = Selection { queue: Some(0), ..Selection::default() };
    for (fault, expected) in [
        (Fault::Lost, "Identify Controller has not ended within 20ms"),
        (Fault::Fail, "the controller reports a fatal error"),
        (Fault::Vanish, "the controller is gone"),
    ] {
        let faults = vec![FaultRule { on, fault }];
        let limits = DriverSettings { admin_timeout: Duration::from_millis(20), ..settings() };
        let text =
            Rig::with(Emulation { faults, ..emulation() }, limits).err().expect("no start").to_string();
        assert!(text.starts_with(expected), "{fault:?}: {text}");
    }
}

#[test]
fn a_shutdown_makes_written_data_durable_and_only_a_shutdown_does() {
    for shut_down in [true, false] {
        let namespaces = vec![Storage::volatile(1 << 20)];
        let mut rig = Rig::new(Emulation { namespaces, ..emulation() });
        let mut queue = rig.controller.create_queue_pair(8).expect("granted");
        rig.fill(0, 4096, 1);
        assert!(rig.write(&mut queue, 8, 0, 4096).is_success());
        let expected = rig.contents(0, 4096);
        if shut_down {
            rig.controller.shut_down().expect("in time");
        }
        let (counters, storage) = rig.stop(queue);
        let Storage::Volatile { durable, .. } = &storage[0] else { panic!("{storage:?}") };
        assert_eq!(durable[4096..8192] == expected, shut_down);
        assert_eq!((counters.shutdowns, counters.bad_addresses), (u64::from(shut_down), 0));
    }
}

#[test]
fn a_flush_makes_written_data_durable() {
    let namespaces = vec![Storage::volatile(1 << 20)];
    let mut rig = Rig::new(Emulation { namespaces, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    rig.fill(0, 4096, 1);
    assert!(rig.write(&mut queue, 8, 0, 4096).is_success());
    assert!(run(&mut queue, &Command::flush(1)).is_success());
    let expected = rig.contents(0, 4096);
    let (_, storage) = rig.stop(queue);
    let Storage::Volatile { durable, .. } = &storage[0] else { panic!("{storage:?}") };
    assert!(durable[4096..8192] == expected);
}

#[test]
fn an_event_that_arrives_with_another_completion_is_not_lost() {
    let mut rig = Rig::new(emulation());
    for event in 1..20 {
        rig.controller.request_event().expect("one is outstanding");
        rig.controller.backing().raise_event(event);
        rig.controller.health().expect("a log page");
        assert_eq!(rig.controller.take_events().expect("no failure"), [event]);
    }
}

#[test]
fn as_many_event_requests_are_outstanding_as_the_controller_allows() {
    let mut rig = Rig::new(emulation());
    let most = usize::from(rig.controller.identity().events_max);
    for _ in 0..most {
        rig.controller.request_event().expect("allowed");
    }
    assert!(matches!(rig.controller.request_event(), Err(NvmeError::Invalid(_))));
    assert_eq!(rig.controller.take_events().expect("no failure"), []);
    // Outstanding requests do not disturb other commands.
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    assert!(run(&mut queue, &Command::flush(1)).is_success());
}
