//! Grants on a fake controller that records the calls.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64};

use reprise_buffers::{Span, check_available};
use reprise_nvme::{DataFormat, DmaMapping};
use reprise_policy::TenantId;

use super::*;

pub(crate) const DEVICE: DeviceId = DeviceId(2);
const ONE: SessionId = SessionId(1);
const TENANT: TenantId = TenantId(0);
const LIMITS: QueueGrantLimits = QueueGrantLimits { pairs_per_device: 8, pairs_per_session: 6, depth: 64 };

pub(crate) type Log = Arc<Mutex<Vec<String>>>;

/// A controller with some queue pairs.
pub(crate) struct FakeLender {
    log: Log,
    free: Mutex<Vec<u16>>,
    pub(crate) hangs: AtomicBool,
    /// Bytes of a queue pair that the machine must have.
    bytes: AtomicU64,
    /// Memory that it may access until it is disabled.
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
    silenced: Mutex<Vec<u16>>,
    /// Runs when the next queue pair is created.
    pub(crate) on_lend: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Runs when the next queue pair is deleted.
    pub(crate) on_delete: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// Records its own drop in the log.
struct Guard(Log, String);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().expect("no panic").push(std::mem::take(&mut self.1));
    }
}

impl FakeLender {
    pub(crate) fn new(log: &Log) -> Arc<FakeLender> {
        Arc::new(FakeLender {
            log: Arc::clone(log),
            free: Mutex::new(vec![4, 3, 2, 1]),
            hangs: AtomicBool::new(false),
            bytes: AtomicU64::new(4096),
            kept: Mutex::default(),
            silenced: Mutex::default(),
            on_lend: Mutex::new(None),
            on_delete: Mutex::new(None),
        })
    }

    fn note(&self, what: String) {
        self.log.lock().expect("no panic").push(what);
    }

    fn guard(&self, what: String) -> Box<dyn Send + Sync> {
        Box::new(Guard(Arc::clone(&self.log), what))
    }
}

impl QueueLender for FakeLender {
    fn lent_device(&self, namespace: u32) -> Option<LentDevice> {
        let format = DataFormat::Sgl;
        (namespace == 1).then_some(LentDevice {
            block_bytes: 512,
            transfer_max: 1 << 20,
            format,
            entries_max: 4096,
        })
    }

    fn lend_doorbells(&self) -> Result<LentDoorbells, NvmeError> {
        Ok(LentDoorbells::of_registers(memory(), 4096, 8192))
    }

    fn map_lent(&self, memory: &Span) -> Result<DmaMapping, NvmeError> {
        self.note(format!("map {} bytes", memory.len()));
        Ok(DmaMapping::new(0x10_0000, memory.len() as u64, self.guard("unmap memory".to_owned())))
    }

    fn lend(&self, entries: u32, _: &mut LentDoorbells) -> Result<LentQueue, NvmeError> {
        if let Some(run) = self.on_lend.lock().expect("no panic").take() {
            run();
        }
        check_available(self.bytes.load(Ordering::SeqCst))?;
        let id = self.free.lock().expect("no panic").pop().ok_or(NvmeError::NoQueue { granted: 4 })?;
        self.note(format!("create {id}"));
        let (memory, file) = MappedRegion::allocate(4096)?;
        Ok(LentQueue {
            id,
            entries,
            file,
            bytes: 4096,
            completions_at: 2048,
            lists_at: 4096,
            submission_doorbell: 0x3000 + 8 * u64::from(id),
            completion_doorbell: 0x3004 + 8 * u64::from(id),
            mapping: DmaMapping::new(u64::from(id) << 32, 4096, self.guard(format!("unmap {id}"))),
            memory,
        })
    }

    fn delete(&self, queue: u16) -> Result<(), NvmeError> {
        if let Some(run) = self.on_delete.lock().expect("no panic").take() {
            run();
        }
        self.note(format!("delete {queue}"));
        if self.hangs.load(Ordering::SeqCst) {
            return Err(NvmeError::Fatal);
        }
        self.free.lock().expect("no panic").push(queue);
        Ok(())
    }

    fn silence(&self, queues: &[u16]) {
        self.silenced.lock().expect("no panic").extend(queues);
    }

    fn keep(&self, memory: Box<dyn Any + Send>) {
        self.kept.lock().expect("no panic").push(memory);
    }
}

/// Adds a controller as the device.
pub(crate) fn attach(service: &QueueGrantService, lender: &Arc<FakeLender>) {
    let weak = Arc::downgrade(lender);
    let find: FindLender = Arc::new(move || weak.upgrade().map(|lender| lender as Arc<dyn QueueLender>));
    service.add_device(DEVICE, LendingDevice { find, serial: "S1".into(), namespace: 1, is_emulated: true });
}

/// Runs a test until a condition holds, for at most some seconds.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < END_WAIT, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn memory() -> OwnedFd {
    MappedRegion::allocate(4096).expect("memory").1
}

struct Fixture {
    service: Arc<QueueGrantService>,
    lender: Arc<FakeLender>,
    log: Log,
    notices: Arc<Mutex<Vec<(GrantGeneration, String, RevocationEnd)>>>,
}

impl Fixture {
    fn new() -> Fixture {
        let log = Log::default();
        let lender = FakeLender::new(&log);
        Fixture::of(QueueGrantService::new(LIMITS), lender, log)
    }

    /// A node with this allocation.
    fn of_allocation(allocation: &Allocation) -> Fixture {
        let log = Log::default();
        let lender = FakeLender::new(&log);
        let fixture = Fixture::of(QueueGrantService::of_allocations(LIMITS), lender, log);
        assert!(fixture.service.set_allocations(vec![allocation.clone()]).is_none());
        fixture
    }

    fn of(service: QueueGrantService, lender: Arc<FakeLender>, log: Log) -> Fixture {
        let service = Arc::new(service);
        attach(&service, &lender);
        Fixture { service, lender, log, notices: Arc::default() }
    }

    fn register(&self, session: SessionId) -> MemoryNumber {
        let notices = Arc::clone(&self.notices);
        let sink: RevocationSink = Arc::new(move |generation, reason: &str, end| {
            notices.lock().expect("no panic").push((generation, reason.to_owned(), end));
        });
        self.service.register(session, (memory(), 4096), sink).expect("registered")
    }

    fn grant(&self, session: SessionId, pairs: u32) -> Result<NewGrant, QueueGrantRefusal> {
        self.grant_to(TENANT, session, pairs)
    }

    fn grant_to(
        &self,
        tenant: TenantId,
        session: SessionId,
        pairs: u32,
    ) -> Result<NewGrant, QueueGrantRefusal> {
        let memory = MemoryNumber(1);
        self.service.grant(QueueRequest { session, tenant, device: DEVICE.0, pairs, depth: 64, memory })
    }

    /// Takes the recorded calls.
    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().expect("no panic"))
    }
}

#[test]
fn grant_names_queue_pairs_and_ends_in_order() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let grant = fixture.grant(ONE, 2).expect("granted");
    assert_eq!(grant.memory_address, 0x10_0000);
    let queues: Vec<_> = grant.queues.iter().map(|queue| (queue.id, queue.submission_doorbell)).collect();
    assert_eq!(queues, [(1, 8192 + 0x1008), (2, 8192 + 0x1010)], "doorbells are offsets in the file");
    assert_eq!(fixture.log(), ["map 4096 bytes", "create 1", "create 2"]);
    fixture.grant(ONE, 1).expect("granted");
    assert_eq!(fixture.log(), ["create 3"], "the memory is mapped already");
    let counters = fixture.service.counters();
    assert_eq!((counters.grants, counters.pairs, counters.memory_bytes), (2, 3, 4096));
    assert_eq!(fixture.service.views()[0].queues, [1, 2]);

    fixture.service.close_session(ONE);
    let expected = ["delete 1", "delete 2", "unmap 1", "unmap 2", "delete 3", "unmap 3", "unmap memory"]
        .map(str::to_owned);
    assert_eq!(fixture.log(), expected);
    assert_eq!(fixture.service.counters().pairs, 0);
    assert!(!fixture.service.is_fenced(ONE));
}

#[test]
fn session_of_another_tenant_gets_no_queue_pairs_of_the_controller() {
    let fixture = Fixture::new();
    let two = SessionId(2);
    fixture.register(ONE);
    fixture.register(two);
    fixture.grant(ONE, 1).expect("granted");
    fixture.log();
    let refused = fixture.grant_to(TenantId(1), two, 1).expect_err("of another tenant");
    assert!(matches!(&refused, QueueGrantRefusal::Exhausted(text) if text.contains("tenant")), "{refused}");
    assert!(fixture.log().is_empty(), "the controller has no memory of the other tenant");
    assert_eq!(fixture.service.counters().refused_total, 1);
    fixture.service.close_session(ONE);
    fixture.grant_to(TenantId(1), two, 1).expect("the sessions of the tenant have ended");
}

#[test]
fn queue_pairs_of_a_failed_request_are_deleted() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let refused = fixture.grant(ONE, 5).expect_err("the controller has four");
    assert!(
        matches!(&refused, QueueGrantRefusal::Exhausted(text) if text.contains("granted 4")),
        "{refused}"
    );
    assert_eq!(fixture.log().iter().filter(|line| line.starts_with("delete")).count(), 4);
    assert_eq!(fixture.service.counters().pairs, 0);
    assert_eq!(fixture.service.counters().refused_total, 1);
    fixture.grant(ONE, 4).expect("all are free again");
}

#[test]
fn queue_pairs_that_do_not_fit_into_memory_are_refused_with_the_limit() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    fixture.lender.bytes.store(1 << 50, Ordering::SeqCst);
    let refused = fixture.grant(ONE, 1).expect_err("a pebibyte");
    let has_limit = |text: &str| text.contains("of memory do not fit") && text.contains("raise the limit");
    assert!(matches!(&refused, QueueGrantRefusal::Exhausted(text) if has_limit(text)), "{refused}");
    assert_eq!(fixture.service.counters().queue_bytes, 0);
    fixture.lender.bytes.store(4096, Ordering::SeqCst);
    fixture.grant(ONE, 2).expect("they fit");
    assert_eq!(fixture.service.counters().queue_bytes, 2 * 4096);
}

#[test]
fn returned_grant_is_ended_once_and_only_by_its_session() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 1).expect("granted").generation;
    fixture.log();
    assert_eq!(fixture.service.return_grant(SessionId(9), generation), GrantEnd::Ended);
    assert!(fixture.log().is_empty(), "another session");
    assert_eq!(fixture.service.return_grant(ONE, generation), GrantEnd::Ended);
    assert_eq!(fixture.log(), ["delete 1", "unmap 1", "unmap memory"], "no grant needs the memory");
    assert_eq!(fixture.service.return_grant(ONE, generation), GrantEnd::Ended);
    assert!(fixture.log().is_empty());
    fixture.grant(ONE, 1).expect("granted");
    assert_eq!(fixture.log(), ["map 4096 bytes", "create 1"]);
}

#[test]
fn revoked_session_is_notified_after_the_deletion_and_gets_none_later() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 2).expect("granted").generation;
    fixture.log();
    let revoking = fixture.service.revoke_device(DEVICE, "the device is closed").expect("a grant");
    revoking.join().expect("it ends well");
    assert_eq!(fixture.log(), ["delete 1", "delete 2", "unmap 1", "unmap 2", "unmap memory"]);
    let notices = std::mem::take(&mut *fixture.notices.lock().expect("no panic"));
    assert_eq!(notices, [(generation, "the device is closed".to_owned(), RevocationEnd::Confirmed)]);
    assert_eq!(fixture.service.counters().revoked_total, 1);
    let refused = fixture.grant(ONE, 1).expect_err("the device is gone");
    assert!(refused.to_string().contains("lends no queue pairs"), "{refused}");
    fixture.service.close_session(ONE);
    assert!(fixture.log().is_empty(), "nothing is left");
}

#[test]
fn device_that_is_revoked_during_a_request_grants_nothing() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let service = Arc::clone(&fixture.service);
    let revoke = Box::new(move || drop(service.revoke_device(DEVICE, "gone")));
    *fixture.lender.on_lend.lock().expect("no panic") = Some(revoke);
    let refused = fixture.grant(ONE, 1).expect_err("revoked");
    assert!(refused.to_string().contains("closed"), "{refused}");
    assert!(fixture.log().contains(&"delete 1".to_owned()));
    assert_eq!(fixture.service.counters().pairs, 0);
}

#[test]
fn device_that_is_replaced_during_a_request_grants_nothing() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let (service, log) = (Arc::clone(&fixture.service), Log::default());
    let replacement = FakeLender::new(&log);
    let replace = {
        let replacement = Arc::clone(&replacement);
        move || {
            service.device_released(DEVICE);
            attach(&service, &replacement);
        }
    };
    *fixture.lender.on_lend.lock().expect("no panic") = Some(Box::new(replace));
    let refused = fixture.grant(ONE, 1).expect_err("replaced");
    assert!(refused.to_string().contains("closed"), "{refused}");
    assert_eq!(
        fixture.log(),
        ["map 4096 bytes", "create 1", "delete 1", "unmap 1", "unmap memory"],
        "on the controller that created it"
    );
    assert_eq!(fixture.service.counters().pairs, 0);
    fixture.grant(ONE, 4).expect("of the replacement");
    assert_eq!(log.lock().expect("no panic")[0], "map 4096 bytes", "the replacement has its own mapping");
}

#[test]
fn grants_of_a_released_device_end_on_its_controller() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 1).expect("granted").generation;
    fixture.log();
    fixture.service.device_released(DEVICE);
    let log = Log::default();
    let replacement = FakeLender::new(&log);
    attach(&fixture.service, &replacement);
    assert_eq!(fixture.service.return_grant(ONE, generation), GrantEnd::Ended);
    // A session that is closed gets no notice.
    wait_until("the notice", || fixture.notices.lock().expect("no panic").len() == 1);
    fixture.service.close_session(ONE);
    wait_until("the end", || fixture.log.lock().expect("no panic").len() == 3);
    assert_eq!(fixture.log(), ["delete 1", "unmap 1", "unmap memory"]);
    assert!(log.lock().expect("no panic").is_empty(), "the replacement has no such queue pair");
    assert_eq!(fixture.service.counters().pairs, 0);
}

#[test]
fn return_of_a_grant_that_is_revoked_waits_for_the_deletion() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 1).expect("granted").generation;
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let wait = Box::new(move || gate.recv().expect("the test sends"));
    *fixture.lender.on_delete.lock().expect("no panic") = Some(wait);
    let revoking = fixture.service.revoke_device(DEVICE, "gone").expect("a grant");
    let (service, (answer, answered)) = (Arc::clone(&fixture.service), std::sync::mpsc::channel());
    let returning = std::thread::spawn(move || answer.send(service.return_grant(ONE, generation)));
    answered.recv_timeout(Duration::from_millis(100)).expect_err("the queue pair is not deleted");
    assert!(fixture.service.is_fenced(ONE));
    go.send(()).expect("the controller waits");
    assert_eq!(answered.recv().expect("an answer"), GrantEnd::Ended);
    assert!(!fixture.service.is_fenced(ONE));
    returning.join().expect("it ends well").expect("sent");
    revoking.join().expect("it ends well");
}

#[test]
fn return_that_the_controller_does_not_confirm_fails() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 2).expect("granted").generation;
    fixture.lender.hangs.store(true, Ordering::SeqCst);
    fixture.log();
    for _ in 0..2 {
        assert_eq!(fixture.service.return_grant(ONE, generation), GrantEnd::Unconfirmed);
    }
    assert_eq!(
        fixture.log(),
        ["delete 1"],
        "a controller that hangs is not waited for again, and memory stays mapped for it"
    );
    assert_eq!(
        *fixture.lender.silenced.lock().expect("no panic"),
        [1, 2],
        "no doorbell is forwarded for either"
    );
    fixture.service.close_session(ONE);
    assert_eq!(fixture.log(), [""; 0]);
    // The controller is disabled.
    fixture.lender.kept.lock().expect("no panic").clear();
    assert_eq!(fixture.log(), ["unmap 1", "unmap 2", "unmap memory"]);
    assert!(fixture.service.is_fenced(ONE));
    assert_eq!(fixture.service.counters().unconfirmed_total, 1);
}

#[test]
fn session_stays_fenced_while_the_controller_does_not_confirm() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    fixture.grant(ONE, 1).expect("granted");
    fixture.lender.hangs.store(true, Ordering::SeqCst);
    fixture.log();
    fixture.service.close_session(ONE);
    // The controller may still access memory, and write data that it has read before.
    assert_eq!(fixture.log(), ["delete 1"]);
    assert!(fixture.service.is_fenced(ONE));
    assert_eq!((fixture.service.counters().unconfirmed_total, fixture.service.counters().pairs), (1, 1));
    fixture.service.device_released(DEVICE);
    assert!(!fixture.service.is_fenced(ONE), "the controller was reset");
    assert_eq!(fixture.service.counters().pairs, 0);
}

#[test]
fn revocation_without_a_confirmation_reports_it() {
    let fixture = Fixture::new();
    fixture.register(ONE);
    let generation = fixture.grant(ONE, 1).expect("granted").generation;
    fixture.lender.hangs.store(true, Ordering::SeqCst);
    let revoking = fixture.service.revoke_device(DEVICE, "gone").expect("a grant");
    revoking.join().expect("it ends well");
    let notices = std::mem::take(&mut *fixture.notices.lock().expect("no panic"));
    assert_eq!(notices, [(generation, "gone".to_owned(), RevocationEnd::Unconfirmed)]);
    assert!(fixture.service.is_fenced(ONE));
}

#[test]
fn queue_pairs_of_a_closed_device_need_no_deletion() {
    let Fixture { service, lender, log, .. } = Fixture::new();
    let sink: RevocationSink = Arc::new(|_, _, _| {});
    let number = service.register(ONE, (memory(), 4096), sink).expect("registered");
    let request =
        QueueRequest { session: ONE, tenant: TENANT, device: DEVICE.0, pairs: 1, depth: 2, memory: number };
    service.grant(request).expect("granted");
    drop(lender);
    log.lock().expect("no panic").clear();
    service.close_session(ONE);
    assert_eq!(*log.lock().expect("no panic"), ["unmap 1", "unmap memory"]);
    assert!(!service.is_fenced(ONE));
}

#[test]
fn memory_that_could_shrink_is_refused_and_not_counted() {
    let fixture = Fixture::new();
    let file = tempfile::tempfile().expect("a file");
    file.set_len(4096).expect("enlarged");
    let sink: RevocationSink = Arc::new(|_, _, _| {});
    let refused = fixture.service.register(ONE, (file.into(), 4096), sink).expect_err("not sealed");
    assert!(refused.to_string().contains("F_SEAL_SHRINK"), "{refused}");
    assert_eq!(fixture.service.counters().memory_bytes, 0);
}

fn allocation(pairs: u32) -> Allocation {
    let pairs = BTreeMap::from([("S1".to_owned(), pairs)]);
    Allocation {
        uid: "u".to_owned(),
        name: "n/a".to_owned(),
        depth: 64,
        memory_bytes: None,
        slack_profile: None,
        pairs,
    }
}

#[test]
fn numbers_of_queue_pairs_are_known_by_allocation_while_they_exist() {
    let fixture = Fixture::of_allocation(&allocation(3));
    fixture.register(ONE);
    let first = fixture.grant(ONE, 2).expect("granted").generation;
    let last = fixture.grant(ONE, 1).expect("granted").generation;
    let created = |generation: GrantGeneration, queues: &[u16]| {
        let created = CreatedQueues { generation: generation.0, queues: queues.to_vec() };
        BTreeMap::from([("u".to_owned(), BTreeMap::from([("S1".to_owned(), created)]))])
    };
    assert_eq!(fixture.service.created(), created(last, &[1, 2, 3]));
    assert_eq!(fixture.service.views()[0].allocation.as_deref(), Some("n/a"));
    let refused = fixture.grant(ONE, 1).expect_err("the allocation has three");
    assert!(refused.to_string().contains("at most 0 left"), "{refused}");
    assert_eq!(fixture.service.return_grant(ONE, last), GrantEnd::Ended);
    assert_eq!(fixture.service.created(), created(first, &[1, 2]));
    fixture.service.close_session(ONE);
    assert_eq!((fixture.service.created(), fixture.service.pairs_of("u")), (BTreeMap::new(), 0));
}

#[test]
fn allocation_has_queue_pairs_until_the_controller_has_deleted_those_of_its_sessions() {
    for successor in [vec![], vec![allocation(1)]] {
        let fixture = Fixture::of_allocation(&allocation(2));
        fixture.register(ONE);
        let generation = fixture.grant(ONE, 2).expect("granted").generation;
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let wait = Box::new(move || gate.recv().expect("the test sends"));
        *fixture.lender.on_delete.lock().expect("no panic") = Some(wait);
        assert!(fixture.service.set_allocations(vec![allocation(2)]).is_none(), "nothing has changed");
        let revoking = fixture.service.set_allocations(successor).expect("a grant ends");
        wait_until("the numbers vanish", || fixture.service.created().is_empty());
        assert_eq!(fixture.service.pairs_of("u"), 2, "they are not deleted");
        assert!(fixture.notices.lock().expect("no panic").is_empty());
        go.send(()).expect("the controller waits");
        revoking.join().expect("it ends well");
        assert_eq!(fixture.service.pairs_of("u"), 0);
        let notices = std::mem::take(&mut *fixture.notices.lock().expect("no panic"));
        assert!(notices[0].0 == generation && notices[0].1.contains("GPUQueueAllocation"), "{notices:?}");
        assert_eq!(fixture.service.counters().revoked_total, 1);
        fixture.grant(ONE, 2).expect_err("the allocation is gone, or smaller");
    }
}

#[test]
fn allocation_that_ends_during_a_request_grants_nothing() {
    let fixture = Fixture::of_allocation(&allocation(2));
    fixture.register(ONE);
    let service = Arc::clone(&fixture.service);
    // It comes back at once, as another allocation with the same uid.
    let replace = move || {
        assert!(service.set_allocations(Vec::new()).is_none(), "the queue pair is being created");
        assert!(service.set_allocations(vec![allocation(2)]).is_none());
    };
    *fixture.lender.on_lend.lock().expect("no panic") = Some(Box::new(replace));
    let refused = fixture.grant(ONE, 1).expect_err("revoked");
    assert!(refused.to_string().contains("GPUQueueAllocation has ended"), "{refused}");
    assert!(fixture.log().contains(&"delete 1".to_owned()));
    assert_eq!(fixture.service.pairs_of("u"), 0);
    fixture.grant(ONE, 2).expect("of the later allocation");
}
