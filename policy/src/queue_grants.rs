//! Queue pairs of NVMe devices that sessions drive themselves: their holders and limits.
//!
//! ```text
//! request ─▶ Creating ── created ─▶ Granted ── begin_end ─▶ Ending ── ended ─▶ removed
//!               └── failed ─▶ removed                          └── not_confirmed ─▶ Unconfirmed ── device_reset ─▶ removed
//! ```
//!
//! A grant is identified by its generation, which is never used twice: a request that names an ended grant reaches no
//! later one, although controllers reuse the numbers of queues. While a session is fenced, a controller may still run its
//! commands, so the slots that it leased or pinned must not be used again.
//!
//! A command can name any block and any memory that is mapped for its controller, so a controller does not separate
//! tenants: all queue pairs of a device belong to sessions of one tenant.
//!
//! On bare metal, the configuration limits the queue pairs of each device. In a cluster, each grant is part of an
//! [`Allocation`], and ends with it.
//!
//! Not included: the queue pairs themselves, and the memory of sessions.

mod allocations;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{SessionId, TenantId};

pub use allocations::Allocation;
use allocations::{Allocations, Held, Wanted};

/// Maximum queue pairs of one request: each has a descriptor in the answer.
pub const PAIRS_PER_GRANT_MAX: u32 = 64;

/// Maximum number of memories that a session registers: KV memory, and buffers of headers, of some GPUs.
pub const MEMORIES_PER_SESSION_MAX: usize = 16;

/// Maximum bytes of the memories of a session.
pub const MEMORY_BYTES_MAX: u64 = 1 << 40;

/// Number of a grant in the life of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantGeneration(pub u64);

/// Number of a registered memory in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryNumber(pub u32);

/// Limits from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueGrantLimits {
    /// Queue pairs of all sessions on one device; 0: none are granted.
    pub pairs_per_device: u32,
    /// Queue pairs of one session on one device.
    pub pairs_per_session: u32,
    /// Entries of a queue.
    pub depth: u32,
}

/// Why a request is refused; the message names the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueGrantRefusal {
    /// The request is outside its limits: fix it.
    #[error("{0}")]
    Invalid(String),
    /// Others hold the queue pairs: return some first.
    #[error("{0}")]
    Exhausted(String),
}

/// Request of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRequest {
    /// The session.
    pub session: SessionId,
    /// Tenant of the session.
    pub tenant: TenantId,
    /// Number of the device.
    pub device: u8,
    /// Number of queue pairs.
    pub pairs: u32,
    /// Entries of each queue.
    pub depth: u32,
    /// Memory that commands access.
    pub memory: MemoryNumber,
}

impl QueueGrantRefusal {
    fn invalid<T>(text: String) -> Result<T, QueueGrantRefusal> {
        Err(QueueGrantRefusal::Invalid(text))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Creating,
    Granted,
    Ending,
    /// The controller did not confirm the end: commands may still run.
    Unconfirmed,
}

/// Progress of the end of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantEnd {
    /// The session has no such grant: it has ended.
    Ended,
    /// The grant exists, or its queue pairs are being deleted.
    Pending,
    /// The controller did not confirm the deletion.
    Unconfirmed,
}

#[derive(Debug)]
struct Grant {
    request: QueueRequest,
    state: State,
    /// The device was released: a later device may have its number.
    is_device_gone: bool,
    /// Size of its memory, which may be mapped for longer than the session exists.
    memory_bytes: u64,
    /// The allocation that it is a part of, in a cluster.
    allocation: Option<Arc<Allocation>>,
}

impl Grant {
    fn is_on(&self, device: u8) -> bool {
        self.request.device == device && !self.is_device_gone
    }
}

/// Grants of all sessions; see the module.
#[derive(Debug)]
pub struct QueueGrants {
    limits: QueueGrantLimits,
    /// `None`: the limits say how many queue pairs a device lends.
    allocations: Option<Allocations>,
    last: u64,
    grants: BTreeMap<GrantGeneration, Grant>,
    memories: BTreeMap<SessionId, Memories>,
}

/// Memories of one session.
#[derive(Debug, Default)]
struct Memories {
    last: u32,
    bytes: BTreeMap<MemoryNumber, u64>,
}

impl QueueGrants {
    /// Creates a table without grants.
    pub fn new(limits: QueueGrantLimits) -> QueueGrants {
        QueueGrants { limits, allocations: None, last: 0, grants: BTreeMap::new(), memories: BTreeMap::new() }
    }

    /// Creates a table that grants queue pairs of allocations only, which are still missing. Of the limits, it
    /// uses the one of a session.
    pub fn of_allocations(limits: QueueGrantLimits) -> QueueGrants {
        QueueGrants { allocations: Some(Allocations::default()), ..QueueGrants::new(limits) }
    }

    /// Whether sessions may have queue pairs, now or after a change of the allocations.
    pub fn may_grant(&self) -> bool {
        self.allocations.is_some() || self.limits.pairs_per_device > 0
    }

    /// Whether sessions may have queue pairs now.
    ///
    /// # Errors
    /// `Invalid`, with the setting or the object that is missing.
    pub fn check_enabled(&self) -> Result<(), QueueGrantRefusal> {
        match &self.allocations {
            Some(allocations) => allocations.check_any(),
            None if self.limits.pairs_per_device > 0 => Ok(()),
            None => QueueGrantRefusal::invalid(
                "this agent grants no queue pairs: set session.queue_pairs in its configuration".to_owned(),
            ),
        }
    }

    /// Replaces the allocations. Begins to end the grants of those that are gone or have changed; returns the grants
    /// with their sessions. A grant whose queue pairs are being created ends after that ([`Self::is_allocated`]).
    pub fn set_allocations(&mut self, wanted: Vec<Allocation>) -> Vec<(GrantGeneration, SessionId)> {
        let Some(allocations) = &mut self.allocations else { return Vec::new() };
        allocations.replace(wanted);
        let allocations = allocations.clone();
        let ending = self.begin_all(|grant| !allocations.has(grant.allocation.as_ref()));
        ending.into_iter().map(|generation| (generation, self.grants[&generation].request.session)).collect()
    }

    /// Whether the allocation of a grant still exists, unchanged.
    pub fn is_allocated(&self, generation: GrantGeneration) -> bool {
        let grant = self.grants.get(&generation);
        let has =
            |allocations: &Allocations| grant.is_some_and(|grant| allocations.has(grant.allocation.as_ref()));
        self.allocations.as_ref().is_none_or(has)
    }

    /// Returns the allocation that a grant is a part of.
    pub fn allocation(&self, generation: GrantGeneration) -> Option<&Arc<Allocation>> {
        self.grants.get(&generation)?.allocation.as_ref()
    }

    /// Returns the queue pairs of an allocation that exist or may exist.
    pub fn pairs_of(&self, uid: &str) -> u32 {
        let is_of = |grant: &&Grant| grant.allocation.as_ref().is_some_and(|of| of.uid == uid);
        self.grants.values().filter(is_of).map(|grant| grant.request.pairs).sum()
    }

    /// Adds a memory of a session; returns its number.
    ///
    /// # Errors
    /// The session has too many, or too large ones.
    pub fn register(&mut self, session: SessionId, bytes: u64) -> Result<MemoryNumber, QueueGrantRefusal> {
        self.check_enabled()?;
        let memories = self.memories.entry(session).or_default();
        let total = memories.bytes.values().sum::<u64>().saturating_add(bytes);
        if bytes == 0 || memories.bytes.len() >= MEMORIES_PER_SESSION_MAX || total > MEMORY_BYTES_MAX {
            return Err(QueueGrantRefusal::Invalid(format!(
                "invalid memory of {bytes} bytes: a session registers at most {MEMORIES_PER_SESSION_MAX} memories of 1 \
                 to {MEMORY_BYTES_MAX} bytes in all"
            )));
        }
        memories.last += 1;
        let number = MemoryNumber(memories.last);
        memories.bytes.insert(number, bytes);
        Ok(number)
    }

    /// Removes a memory that could not be mapped.
    pub fn unregister(&mut self, session: SessionId, memory: MemoryNumber) {
        if let Some(memories) = self.memories.get_mut(&session) {
            memories.bytes.remove(&memory);
        }
    }

    /// Refuses a request for a device of which another tenant holds queue pairs.
    fn check_tenant(
        &self,
        QueueRequest { device, tenant, .. }: QueueRequest,
    ) -> Result<(), QueueGrantRefusal> {
        let is_foreign = |grant: &Grant| grant.is_on(device) && grant.request.tenant != tenant;
        if self.grants.values().any(is_foreign) {
            return Err(QueueGrantRefusal::Exhausted(format!(
                "another tenant holds queue pairs of device {device}, and a controller does not separate tenants: use a \
                 device of another controller or virtual function, or retry after that tenant's sessions have ended"
            )));
        }
        Ok(())
    }

    /// Admits a request for queue pairs of the controller with this serial number; the caller creates them, then
    /// reports [`created`](Self::created) or [`failed`](Self::failed).
    ///
    /// # Errors
    /// `Invalid` outside the limits or for a memory that is not registered, `Exhausted` if others have the queue pairs or
    /// another tenant has some of this device.
    pub fn request(
        &mut self,
        request: QueueRequest,
        serial: &str,
    ) -> Result<GrantGeneration, QueueGrantRefusal> {
        self.check_enabled()?;
        let QueueRequest { session, device, pairs, depth, memory, .. } = request;
        let most = self.limits.pairs_per_session.min(PAIRS_PER_GRANT_MAX);
        if pairs == 0 || pairs > most {
            return QueueGrantRefusal::invalid(format!(
                "invalid number of queue pairs {pairs}: expected 1 to {most}"
            ));
        }
        if depth < 2 || (self.allocations.is_none() && depth > self.limits.depth) {
            let most = self.limits.depth;
            return QueueGrantRefusal::invalid(format!(
                "invalid queue depth {depth}: expected 2 to {most} (session.queue_depth)"
            ));
        }
        let memories = self.memories.get(&session);
        let Some(memory_bytes) = memories.and_then(|memories| memories.bytes.get(&memory)).copied() else {
            return QueueGrantRefusal::invalid(format!("memory {} is not registered", memory.0));
        };
        self.check_tenant(request)?;
        self.check_limit(request, Some(session), (self.limits.pairs_per_session, "this session"))?;
        let allocation = match &self.allocations {
            Some(allocations) => {
                let held = |allocation: &Arc<Allocation>| Held {
                    pairs: self.pairs_on(device, allocation),
                    memory_bytes_then: self.memory_with(allocation, (session, memory, memory_bytes)),
                };
                Some(allocations.choose(serial, Wanted { pairs, depth, memory_bytes }, held)?)
            }
            None => {
                self.check_limit(request, None, (self.limits.pairs_per_device, "all sessions"))?;
                None
            }
        };
        self.last += 1;
        let generation = GrantGeneration(self.last);
        let grant =
            Grant { request, state: State::Creating, is_device_gone: false, memory_bytes, allocation };
        self.grants.insert(generation, grant);
        Ok(generation)
    }

    /// Refuses a request above a limit of one session, or of all.
    fn check_limit(
        &self,
        request: QueueRequest,
        of: Option<SessionId>,
        (limit, name): (u32, &str),
    ) -> Result<(), QueueGrantRefusal> {
        let QueueRequest { device, pairs, .. } = request;
        let counts =
            |grant: &&Grant| grant.is_on(device) && of.is_none_or(|session| grant.request.session == session);
        let held: u32 = self.grants.values().filter(counts).map(|grant| grant.request.pairs).sum();
        if held + pairs <= limit {
            return Ok(());
        }
        Err(QueueGrantRefusal::Exhausted(format!(
            "{name} may have {limit} queue pairs of device {device} and hold {held}: return some first"
        )))
    }

    /// Returns the queue pairs of a device that are part of an allocation.
    fn pairs_on(&self, device: u8, allocation: &Arc<Allocation>) -> u32 {
        let is_of = |of: &Arc<Allocation>| Arc::ptr_eq(of, allocation);
        let counts = |grant: &&Grant| grant.is_on(device) && grant.allocation.as_ref().is_some_and(is_of);
        self.grants.values().filter(counts).map(|grant| grant.request.pairs).sum()
    }

    /// Returns the bytes of the memories that grants of an allocation access, together with one more memory.
    fn memory_with(
        &self,
        allocation: &Arc<Allocation>,
        (session, memory, bytes): (SessionId, MemoryNumber, u64),
    ) -> u64 {
        let is_of = |grant: &&Grant| {
            !grant.is_device_gone && grant.allocation.as_ref().is_some_and(|of| Arc::ptr_eq(of, allocation))
        };
        let accessed = self.grants.values().filter(is_of).map(|grant| {
            let QueueRequest { session, memory, .. } = grant.request;
            ((session, memory), grant.memory_bytes)
        });
        let all: BTreeMap<(SessionId, MemoryNumber), u64> =
            accessed.chain([((session, memory), bytes)]).collect();
        all.into_values().fold(0, u64::saturating_add)
    }

    /// Returns the slack profile that an allocation of the session's queue pairs names; of several, that of the oldest
    /// grant.
    pub fn slack_profile(&self, session: SessionId) -> Option<&str> {
        let held = |grant: &&Grant| grant.request.session == session && grant.state == State::Granted;
        let allocations = self.grants.values().filter(held).filter_map(|grant| grant.allocation.as_ref());
        allocations.filter_map(|allocation| allocation.slack_profile.as_deref()).next()
    }

    /// Notes that the queue pairs of a grant exist.
    pub fn created(&mut self, generation: GrantGeneration) {
        if let Some(grant) = self.grants.get_mut(&generation) {
            grant.state = State::Granted;
        }
    }

    /// Removes a grant whose queue pairs could not be created.
    pub fn failed(&mut self, generation: GrantGeneration) {
        self.grants.remove(&generation);
    }

    /// Begins to end a grant of a session; false if it has no such grant, for example because it was revoked.
    pub fn begin_end(&mut self, session: SessionId, generation: GrantGeneration) -> bool {
        let own = |grant: &&mut Grant| grant.request.session == session && grant.state == State::Granted;
        match self.grants.get_mut(&generation).filter(own) {
            Some(grant) => {
                grant.state = State::Ending;
                true
            }
            None => false,
        }
    }

    /// Begins to end all grants of a session, which has ended; returns them.
    pub fn begin_session_end(&mut self, session: SessionId) -> Vec<GrantGeneration> {
        self.memories.remove(&session);
        self.begin_all(|grant| grant.request.session == session)
    }

    /// Begins to end all grants of a device, which is revoked; returns them with their sessions.
    pub fn begin_revocation(&mut self, device: u8) -> Vec<(GrantGeneration, SessionId)> {
        let ending = self.begin_all(|grant| grant.is_on(device));
        ending.into_iter().map(|generation| (generation, self.grants[&generation].request.session)).collect()
    }

    fn begin_all(&mut self, ends: impl Fn(&Grant) -> bool) -> Vec<GrantGeneration> {
        let granted = |grant: &Grant| grant.state == State::Granted && ends(grant);
        let ending = self.grants.iter_mut().filter(|(_, grant)| granted(grant));
        ending
            .map(|(generation, grant)| {
                grant.state = State::Ending;
                *generation
            })
            .collect()
    }

    /// Removes a grant whose queue pairs were deleted.
    pub fn ended(&mut self, generation: GrantGeneration) {
        self.grants.remove(&generation);
    }

    /// Returns how far the end of a grant of a session has come.
    pub fn end_of(&self, session: SessionId, generation: GrantGeneration) -> GrantEnd {
        match self.grants.get(&generation).filter(|grant| grant.request.session == session) {
            None => GrantEnd::Ended,
            Some(Grant { state: State::Unconfirmed, .. }) => GrantEnd::Unconfirmed,
            Some(_) => GrantEnd::Pending,
        }
    }

    /// Notes that the controller has not confirmed the end of a grant. Its session stays fenced, and its queue pairs stay
    /// counted, until the device ends ([`device_reset`](Self::device_reset)).
    pub fn not_confirmed(&mut self, generation: GrantGeneration) {
        match self.grants.get_mut(&generation) {
            Some(grant) if !grant.is_device_gone => grant.state = State::Unconfirmed,
            _ => drop(self.grants.remove(&generation)),
        }
    }

    /// Notes that the controller of a device is reset, and forgets all queues: unconfirmed grants are removed. Those
    /// that are being created or deleted count no longer for the number of the device.
    pub fn device_reset(&mut self, device: u8) {
        self.grants.retain(|_, grant| !(grant.is_on(device) && grant.state == State::Unconfirmed));
        for grant in self.grants.values_mut().filter(|grant| grant.request.device == device) {
            grant.is_device_gone = true;
        }
    }

    /// Whether a controller may still run commands of a session that has ended.
    pub fn is_fenced(&self, session: SessionId) -> bool {
        let runs = |state| matches!(state, State::Ending | State::Unconfirmed);
        self.grants.values().any(|grant| grant.request.session == session && runs(grant.state))
    }

    /// Returns the grants with their requests, by generation.
    pub fn iter(&self) -> impl Iterator<Item = (GrantGeneration, &QueueRequest)> {
        self.grants.iter().map(|(generation, grant)| (*generation, &grant.request))
    }

    /// Returns the number of queue pairs of all grants.
    pub fn pairs(&self) -> u32 {
        self.grants.values().map(|grant| grant.request.pairs).sum()
    }

    /// Returns the bytes of all registered memories.
    pub fn memory_bytes(&self) -> u64 {
        self.memories.values().flat_map(|memories| memories.bytes.values()).sum()
    }
}
