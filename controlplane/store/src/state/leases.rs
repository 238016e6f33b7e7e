//! Leases of a local store: expiry and attached keys. Pure: time is passed in as a [`Tick`].
//!
//! A lease is alive before its instant of expiry and gone from that instant on, whether or not its entries
//! have been deleted.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::Tick;

use crate::lease::{Lease, LeaseId, TimeToLive};

/// All leases of a store.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    entries: BTreeMap<LeaseId, LeaseEntry>,
    /// The same leases, ordered by expiry.
    by_expiry: BTreeSet<(Tick, LeaseId)>,
}

#[derive(Debug)]
struct LeaseEntry {
    time_to_live: TimeToLive,
    expires: Tick,
    keys: BTreeSet<Vec<u8>>,
}

impl Leases {
    pub(crate) fn count(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_alive(&self, id: LeaseId, now: Tick) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.expires > now)
    }

    /// Expiry of the lease that expires next.
    pub(crate) fn next_expiry(&self) -> Option<Tick> {
        self.by_expiry.first().map(|(expires, _)| *expires)
    }

    /// The expired lease with the earliest expiry.
    pub(crate) fn expired(&self, now: Tick) -> Option<LeaseId> {
        self.by_expiry.first().filter(|(expires, _)| *expires <= now).map(|(_, id)| *id)
    }

    pub(crate) fn insert(&mut self, lease: Lease, now: Tick) {
        let Lease { id, time_to_live } = lease;
        let expires = now.after(time_to_live.duration());
        self.by_expiry.insert((expires, id));
        self.entries.insert(id, LeaseEntry { time_to_live, expires, keys: BTreeSet::new() });
    }

    /// Restarts the time to live of a lease; `false` if it has expired.
    pub(crate) fn renew(&mut self, id: LeaseId, now: Tick) -> bool {
        let Some(entry) = self.entries.get_mut(&id).filter(|entry| entry.expires > now) else { return false };
        self.by_expiry.remove(&(entry.expires, id));
        entry.expires = now.after(entry.time_to_live.duration());
        self.by_expiry.insert((entry.expires, id));
        true
    }

    pub(crate) fn remove(&mut self, id: LeaseId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.by_expiry.remove(&(entry.expires, id));
        }
    }

    /// Keys attached to a lease, in order.
    pub(crate) fn keys(&self, id: LeaseId) -> impl Iterator<Item = &Vec<u8>> {
        self.entries.get(&id).into_iter().flat_map(|entry| &entry.keys)
    }

    pub(crate) fn attach(&mut self, id: LeaseId, key: Vec<u8>) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.keys.insert(key);
        }
    }

    pub(crate) fn detach(&mut self, id: LeaseId, key: &[u8]) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.keys.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(number: u64, seconds: u64) -> Lease {
        Lease { id: LeaseId::new(number).expect("not 0"), time_to_live: TimeToLive::of_seconds(seconds) }
    }

    fn at(milliseconds: u64) -> Tick {
        Tick(milliseconds * 1000)
    }

    #[test]
    fn a_lease_is_alive_until_the_instant_of_its_expiry() {
        let mut leases = Leases::default();
        let lease = lease(1, 2);
        leases.insert(lease, at(500));
        assert!(leases.is_alive(lease.id, at(2499)));
        assert_eq!((leases.expired(at(2499)), leases.next_expiry()), (None, Some(at(2500))));
        assert!(!leases.is_alive(lease.id, at(2500)));
        assert!(!leases.renew(lease.id, at(2500)), "an expired lease cannot be renewed");
        assert_eq!(leases.expired(at(2500)), Some(lease.id));
        leases.remove(lease.id);
        assert_eq!((leases.expired(at(9999)), leases.next_expiry(), leases.count()), (None, None, 0));
    }

    #[test]
    fn a_keep_alive_restarts_the_time_to_live() {
        let mut leases = Leases::default();
        let (long, short) = (lease(1, 3), lease(2, 2));
        leases.insert(long, at(0));
        leases.insert(short, at(0));
        assert_eq!(leases.next_expiry(), Some(at(2000)));
        assert!(leases.renew(short.id, at(1999)));
        assert_eq!(leases.next_expiry(), Some(at(3000)));
        assert_eq!(leases.expired(at(4000)), Some(long.id), "in order of expiry");
        leases.remove(long.id);
        assert_eq!(leases.expired(at(4000)), Some(short.id));
    }
}
