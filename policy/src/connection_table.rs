//! The connections of one listener: how many it accepts, and which one it closes to accept another.
//!
//! A full listener that refuses new connections serves the clients that came first, and idle ones stop all others. A full
//! listener that closes its longest-idle connection stays reachable: each new connection has the time of
//! `connections_max - 1` further ones to send its first request.
//!
//! ```text
//!   admit ──► Fresh ──set_known──► Known ──set_busy──► Busy
//!               │                    │ ▲───set_known──────┘
//!               └── closed first     └── closed when no connection is fresh; a busy one is never closed
//! ```
//!
//! Within a phase, the connection that entered it first is closed first. The table counts entries in place of time, so it
//! needs no clock.

use std::collections::BTreeMap;

/// Connections that may be open in addition to a table's, because they were closed to make room and have not ended.
pub const CLOSING_MAX: usize = 8;

/// A connection of a [`ConnectionTable`]; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// What may happen to a connection when its listener is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// It has not sent a valid greeting or request.
    Fresh,
    /// It has, and waits for nothing.
    Known,
}

/// Connections of one listener, each with what closes it (`C`).
#[derive(Debug)]
pub struct ConnectionTable<C> {
    connections_max: usize,
    next: u64,
    /// Connections that may be closed, in the order in which they would be.
    idle: BTreeMap<(Phase, u64), (ConnectionId, C)>,
    /// Where each connection is in `idle`; `None`: it is busy.
    connections: BTreeMap<ConnectionId, Option<(Phase, u64)>>,
    /// Connections that were closed to make room, and have not ended.
    closing: usize,
}

/// Outcome of [`ConnectionTable::admit`].
#[derive(Debug, PartialEq, Eq)]
pub enum Admission<C> {
    /// There was room.
    Admitted(ConnectionId),
    /// There is room once the caller has closed `closed`, which the table has forgotten.
    Replaced {
        /// The new connection.
        id: ConnectionId,
        /// What closes the longest-idle connection.
        closed: C,
    },
    /// All connections are busy.
    Full(C),
}

impl<C> ConnectionTable<C> {
    /// A table of at most `connections_max` connections; at least one.
    pub fn new(connections_max: usize) -> ConnectionTable<C> {
        ConnectionTable {
            connections_max: connections_max.max(1),
            next: 0,
            idle: BTreeMap::new(),
            connections: BTreeMap::new(),
            closing: 0,
        }
    }

    /// Enters a connection as fresh; `close` closes it.
    pub fn admit(&mut self, close: C) -> Admission<C> {
        let replaced = if self.connections.len() < self.connections_max {
            None
        } else {
            let Some((_, (oldest, closed))) = self.idle.pop_first() else { return Admission::Full(close) };
            self.connections.remove(&oldest);
            self.closing += 1;
            Some(closed)
        };
        let id = ConnectionId(self.tick());
        let place = (Phase::Fresh, self.tick());
        self.idle.insert(place, (id, close));
        self.connections.insert(id, Some(place));
        match replaced {
            None => Admission::Admitted(id),
            Some(closed) => Admission::Replaced { id, closed },
        }
    }

    /// Keeps a connection until [`set_known`](Self::set_known) or [`remove`](Self::remove); false when it was closed to
    /// make room.
    pub fn set_busy(&mut self, id: ConnectionId) -> bool {
        let Some(place) = self.connections.get_mut(&id) else { return false };
        if let Some(place) = place.take() {
            self.idle.remove(&place);
        }
        true
    }

    /// Enters a connection as idle from now on; false when it was closed to make room.
    pub fn set_known(&mut self, id: ConnectionId, close: C) -> bool {
        let place = (Phase::Known, self.tick());
        let Some(entry) = self.connections.get_mut(&id) else { return false };
        if let Some(former) = entry.replace(place) {
            self.idle.remove(&former);
        }
        self.idle.insert(place, (id, close));
        true
    }

    /// Removes a connection that has ended, once.
    pub fn remove(&mut self, id: ConnectionId) {
        match self.connections.remove(&id) {
            Some(Some(place)) => {
                self.idle.remove(&place);
            }
            Some(None) => {}
            None => self.closing = self.closing.saturating_sub(1),
        }
    }

    /// Whether so many connections that were closed to make room have not ended that the next accept must wait: until
    /// then they have their descriptors.
    pub fn must_wait(&self) -> bool {
        self.closing >= CLOSING_MAX
    }

    /// Connections in the table.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether the table has no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn admit(table: &mut ConnectionTable<u32>, close: u32) -> (ConnectionId, Option<u32>) {
        match table.admit(close) {
            Admission::Admitted(id) => (id, None),
            Admission::Replaced { id, closed } => (id, Some(closed)),
            Admission::Full(_) => panic!("full"),
        }
    }

    #[test]
    fn closes_the_oldest_fresh_connection_before_any_known_one() {
        let mut table = ConnectionTable::new(3);
        let (known, _) = admit(&mut table, 0);
        admit(&mut table, 1);
        admit(&mut table, 2);
        assert!(table.set_known(known, 0));
        assert_eq!(admit(&mut table, 3).1, Some(1));
        assert_eq!(admit(&mut table, 4).1, Some(2));
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn closes_the_longest_idle_known_connection_when_none_is_fresh() {
        let mut table = ConnectionTable::new(2);
        let (first, _) = admit(&mut table, 0);
        let (second, _) = admit(&mut table, 1);
        assert!(table.set_known(first, 0) && table.set_known(second, 1));
        // The first one was used after the second one.
        assert!(table.set_busy(first) && table.set_known(first, 0));
        assert_eq!(admit(&mut table, 2).1, Some(1));
    }

    #[test]
    fn refuses_when_every_connection_is_busy_and_admits_after_one_ended() {
        let mut table = ConnectionTable::new(1);
        let (busy, _) = admit(&mut table, 0);
        assert!(table.set_busy(busy));
        assert_eq!(table.admit(1), Admission::Full(1));
        table.remove(busy);
        assert!(matches!(table.admit(2), Admission::Admitted(_)));
    }

    #[test]
    fn a_connection_that_was_closed_to_make_room_cannot_become_busy() {
        let mut table = ConnectionTable::new(1);
        let (first, _) = admit(&mut table, 0);
        let (second, closed) = admit(&mut table, 1);
        assert_eq!(closed, Some(0));
        assert!(!table.set_busy(first) && !table.set_known(first, 0));
        table.remove(first);
        assert!(table.set_busy(second));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn the_next_accept_waits_while_closed_connections_have_not_ended() {
        let mut table = ConnectionTable::new(1);
        let ids: Vec<_> = (0..=CLOSING_MAX as u32).map(|close| admit(&mut table, close).0).collect();
        assert!(table.must_wait());
        table.remove(ids[0]);
        assert!(!table.must_wait());
    }

    proptest! {
        #[test]
        fn holds_at_most_its_maximum_and_never_closes_a_busy_connection(
            max in 1usize..6,
            steps in prop::collection::vec((0u8..4, 0usize..8), 0..200),
        ) {
            let mut table = ConnectionTable::new(max);
            let mut open: Vec<(ConnectionId, u32, bool)> = Vec::new();
            for (number, (step, index)) in (0u32..).zip(steps) {
                if step == 0 {
                    match table.admit(number) {
                        Admission::Admitted(id) => open.push((id, number, false)),
                        Admission::Replaced { id, closed } => {
                            let index = open.iter().position(|(_, close, _)| *close == closed);
                            let (_, _, busy) = open.remove(index.expect("it was open"));
                            prop_assert!(!busy);
                            open.push((id, number, false));
                        }
                        Admission::Full(_) => prop_assert!(open.iter().all(|(_, _, busy)| *busy)),
                    }
                } else if let Some((id, close, busy)) = open.get_mut(index) {
                    match step {
                        1 => { prop_assert!(table.set_busy(*id)); *busy = true; }
                        2 => { prop_assert!(table.set_known(*id, *close)); *busy = false; }
                        _ => { table.remove(*id); open.remove(index); }
                    }
                }
                prop_assert!(table.len() == open.len() && table.len() <= max);
            }
        }
    }
}
