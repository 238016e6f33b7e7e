//! Calls about queue pairs over a socket, on a fake controller, while other requests continue.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use prost::Message;
use reprise_buffers::{Arena, ArenaConfig, HugePolicy, MappedRegion, send_with_fds};
use reprise_daemon::rejected_connections::RejectedConnections;
use reprise_policy::queue_grants::QueueGrantLimits;
use reprise_policy::{SessionId, TenantId, TenantName};
use reprise_proto::local::request;

use super::*;
use crate::core_loop::{Inbox, Input};
use crate::public_tenant::PublicTenant;
use crate::queue_grants::QueueGrantService;
use crate::queue_grants::tests::{DEVICE, FakeLender, attach};
use crate::session::frame::Limits;
use crate::session::{Ids, Outbound, Peer, StatedBackend, TenantSalts, TenantUsers, read_requests};

const LIMITS: QueueGrantLimits = QueueGrantLimits { pairs_per_device: 8, pairs_per_session: 6, depth: 64 };
const LONG: Duration = Duration::from_secs(10);

/// A session with a fake controller, and its reader.
struct Fixture {
    client: UnixStream,
    lender: Arc<FakeLender>,
    inputs: std::sync::mpsc::Receiver<&'static str>,
    session: Arc<Session>,
    reader: JoinHandle<()>,
}

impl Fixture {
    fn start() -> Fixture {
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("an arena of 2 MiB"));
        let (inbox, received) = Inbox::new();
        let queue_grants = Arc::new(QueueGrantService::new(LIMITS));
        let lender = FakeLender::new(&Arc::default());
        attach(&queue_grants, &lender);
        let context = SessionContext {
            inbox,
            arena: Arc::clone(&arena),
            node: "test".to_owned(),
            root: "/".into(),
            identity: None,
            users: TenantUsers::default(),
            salts: TenantSalts::default(),
            keys: crate::encryption::EncryptionKeys::default(),
            public_tenant: PublicTenant::default(),
            tenants: Arc::default(),
            draining: AtomicBool::new(false),
            rejected: RejectedConnections::default(),
            slack: crate::slack::ActiveProfiles::default(),
            queue_grants,
            recorder: Arc::new(crate::recorder::Recorder::new("test".to_owned())),
        };
        let (client, agent) = UnixStream::pair().expect("a socket pair");
        client.set_read_timeout(Some(LONG)).expect("an option of the socket");
        let mut frames = FrameReader::new(agent.try_clone().expect("a descriptor"), Limits::SESSION);
        let tenant = TenantName::default_tenant();
        let session = Arc::new(Session {
            id: SessionId(1),
            tenant: TenantId(0),
            peer: Peer {
                client_name: String::new(),
                tenant,
                pid: 1,
                ids: Ids { uid: 0, gid: 0 },
                gpu: None,
                layout: None,
            },
            outbound: Outbound::new(agent, arena),
            in_flight: 0.into(),
            is_fenced: false.into(),
            load_blocks_max: 1,
            layout: crate::recorder::tests::layout(1),
            namespace: reprise_policy::NamespaceDigest([1; 32]),
            public: None,
            backend: StatedBackend::default(),
        });
        let (noted, inputs) = channel();
        std::thread::spawn(move || {
            for input in received {
                let name = match input {
                    Input::Request(_) => "request",
                    Input::Event(_) => "event",
                    _ => "other",
                };
                if noted.send(name).is_err() {
                    return;
                }
            }
        });
        let reader = std::thread::spawn({
            let session = Arc::clone(&session);
            move || {
                let writer = std::thread::spawn({
                    let session = Arc::clone(&session);
                    move || session.outbound.write_queued()
                });
                read_requests(&context, &session, &mut frames);
                if !session.outbound.is_closing() {
                    session.close();
                }
                writer.join().expect("the writer ends");
            }
        });
        Fixture { client, lender, inputs, session, reader }
    }

    fn send(&mut self, id: u64, body: request::Body) {
        let frame = frame_of(id, body);
        self.client.write_all(&frame).expect("sent");
    }

    fn receive(&mut self) -> (u64, Body) {
        let mut length = [0; 4];
        self.client.read_exact(&mut length).expect("an answer in time");
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        self.client.read_exact(&mut message).expect("a whole answer");
        let response = local::Response::decode(message.as_slice()).expect("an answer");
        (response.id, response.body.expect("a known kind"))
    }

    /// Registers memory with request 1, and requests a queue pair with request 2.
    fn request_queues(&mut self) {
        let frame = frame_of(1, request::Body::RegisterMemory(local::RegisterMemory { bytes: 4096 }));
        let file = MappedRegion::allocate(4096).expect("memory").1;
        send_with_fds(self.client.as_fd(), &frame, &[file.as_fd()]).expect("sent");
        assert!(matches!(self.receive(), (1, Body::MemoryRegistered(_))));
        let (device, pairs, depth, memory) = (u32::from(DEVICE.0), 1, 16, 1);
        self.send(2, request::Body::RequestQueues(local::RequestQueues { device, pairs, depth, memory }));
    }

    /// Makes a request that the reader answers.
    fn check_reader(&mut self, id: u64) {
        self.send(id, request::Body::UseBackend(local::UseBackend { backend: 1 }));
        assert!(matches!(self.receive(), (answered, Body::BackendUsed(_)) if answered == id));
    }

    fn end(self) -> Vec<&'static str> {
        drop(self.client);
        self.reader.join().expect("the reader ends");
        self.inputs.iter().collect()
    }
}

fn frame_of(id: u64, body: request::Body) -> Vec<u8> {
    let message = local::Request { id, body: Some(body) }.encode_to_vec();
    let length = (message.len() as u32).to_le_bytes();
    length.into_iter().chain(message).collect()
}

/// Returns a function for the controller that waits for a message, and the sender.
fn block() -> (Sender<()>, Box<dyn FnOnce() + Send>) {
    let (resume, blocked) = channel();
    (resume, Box::new(move || blocked.recv_timeout(LONG).expect("the test resumes it")))
}

#[test]
fn other_requests_continue_while_queue_pairs_are_created() {
    let mut fixture = Fixture::start();
    let (resume, wait) = block();
    *fixture.lender.on_lend.lock().expect("no panic") = Some(wait);
    fixture.request_queues();
    fixture.check_reader(3);
    resume.send(()).expect("the controller waits");
    let (id, body) = fixture.receive();
    assert!(id == 2 && matches!(body, Body::QueuesGranted(_)), "{id} {body:?}");
    assert_eq!(fixture.end(), ["event"], "the session has ended");
}

/// Returns the queue pair, then extents and a pin, while the controller deletes. Returns what the core received before the
/// deletion, and in all.
fn free_behind_return(is_confirmed: bool) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut fixture = Fixture::start();
    fixture.request_queues();
    let (id, Body::QueuesGranted(granted)) = fixture.receive() else { panic!("not granted") };
    assert_eq!(id, 2);
    let (resume, wait) = block();
    *fixture.lender.on_delete.lock().expect("no panic") = Some(wait);
    fixture.lender.hangs.store(!is_confirmed, Ordering::SeqCst);
    fixture.send(3, request::Body::ReturnQueues(local::ReturnQueues { generation: granted.generation }));
    fixture.send(4, request::Body::Abort(local::Abort { leases: vec![1] }));
    fixture.send(5, request::Body::Unpin(local::Unpin { pins: vec![1] }));
    fixture.check_reader(6);
    let before: Vec<_> = fixture.inputs.try_iter().collect();
    resume.send(()).expect("the controller waits");
    let (id, body) = fixture.receive();
    assert_eq!((id, matches!(body, Body::QueuesReturned(_))), (3, is_confirmed), "{body:?}");
    if is_confirmed {
        let wait = |_| fixture.inputs.recv_timeout(LONG).expect("the core gets both");
        let requests: Vec<_> = (0..2).map(wait).collect();
        return (before, requests.into_iter().chain(fixture.end()).collect());
    }
    (before, fixture.end())
}

#[test]
fn extents_are_freed_behind_a_return() {
    let (before, all) = free_behind_return(true);
    assert!(before.is_empty(), "{before:?}");
    assert_eq!(all, ["request", "request", "event"]);
}

#[test]
fn no_extent_is_freed_behind_a_return_that_is_not_confirmed() {
    let (before, all) = free_behind_return(false);
    assert!(before.is_empty(), "{before:?}");
    assert_eq!(all, ["event"], "only the end of the session, which quarantines its extents");
}

#[test]
fn return_that_takes_too_long_fences_the_session() {
    let mut fixture = Fixture::start();
    returned(&fixture.session, 7, GrantEnd::Pending);
    assert!(fixture.session.is_fenced());
    let (id, body) = fixture.receive();
    assert!(id == 7 && matches!(body, Body::Failure(_)), "{id} {body:?}");
    assert_eq!(fixture.client.read(&mut [0]).expect("closed"), 0, "the session ends");
    assert_eq!(fixture.end(), ["event"]);
}
