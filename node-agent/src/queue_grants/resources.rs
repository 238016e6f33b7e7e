//! What grants hold: memory of sessions, mappings for controllers, queue pairs. No decisions.

use std::collections::BTreeMap;
use std::sync::Arc;

use reprise_agent_core::effect::DeviceId;
use reprise_buffers::MappedRegion;
use reprise_nvme::{DmaMapping, LentQueue};
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

/// Queue pairs of one grant.
pub(super) struct HeldQueues {
    pub(super) device: DeviceId,
    pub(super) queues: Vec<HeldQueue>,
}

/// A queue pair, whose memory is mapped for the controller.
pub(super) struct HeldQueue {
    pub(super) id: u16,
    /// Ends the access of the controller when it is dropped.
    _mapping: DmaMapping,
    _memory: MappedRegion,
}

/// Memory of one session.
pub(super) struct SessionMemory {
    memories: BTreeMap<MemoryNumber, Memory>,
    sink: RevocationSink,
}

struct Memory {
    /// Dropped before the region.
    mappings: BTreeMap<DeviceId, DmaMapping>,
    region: MappedRegion,
}

/// Divides a queue pair into the part for the session and the part that stays here.
pub(super) fn divide(queue: LentQueue, registers_at: u64) -> (NewQueue, HeldQueue) {
    let LentQueue { id, entries, file, bytes, completions_at, lists_at, mapping, memory, .. } = queue;
    let new = NewQueue {
        id,
        entries,
        file,
        bytes,
        address: mapping.address(),
        completions_at,
        lists_at,
        submission_doorbell: registers_at + queue.submission_doorbell,
        completion_doorbell: registers_at + queue.completion_doorbell,
    };
    (new, HeldQueue { id, _mapping: mapping, _memory: memory })
}

impl Resources {
    pub(super) fn add_device(&mut self, device: DeviceId, lending: LendingDevice) {
        self.devices.insert(device, lending);
    }

    pub(super) fn remove_device(&mut self, device: DeviceId) -> Option<LendingDevice> {
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

    /// Returns the address of a memory for the controller of a device.
    pub(super) fn mapped_address(
        &self,
        session: SessionId,
        number: MemoryNumber,
        device: DeviceId,
    ) -> Option<u64> {
        let memory = self.sessions.get(&session)?.memories.get(&number)?;
        Some(memory.mappings.get(&device)?.address())
    }

    /// Adds a mapping of a memory; returns its address.
    pub(super) fn add_mapping(
        &mut self,
        session: SessionId,
        number: MemoryNumber,
        device: DeviceId,
        mapping: DmaMapping,
    ) -> u64 {
        let address = mapping.address();
        let memories = self.sessions.get_mut(&session).map(|session| &mut session.memories);
        if let Some(memory) = memories.and_then(|memories| memories.get_mut(&number)) {
            memory.mappings.insert(device, mapping);
        }
        address
    }

    /// Takes the mappings of the memory of all sessions for a controller; dropping them ends its access.
    pub(super) fn take_mappings(&mut self, device: DeviceId) -> Vec<DmaMapping> {
        let memories = self.sessions.values_mut().flat_map(|session| session.memories.values_mut());
        memories.filter_map(|memory| memory.mappings.remove(&device)).collect()
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

    /// Returns how the controller of a grant is found; of a device that is gone, it is not.
    pub(super) fn find_lender(&self, generation: GrantGeneration) -> FindLender {
        let device = self.held.get(&generation).and_then(|held| self.devices.get(&held.device));
        device.map_or_else(|| Arc::new(|| None) as FindLender, |lending| Arc::clone(&lending.find))
    }

    pub(super) fn queues(&self, generation: GrantGeneration) -> Vec<u16> {
        let queues = self.held.get(&generation).map(|held| &held.queues);
        queues.into_iter().flatten().map(|queue| queue.id).collect()
    }
}
