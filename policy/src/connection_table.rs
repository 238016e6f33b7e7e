//! Table of one listener's connections: how many it accepts, and which one it closes to accept another.
//!
//! A full listener that rejects new connections serves only the first clients, and idle ones block all
//! others. A full listener that closes its longest-idle connection stays reachable. Each new connection has
//! the time until `connections_max - 1` further ones arrive to send its first request.
//!
//! ```text
//!   admit ──► Fresh, Returning ──set_known──► Known ──set_busy──► Busy
//!               │                               │ ▲───set_known──────┘
//!               └── closed first                └── closed when no connection is fresh; a busy one is never closed
//! ```
//!
//! Within a phase, the connection that entered it first is closed first. The table counts events instead of
//! time, so it needs no clock.
//!
//! Connections may have an owner: the identity of the client, or its address before it has shown one. An owner has
//! at most a share of the connections: a further one closes its own longest-idle connection, never another's.

use std::collections::BTreeMap;

/// Maximum open connections beyond the table's: closed to make room, and not ended yet.
pub const CLOSING_MAX: usize = 8;

/// Maximum number of remembered owners that have shown an identity: the nodes of a cluster. Less than 64 bytes each.
pub const PROVEN_MAX: usize = 4096;

/// Identifier of a connection in a [`ConnectionTable`]; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// Phase of a connection, which decides when a full listener may close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// The connection has not sent a valid greeting or request.
    Fresh,
    /// The same, but its owner has shown an identity on an earlier connection.
    Returning,
    /// The connection has sent one, and is idle.
    Known,
}

/// Connections of one listener, each with a handle that closes it (`C`), and possibly an owner (`O`).
#[derive(Debug)]
pub struct ConnectionTable<C, O = ()> {
    connections_max: usize,
    /// Most connections of one owner.
    share_max: usize,
    next: u64,
    /// Connections that may be closed, in the order of closing.
    idle: BTreeMap<(Phase, u64), (ConnectionId, C)>,
    connections: BTreeMap<ConnectionId, Connection<O>>,
    /// Number of connections of each owner that has any.
    owned: BTreeMap<O, usize>,
    /// Owners whose connections were assigned to an identity, with the time of the last one.
    proven: BTreeMap<O, u64>,
    /// Number of connections that were closed to make room and have not ended.
    closing: usize,
}

#[derive(Debug)]
struct Connection<O> {
    /// Key in `idle`; `None` if the connection is busy.
    place: Option<(Phase, u64)>,
    owner: Option<O>,
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
    /// All connections are busy, or all of the owner's; contains the handle of the rejected connection.
    Full(C),
}

/// Outcome of a call of [`ConnectionTable::assign`].
#[derive(Debug, PartialEq, Eq)]
pub enum Assignment<C> {
    /// The owner had room.
    Assigned,
    /// The owner has room once the caller has closed its longest-idle connection, which is no longer in the table.
    Replaced(C),
    /// All connections of the owner are busy, or the connection was already closed to make room: it must end.
    Refused,
}

impl<C> ConnectionTable<C> {
    /// Creates a table of at most `connections_max` connections, at least one, without owners.
    pub fn new(connections_max: usize) -> ConnectionTable<C> {
        ConnectionTable::with_share(connections_max, connections_max)
    }
}

impl<C, O: Ord + Clone> ConnectionTable<C, O> {
    /// Creates a table of at most `connections_max` connections, of which one owner has at most `share_max`; each at
    /// least one.
    pub fn with_share(connections_max: usize, share_max: usize) -> ConnectionTable<C, O> {
        ConnectionTable {
            connections_max: connections_max.max(1),
            share_max: share_max.max(1),
            next: 0,
            idle: BTreeMap::new(),
            connections: BTreeMap::new(),
            owned: BTreeMap::new(),
            proven: BTreeMap::new(),
            closing: 0,
        }
    }

    /// Adds a connection without an owner as fresh; `close` is the handle that closes it.
    pub fn admit(&mut self, close: C) -> Admission<C> {
        self.admit_from(None, close)
    }

    /// Adds a connection as fresh; `close` is the handle that closes it.
    pub fn admit_from(&mut self, owner: Option<O>, close: C) -> Admission<C> {
        // The place of the connection to close, if one must be closed: `Some(None)` if all of them are busy.
        let must_close = match &owner {
            Some(owner) if self.has_share(owner) => Some(self.oldest_of(owner, None)),
            _ if self.connections.len() >= self.connections_max => {
                Some(self.idle.first_key_value().map(|(place, _)| *place))
            }
            _ => None,
        };
        let closed = must_close.map(|place| place.and_then(|place| self.close(place)));
        if matches!(closed, Some(None)) {
            return Admission::Full(close);
        }
        let id = ConnectionId(self.tick());
        let is_proven = owner.as_ref().is_some_and(|owner| self.proven.contains_key(owner));
        let place = (if is_proven { Phase::Returning } else { Phase::Fresh }, self.tick());
        self.idle.insert(place, (id, close));
        self.count(owner.as_ref());
        self.connections.insert(id, Connection { place: Some(place), owner });
        match closed.flatten() {
            None => Admission::Admitted(id),
            Some(closed) => Admission::Replaced { id, closed },
        }
    }

    /// Counts a connection against another owner from now on, because its client has shown an identity.
    pub fn assign(&mut self, id: ConnectionId, owner: O) -> Assignment<C> {
        let Some(connection) = self.connections.get(&id) else { return Assignment::Refused };
        if connection.owner.as_ref() == Some(&owner) {
            return Assignment::Assigned;
        }
        let closed = if self.has_share(&owner) {
            let Some(place) = self.oldest_of(&owner, Some(id)) else { return Assignment::Refused };
            self.close(place)
        } else {
            None
        };
        self.count(Some(&owner));
        let former = self.connections.get_mut(&id).and_then(|connection| connection.owner.replace(owner));
        if let Some(former) = former {
            self.remember(&former);
            self.discount(Some(former));
        }
        closed.map_or(Assignment::Assigned, Assignment::Replaced)
    }

    /// Protects a connection from being closed until [`set_known`](Self::set_known) or
    /// [`remove`](Self::remove); `false` if it was already closed to make room.
    pub fn set_busy(&mut self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        if let Some(place) = connection.place.take() {
            self.idle.remove(&place);
        }
        true
    }

    /// Marks a connection as idle from now on; `false` if it was already closed to make room.
    pub fn set_known(&mut self, id: ConnectionId, close: C) -> bool {
        let place = (Phase::Known, self.tick());
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        if let Some(former) = connection.place.replace(place) {
            self.idle.remove(&former);
        }
        self.idle.insert(place, (id, close));
        true
    }

    /// Removes a connection that has ended. Call it once per connection.
    pub fn remove(&mut self, id: ConnectionId) {
        match self.connections.remove(&id) {
            Some(Connection { place, owner }) => {
                place.map(|place| self.idle.remove(&place));
                self.discount(owner);
            }
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

    /// Remembers an owner whose client has shown an identity; forgets the one that did so least recently.
    fn remember(&mut self, owner: &O) {
        let now = self.tick();
        if let Some(last) = self.proven.get_mut(owner) {
            *last = now;
            return;
        }
        if self.proven.len() >= PROVEN_MAX {
            let oldest = self.proven.iter().min_by_key(|(_, last)| **last).map(|(owner, _)| owner.clone());
            oldest.map(|oldest| self.proven.remove(&oldest));
        }
        self.proven.insert(owner.clone(), now);
    }

    fn has_share(&self, owner: &O) -> bool {
        self.owned.get(owner).is_some_and(|count| *count >= self.share_max)
    }

    /// Place of the owner's connection that is closed first, other than `except`. Walks all idle connections: callers
    /// only need it for an owner that has its share.
    fn oldest_of(&self, owner: &O, except: Option<ConnectionId>) -> Option<(Phase, u64)> {
        let is_of = |id| self.connections.get(id).is_some_and(|one| one.owner.as_ref() == Some(owner));
        let mut idle = self.idle.iter();
        idle.find(|(_, (id, _))| Some(*id) != except && is_of(id)).map(|(place, _)| *place)
    }

    /// Removes an idle connection to make room; returns the handle that closes it.
    fn close(&mut self, place: (Phase, u64)) -> Option<C> {
        let (id, closed) = self.idle.remove(&place)?;
        let owner = self.connections.remove(&id).and_then(|connection| connection.owner);
        self.discount(owner);
        self.closing += 1;
        Some(closed)
    }

    fn count(&mut self, owner: Option<&O>) {
        if let Some(owner) = owner {
            *self.owned.entry(owner.clone()).or_default() += 1;
        }
    }

    fn discount(&mut self, owner: Option<O>) {
        let Some(owner) = owner else { return };
        if let Some(count) = self.owned.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.owned.remove(&owner);
            }
        }
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

    #[test]
    fn an_owner_with_its_share_closes_its_own_connections_and_no_others() {
        let mut table = ConnectionTable::with_share(8, 2);
        assert!(matches!(table.admit_from(Some("a"), 0), Admission::Admitted(_)));
        let Admission::Admitted(second) = table.admit_from(Some("b"), 1) else { panic!("there is room") };
        assert!(matches!(table.admit_from(Some("b"), 2), Admission::Admitted(_)));
        assert!(matches!(table.admit_from(Some("b"), 3), Admission::Replaced { closed: 1, .. }));
        assert!(matches!(table.admit_from(Some("b"), 4), Admission::Replaced { closed: 2, .. }));
        assert_eq!(table.len(), 3);
        table.remove(second);
        assert!(!table.must_wait());
    }

    #[test]
    fn an_owner_whose_share_is_busy_is_refused_while_others_are_admitted() {
        let mut table = ConnectionTable::with_share(8, 1);
        let Admission::Admitted(busy) = table.admit_from(Some("a"), 0) else { panic!("there is room") };
        assert!(table.set_busy(busy));
        assert_eq!(table.admit_from(Some("a"), 1), Admission::Full(1));
        assert!(matches!(table.admit_from(Some("b"), 2), Admission::Admitted(_)));
        table.remove(busy);
        assert!(matches!(table.admit_from(Some("a"), 3), Admission::Admitted(_)));
    }

    #[test]
    fn a_connection_counts_against_the_owner_that_it_was_assigned_last() {
        let mut table = ConnectionTable::with_share(8, 1);
        let Admission::Admitted(first) = table.admit_from(Some("address"), 0) else {
            panic!("there is room")
        };
        assert_eq!(table.assign(first, "a"), Assignment::Assigned);
        assert_eq!(table.assign(first, "a"), Assignment::Assigned);
        let Admission::Admitted(second) = table.admit_from(Some("address"), 1) else {
            panic!("there is room")
        };
        assert_eq!(table.assign(second, "a"), Assignment::Replaced(0));
        assert!(table.set_busy(second));
        let Admission::Admitted(third) = table.admit_from(Some("address"), 2) else {
            panic!("there is room")
        };
        assert_eq!(table.assign(third, "a"), Assignment::Refused);
        assert_eq!(table.assign(first, "b"), Assignment::Refused, "it was closed to make room");
    }

    #[test]
    fn new_connections_of_a_proven_address_outlast_a_flood_of_others() {
        let mut table = ConnectionTable::with_share(8, 4);
        let Admission::Admitted(first) = table.admit_from(Some(1), 0) else { panic!("there is room") };
        assert_eq!(table.assign(first, 1000), Assignment::Assigned);
        table.remove(first);
        let Admission::Admitted(again) = table.admit_from(Some(1), 1) else { panic!("there is room") };
        for flood in 2..200 {
            match table.admit_from(Some(flood), flood) {
                Admission::Admitted(_) => {}
                Admission::Replaced { closed, .. } => {
                    assert_ne!(closed, 1, "connection of the proven address");
                }
                Admission::Full(_) => panic!("fresh connections make room"),
            }
        }
        // It is still there, and a connection without an earlier one is not.
        assert_eq!(table.assign(again, 1000), Assignment::Assigned);
        let Admission::Replaced { id: unknown, .. } = table.admit_from(Some(200), 200) else {
            panic!("the table is full")
        };
        for flood in 201..220 {
            table.admit_from(Some(flood), flood);
        }
        assert_eq!(table.assign(unknown, 1001), Assignment::Refused, "it made room");
    }

    #[test]
    fn remembered_addresses_are_bounded() {
        let mut table = ConnectionTable::with_share(8, 8);
        let most = u32::try_from(PROVEN_MAX).expect("small");
        for address in 0..most + 10 {
            let Admission::Admitted(id) = table.admit_from(Some(address), address) else {
                panic!("there is room")
            };
            assert_eq!(table.assign(id, u32::MAX), Assignment::Assigned);
            table.remove(id);
        }
        assert_eq!(table.proven.len(), PROVEN_MAX);
        assert!(!table.proven.contains_key(&9) && table.proven.contains_key(&10), "the oldest are forgotten");
    }

    proptest! {
        #[test]
        fn an_owner_never_has_more_than_its_share(
            share in 1usize..4,
            steps in prop::collection::vec((0u8..5, 0usize..8, 0u8..3), 0..200),
        ) {
            let mut table = ConnectionTable::with_share(6, share);
            let mut open: Vec<(ConnectionId, u32, Option<u8>, bool)> = Vec::new();
            for (number, (step, index, owner)) in (0u32..).zip(steps) {
                let owner = (owner > 0).then_some(owner);
                let mut closed_now = None;
                if step == 0 {
                    match table.admit_from(owner, number) {
                        Admission::Admitted(id) => open.push((id, number, owner, false)),
                        Admission::Replaced { id, closed } => {
                            closed_now = Some(closed);
                            open.push((id, number, owner, false));
                        }
                        Admission::Full(_) => {}
                    }
                } else if let Some((id, close, of, busy)) = open.get_mut(index) {
                    match (step, owner) {
                        (1, _) => { prop_assert!(table.set_busy(*id)); *busy = true; }
                        (2, _) => { prop_assert!(table.set_known(*id, *close)); *busy = false; }
                        (3, Some(owner)) => match table.assign(*id, owner) {
                            Assignment::Assigned => *of = Some(owner),
                            Assignment::Replaced(closed) => { *of = Some(owner); closed_now = Some(closed); }
                            Assignment::Refused => {}
                        },
                        _ => { table.remove(*id); open.remove(index); }
                    }
                }
                if let Some(closed) = closed_now {
                    let index = open.iter().position(|(_, close, _, _)| *close == closed);
                    let (_, _, _, busy) = open.remove(index.expect("it was open"));
                    prop_assert!(!busy, "a busy connection was closed");
                }
                prop_assert!(table.len() == open.len() && table.len() <= 6);
                for owner in [1, 2] {
                    let count = open.iter().filter(|(_, _, of, _)| *of == Some(owner)).count();
                    prop_assert!(count <= share);
                    prop_assert_eq!(table.owned.get(&owner).copied().unwrap_or(0), count);
                }
            }
        }

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
