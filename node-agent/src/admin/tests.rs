//! What the pages say of a core that is busy, and of one that is stuck.

use std::sync::mpsc;

use reprise_agent_core::agent::limits;
use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::Event;

use super::*;
use crate::config::Config;
use crate::core_loop::Clock;
use crate::directory::{CHANGES_QUEUED_MAX, DirectorySettings, Registration};

fn context(inbox: Inbox, pulse: Pulse) -> Arc<AdminContext> {
    let registration = Registration {
        name: "test".to_owned(),
        peer_address: String::new(),
        admin_address: String::new(),
        dram_bytes: 0,
        nvme_bytes: 0,
        failure_domain: String::new(),
        version: String::new(),
    };
    let alone = DirectorySettings {
        endpoints: Vec::new(),
        registration,
        connect_timeout: CORE_PATIENCE,
        call_timeout: CORE_PATIENCE,
        changes_queued_max: CHANGES_QUEUED_MAX,
        lookups_max: limits::LOOKUPS_MAX,
        tenants: Arc::default(),
    };
    Arc::new(AdminContext {
        inbox,
        pulse,
        metrics: Arc::new(Metrics::new("test", reprise_buffers::PageCoverage::default())),
        directory: Arc::new(DirectoryClient::start(alone, Arc::new(|_| {})).expect("a thread is to be had")),
        peers: None,
        devices: Vec::new(),
        arena: ArenaInfo { bytes: 0, regions: 0, page_kind: String::new() },
        settings: Config::default().validate().expect("the defaults are valid"),
        tenants: Arc::default(),
        ready: AtomicBool::new(true),
    })
}

fn input() -> Input {
    Input::Event(Event::LookupFailed { lookup: LookupId(0) })
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(future)
}

#[test]
fn a_core_with_a_full_inbox_is_healthy_and_answers_when_there_is_room() {
    let (inbox, inputs) = Inbox::new();
    let context = context(inbox.clone(), Pulse::new(Clock::start()));
    while inbox.send_within(input(), Duration::ZERO).is_ok() {}
    run(async {
        assert_eq!(healthz(State(context.clone())).await.status(), StatusCode::OK);
        let (asked, is_asked) = mpsc::channel();
        let core = std::thread::spawn(move || {
            is_asked.recv().expect("the test asks");
            for input in inputs.iter() {
                if let Input::Inspect(answer) = input {
                    answer.send(CoreView::default()).expect("the page waits for the answer");
                    return;
                }
            }
            unreachable!("the test asks")
        });
        asked.send(()).expect("the core is there");
        assert_eq!(metrics(State(context.clone())).await.status(), StatusCode::OK);
        core.join().expect("it answered");
    });
}

#[test]
fn a_core_that_takes_nothing_for_too_long_is_not_waited_for() {
    let (inbox, _inputs) = Inbox::new();
    let context = context(inbox.clone(), Pulse::stopped());
    while inbox.send_within(input(), Duration::ZERO).is_ok() {}
    run(async {
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        assert_eq!(healthz(State(context.clone())).await.status(), unavailable);
        assert_eq!(status_page(State(context.clone())).await.status(), unavailable);
    });
}
