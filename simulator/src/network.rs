//! Connections between hosts: delay, loss, order within a connection and none between two, partitions.
//!
//! A message waits while its way is cut and goes on in its order when the way is whole again, as TCP sends it again; who
//! sent it gives up by a deadline of its own. A connection whose other end has died is found out by the next message
//! over it, or at once when the dying host's kernel could still say so.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::Tick;

use crate::rng::Rng;

/// A machine: nodes and members by their index, and the one with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Host {
    Node(usize),
    Member(usize),
    Store,
}

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LineId(pub(crate) u64);

/// One end of a connection: a process on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) host: Host,
    /// Which process of the host; the next one has another life.
    pub(crate) life: u64,
}

/// A connection: who opened it, and to whom.
#[derive(Debug)]
pub(crate) struct Line<M> {
    pub(crate) ends: [End; 2],
    /// When the last message to each end arrives.
    last: [Tick; 2],
    /// Messages to each end that were sent, and that have arrived in their order.
    sent: [u64; 2],
    arrived: [u64; 2],
    /// Messages that arrived at a cut, by the index of the end they go to and their number.
    held: Vec<(usize, u64, M)>,
    /// Messages that have overtaken those.
    early: BTreeMap<(usize, u64), M>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Network<M> {
    lines: BTreeMap<LineId, Line<M>>,
    cuts: BTreeSet<(Host, Host)>,
    next: u64,
    /// Nothing is late any more.
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

    /// Connections that have an end at a host.
    pub(crate) fn lines_of(&self, host: Host) -> Vec<LineId> {
        let has = |line: &Line<M>| line.ends.iter().any(|end| end.host == host);
        self.lines.iter().filter(|(_, line)| has(line)).map(|(id, _)| *id).collect()
    }

    /// One of all connections.
    pub(crate) fn any(&self, which: u64) -> Option<LineId> {
        let count = self.lines.len().max(1) as u64;
        self.lines.keys().nth((which % count) as usize).copied()
    }

    /// The number of the next message to an end of a connection.
    pub(crate) fn number(&mut self, id: LineId, to: usize) -> Option<u64> {
        let sent = &mut self.lines.get_mut(&id)?.sent[to];
        *sent += 1;
        Some(*sent - 1)
    }

    /// A message has arrived: what can be given to the receiver, in the order in which it was sent.
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

    /// When a message sent now arrives at an end of a connection.
    pub(crate) fn arrival(&mut self, id: LineId, to: usize, now: Tick, rng: &mut Rng) -> Option<Tick> {
        let delay = match rng.below(1000) {
            0..950 => rng.micros(40..600),
            _ if self.calm => rng.micros(40..600),
            950..995 => rng.millis(1..20),
            _ => rng.millis(20..900),
        };
        let last = &mut self.lines.get_mut(&id)?.last[to];
        *last = now.after(delay).max(Tick(last.0 + 1));
        Some(*last)
    }

    pub(crate) fn is_cut(&self, a: Host, b: Host) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    pub(crate) fn cut(&mut self, a: Host, b: Host) {
        self.cuts.insert((a.min(b), a.max(b)));
    }

    /// Keeps a message that has come to a cut.
    pub(crate) fn hold(&mut self, id: LineId, to: usize, number: u64, message: M) {
        let line = self.lines.get_mut(&id).expect("a message arrives over a connection");
        line.held.push((to, number, message));
    }

    /// The way between two hosts is whole: what was held goes on.
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
