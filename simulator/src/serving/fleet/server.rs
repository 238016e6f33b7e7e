//! State of one node: its engine, its channels and its events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use reprise_policy::prefetch::{IterationTime, LookaheadWindow};
use reprise_policy::recompute::{BlockSize, LoadPolicy, WaitLimit};
use reprise_policy::session::Source as LoadSource;

use super::FleetSetup;
use super::hbm::{Hbm, HbmUse};
use super::run::Run;
use crate::replay::InUse;
use crate::serving::events::{EventQueue, Nanos};
use crate::serving::fabric::{ChannelEvent, ChannelKind, Fabric};

/// Place of an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(pub(super) u32);

/// Event of a node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A run of steps ends, unless it was replaced since.
    StepEnd(u32),
    /// The load of a request reaches the limit of its wait, if it is still in progress.
    WaitLimit { place: Place, number: u64 },
    /// A channel has something to do.
    Channel { kind: ChannelKind, stamp: u32 },
}

/// Purpose of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Part of a load at this node.
    Load(Place),
    /// Part of the load of another node.
    LoadOf { node: u16, place: Place },
    /// Blocks that are read ahead, with their number.
    ReadAhead(u32),
    /// Bytes for which no request waits: saves, and rests of loads.
    Unattended,
}

/// Amounts on channels; those that are zero are left out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Legs {
    legs: [(ChannelKind, u64); 5],
    count: usize,
}

/// Transfer of a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Node whose channels it occupies.
    pub(super) node: usize,
    pub(super) job: u32,
    pub(super) legs: Legs,
}

/// Request that waits for memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) request: u32,
    /// Tokens that it generated before it was preempted.
    pub(super) produced: u32,
    pub(super) first_token: Nanos,
    /// Whether its hits are counted: it was admitted before, and preempted.
    pub(super) is_counted: bool,
    /// Whether its blocks on NVMe are, or were, read ahead.
    pub(super) is_read_ahead: bool,
}

/// Blocks that are read ahead for a request.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pub(super) request: u32,
    /// Numbers of the blocks in its prompt.
    pub(super) positions: Vec<u32>,
}

/// Load of a request.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) began: Nanos,
    /// Source of each block.
    pub(super) sources: Vec<LoadSource>,
    /// Transfers that have not ended.
    pub(super) parts: Vec<Part>,
    pub(super) limit: Option<WaitLimit>,
    /// Leading blocks of the prompt that needed no load.
    pub(super) before: usize,
}

/// Request that has memory.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) request: u32,
    /// Number in the order of admissions.
    pub(super) number: u64,
    /// Tokens to compute before the next token: the prompt, and those that were generated before a preemption.
    pub(super) prompt: u32,
    /// Tokens whose KV cache exists, at the begin of its decoding.
    pub(super) computed: u32,
    /// Tokens that were generated before its decoding.
    pub(super) produced: u32,
    pub(super) first_token: Nanos,
    /// Steps of the engine at the begin of its decoding.
    pub(super) joined: u64,
    /// Leading blocks that a tier had.
    pub(super) run: usize,
    pub(super) in_use: InUse,
    pub(super) hbm: HbmUse,
    pub(super) load: Load,
}

/// Node with its engine.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) events: EventQueue<Event>,
    pub(super) fabric: Fabric<Purpose>,
    pub(super) ended: Vec<Purpose>,
    pub(super) hbm: Hbm,
    pub(super) policy: Option<LoadPolicy>,
    pub(super) waiting: VecDeque<Waiting>,
    /// Whether the first waiting request may fit: memory was released since it did not.
    pub(super) may_admit: bool,
    pub(super) active: Vec<Option<Active>>,
    free: Vec<Place>,
    pub(super) admitted: u64,
    pub(super) prefilling: VecDeque<Place>,
    /// Requests that decode, by the number of steps at their end.
    pub(super) decoding: BinaryHeap<Reverse<(u64, Place)>>,
    /// Tokens of KV cache of all decoding requests.
    pub(super) context: u64,
    pub(super) steps: u64,
    pub(super) run: Option<Run>,
    pub(super) stamp: u32,
    /// Prompts of the step that runs: tokens of each.
    pub(super) scheduled: Vec<(Place, u32)>,
    /// Bytes of transfers from and to accelerator memory that no step has paid for yet.
    pub(super) unpaid_bytes: u64,
    /// Time of a step.
    pub(super) iteration: IterationTime,
    /// Steps within which a request must run to be read ahead.
    pub(super) window: LookaheadWindow,
    staged: Vec<Option<Staging>>,
    /// Blocks written to NVMe whose transfers have begun.
    pub(super) nvme_written: u64,
    /// Blocks written to the cold store whose transfers have begun.
    pub(super) cold_written: u64,
}

impl Legs {
    pub(super) fn new(all: &[(ChannelKind, u64)]) -> Legs {
        let mut legs = Legs { legs: [(ChannelKind::Dram, 0); 5], count: 0 };
        for leg in all.iter().filter(|(_, bytes)| *bytes > 0) {
            legs.legs[legs.count] = *leg;
            legs.count += 1;
        }
        legs
    }

    pub(super) fn as_slice(&self) -> &[(ChannelKind, u64)] {
        &self.legs[..self.count]
    }
}

impl ChannelEvent for Event {
    fn of_channel(kind: ChannelKind, stamp: u32) -> Event {
        Event::Channel { kind, stamp }
    }
}

impl Server {
    pub(super) fn new(setup: &FleetSetup) -> Server {
        let block = BlockSize {
            tokens: u32::try_from(setup.tiers.block_tokens).unwrap_or(u32::MAX),
            bytes: setup.tiers.block_bytes,
        };
        Server {
            events: EventQueue::default(),
            fabric: Fabric::new(&setup.hardware, setup.accelerators),
            ended: Vec::new(),
            hbm: Hbm::new(setup.hbm_tokens(), setup.tiers.block_tokens, setup.has_hbm_cache),
            policy: setup.load_policy.map(|bound| LoadPolicy::new(bound, block)),
            waiting: VecDeque::new(),
            may_admit: true,
            active: Vec::new(),
            free: Vec::new(),
            admitted: 0,
            prefilling: VecDeque::new(),
            decoding: BinaryHeap::new(),
            context: 0,
            steps: 0,
            run: None,
            stamp: 0,
            scheduled: Vec::new(),
            unpaid_bytes: 0,
            iteration: IterationTime::default(),
            window: LookaheadWindow::default(),
            staged: Vec::new(),
            nvme_written: 0,
            cold_written: 0,
        }
    }

    /// Number of admitted requests.
    pub(super) fn active_count(&self) -> usize {
        self.active.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, active: Active) -> Place {
        match self.free.pop() {
            Some(place) => {
                self.active[place.0 as usize] = Some(active);
                place
            }
            None => {
                self.active.push(Some(active));
                Place(self.active.len() as u32 - 1)
            }
        }
    }

    pub(super) fn at(&mut self, place: Place) -> &mut Active {
        self.active[place.0 as usize].as_mut().expect("the request is admitted")
    }

    pub(super) fn remove(&mut self, place: Place) -> Active {
        self.free.push(place);
        self.active[place.0 as usize].take().expect("the request is admitted")
    }

    /// The request that was admitted last, of those in the batch.
    pub(super) fn youngest(&self) -> Option<Place> {
        let decoding = self.decoding.iter().map(|Reverse((_, place))| *place);
        let number = |place: &Place| self.active[place.0 as usize].as_ref().map(|active| active.number);
        decoding.chain(self.prefilling.iter().copied()).max_by_key(number)
    }

    /// Notes blocks that are read ahead, and returns their number.
    pub(super) fn add_staging(&mut self, staging: Staging) -> u32 {
        // Few are in flight, so the search is short.
        let free = self.staged.iter().position(Option::is_none).unwrap_or(self.staged.len());
        if free == self.staged.len() {
            self.staged.push(None);
        }
        self.staged[free] = Some(staging);
        free as u32
    }

    /// Takes the blocks that were read ahead.
    pub(super) fn take_staging(&mut self, number: u32) -> Staging {
        self.staged[number as usize].take().expect("each read ahead ends once")
    }

    /// Starts a transfer, and returns its job.
    pub(super) fn transfer(&mut self, now: Nanos, legs: &Legs, purpose: Purpose) -> u32 {
        self.fabric.start(&mut self.events, now, legs.as_slice(), purpose)
    }
}
