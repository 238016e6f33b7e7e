//! Scheduling order of operations for a device: reads before writes, until a write has waited too long.
//!
//! Mixing writes into reads costs read bandwidth. A load waits for every read, while nothing waits for a
//! write-back before its delay bound. Syncs come first: they move no data, and a whole batch waits for each.
//! Prefetches are reads that nothing waits for yet: they precede writes that are not overdue, because they are
//! useless when late, and they start only while no other read waits.
//!
//! Writes of several tenants get shares by weight ([`FairQueue`]), in order for each tenant.
//!
//! Overdue writes alternate with waiting reads: a flood of writes cannot starve reads either. The caller decides whether
//! a tenant's write may precede: a tenant that has had its share of the device waits for the reads of others, but at
//! most four delays. Batches mix tenants, so a write that waits longer would delay the batches of all.
//! The module does no I/O and reads no clock; time is passed in as a [`Tick`].

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use reprise_policy::fair_order::Weights;
use reprise_policy::fair_queue::FairQueue;
use reprise_policy::{TenantId, Tick};

/// Number of delays after which an overdue write precedes reads although its tenant has had its share.
const HELD_BACK_DELAYS: u32 = 4;

/// Class of an operation in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpClass {
    /// A read; a load waits for it.
    Read,
    /// A read ahead of its use; nothing waits for it yet.
    Prefetch,
    /// A write-back, which may wait.
    Write,
    /// A sync; a batch waits for it.
    Sync,
}

/// Whose write an item is, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteFlow {
    /// Tenant; `None` for pages of the journal, for which batches of all tenants wait.
    pub tenant: Option<TenantId>,
    /// Bytes to write.
    pub bytes: u64,
}

/// Limits of a [`ReadFirstQueue`].
#[derive(Clone, Debug)]
pub struct QueueSettings {
    /// Maximum number of items over all classes.
    pub capacity: usize,
    /// Maximum time that a write waits behind reads.
    pub delay_max: Duration,
    /// Weights of the tenants of writes.
    pub weights: Weights<TenantId>,
}

/// A bounded queue that prefers reads. First in, first out within a class, and for writes within a tenant.
#[derive(Debug)]
pub struct ReadFirstQueue<T> {
    settings: QueueSettings,
    reads: VecDeque<T>,
    prefetches: VecDeque<T>,
    syncs: VecDeque<T>,
    /// Writes of no tenant.
    own_writes: VecDeque<Write<T>>,
    writes: FairQueue<TenantId, Write<T>>,
    /// Instants from which writes precede reads, by number. Numbers and instants have the same order.
    due: BTreeMap<u64, Tick>,
    numbers: u64,
    turn: Turn,
}

#[derive(Debug)]
struct Write<T> {
    number: u64,
    bytes: u64,
    /// Instant from which it precedes reads.
    due: Tick,
    item: T,
}

/// Class that is served next while writes are overdue and reads wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Write,
    Read,
}

impl<T> ReadFirstQueue<T> {
    /// Creates an empty queue.
    pub fn new(settings: QueueSettings) -> ReadFirstQueue<T> {
        ReadFirstQueue {
            writes: FairQueue::new(settings.weights.clone()),
            own_writes: VecDeque::new(),
            due: BTreeMap::new(),
            numbers: 0,
            settings,
            reads: VecDeque::new(),
            prefetches: VecDeque::new(),
            syncs: VecDeque::new(),
            turn: Turn::Write,
        }
    }

    /// Queues a write.
    ///
    /// # Errors
    /// Returns the item when the queue is full.
    pub fn push_write(&mut self, now: Tick, flow: WriteFlow, item: T) -> Result<(), T> {
        if self.len() == self.settings.capacity {
            return Err(item);
        }
        self.numbers += 1;
        let due = now.after(self.settings.delay_max);
        self.due.insert(self.numbers, due);
        let write = Write { number: self.numbers, bytes: flow.bytes, due, item };
        match flow.tenant {
            Some(tenant) => self.writes.push(&tenant, write),
            None => self.own_writes.push_back(write),
        }
        Ok(())
    }

    /// Queues an item; a write is one of no tenant.
    ///
    /// # Errors
    /// Returns the item when the queue is full.
    pub fn push(&mut self, now: Tick, class: OpClass, item: T) -> Result<(), T> {
        if self.len() == self.settings.capacity {
            return Err(item);
        }
        match class {
            OpClass::Read => self.reads.push_back(item),
            OpClass::Prefetch => self.prefetches.push_back(item),
            OpClass::Sync => self.syncs.push_back(item),
            OpClass::Write => return self.push_write(now, WriteFlow { tenant: None, bytes: 0 }, item),
        }
        Ok(())
    }

    /// Removes the item that the device should get next. `may_precede` is whether an overdue write of a tenant may precede
    /// the waiting reads.
    pub fn pop(&mut self, now: Tick, may_precede: impl Fn(TenantId) -> bool) -> Option<T> {
        if let Some(sync) = self.syncs.pop_front() {
            return Some(sync);
        }
        let reads = if self.reads.is_empty() { &self.prefetches } else { &self.reads };
        if reads.is_empty() {
            self.turn = Turn::Write;
            return self.pop_write(|_, _| true);
        }
        let held_back_max = self.settings.delay_max * HELD_BACK_DELAYS;
        let may_start = |tenant: Option<TenantId>, due: Tick| {
            due <= now && (tenant.is_none_or(&may_precede) || due.after(held_back_max) <= now)
        };
        if self.turn == Turn::Write
            && let Some(write) = self.pop_write(may_start)
        {
            self.turn = Turn::Read;
            return Some(write);
        }
        self.turn = Turn::Write;
        self.reads.pop_front().or_else(|| self.prefetches.pop_front())
    }

    /// Removes the next write for which `may_start` is true, by its tenant and the instant at which it is due.
    fn pop_write(&mut self, may_start: impl Fn(Option<TenantId>, Tick) -> bool) -> Option<T> {
        let of_pool = self.own_writes.front().is_some_and(|write| may_start(None, write.due));
        let write = if of_pool { self.own_writes.pop_front() } else { self.pop_tenant_write(may_start) }?;
        self.due.remove(&write.number);
        Some(write.item)
    }

    fn pop_tenant_write(&mut self, may_start: impl Fn(Option<TenantId>, Tick) -> bool) -> Option<Write<T>> {
        let (tenant, bytes) = self
            .writes
            .fronts()
            .find(|(tenant, write)| may_start(Some(**tenant), write.due))
            .map(|(tenant, write)| (*tenant, write.bytes))?;
        self.writes.pass_over_until(&tenant, |write| write.bytes);
        self.writes.pop_of(&tenant, bytes)
    }

    /// Returns the instant from which the oldest write precedes reads.
    pub fn overdue_at(&self) -> Option<Tick> {
        self.due.first_key_value().map(|(_, due)| *due)
    }

    /// Returns the number of items of one class.
    pub fn count(&self, class: OpClass) -> usize {
        match class {
            OpClass::Read => self.reads.len(),
            OpClass::Prefetch => self.prefetches.len(),
            OpClass::Write => self.due.len(),
            OpClass::Sync => self.syncs.len(),
        }
    }

    /// Returns the number of items of all classes.
    pub fn len(&self) -> usize {
        self.reads.len() + self.prefetches.len() + self.syncs.len() + self.due.len()
    }

    /// Reports whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DELAY: Duration = Duration::from_micros(100);

    fn queue(capacity: usize) -> ReadFirstQueue<u32> {
        ReadFirstQueue::new(QueueSettings {
            capacity,
            delay_max: DELAY,
            weights: [(TenantId(1), 3)].into_iter().collect(),
        })
    }

    fn drain(queue: &mut ReadFirstQueue<u32>, now: Tick) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop(now, |_| true)).collect()
    }

    fn push_all(queue: &mut ReadFirstQueue<u32>, items: &[(OpClass, u32)]) {
        for (class, item) in items {
            queue.push(Tick(0), *class, *item).expect("there is room");
        }
    }

    use OpClass::{Prefetch, Read, Sync, Write};

    #[test]
    fn reads_precede_writes_and_syncs_precede_all() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Write, 1), (Read, 2), (Write, 3), (Read, 4), (Sync, 5)]);
        assert_eq!(drain(&mut queue, Tick(99)), [5, 2, 4, 1, 3]);
    }

    #[test]
    fn writes_are_served_at_once_when_no_read_waits() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Write, 1)]);
        assert_eq!(queue.pop(Tick(0), |_| true), Some(1));
    }

    #[test]
    fn overdue_writes_and_reads_alternate() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Write, 1), (Write, 2), (Write, 3), (Read, 10), (Read, 11)]);
        assert_eq!(queue.overdue_at(), Some(Tick(100)));
        assert_eq!(drain(&mut queue, Tick(100)), [1, 10, 2, 11, 3]);
    }

    #[test]
    fn writes_of_tenants_get_shares_by_weight_behind_those_of_the_pool() {
        let mut queue = queue(64);
        for number in 0..12 {
            for tenant in [1, 2] {
                let flow = WriteFlow { tenant: Some(TenantId(tenant)), bytes: 4096 };
                let pushed =
                    queue.push_write(Tick(u64::from(number)), flow, u32::from(tenant) * 100 + number);
                pushed.expect("there is room");
            }
        }
        push_all(&mut queue, &[(Write, 7)]);
        assert_eq!((queue.pop(Tick(0), |_| true), queue.count(Write)), (Some(7), 24));
        let first: Vec<u32> = (0..12).filter_map(|_| queue.pop(Tick(0), |_| true)).collect();
        let of =
            |tenant: u32| first.iter().filter(|item| **item / 100 == tenant).copied().collect::<Vec<_>>();
        assert_eq!((of(1).len(), of(2).len()), (9, 3), "{first:?}");
        assert!(of(1).is_sorted() && of(2).is_sorted());
        assert_eq!(queue.overdue_at(), Some(Tick(103)), "the oldest write that waits is of the other tenant");
    }

    #[test]
    fn overdue_writes_of_a_tenant_that_has_had_its_share_wait_for_reads() {
        let mut queue = queue(8);
        for (tenant, item) in [(1, 1), (1, 2), (2, 3)] {
            let flow = WriteFlow { tenant: Some(TenantId(tenant)), bytes: 4096 };
            queue.push_write(Tick(0), flow, item).expect("there is room");
        }
        push_all(&mut queue, &[(Read, 10), (Read, 11), (Read, 12), (Write, 4)]);
        let served = std::iter::from_fn(|| queue.pop(Tick(100), |tenant| tenant == TenantId(2)));
        assert_eq!(served.collect::<Vec<_>>(), [4, 10, 3, 11, 12, 1, 2]);
    }

    #[test]
    fn prefetches_wait_for_all_reads_and_precede_writes_that_are_not_overdue() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Write, 1), (Prefetch, 2), (Read, 3), (Prefetch, 4), (Read, 5), (Sync, 6)]);
        assert_eq!((queue.count(Prefetch), queue.len()), (2, 6));
        assert_eq!(drain(&mut queue, Tick(99)), [6, 3, 5, 2, 4, 1]);
    }

    #[test]
    fn a_read_that_arrives_late_precedes_waiting_prefetches() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Prefetch, 1), (Prefetch, 2)]);
        assert_eq!(queue.pop(Tick(0), |_| true), Some(1));
        push_all(&mut queue, &[(Read, 3)]);
        assert_eq!(drain(&mut queue, Tick(0)), [3, 2]);
    }

    #[test]
    fn overdue_writes_and_prefetches_alternate() {
        let mut queue = queue(8);
        push_all(&mut queue, &[(Write, 1), (Write, 2), (Prefetch, 10), (Prefetch, 11)]);
        assert_eq!(drain(&mut queue, Tick(100)), [1, 10, 2, 11]);
    }

    #[test]
    fn a_full_queue_returns_the_item() {
        let mut queue = queue(1);
        assert_eq!(queue.push(Tick(0), Write, 1), Ok(()));
        assert_eq!(queue.push(Tick(0), Read, 2), Err(2));
        assert_eq!((queue.len(), queue.count(Write), queue.is_empty()), (1, 1, false));
    }

    #[test]
    fn write_of_a_tenant_that_has_had_its_share_waits_for_a_bounded_time() {
        let mut queue = queue(8);
        for item in [1, 2] {
            let flow = WriteFlow { tenant: Some(TenantId(1)), bytes: 4096 };
            queue.push_write(Tick(0), flow, item).expect("there is room");
        }
        let mut served = Vec::new();
        for now in (0..=700).step_by(10) {
            // The reader never stops.
            queue.push(Tick(now), Read, 10).expect("there is room");
            let item = queue.pop(Tick(now), |_| false).expect("a read waits");
            if item == 10 {
                continue;
            }
            served.push((now, item));
        }
        assert_eq!(served, [(500, 1), (520, 2)], "due at 100, and held back for four delays");
    }

    #[test]
    fn fresh_writes_do_not_precede_reads_because_another_one_is_overdue() {
        let mut queue = queue(8);
        let [first, second] = [1, 2].map(|tenant| WriteFlow { tenant: Some(TenantId(tenant)), bytes: 4096 });
        queue.push_write(Tick(0), second, 1).expect("there is room");
        queue.push_write(Tick(90), first, 2).expect("there is room");
        queue.push(Tick(90), Write, 3).expect("there is room");
        for read in [10, 11, 12] {
            queue.push(Tick(90), Read, read).expect("there is room");
        }
        let now = Tick(100);
        let served: Vec<_> = (0..4).filter_map(|_| queue.pop(now, |_| true)).collect();
        assert_eq!(served, [1, 10, 11, 12], "only the overdue write precedes reads");
    }

    /// Item of the random tests.
    #[derive(Clone, Copy, Debug)]
    struct Pushed {
        class: OpClass,
        tenant: Option<TenantId>,
        at: Tick,
        id: u32,
    }

    /// First writes of the pool and of each tenant.
    fn write_fronts(waiting: &[Pushed]) -> BTreeMap<Option<u16>, Pushed> {
        let mut fronts = BTreeMap::new();
        for write in waiting.iter().filter(|item| item.class == Write) {
            fronts.entry(write.tenant.map(|tenant| tenant.0)).or_insert(*write);
        }
        fronts
    }

    proptest! {
        #[test]
        fn every_item_is_served_once_in_class_order_and_only_due_writes_that_may_precede_reads_do(
            steps in proptest::collection::vec((0u8..7, 0u64..60, 0u16..8), 1..200)
        ) {
            let mut queue = queue(64);
            let (mut now, mut next) = (Tick(0), 0u32);
            let (mut pushed, mut waiting, mut popped) = (Vec::new(), Vec::new(), Vec::new());
            let mut reads_past_writes = 0;
            for (action, pause, number) in steps {
                now = Tick(now.0 + pause);
                let (class, tenant) = match action {
                    0 => (Some(Read), None),
                    1 => (Some(Write), None),
                    2 => (Some(Sync), None),
                    3 => (Some(Prefetch), None),
                    4 => (Some(Write), Some(TenantId(number % 3))),
                    _ => (None, None),
                };
                if let Some(class) = class {
                    let result = match class {
                        Write => queue.push_write(now, WriteFlow { tenant, bytes: 4096 }, next),
                        _ => queue.push(now, class, next),
                    };
                    if result.is_ok() {
                        let item = Pushed { class, tenant, at: now, id: next };
                        pushed.push(item);
                        waiting.push(item);
                    }
                    next += 1;
                    continue;
                }
                // Bits of the number: tenants that have had their share.
                let may_precede = |tenant: TenantId| (number >> tenant.0) & 1 == 0;
                let may_start = |write: &Pushed| {
                    let due = write.at.after(DELAY);
                    due <= now && (write.tenant.is_none_or(may_precede) || due.after(4 * DELAY) <= now)
                };
                let a_write_may_start = write_fronts(&waiting).values().any(may_start);
                let (reads_waited, prefetches_waited) = (queue.count(Read) > 0, queue.count(Prefetch) > 0);
                let Some(id) = queue.pop(now, may_precede) else {
                    prop_assert!(waiting.is_empty());
                    continue;
                };
                let at = waiting.iter().position(|item| item.id == id).expect("it waits");
                let item = waiting.remove(at);
                popped.push(item);
                match item.class {
                    Read | Prefetch if a_write_may_start => reads_past_writes += 1,
                    Write => reads_past_writes = 0,
                    _ => {}
                }
                prop_assert!(reads_past_writes <= 1);
                prop_assert!(item.class != Prefetch || !reads_waited, "a prefetch overtook a read");
                if item.class == Write && (reads_waited || prefetches_waited) {
                    prop_assert!(may_start(&item), "{item:?} preceded reads");
                }
            }
            while let Some(id) = queue.pop(now, |_| true) {
                let at = waiting.iter().position(|item| item.id == id).expect("it waits");
                popped.push(waiting.remove(at));
            }
            prop_assert!(waiting.is_empty());
            let flows = [Read, Prefetch, Write, Sync].map(|class| (class, None));
            let of_tenants = (0..3).map(|tenant| (Write, Some(TenantId(tenant))));
            for flow in flows.into_iter().chain(of_tenants) {
                let of = |list: &[Pushed]| -> Vec<u32> {
                    list.iter().filter(|item| (item.class, item.tenant) == flow).map(|item| item.id).collect()
                };
                prop_assert_eq!(of(&pushed), of(&popped));
            }
        }
    }
}
