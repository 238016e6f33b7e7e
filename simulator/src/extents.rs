//! Processes that read and write extents of a node's disks themselves, past the agent.
//!
//! The process of an engine becomes a holder with its first extent. The I/O of a holder continues when its session
//! ends, when the process dies and when the agent dies; only a power loss ends it at once. The locks of the real
//! devices are [`Extents::is_held`]: they show when no process can do I/O for a holder.
//!
//! Checked, at every step that could violate it:
//!
//! * The agent does not write to an extent that a living process has leased or pinned, and not to one with I/O of an
//!   ended process in flight. It neither leases nor pins such an extent for others.
//! * A leased extent has the bytes that its holder wrote.
//! * A pinned block is intact, or its damage is detected. After the end of the agent, which ends its pins, a reader
//!   gets the block or detects that it has gone.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use reprise_agent_core::effect::{DeviceId, LeaseId, Place};
use reprise_agent_core::event::CommitItem;
use reprise_agent_core::extents::{ExtentHolder, PinId, PinnedBlock};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{DeviceOpKind, PageNumber};
use reprise_policy::{BlockKey, Generation, Layout, SessionId};

use crate::disk::{Disk, DiskWrite};
use crate::engine::ExtentAnswer;
use crate::environment::Environment;
use crate::memory::{Tag, checksums, is_rotten, rot, verified};
use crate::network::Host;
use crate::observation::Observation;
use crate::setup::Variant;
use crate::simulation::Action;

const PAGE: u64 = 4096;
/// Interval in which an agent polls the locks of its devices, as long as it awaits a holder.
pub(crate) const POLL_EVERY: Duration = Duration::from_millis(20);
/// Of 1000 writes: those that take long, so that many are in flight when their process ends.
const LONG_PERMILLE: u64 = 150;
/// Of 1000 writes: those that put other bytes on the medium than the holder intended.
const CORRUPT_PERMILLE: u64 = 20;
/// Of 1000 steps of a process without a session: those that end it.
const END_PERMILLE: u64 = 120;

/// A process with a session: the life of the agent that opened the session, and the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HolderId {
    pub(crate) life: u64,
    pub(crate) session: SessionId,
}

/// Holders of one node, and their I/O; see the module.
#[derive(Debug)]
pub(crate) struct Extents {
    node: usize,
    holders: BTreeMap<HolderId, Holder>,
    writes: BTreeMap<u64, Write>,
    writes_begun: u64,
    /// Blocks that were reported as durable since the last check.
    durable: Vec<BlockKey>,
}

#[derive(Debug)]
struct Holder {
    layout: Layout,
    state: HolderState,
    /// Whether the agent that granted its pins runs.
    pins_valid: bool,
    /// Devices that the process can access.
    devices: BTreeSet<usize>,
    leased: Vec<Leased>,
    pinned: Vec<Pinned>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderState {
    Open,
    /// The session has ended, and the process lives.
    WithoutSession,
    /// The process has ended; I/O of it may be in flight.
    Ended,
}

/// A slot of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    device: usize,
    page: PageNumber,
    /// Bytes of header page and payload.
    bytes: u64,
    generation: Generation,
    header_crc: u32,
}

#[derive(Clone, Debug)]
struct Leased {
    lease: LeaseId,
    extent: Extent,
    content: Content,
}

/// Payload of a leased slot.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    Unwritten,
    /// The write with this number is in flight.
    Writing(u64),
    /// The intended content, and the written one.
    Written(Tag, Vec<Tag>),
}

#[derive(Clone, Debug)]
struct Pinned {
    pin: PinId,
    key: BlockKey,
    extent: Extent,
    /// Its content was damaged: the holder no longer reads it.
    given_up: bool,
}

/// A write of a holder in flight.
#[derive(Debug)]
struct Write {
    holder: HolderId,
    extent: Extent,
    intended: Tag,
    payload: Vec<Tag>,
}

impl Extent {
    fn of(place: &Place) -> Extent {
        match *place {
            Place::Extent { device, generation, offset, bytes, header_crc } => {
                assert!(offset.is_multiple_of(PAGE), "{place:?} does not begin at a page");
                let (device, page) = (usize::from(device.0), PageNumber(offset / PAGE));
                Extent { device, page, bytes: PAGE + bytes, generation, header_crc }
            }
            Place::Arena(slot) => panic!("{slot:?} is not an extent"),
        }
    }

    fn overlaps(&self, device: usize, bytes: &Range<u64>) -> bool {
        let begin = self.page.offset();
        self.device == device && begin < bytes.end && bytes.start < begin + self.bytes
    }

    fn range(&self) -> Range<u64> {
        self.page.offset()..self.page.offset() + self.bytes
    }
}

/// Bytes of a device that an operation writes; `None` for a sync.
pub(crate) fn written_bytes(kind: &DeviceOpKind) -> Option<Range<u64>> {
    match kind {
        DeviceOpKind::WritePages { offset, bytes } => Some(*offset..offset + bytes.len() as u64),
        DeviceOpKind::WriteBlock { offset, header, slot, .. } => {
            Some(*offset..offset + header.len() as u64 + slot.bytes)
        }
        DeviceOpKind::WriteHeader { offset, header } => Some(*offset..offset + header.len() as u64),
        DeviceOpKind::Sync => None,
    }
}

impl Extents {
    pub(crate) fn new(node: usize) -> Extents {
        let (holders, writes) = (BTreeMap::new(), BTreeMap::new());
        Extents { node, holders, writes, writes_begun: 0, durable: Vec::new() }
    }

    /// Returns the blocks that were reported as durable since the last call.
    pub(crate) fn take_durable(&mut self) -> Vec<BlockKey> {
        std::mem::take(&mut self.durable)
    }

    /// Number of processes that hold extents or have I/O in flight.
    pub(crate) fn holders(&self) -> usize {
        self.holders.len()
    }

    /// Reports whether a process can still do I/O for a holder of the agent's life: it lives, or I/O is in flight.
    pub(crate) fn is_held(&self, life: u64, holder: ExtentHolder) -> bool {
        match holder {
            ExtentHolder::Session(session) => self.holders.contains_key(&HolderId { life, session }),
            ExtentHolder::Earlier(DeviceId(device)) => {
                let device = usize::from(device);
                let alive = |(id, holder): (&HolderId, &Holder)| {
                    id.life < life && holder.state != HolderState::Ended && holder.devices.contains(&device)
                };
                let in_flight = |write: &Write| write.holder.life < life && write.extent.device == device;
                self.holders.iter().any(alive) || self.writes.values().any(in_flight)
            }
        }
    }

    // ---- checks -------------------------------------------------------------------------------------------

    /// Checks that the agent may write these bytes of a device.
    pub(crate) fn assert_writable(&self, device: usize, bytes: &Range<u64>) {
        let node = self.node;
        for (id, extent, how) in self.in_use() {
            assert!(
                !extent.overlaps(device, bytes),
                "node {node}: the agent writes {bytes:?} of device {device}, {how} {id:?}"
            );
        }
    }

    /// Checks that no process uses an extent, before another one gets a lease of it.
    fn assert_unused(&self, extent: &Extent) {
        let node = self.node;
        for (id, other, how) in self.in_use() {
            let is_free = !other.overlaps(extent.device, &extent.range());
            assert!(is_free, "node {node}: the agent leases {extent:?}, {how} {id:?}");
        }
    }

    /// Extents whose bytes no other process may change.
    fn in_use(&self) -> impl Iterator<Item = (HolderId, &Extent, &'static str)> {
        let of_holders = self.holders.iter().flat_map(|(id, holder)| {
            let pinned = holder.pinned.iter().filter(|_| holder.pins_valid);
            let leased = holder.leased.iter().map(|leased| (*id, &leased.extent, "which is leased by"));
            leased.chain(pinned.map(|pinned| (*id, &pinned.extent, "which is pinned by")))
        });
        let in_flight =
            self.writes.values().map(|write| (write.holder, &write.extent, "to which I/O is in flight of"));
        of_holders.chain(in_flight)
    }

    /// Lets all processes read their pinned blocks, and compare the extents that they have written.
    pub(crate) fn read_all(&mut self, env: &mut Environment, disks: &[Disk]) {
        for holder in self.holders.values_mut() {
            for leased in &holder.leased {
                leased.assert_kept(disks);
            }
            let (layout, valid) = (holder.layout, holder.pins_valid);
            holder.pinned.iter_mut().filter(|pinned| !pinned.given_up).for_each(|pinned| {
                pinned.read(env, &disks[pinned.extent.device], &layout, valid);
            });
        }
    }

    // ---- requests of a session ----------------------------------------------------------------------------

    /// Starts to write the unwritten extents of a holder, and some of the others again.
    pub(crate) fn begin_writes(&mut self, env: &mut Environment, disks: &[Disk], id: HolderId) {
        let Some(holder) = self.holders.get_mut(&id) else { return };
        for leased in &mut holder.leased {
            let permille = match leased.content {
                Content::Unwritten => 700,
                Content::Writing(_) => 0,
                Content::Written(..) => 100,
            };
            if !env.rng.chance(permille) {
                continue;
            }
            let intended = env.new_content();
            let mut payload = vec![intended; holder.layout.layers() as usize];
            if env.rng.chance(CORRUPT_PERMILLE) {
                rot(&mut payload, env.rng.next());
                env.count("extents written corrupt");
            }
            let number = self.writes_begun;
            self.writes_begun += 1;
            leased.content = Content::Writing(number);
            self.writes.insert(number, Write { holder: id, extent: leased.extent, intended, payload });
            let most = if env.rng.chance(LONG_PERMILLE) { 500_000 } else { 500 };
            let time = env.rng.micros(30..most) * disks[leased.extent.device].health.slowness.min(20);
            env.after(time, Action::ExtentWritten { node: self.node, number });
            env.count("extent writes");
        }
    }

    /// Returns the written extents of a holder as items of a commit under these keys, as far as there are keys.
    /// The holder has ended its I/O on them.
    pub(crate) fn take_written(
        &mut self,
        env: &mut Environment,
        (id, disks): (HolderId, &[Disk]),
        keys: &[BlockKey],
    ) -> Vec<CommitItem> {
        let Some(holder) = self.holders.get_mut(&id) else { return Vec::new() };
        let layout = holder.layout;
        let is_written = |leased: &mut Leased| matches!(leased.content, Content::Written(..));
        let written: Vec<Leased> = holder.leased.extract_if(.., is_written).take(keys.len()).collect();
        let mut items = Vec::with_capacity(written.len());
        for (leased, key) in written.into_iter().zip(keys) {
            leased.assert_kept(disks);
            let Content::Written(content, _) = leased.content else { unreachable!("filtered above") };
            env.observe(Observation::BlockCommitted { key: *key, content });
            let checksums = checksums(content, &layout);
            items.push(CommitItem { lease: leased.lease, key: Some(*key), checksums });
        }
        items
    }

    /// Returns leases of a holder without I/O in flight; the holder has ended its I/O on them.
    pub(crate) fn take_idle(&mut self, id: HolderId, count: usize) -> Vec<LeaseId> {
        let Some(holder) = self.holders.get_mut(&id) else { return Vec::new() };
        let is_idle = |leased: &mut Leased| !matches!(leased.content, Content::Writing(_));
        holder.leased.extract_if(.., is_idle).take(count).map(|leased| leased.lease).collect()
    }

    /// Returns some pins of a holder, which no longer reads their blocks.
    pub(crate) fn take_pins(&mut self, env: &mut Environment, id: HolderId, permille: u64) -> Vec<PinId> {
        let Some(holder) = self.holders.get_mut(&id) else { return Vec::new() };
        let taken = holder.pinned.extract_if(.., |_| env.rng.chance(permille));
        taken.map(|pinned| pinned.pin).collect()
    }

    /// Handles the agent's answer to a request about extents.
    pub(crate) fn on_answer(
        &mut self,
        env: &mut Environment,
        (id, layout): (HolderId, Layout),
        answer: ExtentAnswer,
    ) {
        match answer {
            ExtentAnswer::Leased(leases) => {
                for (lease, place) in leases {
                    let extent = Extent::of(&place);
                    assert_eq!(extent.bytes, PAGE + layout.slot_bytes(), "a lease has the size of a block");
                    self.assert_unused(&extent);
                    self.holder(id, layout, extent.device).leased.push(Leased {
                        lease,
                        extent,
                        content: Content::Unwritten,
                    });
                    env.count("extents leased");
                }
            }
            ExtentAnswer::Pinned(blocks) => {
                for (key, block) in blocks {
                    let PinnedBlock::Pinned { pin, place } = block else {
                        env.count("pins refused");
                        continue;
                    };
                    let extent = Extent::of(&place);
                    let pinned = Pinned { pin, key, extent, given_up: false };
                    self.holder(id, layout, extent.device).pinned.push(pinned);
                    env.count("extents pinned");
                }
            }
            ExtentAnswer::Durable(keys) => self.durable.extend(keys),
        }
    }

    fn holder(&mut self, id: HolderId, layout: Layout, device: usize) -> &mut Holder {
        let holder = self.holders.entry(id).or_insert_with(|| Holder {
            layout,
            state: HolderState::Open,
            pins_valid: true,
            devices: BTreeSet::new(),
            leased: Vec::new(),
            pinned: Vec::new(),
        });
        holder.devices.insert(device);
        holder
    }

    // ---- ends ---------------------------------------------------------------------------------------------

    /// Handles the end of a session: its process ends too, or does I/O for some time.
    pub(crate) fn session_ended(&mut self, env: &mut Environment, id: HolderId, process_ends: bool) {
        let Some(holder) = self.holders.get_mut(&id) else { return };
        holder.state = HolderState::WithoutSession;
        if process_ends {
            return self.end_process(env, id);
        }
        env.count("sessions ended before their holders");
        self.schedule(env, id);
    }

    /// Handles the death of the agent: the processes live, and notice it later.
    pub(crate) fn agent_killed(&mut self, env: &mut Environment) {
        let alive = self.holders.iter().filter(|(_, holder)| holder.state != HolderState::Ended);
        let alive: Vec<(HolderId, HolderState)> = alive.map(|(id, holder)| (*id, holder.state)).collect();
        for (id, state) in alive {
            let holder = self.holders.get_mut(&id).expect("just listed");
            (holder.pins_valid, holder.state) = (false, HolderState::WithoutSession);
            env.count("holders that outlived the agent");
            if state == HolderState::Open {
                self.schedule(env, id);
            }
        }
    }

    /// Handles a power loss: returns the writes to each disk that were in flight.
    pub(crate) fn power_lost(&mut self, env: &mut Environment) -> Vec<(usize, DiskWrite)> {
        self.holders.clear();
        let lost = std::mem::take(&mut self.writes).into_values().map(|write| {
            env.count("extent writes in power losses");
            (write.extent.device, DiskWrite::of_holder(write.extent.page, write.payload))
        });
        lost.collect()
    }

    /// Handles the replacement of a device: the holders' files are gone.
    pub(crate) fn device_replaced(&mut self, device: usize) {
        self.writes.retain(|_, write| write.extent.device != device);
        for holder in self.holders.values_mut() {
            holder.devices.remove(&device);
            holder.leased.retain(|leased| leased.extent.device != device);
            holder.pinned.retain(|pinned| pinned.extent.device != device);
        }
        self.remove_ended();
    }

    /// Runs a step of a process without a session: it writes, or ends.
    pub(crate) fn step(&mut self, env: &mut Environment, disks: &[Disk], id: HolderId) {
        let is_alive = |holder: &Holder| holder.state == HolderState::WithoutSession;
        if !self.holders.get(&id).is_some_and(is_alive) {
            return;
        }
        if env.calm || env.rng.chance(END_PERMILLE) {
            return self.end_process(env, id);
        }
        self.read_all(env, disks);
        self.begin_writes(env, disks, id);
        self.schedule(env, id);
    }

    fn schedule(&self, env: &mut Environment, holder: HolderId) {
        let time = env.rng.micros(1..400_000);
        env.after(time, Action::Holder { node: self.node, holder });
    }

    fn end_process(&mut self, env: &mut Environment, id: HolderId) {
        let holder = self.holders.get_mut(&id).expect("a living process");
        holder.state = HolderState::Ended;
        holder.leased.clear();
        holder.pinned.clear();
        if self.writes.values().any(|write| write.holder == id) {
            env.count("holders ended with I/O in flight");
        }
        self.remove_ended();
    }

    /// Handles the end of a write.
    pub(crate) fn written(&mut self, env: &mut Environment, disks: &mut [Disk], number: u64) {
        let Some(Write { holder: id, extent, intended, payload }) = self.writes.remove(&number) else {
            return;
        };
        let (disk, life) = (&mut disks[extent.device], env.host(Host::Node(self.node)).life);
        let fails = disk.health.errors_permille > 0 && env.rng.chance(disk.health.errors_permille);
        let write = DiskWrite::of_holder(extent.page, payload.clone());
        match env.setup.variant {
            _ if disk.health.lost => {}
            _ if fails => disk.complete(write.torn(&mut env.rng)),
            Variant::ExtentsOutsideOfSyncs => disk.complete_outside_of_syncs(write),
            _ => disk.complete(write),
        }
        let holder = self.holders.get_mut(&id).expect("it lives until its I/O has ended");
        match holder.state {
            HolderState::Open => {}
            _ if id.life < life => env.count("extent writes after a restart of the agent"),
            HolderState::WithoutSession => env.count("extent writes after a session"),
            HolderState::Ended => env.count("extent writes of ended processes"),
        }
        for leased in &mut holder.leased {
            if leased.content == Content::Writing(number) {
                let is_written = !fails && !disk.health.lost;
                leased.content =
                    if is_written { Content::Written(intended, payload.clone()) } else { Content::Unwritten };
            }
        }
        self.remove_ended();
    }

    fn remove_ended(&mut self) {
        let writes = &self.writes;
        self.holders.retain(|id, holder| {
            holder.state != HolderState::Ended || writes.values().any(|write| write.holder == *id)
        });
    }
}

impl Leased {
    /// Checks that a written extent has the bytes that its holder wrote, or damaged ones.
    fn assert_kept(&self, disks: &[Disk]) {
        let (Content::Written(_, payload), extent) = (&self.content, &self.extent) else { return };
        let (_, found) = disks[extent.device].read(extent.page);
        assert!(found == payload || is_rotten(found), "{extent:?} is leased and was overwritten");
    }
}

impl Pinned {
    /// Reads the block and verifies it; a damaged one counts as a miss.
    fn read(&mut self, env: &mut Environment, disk: &Disk, layout: &Layout, valid: bool) {
        if disk.health.lost {
            return;
        }
        let Pinned { key, extent, .. } = *self;
        let (page, payload) = disk.read(extent.page);
        let expected = ExpectedHeader { key, generation: extent.generation, header_crc: extent.header_crc };
        let whole = payload.len() == layout.layers() as usize;
        let header = decode_header(&page, &expected).ok().filter(|_| whole);
        if env.setup.variant == Variant::PinnedReadsUnverified && valid {
            let read = payload.iter().map(|content| Observation::BlockRead { key, content: *content });
            read.for_each(|read| env.observe(read));
        }
        match header.and_then(|header| verified(payload, 0, layout, &header.checksums)) {
            Some(content) => {
                env.observe(Observation::BlockRead { key, content });
                env.count(if valid {
                    "pinned blocks read"
                } else {
                    "blocks read after the end of their pin"
                });
            }
            None if !valid => {
                self.given_up = true;
                env.count("blocks gone after the end of their pin");
            }
            None => {
                assert!(is_rotten(payload), "{key}: {extent:?} is pinned and was overwritten");
                self.given_up = true;
                env.count("pinned blocks found corrupt");
            }
        }
    }
}
