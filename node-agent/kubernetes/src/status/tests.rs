//! The status built from facts, and which changes of facts count as changes of the status.

use std::path::PathBuf;

use reprise_crds::fields::Engine;
use reprise_crds::node::PageKind;
use reprise_crds::status::find;
use reprise_policy::slack::prediction::PredictionError;

use super::*;
use crate::facts::{DeviceFault, DrainFact, Memory};

const GIB: u64 = 1 << 30;

fn at(text: &str) -> Time {
    serde_json::from_value(text.into()).expect("a time")
}

fn early() -> Time {
    at("2026-01-01T00:00:00Z")
}

fn identity() -> Identity {
    Identity { version: "0.1.0".to_owned(), pod: Some("agent-x".to_owned()), started_at: early() }
}

fn device(path: &str, state: DeviceState) -> DeviceFact {
    DeviceFact {
        path: path.to_owned(),
        pool: "fast".to_owned(),
        state,
        fault: None,
        fallback: None,
        size: 64 * GIB,
        used: GIB,
        engine: (state == DeviceState::Open).then_some(Engine::IoUring),
        direct: state == DeviceState::Open,
        read_p99_micros: None,
        slow: None,
        media_errors: (state == DeviceState::Open).then_some(0),
        spare_percent: None,
        worn: None,
        serial: None,
        model: None,
        namespace: None,
        emulated: false,
    }
}

fn another_engine() -> DeviceFault {
    DeviceFault { reason: Reason::EngineUnavailable, message: "another engine".to_owned() }
}

fn faulty(path: &str, state: DeviceState, reason: Reason) -> DeviceFact {
    let fault = Some(DeviceFault { reason, message: format!("{reason} there") });
    DeviceFact { fault, ..device(path, state) }
}

pub(crate) fn facts() -> Facts {
    Facts {
        phase: Phase::Serving,
        sequence: 1,
        generation: 4,
        problems: Vec::new(),
        configuration: Some("sha256:0".to_owned()),
        configuration_pending: None,
        peer: Some("10.0.0.1:7410".to_owned()),
        admin: "10.0.0.1:7411".to_owned(),
        socket_directory: PathBuf::from("/run/reprise"),
        control_plane: ControlPlane::Connected { node: 3, epoch: 9, members: 2, connected: 2 },
        memory: Memory { total: 8 * GIB, used: GIB, pages: PageKind::Huge },
        sessions: 2,
        claims: vec![ClaimFact { pool: "fast".to_owned(), uid: "u".to_owned(), generation: 2, fault: None }],
        devices: vec![device("/pool", DeviceState::Open)],
        gpus: vec![GpuFact { uuid: "GPU-0a".to_owned(), product: "NVIDIA H200".to_owned() }],
        tenants: Some("sha256:1".to_owned()),
        profiles: Vec::new(),
        queues: vec![QueueFact {
            uid: "u-q".to_owned(),
            kept: 8,
            created: vec![CreatedFact { serial: "S1".to_owned(), generation: 3, queues: vec![1, 2] }],
            unavailable: None,
            refused: None,
        }],
        controllers: vec![ControllerFact {
            serial: "S1".to_owned(),
            pci_address: Some("0000:01:00.0".to_owned()),
            pool: Some("fast".to_owned()),
            queue_pairs: 64,
        }],
        mode: NodeMode::Active,
        drain: DrainFact::default(),
    }
}

fn status_of(facts: &Facts) -> CacheNodeStatus {
    status(&identity(), facts, None, &[], &early())
}

/// Returns status and reason of a condition.
fn condition(facts: &Facts, kind: ConditionType) -> (ConditionStatus, String) {
    let status = status_of(facts);
    let condition = find(&status.conditions, kind).unwrap_or_else(|| panic!("no {kind}"));
    assert_eq!(condition.observed_generation, facts.generation);
    (condition.status, condition.reason.clone())
}

const TRUE: ConditionStatus = ConditionStatus::True;
const FALSE: ConditionStatus = ConditionStatus::False;

#[test]
fn status_of_a_node_in_the_desired_state_has_every_field() {
    let status = status_of(&facts());
    assert_eq!(status.observed_generation, 4);
    let capacity = status.capacity.as_ref().expect("capacity");
    assert_eq!((capacity.dram_total.as_str(), capacity.ssd_total.as_str()), ("8Gi", "64Gi"));
    assert_eq!((capacity.dram_used.as_str(), capacity.ssd_used.as_str()), ("1Gi", "1Gi"));
    assert_eq!(status.registration.as_ref().map(|registration| registration.node), Some(3));
    let applied = status.applied.as_ref().expect("applied");
    assert_eq!((applied.pools[0].generation, applied.pools[0].uid.as_str()), (2, "u"));
    let queues = &applied.queues[0];
    assert_eq!((queues.uid.as_str(), queues.kept, queues.queue_pairs, &queues.refused), ("u-q", 8, 2, &None));
    let created = &queues.created[0];
    assert_eq!((created.serial.as_str(), created.generation, &created.queues), ("S1", 3, &vec![1, 2]));
    assert_eq!(status.devices[0].engine, Some(Engine::IoUring));
    assert_eq!((status.gpus[0].uuid.as_str(), status.gpus[0].product.as_str()), ("GPU-0a", "NVIDIA H200"));
    let controller = &status.controllers[0];
    assert_eq!(
        (controller.serial.as_str(), controller.queue_pairs, controller.queue_pairs_lent),
        ("S1", 64, 2)
    );
    assert_eq!(controller.pool.as_ref().map(ShortName::as_str), Some("fast"));
    for (kind, wanted) in [
        (ConditionType::AgentReady, TRUE),
        (ConditionType::Connected, TRUE),
        (ConditionType::DevicesReady, TRUE),
        (ConditionType::ConfigurationApplied, TRUE),
        (ConditionType::EngineFallback, FALSE),
        (ConditionType::Degraded, FALSE),
        (ConditionType::Cordoned, FALSE),
        (ConditionType::Drained, FALSE),
    ] {
        assert_eq!(condition(&facts(), kind), (wanted, "AsDesired".to_owned()), "{kind}");
    }
}

#[test]
fn sessions_are_reported_and_end_with_the_agent() {
    assert_eq!(status_of(&facts()).sessions, Some(2));
    assert_eq!(status_of(&Facts { phase: Phase::Stopping, ..facts() }).sessions, Some(0));
}

#[test]
fn slow_device_is_open_and_reported_as_slow() {
    let slow = |fallback: Option<DeviceFault>| {
        let device = DeviceFact {
            slow: Some("reads take long".to_owned()),
            read_p99_micros: Some(80_000),
            fallback,
            ..device("/pool", DeviceState::Open)
        };
        Facts { devices: vec![device], ..facts() }
    };
    let device_status = status_of(&slow(None)).devices[0].clone();
    assert_eq!(
        (device_status.state, device_status.slow, device_status.read_latency_p99_micros),
        (DeviceState::Open, true, Some(80_000))
    );
    assert_eq!(device_status.message, "reads take long");
    assert_eq!(condition(&slow(None), ConditionType::Degraded), (TRUE, "DeviceSlow".to_owned()));
    assert_eq!(condition(&slow(None), ConditionType::DevicesReady), (TRUE, "AsDesired".to_owned()));
    let fallen = status_of(&slow(Some(another_engine()))).devices[0].clone();
    assert_eq!(fallen.message, "another engine; reads take long");
    assert_eq!(fallen.reason.as_deref(), Some("EngineUnavailable"));
}

#[test]
fn rejected_writes_and_another_engine_are_both_reported() {
    let rejects = DeviceFault { reason: Reason::DeviceFailed, message: "it rejects writes".to_owned() };
    let engine = Some(Engine::Plain);
    let (fault, fallback) = (Some(rejects), Some(another_engine()));
    let fact = DeviceFact { fault, fallback, engine, ..device("/pool", DeviceState::Faulted) };
    let facts = Facts { devices: vec![fact], ..facts() };
    let reported = status_of(&facts).devices[0].clone();
    assert_eq!(
        (reported.reason.as_deref(), reported.message.as_str(), reported.engine),
        (Some("DeviceFailed"), "it rejects writes; another engine", engine)
    );
    let of =
        |kind| findings(&facts).into_iter().find(|finding| finding.kind == kind).expect("reported").message;
    assert!(of(ConditionType::EngineFallback).ends_with("/pool: another engine"));
    assert!(of(ConditionType::DevicesReady).ends_with("/pool: it rejects writes"));
}

#[test]
fn worn_device_is_open_and_wear_is_reported_before_slowness() {
    let worn = DeviceFact {
        worn: Some("it has met 11 media errors".to_owned()),
        media_errors: Some(11),
        spare_percent: Some(4),
        serial: Some("S4".to_owned()),
        model: Some("Fast\n9".to_owned()),
        slow: Some("reads take long".to_owned()),
        ..device("/dev/disk/by-id/a", DeviceState::Open)
    };
    let facts = Facts { devices: vec![device("/pool", DeviceState::Open), worn], ..facts() };
    let status = status_of(&facts);
    let [fine, device_status] = status.devices.as_slice() else { panic!("{:?}", status.devices) };
    assert_eq!((fine.worn, fine.media_errors, fine.spare_percent), (false, Some(0), None));
    assert_eq!(
        (device_status.worn, device_status.slow, device_status.state),
        (true, true, DeviceState::Open)
    );
    assert_eq!((device_status.media_errors, device_status.spare_percent), (Some(11), Some(Percent(4))));
    assert_eq!(device_status.serial.as_ref().map(Serial::as_str), Some("S4"));
    assert_eq!(device_status.model.as_ref().map(Text::as_str), Some("Fast 9"));
    assert_eq!(device_status.message, "it has met 11 media errors; reads take long");
    assert_eq!(condition(&facts, ConditionType::Degraded), (TRUE, "DeviceWorn".to_owned()));
    assert_eq!(condition(&facts, ConditionType::DevicesReady), (TRUE, "AsDesired".to_owned()));
}

#[test]
fn each_deviation_is_a_condition_with_its_reason() {
    let with = |change: &dyn Fn(&mut Facts)| {
        let mut facts = facts();
        change(&mut facts);
        facts
    };
    let devices = |devices: Vec<DeviceFact>| with(&|facts| facts.devices.clone_from(&devices));
    let open = || device("/a", DeviceState::Open);
    let fallback = Some(another_engine());
    let fallen = DeviceFact { engine: Some(Engine::Plain), fallback, ..open() };
    let rejecting = DeviceFact { state: DeviceState::Faulted, ..fallen.clone() };
    let rejecting =
        DeviceFact { fault: faulty("/a", DeviceState::Faulted, Reason::DeviceFailed).fault, ..rejecting };
    let draining = |drain: DrainFact| {
        with(&|facts| {
            facts.mode = NodeMode::Draining;
            facts.drain = drain;
        })
    };
    use ConditionType as Type;
    for (facts, kind, status, reason) in [
        (with(&|facts| facts.phase = Phase::Starting), Type::AgentReady, FALSE, Reason::Progressing),
        (with(&|facts| facts.phase = Phase::Stopping), Type::AgentReady, FALSE, Reason::AgentGone),
        (
            with(&|facts| facts.control_plane = ControlPlane::Unreachable { members: 2 }),
            Type::Connected,
            FALSE,
            Reason::ControlPlaneUnreachable,
        ),
        (
            with(&|facts| facts.control_plane = ControlPlane::Unreachable { members: 2 }),
            Type::Degraded,
            TRUE,
            Reason::ControlPlaneUnreachable,
        ),
        (
            with(&|facts| facts.control_plane = ControlPlane::NotConfigured),
            Type::Connected,
            TRUE,
            Reason::AsDesired,
        ),
        (devices(Vec::new()), Type::DevicesReady, TRUE, Reason::AsDesired),
        (devices(vec![device("/a", DeviceState::Wiped)]), Type::DevicesReady, TRUE, Reason::AsDesired),
        (
            devices(vec![open(), device("/b", DeviceState::Opening)]),
            Type::DevicesReady,
            FALSE,
            Reason::Progressing,
        ),
        (devices(vec![device("/b", DeviceState::Opening)]), Type::Degraded, FALSE, Reason::AsDesired),
        (
            devices(vec![
                device("/a", DeviceState::Opening),
                faulty("/b", DeviceState::Faulted, Reason::DeviceFailed),
            ]),
            Type::DevicesReady,
            FALSE,
            Reason::DeviceFailed,
        ),
        (
            devices(vec![open(), faulty("/b", DeviceState::Refused, Reason::ForeignSignature)]),
            Type::Degraded,
            TRUE,
            Reason::ForeignSignature,
        ),
        (
            with(&|facts| {
                let message = "nothing like it".to_owned();
                facts.claims[0].fault = Some(DeviceFault { reason: Reason::NoDevices, message });
            }),
            Type::DevicesReady,
            FALSE,
            Reason::NoDevices,
        ),
        (devices(vec![open(), fallen]), Type::EngineFallback, TRUE, Reason::EngineUnavailable),
        (devices(vec![rejecting.clone()]), Type::EngineFallback, TRUE, Reason::EngineUnavailable),
        (devices(vec![rejecting]), Type::DevicesReady, FALSE, Reason::DeviceFailed),
        (
            devices(vec![faulty("/a", DeviceState::Refused, Reason::EngineUnavailable)]),
            Type::EngineFallback,
            FALSE,
            Reason::EngineUnavailable,
        ),
        (
            with(&|facts| facts.problems = vec!["spec.mode: odd".to_owned()]),
            Type::ConfigurationApplied,
            FALSE,
            Reason::InvalidSpec,
        ),
        (
            with(&|facts| facts.configuration_pending = Some("restart".to_owned())),
            Type::ConfigurationApplied,
            FALSE,
            Reason::Progressing,
        ),
        (with(&|facts| facts.mode = NodeMode::Cordoned), Type::Cordoned, TRUE, Reason::SetByOperator),
        (draining(DrainFact::default()), Type::Cordoned, TRUE, Reason::SetByOperator),
        (draining(DrainFact::default()), Type::Drained, FALSE, Reason::Draining),
        (
            draining(DrainFact { nowhere: 1, ..DrainFact::default() }),
            Type::Drained,
            FALSE,
            Reason::OverCapacity,
        ),
        (
            draining(DrainFact { drained: true, ..DrainFact::default() }),
            Type::Drained,
            TRUE,
            Reason::AsDesired,
        ),
    ] {
        assert_eq!(condition(&facts, kind), (status, reason.to_string()), "{kind} of {facts:?}");
    }
}

#[test]
fn rejections_of_profiles_are_reported_in_one_bounded_line() {
    let mut facts = facts();
    let profile = |refused: Option<String>| {
        let digest = format!("sha256:{}", "0f".repeat(32));
        let prediction_error =
            refused.is_none().then_some(PredictionError { p50_percent: 4, p99_percent: 31 });
        ProfileFact { name: "llama".to_owned(), digest, refused, prediction_error }
    };
    facts.profiles = vec![profile(None), profile(Some(format!("it is odd\r\n{}", "x".repeat(300))))];
    let applied = status_of(&facts).applied.expect("applied").profiles;
    assert_eq!((applied[0].name.as_str(), applied[0].refused.as_ref()), ("llama", None));
    let errors = |at: usize| {
        let profile = &applied[at];
        (profile.prediction_error_p50_percent, profile.prediction_error_p99_percent)
    };
    assert_eq!((errors(0), errors(1)), ((Some(4), Some(31)), (None, None)));
    let refused = applied[1].refused.as_ref().expect("the profile was rejected").as_str();
    assert!(refused.starts_with("it is odd xx") && refused.chars().count() == 253, "{refused}");
}

#[test]
fn message_about_several_devices_names_one_and_counts_the_others() {
    let mut facts = facts();
    let faulted = |path: &str| faulty(path, DeviceState::Faulted, Reason::DeviceFailed);
    facts.devices = vec![faulted("/a"), faulted("/b"), faulted("/c")];
    let status = status_of(&facts);
    let message = &find(&status.conditions, ConditionType::DevicesReady).expect("there").message;
    assert!(message.contains("/a") && message.contains("2 more") && !message.contains("/b"), "{message}");
}

#[test]
fn small_changes_of_usage_do_not_change_the_status() {
    let mut more = facts();
    more.memory.used += 1 << 20;
    more.devices[0].used += 1 << 20;
    assert_eq!(status_of(&facts()), status_of(&more));
    more.devices[0].used += GIB;
    assert_ne!(status_of(&facts()), status_of(&more));
}

#[test]
fn unchanged_conditions_keep_their_transition_times() {
    let first = status_of(&facts());
    let later = at("2026-02-01T00:00:00Z");
    assert_eq!(status(&identity(), &facts(), None, &first.conditions, &later), first);
    let cordoned = Facts { mode: NodeMode::Cordoned, ..facts() };
    let second = status(&identity(), &cordoned, None, &first.conditions, &later);
    let time = |kind| find(&second.conditions, kind).expect("there").last_transition_time.clone();
    assert_eq!((time(ConditionType::Cordoned), time(ConditionType::AgentReady)), (later, early()));
}

#[test]
fn conditions_of_other_writers_are_omitted() {
    let device_status =
        Finding::yes(ConditionType::ModeApplied, Reason::AsDesired, "the control plane has the mode");
    let mut there = status_of(&facts()).conditions;
    set(&mut there, &device_status, 1, &early());
    assert_eq!(status(&identity(), &facts(), None, &there, &early()), status_of(&facts()));
}

#[test]
fn quantities_of_any_size_fit_the_schema() {
    for bytes in [0, 1023, 1025, (16 << 40) - 4096, u64::MAX] {
        let text = quantity(bytes).to_string();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        assert!(text.len() <= 14 && digits <= 12 || bytes == u64::MAX, "{text}");
    }
    assert_eq!(rounded(1000, 100), 1000, "small amounts are exact");
}

#[test]
fn socket_directory_that_the_schema_rejects_is_omitted() {
    for (path, fits) in [
        ("/run/reprise", true),
        ("/run/reprise.d/a-b_c", true),
        ("/srv/.cache/reprise", false),
        ("/run/with space", false),
        ("relative", false),
        ("/", false),
        ("/run//x", false),
    ] {
        assert_eq!(host_path(path).is_some(), fits, "{path}");
    }
    assert!(host_path(&format!("/{}", "x".repeat(90))).is_none());
}

#[test]
fn conflict_with_other_writers_is_a_condition_while_it_is_recent() {
    let contested = Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, "another writer");
    let first = status(&identity(), &facts(), Some(contested.clone()), &[], &early());
    let kinds =
        |status: &CacheNodeStatus| status.conditions.iter().map(|one| one.kind.clone()).collect::<Vec<_>>();
    assert!(kinds(&first).contains(&"StatusContested".to_owned()));
    assert_eq!(status(&identity(), &facts(), Some(contested), &first.conditions, &early()), first);
    let after = status(&identity(), &facts(), None, &first.conditions, &early());
    assert!(!kinds(&after).contains(&"StatusContested".to_owned()));
}

#[test]
fn device_has_the_reason_why_it_is_not_used() {
    let refused = faulty("/b", DeviceState::Refused, Reason::DeviceNotPermitted);
    let facts = Facts { devices: vec![device("/a", DeviceState::Open), refused], ..facts() };
    let device_status = status(&identity(), &facts, None, &[], &early()).devices;
    assert_eq!(
        (&device_status[0].reason, device_status[1].reason.as_deref()),
        (&None, Some("DeviceNotPermitted"))
    );
}

#[test]
fn only_changes_of_state_count_as_state_changes() {
    let of = |facts: &Facts| without_amounts(&status(&identity(), facts, None, &[], &early()));
    let facts = Facts { sessions: 2, devices: vec![device("/dev/a", DeviceState::Open)], ..facts() };
    let before = of(&facts);
    let with = |change: fn(&mut Facts)| {
        let mut changed = facts.clone();
        change(&mut changed);
        assert_ne!(changed, facts);
        of(&changed)
    };
    let amounts: [fn(&mut Facts); 5] = [
        |facts| facts.control_plane = ControlPlane::Connected { node: 3, epoch: 9, members: 2, connected: 1 },
        |facts| facts.memory.used = facts.memory.total,
        |facts| facts.sessions = 3,
        |facts| facts.devices[0].used = 0,
        |facts| facts.devices[0].media_errors = Some(1),
    ];
    for (index, change) in amounts.into_iter().enumerate() {
        assert_eq!(with(change), before, "amount {index}");
    }
    let news: [fn(&mut Facts); 6] = [
        |facts| facts.sessions = 0,
        |facts| facts.generation += 1,
        |facts| facts.phase = Phase::Stopping,
        |facts| facts.devices[0] = faulty("/dev/a", DeviceState::Faulted, Reason::DeviceFailed),
        |facts| facts.devices[0].worn = Some("worn".to_owned()),
        |facts| facts.configuration = Some("sha256:1".to_owned()),
    ];
    for (index, change) in news.into_iter().enumerate() {
        assert_ne!(with(change), before, "news {index}");
    }
}
