//! Table of one listener's connections: how many it accepts, and which one it closes to accept another.
//!
//! A full listener that rejects new connections serves only the first clients, and idle ones block all
//! others. A full listener that closes its longest-idle connection stays reachable. Each new connection has
//! the time until `connections_max - 1` further ones arrive to send its first request.
//!
//! ```text
//!   admit ──► Fresh ──set_known──► Known ──set_busy──► Busy
//!               │                    │ ▲───set_known──────┘
//!               └── closed first     └── closed when no connection is fresh; a busy one is never closed
//! ```
//!
//! Within a phase, the connection that entered it first is closed first. The table counts events instead of
//! time, so it needs no clock.

use std::collections::BTreeMap;

/// Maximum open connections beyond the table's: closed to make room, and not ended yet.
pub const CLOSING_MAX: usize = 8;

/// Identifier of a connection in a [`ConnectionTable`]; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// Phase of a connection, which decides when a full listener may close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// The connection has not sent a valid greeting or request.
    Fresh,
    /// The connection has sent one, and is idle.
    Known,
}

/// Connections of one listener, each with a handle that closes it (`C`).
#[derive(Debug)]
pub struct ConnectionTable<C> {
    connections_max: usize,
    next: u64,
    /// Connections that may be closed, in the order of closing.
    idle: BTreeMap<(Phase, u64), (ConnectionId, C)>,
    /// Key of each connection in `idle`; `None` if it is busy.
    connections: BTreeMap<ConnectionId, Option<(Phase, u64)>>,
    /// Number of connections that were closed to make room and have not ended.
    closing: usize,
}

/// Outcome of a call of [`ConnectionTable::admit`].
#[derive(Debug, PartialEq, Eq)]
pub enum Admission<C> {
    /// The listener had room.
    Admitted(ConnectionId),
    /// The listener has room once the caller has closed `closed`, which is no longer in the table.
    Replaced {
        /// Identifier of the new connection.
        id: ConnectionId,
        /// Handle that closes the longest-idle connection.
        closed: C,
    },
    /// All connections are busy; contains the handle of the rejected connection.
    Full(C),
}

impl<C> ConnectionTable<C> {
    /// Creates a table of at most `connections_max` connections, at least one.
    pub fn new(connections_max: usize) -> ConnectionTable<C> {
        ConnectionTable {
            connections_max: connections_max.max(1),
            next: 0,
            idle: BTreeMap::new(),
            connections: BTreeMap::new(),
            closing: 0,
        }
    }

    /// Adds a connection as fresh; `close` is the handle that closes it.
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

    /// Protects a connection from being closed until [`set_known`](Self::set_known) or
    /// [`remove`](Self::remove); `false` if it was already closed to make room.
    pub fn set_busy(&mut self, id: ConnectionId) -> bool {
        let Some(place) = self.connections.get_mut(&id) else { return false };
        if let Some(place) = place.take() {
            self.idle.remove(&place);
        }
        true
    }

    /// Marks a connection as idle from now on; `false` if it was already closed to make room.
    pub fn set_known(&mut self, id: ConnectionId, close: C) -> bool {
        let place = (Phase::Known, self.tick());
        let Some(entry) = self.connections.get_mut(&id) else { return false };
        if let Some(former) = entry.replace(place) {
            self.idle.remove(&former);
        }
        self.idle.insert(place, (id, close));
        true
    }

    /// Removes a connection that has ended. Call it once per connection.
    pub fn remove(&mut self, id: ConnectionId) {
        match self.connections.remove(&id) {
            Some(Some(place)) => {
                self.idle.remove(&place);
            }
            Some(None) => {}
            None => self.closing = self.closing.saturating_sub(1),
        }
    }

    /// Whether the next accept must wait, because too many closed connections have not ended yet and still
    /// hold their descriptors.
    pub fn must_wait(&self) -> bool {
        self.closing >= CLOSING_MAX
    }

    /// Number of connections in the table.
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
