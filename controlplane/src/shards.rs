//! Control-plane members: this member's registration, and the map of hash slots derived from all of them.
//!
//! | key              | value |
//! |------------------|-------|
//! | `members/<name>` | JSON: address, version of the program; bound to the lease of the process that wrote it |
//!
//! ```text
//!   joining ──the name is free──► registered ──the lease is lost──► joining
//!      ▲ │
//!      └─┘ the name is taken: by another member, or by a former process of this one until its lease expires
//! ```
//!
//! The map is a function of the entries under `members/` ([`ShardMap`]); every member computes it. Its epoch
//! is a revision at which the list was current, so a higher epoch is a later list. A member's incarnation is
//! the revision that created its entry, and increases with every registration under a name.
//!
//! A map has at most [`MEMBERS_MAX`] members. A member that finds so many others does not register, and logs
//! an error. If several register at the same moment, those beyond the limit have no place in the map. All
//! members agree on which those are, and they own no slots.
//!
//! A member serves its slots while its registration is certain by its own clock. When it is not, the member
//! keeps the contents of its slots but serves none, until it is registered again or another member owns them.
//!
//! The contents of the slots are in [`crate::cluster`].

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use reprise_controlplane_core::Standing;
use reprise_controlplane_store::{
    Condition, Event, KeyValue, LeaseGuard, LeaseLoss, LeaseStatus, Outcome, Revision, Store, StoreError,
    TimeToLive, Transaction, Write,
};
use reprise_policy::shards::{MEMBERS_MAX, MemberName, ShardMap};
use reprise_policy::{Epoch, SlotSet};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::identity::Identity;
use crate::store_keys::{Family, Key};
use crate::store_watch::{self, StoreUpdate};

/// Version that this member publishes in its entry.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Entries read at once: more than a map has, so that all members see the same first ones even if too many
/// register.
const RECORDS_MAX: usize = 4 * MEMBERS_MAX;
/// Pause after a failed access to the store.
const RETRY_AFTER: Duration = Duration::from_millis(250);
/// Wait for a former process's lease, in lease durations: one, and one more because the store may expire it
/// late.
const FORMER_LEASE_FACTOR: u32 = 2;

/// The members, and this member's registration.
#[derive(Debug)]
pub struct Shards {
    store: Arc<dyn Store>,
    /// Identity of the store at the start of this member.
    identity: Identity,
    name: MemberName,
    address: String,
    time_to_live: TimeToLive,
    updates: watch::Sender<MembersUpdate>,
    registration: RwLock<Option<Registration>>,
}

/// This member's entry in the store.
#[derive(Clone, Debug)]
struct Registration {
    incarnation: u64,
    /// Status of its lease.
    lease_status: watch::Receiver<LeaseStatus>,
}

/// An update for watchers of the members.
#[derive(Clone, Debug)]
pub enum MembersUpdate {
    /// The current members.
    Members(Arc<MemberView>),
    /// This member shuts down.
    Closing,
}

/// The members at an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Owner of each hash slot.
    pub map: ShardMap,
    /// Members in the order of the map.
    pub members: Vec<Member>,
}

/// A registered control-plane member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Unique name of the member.
    pub name: MemberName,
    /// `host:port` of its gRPC services.
    pub address: String,
    /// Increases with every registration under the name.
    pub incarnation: u64,
    /// Version of its program; empty if unknown.
    pub version: String,
}

/// A member as stored.
#[derive(Debug, Serialize, Deserialize)]
struct MemberJson {
    address: String,
    /// Empty for members that predate this field.
    #[serde(default)]
    version: String,
}

/// Outcome of an attempt to register.
enum JoinOutcome {
    /// Registered at this revision.
    Registered(Revision),
    NameTaken,
    /// The store has another identity than at the start; this member is about to exit.
    OtherStore,
    /// The map is full.
    Full,
}

impl Shards {
    /// Creates an unregistered member. Run [`Shards::follow`] and [`Shards::keep_registered`].
    pub fn new(
        (store, identity): (Arc<dyn Store>, Identity),
        name: MemberName,
        address: String,
        time_to_live: TimeToLive,
    ) -> Shards {
        let empty = MemberView::of(Revision(0), &BTreeMap::new());
        let updates = watch::Sender::new(MembersUpdate::Members(Arc::new(empty)));
        Shards { store, identity, name, address, time_to_live, updates, registration: RwLock::new(None) }
    }

    /// Name of this member.
    pub fn name(&self) -> &MemberName {
        &self.name
    }

    /// Deletes all member entries. For a store of this process alone, where they are left over from former
    /// processes.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn delete_former_members(&self) -> Result<(), StoreError> {
        let former = self.store.range(Family::Members.prefix().as_bytes(), RECORDS_MAX).await?;
        if former.entries.is_empty() {
            return Ok(());
        }
        let writes = former.entries.into_iter().map(|entry| Write::Delete { key: entry.key }).collect();
        self.store.transact(Transaction { conditions: Vec::new(), writes }).await.map(drop)
    }

    /// Whether this member's registration is certain at this instant.
    pub fn is_registered(&self) -> bool {
        self.certain_incarnation().is_some()
    }

    /// The map, if this member's place in it is certain at this instant; only then may it serve its slots.
    pub fn certain_map(&self) -> Option<Arc<MemberView>> {
        self.view().filter(|view| self.is_certain_in(view))
    }

    /// Whether this member's registration is certain now and part of the view. An older view is outdated.
    pub fn is_certain_in(&self, view: &MemberView) -> bool {
        self.standing(view).is_certain()
    }

    /// Incarnation of this member in a view.
    pub fn incarnation(&self, view: &MemberView) -> Option<u64> {
        view.find(&self.name).map(|own| own.incarnation)
    }

    /// Slots to retain of those in `before`: the slots of this member or, while its registration is
    /// uncertain, the slots that no other member owns.
    pub fn retained_slots(&self, before: &SlotSet) -> SlotSet {
        match self.view() {
            Some(view) => self.standing(&view).retained_slots(before),
            None => before.clone(),
        }
    }

    fn standing<'a>(&'a self, view: &'a MemberView) -> Standing<'a> {
        let (listed, held) = (self.incarnation(view), self.certain_incarnation());
        Standing { map: &view.map, name: &self.name, listed, held }
    }

    fn certain_incarnation(&self) -> Option<u64> {
        let registration = self.registration.read().unwrap_or_else(PoisonError::into_inner);
        let Registration { incarnation, lease_status } = registration.as_ref()?;
        let certain =
            matches!(&*lease_status.borrow(), LeaseStatus::Held { until } if Instant::now() < *until);
        certain.then_some(*incarnation)
    }

    /// The members as last read; an empty list before the first read, `None` at shutdown.
    pub fn view(&self) -> Option<Arc<MemberView>> {
        match &*self.updates.borrow() {
            MembersUpdate::Members(view) => Some(view.clone()),
            MembersUpdate::Closing => None,
        }
    }

    /// Watch of the members, starting with the current ones.
    pub fn watch(&self) -> watch::Receiver<MembersUpdate> {
        self.updates.subscribe()
    }

    /// Ends all watches of the members.
    pub fn close(&self) {
        self.updates.send_replace(MembersUpdate::Closing);
    }

    /// Follows the members in the store; never returns.
    pub async fn follow(&self) {
        let mut members = BTreeMap::new();
        store_watch::follow(&self.store, Family::Members, RECORDS_MAX, |updates| {
            match updates {
                StoreUpdate::All(range) => {
                    let all = range.entries.iter().filter_map(read);
                    members = all.map(|member| (member.name.clone(), member)).collect();
                }
                StoreUpdate::Changes(batch) => {
                    batch.events.iter().for_each(|event| apply(&mut members, event));
                }
            }
            self.publish(updates.revision(), &members);
        })
        .await;
    }

    /// Registers this member, and again whenever its lease is lost, until `stop`; then deletes the entry.
    pub async fn keep_registered(&self, mut stop: watch::Receiver<bool>) {
        loop {
            let joined = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                joined = self.join() => joined,
            };
            match joined {
                Ok((lease, incarnation)) => {
                    tracing::info!(recovered = "member_not_registered", "member is registered again");
                    if self.hold_lease(lease, incarnation, &mut stop).await == LeaseLoss::Released {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        condition = "member_not_registered",
                        %error,
                        "cannot register this member; retrying"
                    );
                    sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    /// Waits until the lease is lost, or releases it on `stop`.
    async fn hold_lease(
        &self,
        lease: LeaseGuard,
        incarnation: Revision,
        stop: &mut watch::Receiver<bool>,
    ) -> LeaseLoss {
        self.set_registration(Some(Registration {
            incarnation: incarnation.0,
            lease_status: lease.status(),
        }));
        tracing::info!(name = %self.name, address = self.address, "member registered");
        let loss = tokio::select! {
            loss = lease.wait_lost() => loss,
            _ = stop.wait_for(|stop| *stop) => LeaseLoss::Released,
        };
        self.set_registration(None);
        if loss == LeaseLoss::Released {
            if let Err(error) = lease.release().await {
                tracing::warn!(%error, "cannot release the registration; it will expire");
            }
        } else {
            tracing::warn!(name = %self.name, %loss, "registration of this member lost; registering again");
        }
        loss
    }

    /// Creates this member's entry under a new lease, as soon as its name is free.
    async fn join(&self) -> Result<(LeaseGuard, Revision), StoreError> {
        loop {
            let lease = LeaseGuard::grant(self.store.clone(), self.time_to_live).await?;
            let former = lease.time_to_live().duration() * FORMER_LEASE_FACTOR;
            match self.create_entry(&lease).await? {
                JoinOutcome::Registered(revision) => return Ok((lease, revision)),
                JoinOutcome::NameTaken => drop(lease),
                JoinOutcome::OtherStore => {
                    drop(lease);
                    sleep(former).await;
                    continue;
                }
                JoinOutcome::Full => {
                    drop(lease);
                    tracing::error!(
                        name = %self.name,
                        "the maximum of {MEMBERS_MAX} members is registered: waiting until another member stops"
                    );
                    sleep(former).await;
                    continue;
                }
            }
            let mut updates = self.watch();
            let is_free = |updates: &MembersUpdate| match updates {
                MembersUpdate::Members(view) => view.map.position(&self.name).is_none(),
                MembersUpdate::Closing => true,
            };
            if timeout(former, updates.wait_for(is_free)).await.is_err() {
                let address = self.view().and_then(|view| Some(view.find(&self.name)?.address.clone()));
                tracing::error!(
                    name = %self.name,
                    address,
                    "another member is registered under this name: set a unique member.name for each"
                );
            }
        }
    }

    async fn create_entry(&self, lease: &LeaseGuard) -> Result<JoinOutcome, StoreError> {
        let others = self.store.range(Family::Members.prefix().as_bytes(), MEMBERS_MAX).await?;
        if others.entries.len() == MEMBERS_MAX {
            return Ok(JoinOutcome::Full);
        }
        let key = Key::Record(Family::Members, self.name.as_str()).bytes();
        let stored = MemberJson { address: self.address.clone(), version: VERSION.to_owned() };
        let value = serde_json::to_vec(&stored).expect("strings serialize to JSON");
        let transaction = Transaction {
            // In another store, map epochs start over, so an entry there could be mistaken for one of this
            // store.
            conditions: vec![self.identity.unchanged(), Condition::Absent { key: key.clone() }],
            writes: vec![Write::Put { key, value, lease: Some(lease.id()) }],
        };
        Ok(match self.store.transact(transaction).await? {
            Outcome::Committed(revision) => JoinOutcome::Registered(revision),
            Outcome::Conflict if self.identity.is_current(self.store.as_ref()).await? => {
                JoinOutcome::NameTaken
            }
            Outcome::Conflict => JoinOutcome::OtherStore,
        })
    }

    /// Publishes a list of members, if it differs from the last one.
    fn publish(&self, revision: Revision, members: &BTreeMap<MemberName, Member>) {
        self.updates.send_if_modified(|updates| {
            let MembersUpdate::Members(known) = updates else { return false };
            if known.members.iter().eq(members.values().take(MEMBERS_MAX)) {
                return false;
            }
            let view = MemberView::of(revision, members);
            tracing::info!(
                epoch = view.map.epoch().0,
                members = view.members.len(),
                "control-plane members changed"
            );
            *known = Arc::new(view);
            true
        });
    }

    /// Sets the registration and notifies watchers.
    fn set_registration(&self, registration: Option<Registration>) {
        *self.registration.write().unwrap_or_else(PoisonError::into_inner) = registration;
        self.updates.send_modify(|_| ());
    }
}

impl MemberView {
    fn of(revision: Revision, members: &BTreeMap<MemberName, Member>) -> MemberView {
        let names = members.keys().take(MEMBERS_MAX).cloned();
        let map = ShardMap::new(Epoch(revision.0), names).expect("names are unique and within the limit");
        MemberView { map, members: members.values().take(MEMBERS_MAX).cloned().collect() }
    }

    /// The member with this name.
    pub fn find(&self, name: &MemberName) -> Option<&Member> {
        self.map.position(name).map(|at| &self.members[usize::from(at.0)])
    }
}

fn apply(members: &mut BTreeMap<MemberName, Member>, event: &Event) {
    match event {
        Event::Put(entry) => {
            if let Some(member) = read(entry) {
                members.insert(member.name.clone(), member);
            }
        }
        Event::Deleted { key, .. } => {
            if let Some(name) = name_of(key) {
                members.remove(&name);
            }
        }
    }
}

/// Decodes a member entry; logs and skips an invalid one.
fn read(entry: &KeyValue) -> Option<Member> {
    let stored = serde_json::from_slice::<MemberJson>(&entry.value).ok();
    match (name_of(&entry.key), stored) {
        (Some(name), Some(MemberJson { address, version })) => {
            Some(Member { name, address, incarnation: entry.created.0, version })
        }
        _ => {
            let key = String::from_utf8_lossy(&entry.key);
            tracing::error!(%key, "ignoring an invalid member record: remove it from the store");
            None
        }
    }
}

fn name_of(key: &[u8]) -> Option<MemberName> {
    MemberName::new(Family::Members.name(key)?).ok()
}

#[cfg(test)]
mod tests;
