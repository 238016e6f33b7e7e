//! Laws of every policy, checked on random sequences of calls, and deliberate flaws that break each law.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::{Block, Chains, Class, EntryIndex, EvictionKind, EvictionOrder, EvictionPolicy, Group, fair};
use crate::quota::{self, Quota, QuotaUsage, SpaceRequest};

mod searches;

const TENANTS: u16 = 3;

/// Bytes that all blocks may use.
const BUDGET: u64 = 400;

/// Maximum bytes of a block.
const BYTES_MAX: u64 = 40;

/// Maximum number of blocks examined for an insertion, touch, use or pin, in addition to one per victim.
const STEPS_PER_CALL: u64 = 3;

/// Mistake of a cache or of its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// Blocks in use remain evictable.
    Pinned,
    /// At most one block is evicted for a new one.
    Budget,
    /// A search for a victim examines all blocks.
    Steps,
    /// The policy ignores chains.
    Chains,
    /// The first tenant with a victim is evicted from.
    Fairness,
}

#[derive(Clone, Debug)]
enum Call {
    /// Adds a block behind another one, if that is there.
    Save {
        parent: usize,
        bytes: u64,
        tenant: u16,
        class: u8,
    },
    Touch(usize),
    Use(usize),
    Reclass(usize, u8),
    Pin(usize),
    Unpin(usize),
    /// Evicts one block ahead of requests.
    Evict,
}

#[derive(Clone, Debug)]
struct Model {
    bytes: u64,
    tenant: u16,
    class: u8,
    position: u32,
    parent: Option<u32>,
    pinned: bool,
}

/// Cache over an order, which knows what the order may return.
struct Cache {
    order: EvictionOrder,
    chains: Chains,
    flaw: Flaw,
    blocks: BTreeMap<u32, Model>,
    free: Vec<u32>,
    quotas: Vec<Quota>,
    /// Steps that the victims so far and the calls allow.
    steps_max: u64,
    extra_steps: u64,
    keys: u64,
}

fn class(class: u8) -> Class {
    [Class::Evictable, Class::Idle, Class::Recent, Class::Active][usize::from(class)]
}

impl Cache {
    fn new(policy: EvictionPolicy, flaw: Flaw) -> Cache {
        let real = if flaw == Flaw::Chains { Chains::Ignored } else { policy.chains };
        let reserved = |bytes| Quota::new(bytes, BUDGET).expect("below the limit");
        Cache {
            order: EvictionOrder::new(EvictionPolicy { chains: real, ..policy }),
            chains: policy.chains,
            flaw,
            blocks: BTreeMap::new(),
            free: (0..200).rev().collect(),
            quotas: vec![reserved(0), reserved(60), Quota::UNLIMITED],
            steps_max: 0,
            extra_steps: 0,
            keys: 0,
        }
    }

    fn usages(&self) -> Vec<QuotaUsage> {
        let used = |tenant: usize| {
            let own = self.blocks.values().filter(|block| usize::from(block.tenant) == tenant);
            own.map(|block| block.bytes).sum()
        };
        (0..self.quotas.len()).map(|at| QuotaUsage { quota: self.quotas[at], used: used(at) }).collect()
    }

    fn used(&self) -> u64 {
        self.blocks.values().map(|block| block.bytes).sum()
    }

    fn children(&self, of: u32) -> impl Iterator<Item = (&u32, &Model)> {
        self.blocks.iter().filter(move |(_, block)| block.parent == Some(of))
    }

    /// Block with the n-th lowest number, modulo their number.
    fn nth(&self, n: usize) -> Option<u32> {
        let count = self.blocks.len();
        (count > 0).then(|| *self.blocks.keys().nth(n % count).expect("below the count"))
    }

    fn evict(&mut self, request: Option<SpaceRequest>) -> Result<bool, String> {
        let usages = self.usages();
        let bytes: BTreeMap<u32, u64> = self.blocks.iter().map(|(at, block)| (*at, block.bytes)).collect();
        let bytes_of = |entry: EntryIndex| bytes[&entry.0];
        if self.flaw == Flaw::Steps {
            self.extra_steps += self.blocks.len() as u64;
        }
        let victim = match self.flaw {
            Flaw::Fairness => (0..TENANTS).find_map(|tenant| self.order.victim(Group(tenant))),
            _ => fair::take_victim(&mut self.order, &usages, request, bytes_of),
        };
        // Each tenant is asked once, and a block that is too large is found again.
        self.steps_max += 2 * u64::from(TENANTS);
        let Some(EntryIndex(victim)) = victim else { return Ok(false) };
        self.check_victim(victim, &usages, request)?;
        self.order.forget(EntryIndex(victim));
        self.blocks.remove(&victim);
        self.free.push(victim);
        for block in self.blocks.values_mut().filter(|block| block.parent == Some(victim)) {
            block.parent = None;
        }
        Ok(true)
    }

    fn check_victim(
        &self,
        victim: u32,
        usages: &[QuotaUsage],
        request: Option<SpaceRequest>,
    ) -> Result<(), String> {
        let block = &self.blocks[&victim];
        if block.pinned {
            return Err(format!("Pinned: {victim} is in use"));
        }
        let peers = self.blocks.iter().filter(|(_, other)| other.tenant == block.tenant && !other.pinned);
        let mut leaves = peers.filter(|(at, _)| self.children(**at).next().is_none());
        let own_children = |tenant| self.children(victim).filter(move |(_, child)| child.tenant == tenant);
        if self.chains == Chains::DescendantsFirst && self.children(victim).next().is_some() {
            if own_children(block.tenant).any(|(_, child)| !child.pinned) {
                return Err(format!("Chains: {victim} has an evictable child"));
            }
            if let Some((leaf, _)) = leaves.next() {
                return Err(format!("Chains: {victim} has children, {leaf} has none"));
            }
        }
        let may_be = |wanted: &quota::Victim| {
            let of_tenant = |block: &&Model| usize::from(block.tenant) == wanted.tenant && !block.pinned;
            self.blocks.values().any(|block| of_tenant(&block) && block.bytes <= wanted.bytes_max)
        };
        let order = quota::victims(usages, request);
        let before: Vec<_> =
            order.iter().take_while(|next| next.tenant != usize::from(block.tenant)).collect();
        let allowed = order.get(before.len()).is_some_and(|next| block.bytes <= next.bytes_max);
        if !allowed || before.iter().any(|next| next.bytes_max >= BYTES_MAX && may_be(next)) {
            return Err(format!("Fairness: tenant {} is evicted from, of {order:?}", block.tenant));
        }
        Ok(())
    }

    fn save(&mut self, parent: usize, bytes: u64, (tenant, class_number): (u16, u8)) -> Result<(), String> {
        let request = SpaceRequest { tenant: usize::from(tenant), bytes };
        let mut tries = 0;
        while self.used() + bytes > BUDGET && (tries == 0 || self.flaw != Flaw::Budget) {
            tries += 1;
            if !self.evict(Some(request))? {
                return Ok(());
            }
        }
        let parent = self.nth(parent).filter(|parent| {
            // Mostly in a chain of one tenant.
            let other = &self.blocks[parent];
            other.tenant == tenant || bytes.is_multiple_of(7)
        });
        let position = parent.map_or(0, |parent| self.blocks[&parent].position + 1);
        let Some(entry) = self.free.pop() else { return Ok(()) };
        let model = Model { bytes, tenant, class: class_number, position, parent, pinned: false };
        self.blocks.insert(entry, model);
        self.keys += 1;
        if let Some(parent) = parent {
            self.order.link(EntryIndex(entry), EntryIndex(parent));
        }
        self.order.attach(EntryIndex(entry), Group(tenant));
        self.order.insert(EntryIndex(entry), &self.block(entry));
        self.order.settle(EntryIndex(entry));
        Ok(())
    }

    fn block(&self, entry: u32) -> Block {
        let Model { bytes, tenant, class: number, position, .. } = self.blocks[&entry];
        let (group, restore_ns) = (Group(tenant), 1000 * (1 + u64::from(position % 5)));
        // A third of the keys return.
        let key_hash = self.keys % 30 + 1;
        Block { group, class: class(number), key_hash, bytes, position: Some(position), restore_ns }
    }

    fn apply(&mut self, call: &Call) -> Result<(), String> {
        self.steps_max += STEPS_PER_CALL;
        match *call {
            Call::Save { parent, bytes, tenant, class } => self.save(parent, bytes, (tenant, class))?,
            Call::Evict => {
                self.evict(None)?;
            }
            Call::Touch(at) => {
                if let Some(entry) = self.nth(at) {
                    self.order.touch(EntryIndex(entry));
                }
            }
            Call::Use(at) => {
                if let Some(entry) = self.nth(at) {
                    self.order.used(EntryIndex(entry));
                }
            }
            Call::Reclass(at, number) => {
                if let Some(entry) = self.nth(at) {
                    self.blocks.get_mut(&entry).expect("there").class = number;
                    self.order.reclass(EntryIndex(entry), class(number));
                }
            }
            Call::Pin(at) => {
                if let Some(entry) = self.nth(at) {
                    self.blocks.get_mut(&entry).expect("there").pinned = true;
                    if self.flaw != Flaw::Pinned {
                        self.order.remove(EntryIndex(entry));
                    }
                }
            }
            Call::Unpin(at) => {
                if let Some(entry) = self.nth(at).filter(|entry| self.blocks[entry].pinned) {
                    self.blocks.get_mut(&entry).expect("there").pinned = false;
                    self.order.insert(EntryIndex(entry), &self.block(entry));
                }
            }
        }
        self.check_totals()
    }

    fn check_totals(&self) -> Result<(), String> {
        if self.used() > BUDGET {
            return Err(format!("Budget: {} of {BUDGET} bytes", self.used()));
        }
        let steps = self.order.steps() + self.extra_steps;
        if steps > self.steps_max {
            return Err(format!("Steps: {steps} of at most {}", self.steps_max));
        }
        let evictable = self.blocks.values().filter(|block| !block.pinned).count();
        if self.flaw != Flaw::Pinned && self.order.len() != evictable {
            return Err(format!("{} evictable, not {evictable}", self.order.len()));
        }
        Ok(())
    }

    /// Evicts everything that is not in use: no block is lost from the order.
    fn drain(&mut self) -> Result<(), String> {
        for tenant in 0..TENANTS {
            let listed = self.order.following(Group(tenant), None, usize::MAX).len();
            let own = |block: &&Model| block.tenant == tenant && !block.pinned;
            let held = self.blocks.values().filter(own).count();
            let taken = std::iter::from_fn(|| {
                let victim = self.order.victim(Group(tenant))?;
                self.order.forget(victim);
                Some(victim)
            });
            let taken = taken.count();
            if listed != held || taken != held {
                return Err(format!("tenant {tenant}: {held} blocks, {listed} listed, {taken} taken"));
            }
        }
        Ok(())
    }
}

fn call() -> impl Strategy<Value = Call> {
    let save = (0..64usize, 1..=BYTES_MAX, 0..TENANTS, 0..4u8);
    prop_oneof![
        6 => save.prop_map(|(parent, bytes, tenant, class)| Call::Save { parent, bytes, tenant, class }),
        2 => (0..64usize).prop_map(Call::Touch),
        3 => (0..64usize).prop_map(Call::Use),
        2 => (0..64usize, 0..4u8).prop_map(|(at, class)| Call::Reclass(at, class)),
        2 => (0..64usize).prop_map(Call::Pin),
        2 => (0..64usize).prop_map(Call::Unpin),
        1 => Just(Call::Evict),
    ]
}

/// Runs calls under all laws; the error begins with the broken law.
fn run(policy: EvictionPolicy, flaw: Flaw, calls: &[Call]) -> Result<(), String> {
    let mut cache = Cache::new(policy, flaw);
    for call in calls {
        cache.apply(call)?;
    }
    if flaw == Flaw::None { cache.drain() } else { Ok(()) }
}

/// Checks the laws on random calls; returns the smallest failure that was found.
fn check(policy: EvictionPolicy, flaw: Flaw) -> Result<(), String> {
    let config = Config { cases: 300, failure_persistence: None, max_shrink_iters: 500, ..Config::default() };
    let algorithm = proptest::test_runner::RngAlgorithm::ChaCha;
    let rng = proptest::test_runner::TestRng::deterministic_rng(algorithm);
    let calls = prop::collection::vec(call(), 0..300);
    let outcome = TestRunner::new_with_rng(config, rng)
        .run(&calls, |calls| run(policy, flaw, &calls).map_err(TestCaseError::fail));
    outcome.map_err(|error| error.to_string())
}

#[test]
fn every_policy_obeys_all_laws() {
    for kind in EvictionKind::ALL {
        for chains in [Chains::DescendantsFirst, Chains::Ignored] {
            let outcome = check(EvictionPolicy { kind, chains }, Flaw::None);
            assert_eq!(outcome, Ok(()), "{kind:?} {chains:?}");
        }
    }
}

#[test]
fn each_flaw_breaks_its_law_under_every_policy() {
    for kind in EvictionKind::ALL {
        for flaw in [Flaw::Pinned, Flaw::Budget, Flaw::Steps, Flaw::Chains, Flaw::Fairness] {
            let error = check(EvictionPolicy::from(kind), flaw).expect_err("the flaw is not noticed");
            assert!(error.contains(&format!("{flaw:?}: ")), "{kind:?}: {error}");
        }
    }
}
