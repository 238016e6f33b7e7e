//! Scenarios at sizes for which the harness, which checks everything after every event, is too slow. A step
//! with quadratic cost would not finish.

use std::collections::VecDeque;
use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, Effect, FillId, LeaseId, PlaceKind, RegionId, Reply};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, Event, FillError, FillUpdate, LoadRequest, Priority, Request, RequestId,
    Scope, SessionOpened,
};
use reprise_agent_core::{AgentCore, Settings};
use reprise_policy::{BlockKey, Layout, NamespaceDigest, Parts, SessionId, TenantId, Tick};

use crate::disk::Disk;
use crate::harness::{key, layout};
use crate::memory::checksums;

const SESSION: SessionId = SessionId(1);

/// Core whose device operations complete at once; reads remain pending.
struct Quick {
    core: AgentCore,
    now: Tick,
    layout: Layout,
    replies: Vec<Reply>,
    fills: Vec<FillId>,
    lost: usize,
}

impl Quick {
    /// Creates a core with 64 regions of 1 MiB, one device and one session.
    fn new(disk_bytes: u64, layout: Layout, settings: Settings) -> Quick {
        let (_, pool) = Disk::format(disk_bytes, 0);
        let regions: Vec<_> = (0..64).map(|region| (RegionId(region), 1 << 20)).collect();
        let (core, effects) = AgentCore::new(settings, vec![(pool, Vec::new())], &regions);
        let (replies, fills) = (Vec::new(), Vec::new());
        let mut quick = Quick { core, now: Tick(1), layout, replies, fills, lost: 0 };
        quick.execute(effects);
        let (tenant, namespace) = (TenantId::DEFAULT, NamespaceDigest([0; 32]));
        quick.apply(Event::SessionOpened(SessionOpened {
            session: SESSION,
            tenant,
            namespace,
            layout,
            gpu: None,
        }));
        quick
    }

    fn apply(&mut self, event: Event) {
        let mut effects = Vec::new();
        self.core.apply(self.now, event, &mut effects);
        self.execute(effects);
    }

    fn execute(&mut self, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Device { device, op } => {
                    let mut more = Vec::new();
                    let done = Event::DeviceDone { device, token: op.token, result: Ok(()) };
                    self.core.apply(self.now, done, &mut more);
                    effects.extend(more);
                }
                Effect::Reply { reply, .. } => self.replies.push(reply),
                Effect::ReadBlocks { batch, .. } => {
                    self.fills.extend(batch.blocks.iter().map(|read| read.fill));
                }
                Effect::Durable { lost, .. } => self.lost += lost.len(),
                _ => {}
            }
        }
    }

    fn request(&mut self, body: Request) -> Reply {
        self.apply(Event::Request { session: SESSION, request: RequestId(1), body, received: self.now });
        self.replies.pop().expect("answered at once")
    }

    fn save(&mut self, keys: &[BlockKey]) {
        let Reply::Reserved { leases, .. } =
            self.request(Request::Reserve { count: keys.len() as u32, kind: PlaceKind::Arena })
        else {
            panic!("not reserved")
        };
        assert_eq!(leases.len(), keys.len());
        let sums = checksums(1, &self.layout);
        let item = |(lease, key): (LeaseId, &BlockKey)| CommitItem {
            lease,
            key: Some(*key),
            checksums: sums.clone(),
        };
        let items = leases.into_iter().map(|(lease, _)| lease).zip(keys).map(item).collect();
        let Reply::Committed { statuses, .. } = self.request(Request::Commit(CommitRequest {
            items,
            priority: Priority::Normal,
            parent: None,
            position: Some(0),
        })) else {
            panic!("not committed")
        };
        assert!(statuses.iter().all(|status| *status == CommitStatus::Committed));
        self.pass(Duration::from_millis(60));
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now.after(time);
        self.apply(Event::Tick);
    }

    fn load(&mut self, keys: Vec<BlockKey>) {
        let deadline = Duration::from_secs(60);
        let wanted = LoadRequest { keys, deadline, read_bytes: 0, scope: Scope::Local, public: None };
        self.apply(Event::Request {
            session: SESSION,
            request: RequestId(1),
            body: Request::Load(wanted),
            received: self.now,
        });
    }
}

fn tiny() -> Layout {
    layout(1, Parts::Latent, 16)
}

/// Session that requests one cold block as often as possible.
fn all_copies_of_one_block() -> Quick {
    let mut quick = Quick::new(8 << 20, tiny(), Settings::default());
    quick.save(&[key(0)]);
    quick.request(Request::Trim);
    for _ in 0..64 {
        quick.load(vec![key(0); 8192]);
    }
    assert_eq!(quick.fills.len(), 1, "one read");
    quick
}

#[test]
fn half_a_million_waiters_detach_from_one_fill() {
    let mut quick = all_copies_of_one_block();
    assert_eq!(quick.core.counters().read_leases, 64 * 8192);
    quick.pass(Duration::from_secs(61));
    assert_eq!(quick.core.counters().deadline_blocks, 64 * 8192);
    assert_eq!(quick.core.counters().read_leases, 0);
    quick.core.audit().expect("consistent");
}

#[test]
fn half_a_million_waiters_fail_with_their_fill() {
    let mut quick = all_copies_of_one_block();
    let update = FillUpdate::Failed(FillError::Device);
    quick.apply(Event::Fill { fill: quick.fills[0], update });
    assert_eq!(quick.core.counters().failed_blocks, 64 * 8192);
    quick.core.audit().expect("consistent");
}

#[test]
fn closing_a_session_detaches_half_a_million_waiters() {
    let mut quick = all_copies_of_one_block();
    quick.apply(Event::SessionClosed { session: SESSION });
    assert_eq!(quick.core.counters().read_leases, 0);
    quick.core.audit().expect("consistent");
}

#[test]
fn pool_with_a_full_journal_evicts_before_its_bytes_are_used_up() {
    // 640 MiB provide 80,000 slots of 8 KiB, but 65,536 entries.
    let mut quick = Quick::new(640 << 20, tiny(), Settings::default());
    assert_eq!(quick.layout.slot_bytes(), 4096);
    for start in (0..80_000).step_by(1000) {
        quick.save(&(start..start + 1000).map(key).collect::<Vec<_>>());
    }
    let counters = quick.core.counters();
    assert_eq!((quick.lost, counters.unsaved_blocks), (0, 0));
    assert!(counters.pool_free_bytes * 10 > counters.pool_capacity_bytes, "bytes remain free");
    assert!(counters.nvme_blocks <= 65_536 * 97 / 100 + 1, "3 % of the entries are free");
    quick.core.audit().expect("consistent");
}
