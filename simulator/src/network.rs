//! Connections between hosts: delay, loss, order within a connection, partitions.
//!
//! A message that reaches a partition waits there, and continues in its order when the partition ends, as TCP
//! retransmits it; the sender gives up by its own deadline. The death of the other end is detected by the
//! next message, or at once if the dying host's kernel could still report it. Messages of different
//! connections are not ordered.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::Tick;

use crate::rng::Rng;

/// A host: nodes and members by their index, and the host of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Host {
    Node(usize),
    Member(usize),
    Store,
}

/// Identifies a connection between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LineId(pub(crate) u64);

/// One end of a connection: a process on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) host: Host,
    /// Number of the process on the host; each process has a new one.
    pub(crate) life: u64,
}

/// A connection with its opener and its acceptor.
#[derive(Debug)]
pub(crate) struct Line<M> {
    pub(crate) ends: [End; 2],
    /// Arrival time of the last message to each end.
    last: [Tick; 2],
    /// Number of messages to each end that were sent, and that have arrived in order.
    sent: [u64; 2],
    arrived: [u64; 2],
    /// Messages held at a partition, with the index of their receiver and their number.
    held: Vec<(usize, u64, M)>,
    /// Messages that have overtaken the held ones.
    early: BTreeMap<(usize, u64), M>,
}

/// The network of the simulation; see the module.
#[derive(Debug)]
pub(crate) struct Network<M> {
    lines: BTreeMap<LineId, Line<M>>,
    cuts: BTreeSet<(Host, Host)>,
    next: u64,
    /// Messages are no longer delayed.
    pub(crate) calm: bool,
}

impl<M> Network<M> {
    pub(crate) fn new() -> Network<M> {
        Network { lines: BTreeMap::new(), cuts: BTreeSet::new(), next: 0, calm: false }
    }

    pub(crate) fn open(&mut self, from: End, to: End) -> LineId {
        let id = LineId(self.next);
        self.next += 1;
        let line = Line {
            ends: [from, to],
            last: [Tick(0); 2],
            sent: [0; 2],
            arrived: [0; 2],
            held: Vec::new(),
            early: BTreeMap::new(),
        };
        self.lines.insert(id, line);
        id
    }

    pub(crate) fn line(&self, id: LineId) -> Option<&Line<M>> {
        self.lines.get(&id)
    }

    pub(crate) fn close(&mut self, id: LineId) {
        self.lines.remove(&id);
    }

    /// Returns the connections that have an end at a host.
    pub(crate) fn lines_of(&self, host: Host) -> Vec<LineId> {
        let has = |line: &Line<M>| line.ends.iter().any(|end| end.host == host);
        self.lines.iter().filter(|(_, line)| has(line)).map(|(id, _)| *id).collect()
    }

    /// Selects one of all connections.
    pub(crate) fn any(&self, which: u64) -> Option<LineId> {
        let count = self.lines.len().max(1) as u64;
        self.lines.keys().nth((which % count) as usize).copied()
    }

    /// Allocates the number of the next message to an end of a connection.
    pub(crate) fn number(&mut self, id: LineId, to: usize) -> Option<u64> {
        let sent = &mut self.lines.get_mut(&id)?.sent[to];
        *sent += 1;
        Some(*sent - 1)
    }

    /// Handles the arrival of a message; returns the messages that can be delivered in order.
    pub(crate) fn in_order(&mut self, id: LineId, to: usize, number: u64, message: M) -> Vec<M> {
        let Some(line) = self.lines.get_mut(&id) else { return Vec::new() };
        if number != line.arrived[to] {
            line.early.insert((to, number), message);
            return Vec::new();
        }
        line.arrived[to] += 1;
        let mut ready = vec![message];
        while let Some(message) = line.early.remove(&(to, line.arrived[to])) {
            line.arrived[to] += 1;
            ready.push(message);
        }
        ready
    }

    /// Returns the arrival time of a message that is sent now.
    pub(crate) fn arrival(&mut self, id: LineId, to: usize, now: Tick, rng: &mut Rng) -> Option<Tick> {
        let delay = match rng.below(1000) {
            0..950 => rng.micros(40..600),
            _ if self.calm => rng.micros(40..600),
            950..995 => rng.millis(1..20),
            _ => rng.millis(20..900),
        };
        self.arrival_after(id, to, now.after(delay))
    }

    /// Returns the arrival time of a message that arrives at `at`, or behind the messages before it.
    pub(crate) fn arrival_after(&mut self, id: LineId, to: usize, at: Tick) -> Option<Tick> {
        let last = &mut self.lines.get_mut(&id)?.last[to];
        *last = at.max(Tick(last.0 + 1));
        Some(*last)
    }

    pub(crate) fn is_cut(&self, a: Host, b: Host) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    pub(crate) fn cut(&mut self, a: Host, b: Host) {
        self.cuts.insert((a.min(b), a.max(b)));
    }

    /// Holds a message that has reached a partition.
    pub(crate) fn hold(&mut self, id: LineId, to: usize, number: u64, message: M) {
        let line = self.lines.get_mut(&id).expect("a message arrives over a connection");
        line.held.push((to, number, message));
    }

    /// Ends the partition between two hosts; returns the held messages.
    pub(crate) fn heal(&mut self, a: Host, b: Host) -> Vec<(LineId, usize, u64, M)> {
        self.cuts.remove(&(a.min(b), a.max(b)));
        let mut freed = Vec::new();
        for (id, line) in &mut self.lines {
            let [one, other] = line.ends.map(|end| end.host);
            if (one, other) == (a, b) || (one, other) == (b, a) {
                freed.extend(line.held.drain(..).map(|(to, number, message)| (*id, to, number, message)));
            }
        }
        freed
    }
}
