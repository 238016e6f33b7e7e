//! What grants hold: memory of sessions, mappings for controllers, queue pairs. No decisions.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use reprise_agent_core::effect::DeviceId;
use reprise_buffers::MappedRegion;
use reprise_nvme::{DmaMapping, DoorbellKind, LentQueue};
use reprise_policy::SessionId;
use reprise_policy::queue_grants::{GrantGeneration, MemoryNumber};

use super::{FindLender, LendingDevice, NewQueue, RevocationSink};

/// Resources of all grants.
#[derive(Default)]
pub(super) struct Resources {
    devices: BTreeMap<DeviceId, LendingDevice>,
    sessions: BTreeMap<SessionId, SessionMemory>,
    held: BTreeMap<GrantGeneration, HeldQueues>,
}

/// Queue pairs of one grant, and what their commands access.
pub(super) struct HeldQueues {
    pub(super) device: DeviceId,
    /// Serial number of the controller.
    pub(super) serial: Arc<str>,
    /// Finds the controller that has created them; a later one may have the number of the device.
    pub(super) find: FindLender,
    /// How doorbells reach the controller.
    pub(super) doorbells: DoorbellKind,
    pub(super) queues: Vec<HeldQueue>,
    /// Memory of the session.
    pub(super) _access: MemoryAccess,
}

/// Memory of a session as a controller accesses it. The access ends with the last clone.
#[derive(Clone)]
pub(super) struct MemoryAccess {
    /// Dropped before the region.
    mapping: Arc<DmaMapping>,
    _region: MappedRegion,
}

impl MemoryAccess {
    /// Returns the address of the first byte for the controller.
    pub(super) fn address(&self) -> u64 {
        self.mapping.address()
    }
}

/// A memory of a session, and the device that accesses it.
type AccessKey = (SessionId, MemoryNumber, DeviceId);

/// A queue pair, whose memory is mapped for the controller.
pub(super) struct HeldQueue {
    pub(super) id: u16,
    /// Ends the access of the controller when it is dropped.
    _mapping: DmaMapping,
    memory: MappedRegion,
}

/// Memory of one session.
pub(super) struct SessionMemory {
    memories: BTreeMap<MemoryNumber, Memory>,
    sink: RevocationSink,
}

struct Memory {
    /// Held by the grants: without a grant, the controller does not access the memory.
    mappings: BTreeMap<DeviceId, Weak<DmaMapping>>,
    region: MappedRegion,
}

/// Divides a queue pair into the part for the session and the part that stays here.
pub(super) fn divide(queue: LentQueue) -> (NewQueue, HeldQueue) {
    let LentQueue { id, entries, file, bytes, completions_at, lists_at, mapping, memory, .. } = queue;
    let new = NewQueue {
        id,
        entries,
        file,
        bytes,
        address: mapping.address(),
        completions_at,
        lists_at,
        submission_doorbell: queue.submission_doorbell,
        completion_doorbell: queue.completion_doorbell,
    };
    (new, HeldQueue { id, _mapping: mapping, memory })
}

impl Resources {
    pub(super) fn add_device(&mut self, device: DeviceId, lending: LendingDevice) {
        self.devices.insert(device, lending);
    }

    pub(super) fn remove_device(&mut self, device: DeviceId) -> Option<LendingDevice> {
        // A later device may have its number.
        for memory in self.sessions.values_mut().flat_map(|session| session.memories.values_mut()) {
            memory.mappings.remove(&device);
        }
        self.devices.remove(&device)
    }

    pub(super) fn device(&self, device: DeviceId) -> Option<LendingDevice> {
        self.devices.get(&device).cloned()
    }

    pub(super) fn add_memory(
        &mut self,
        session: SessionId,
        number: MemoryNumber,
        region: MappedRegion,
        sink: RevocationSink,
    ) {
        let memory = Memory { mappings: BTreeMap::new(), region };
        let session = self.sessions.entry(session);
        let session = session.or_insert_with(|| SessionMemory { memories: BTreeMap::new(), sink });
        session.memories.insert(number, memory);
    }

    pub(super) fn memory(&self, session: SessionId, number: MemoryNumber) -> Option<MappedRegion> {
        Some(self.sessions.get(&session)?.memories.get(&number)?.region.clone())
    }

    /// Whether a device has this lending controller: it was neither removed nor replaced.
    pub(super) fn is_lent(&self, device: DeviceId, lending: &LendingDevice) -> bool {
        self.devices.get(&device).is_some_and(|found| Arc::ptr_eq(&found.find, &lending.find))
    }

    /// Returns a memory as the controller of a device accesses it.
    pub(super) fn mapping(
        &self,
        (session, number, device): AccessKey,
        lending: &LendingDevice,
    ) -> Option<MemoryAccess> {
        let memory = self.sessions.get(&session)?.memories.get(&number)?;
        let mapping = memory.mappings.get(&device).filter(|_| self.is_lent(device, lending))?.upgrade()?;
        Some(MemoryAccess { mapping, _region: memory.region.clone() })
    }

    /// Adds a mapping of a memory; `None` if the device or the memory is gone.
    pub(super) fn add_mapping(
        &mut self,
        (session, number, device): AccessKey,
        lending: &LendingDevice,
        mapping: DmaMapping,
    ) -> Option<MemoryAccess> {
        if !self.is_lent(device, lending) {
            return None;
        }
        let memory = self.sessions.get_mut(&session)?.memories.get_mut(&number)?;
        let access = MemoryAccess { mapping: Arc::new(mapping), _region: memory.region.clone() };
        memory.mappings.insert(device, Arc::downgrade(&access.mapping));
        Some(access)
    }

    pub(super) fn sink(&self, session: SessionId) -> Option<RevocationSink> {
        self.sessions.get(&session).map(|session| Arc::clone(&session.sink))
    }

    /// Removes the memory of a session; dropping the result unmaps it.
    pub(super) fn remove_session(&mut self, session: SessionId) -> Option<SessionMemory> {
        self.sessions.remove(&session)
    }

    pub(super) fn hold(&mut self, generation: GrantGeneration, held: HeldQueues) {
        self.held.insert(generation, held);
    }

    pub(super) fn take(&mut self, generation: GrantGeneration) -> Option<HeldQueues> {
        self.held.remove(&generation)
    }

    /// Returns the queue pairs of a grant, unless they are being deleted.
    pub(super) fn held(&self, generation: GrantGeneration) -> Option<&HeldQueues> {
        self.held.get(&generation)
    }

    /// Returns the bytes of all queue pairs, which count as memory of this process.
    pub(super) fn queue_bytes(&self) -> u64 {
        self.held.values().flat_map(|held| &held.queues).map(|queue| queue.memory.bytes()).sum()
    }

    pub(super) fn queues(&self, generation: GrantGeneration) -> Vec<u16> {
        let queues = self.held(generation).map(|held| &held.queues);
        queues.into_iter().flatten().map(|queue| queue.id).collect()
    }
}
