//! Admin pages of a busy core and of a stuck one.

use std::sync::mpsc;

use reprise_agent_core::effect::{DeviceId, LookupId};
use reprise_agent_core::event::{Event, Priority};
use reprise_agent_core::{BlockDescription, BlockOrigin, DramCopy, limits};

use axum::Extension;
use reprise_daemon::http::ClientAddress;
use reprise_identity::Security;
use reprise_policy::eviction::Class;

use super::*;
use crate::config::Config;
use crate::core_loop::{Clock, CoreView, LocatedBlock};
use crate::directory::{CHANGES_QUEUED_MAX, DirectorySettings, Registration};

const KEY: &str = "00112233445566778899aabbccddeeff";

fn context(inbox: Inbox, liveness: Liveness) -> Arc<AdminContext> {
    let registration = Registration {
        name: "test".to_owned(),
        peer_endpoints: Vec::new(),
        admin_address: String::new(),
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
        security: Security::Plain,
        tenants: Arc::default(),
    };
    Arc::new(AdminContext {
        inbox,
        liveness,
        metrics: Arc::new(Metrics::new("test", reprise_buffers::PageCoverage::default())),
        directory: Arc::new(DirectoryClient::start(alone, Arc::new(|_| {})).expect("the client starts")),
        peers: None,
        arena: ArenaInfo { bytes: 0, regions: 0, page_kind: String::new() },
        settings: settings(),
        tenants: Arc::default(),
        public_tenant: PublicTenant::default(),
        slack: ActiveProfiles::default(),
        queue_grants: Arc::new(QueueGrantService::new(settings().session.queue_grants)),
        recorder: Arc::new(Recorder::new("test".to_owned())),
        certificates: Certificates::default(),
        guard: reprise_daemon::guard::Guard::plain(),
        connections_max: 8,
        ready: AtomicBool::new(true),
    })
}

fn settings() -> Settings {
    Config::default().validate().expect("the defaults are valid")
}

fn input() -> Input {
    Input::Event(Event::LookupFailed { lookup: LookupId(0) })
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(future)
}

#[test]
fn core_with_a_full_inbox_is_healthy_and_responds_when_there_is_room() {
    let (inbox, inputs) = Inbox::new();
    let context = context(inbox.clone(), Liveness::new(Clock::start()));
    while inbox.send_within(input(), Duration::ZERO).is_ok() {}
    run(async {
        assert_eq!(healthz(State(context.clone())).await.status(), StatusCode::OK);
        let (asked, is_asked) = mpsc::channel();
        let core = std::thread::spawn(move || {
            is_asked.recv().expect("the test queries the core");
            for input in inputs.iter() {
                if let Input::Inspect(answer) = input {
                    answer.send(CoreView::default()).expect("the page waits for the response");
                    return;
                }
            }
            unreachable!("the test queries the core")
        });
        asked.send(()).expect("the core thread runs");
        assert_eq!(metrics(State(context.clone()), HeaderMap::new()).await.status(), StatusCode::OK);
        core.join().expect("the core responded");
    });
}

#[test]
fn startup_probe_responds_only_once_the_agent_is_ready() {
    let (inbox, _inputs) = Inbox::new();
    let context = context(inbox, Liveness::new(Clock::start()));
    context.ready.store(false, Ordering::Release);
    run(async {
        let mut answer = std::pin::pin!(startz(State(context.clone())));
        let early = tokio::time::timeout(3 * CHECK_EVERY, &mut answer).await;
        assert!(early.is_err(), "responded before the agent is ready");
        assert_eq!(readyz(State(context.clone())).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        context.ready.store(true, Ordering::Release);
        assert_eq!(answer.await.status(), StatusCode::OK);
    });
}

#[test]
fn pages_fail_if_the_core_does_not_respond_in_time() {
    let (inbox, _inputs) = Inbox::new();
    let context = context(inbox.clone(), Liveness::stopped());
    while inbox.send_within(input(), Duration::ZERO).is_ok() {}
    run(async {
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        assert_eq!(healthz(State(context.clone())).await.status(), unavailable);
        assert_eq!(status_page(State(context.clone())).await.status(), unavailable);
        assert_eq!(block_page(State(context.clone()), Path(KEY.to_owned())).await.status(), unavailable);
    });
}

/// Returns the page of a block that the core describes like this.
fn block_response(description: Option<BlockDescription>) -> (StatusCode, String) {
    let (inbox, inputs) = Inbox::new();
    let context = context(inbox, Liveness::new(Clock::start()));
    let core = std::thread::spawn(move || {
        let Ok(Input::Describe { key, answer }) = inputs.recv() else {
            panic!("expected a query for a block")
        };
        assert_eq!(key.to_string(), KEY);
        let described = description.map(|description| LocatedBlock { description, path: None });
        answer.send(described).expect("the page waits for the response");
    });
    let response = run(response(block_page(State(context), Path(KEY.to_owned()))));
    core.join().expect("the core responded");
    response
}

async fn response(page: impl Future<Output = Response>) -> (StatusCode, String) {
    let page = page.await;
    let status = page.status();
    let body = axum::body::to_bytes(page.into_body(), usize::MAX).await.expect("in memory");
    (status, String::from_utf8(body.to_vec()).expect("text"))
}

#[test]
fn block_page_contains_the_description_by_the_core() {
    let description = BlockDescription {
        origin: BlockOrigin::Placed,
        dram: Some(DramCopy::Unsaved),
        nvme: None,
        priority: Priority::High,
        class: Class::Active,
        leases: 3,
    };
    let (status, body) = block_response(Some(description));
    assert_eq!(status, StatusCode::OK);
    let node = Config::default().validate().expect("the defaults are valid").node.name;
    let expected = serde_json::json!({
        "node": node, "key": KEY, "origin": "placed", "dram": "unsaved", "nvme": null, "priority": "high", "class": "active",
        "leases": 3
    });
    let page = |body: &str| serde_json::from_str::<serde_json::Value>(body).expect("JSON");
    assert_eq!(page(&body), expected);
    let stored = BlockDescription { dram: None, nvme: Some(DeviceId(1)), ..description };
    let (_, body) = block_response(Some(stored));
    assert_eq!((&page(&body)["dram"], &page(&body)["nvme"]["device"]), (&serde_json::Value::Null, &1.into()));
}

#[test]
fn missing_block_and_invalid_key_have_different_responses() {
    let (status, body) = block_response(None);
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(body.contains(KEY) && body.contains("not on node"), "{body}");

    let (inbox, inputs) = Inbox::new();
    let context = context(inbox, Liveness::new(Clock::start()));
    let (status, body) = run(response(block_page(State(context), Path("12".to_owned()))));
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body.contains("32 hexadecimal digits"), "{body}");
    assert!(inputs.is_empty(), "the core is not queried");
}

#[test]
fn traces_are_off_until_the_configuration_allows_them() {
    let (inbox, _inputs) = Inbox::new();
    let context = context(inbox, Liveness::new(Clock::start()));
    let local = SocketAddr::from(([127, 0, 0, 1], 1));
    let client = Some(Extension(ClientAddress { client: local, server: local }));
    let (status, body) = run(response(trace::page(State(context), (client, None), Path(1))));
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert!(body.contains("admin.trace = true"), "{body}");
}

#[test]
fn traces_are_for_clients_of_the_node_and_bounded() {
    let (inbox, _inputs) = Inbox::new();
    let mut context = context(inbox, Liveness::new(Clock::start()));
    Arc::get_mut(&mut context).expect("the only reference").settings.admin_trace = true;
    let server = SocketAddr::from(([10, 0, 0, 9], 1));
    let ask = async |address: Option<&str>, seconds| {
        let address = address.map(|address| SocketAddr::new(address.parse().expect("an address"), 1));
        let client = address.map(|client| Extension(ClientAddress { client, server }));
        trace::page(State(context.clone()), (client, None), Path(seconds)).await
    };
    run(async {
        for address in [None, Some("10.0.0.2"), Some("::ffff:10.0.0.2"), Some("2001:db8::1")] {
            assert_eq!(ask(address, 1).await.status(), StatusCode::FORBIDDEN, "{address:?}");
        }
        for seconds in [0, 86_401] {
            assert_eq!(ask(Some("127.0.0.1"), seconds).await.status(), StatusCode::BAD_REQUEST);
        }
        let mut open = Vec::new();
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.9"] {
            open.push(ask(Some(address), 1).await);
            assert_eq!(open.last().expect("pushed").status(), StatusCode::OK, "{address}");
        }
        assert_eq!(ask(Some("::1"), 1).await.status(), StatusCode::TOO_MANY_REQUESTS);
    });
}
