//! Control-plane members: this member's registration, and the map of hash slots derived from all of them.
//!
//! | key              | value |
//! |------------------|-------|
//! | `members/<name>` | JSON: address, version of the program; bound to the lease of the process that wrote it |
//!
//! [`Joining`] decides how the entry is created and re-created.
//!
//! The map is a function of the entries under `members/` ([`MemberList`]); every member computes it. A member's
//! incarnation is the revision that created its entry, and increases with every registration under a name.
//!
//! A map has at most [`MEMBERS_MAX`] members. A member that finds so many others does not register, and logs
//! an error. If several register at the same moment, those beyond the limit have no place in the map. All
//! members agree on which those are, and they own no slots.
//!
//! A member serves its slots while its registration is certain by its own clock. When it is not, the member
//! keeps the contents of its slots but serves none, until it is registered again or another member owns them.
//!
//! The contents of the slots are in [`crate::cluster`].

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use reprise_controlplane_core::joining::{JoinInput, JoinOutput, JoinRefusal, Joining, ListedName};
use reprise_controlplane_core::{AssignedSlots, Member, MemberList, MemberPlace, MemberView, Standing};
use reprise_controlplane_store::{
    Condition, KeyValue, LeaseGuard, LeaseId, LeaseStatus, Outcome, Store, StoreError, TimeToLive,
    Transaction, Write,
};
use reprise_policy::shards::{MEMBERS_MAX, MemberName, ShardMap};
use reprise_policy::{Epoch, SlotSet};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::identity::Identity;
use crate::store_keys::{Family, Key};
use crate::store_watch::{self, Records};

/// Version that this member publishes in its entry.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Entries read at once: more than a map has, so that all members see the same first ones even if too many
/// register.
const RECORDS_MAX: usize = 4 * MEMBERS_MAX;
const RECORDS: Records<MemberName, Member> =
    Records { family: Family::Members, limit: RECORDS_MAX, name, read };

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

/// A member as stored.
#[derive(Debug, Serialize, Deserialize)]
struct MemberJson {
    address: String,
    /// Empty for members that predate this field.
    #[serde(default)]
    version: String,
}

impl Shards {
    /// Creates an unregistered member. Run [`Shards::follow`] and [`Shards::keep_registered`].
    pub fn new(
        (store, identity): (Arc<dyn Store>, Identity),
        name: MemberName,
        address: String,
        time_to_live: TimeToLive,
    ) -> Shards {
        let empty = MemberList::default().view().clone();
        let updates = watch::Sender::new(MembersUpdate::Members(empty));
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

    /// The map, if this member may answer with slots that were assigned by the map of `slots_epoch`.
    pub fn answerable_map(&self, slots_epoch: Epoch) -> Option<Arc<MemberView>> {
        self.view().filter(|view| self.standing(view).answers(slots_epoch))
    }

    /// Calls `act` with this member's place, if that is certain.
    pub fn with_place<R>(&self, act: impl FnOnce(&MemberPlace<'_>) -> R) -> Option<R> {
        let view = self.view()?;
        self.standing(&view).place().map(|place| act(&place))
    }

    /// Whether this member's registration is certain now and part of the view. An older view is outdated.
    pub fn is_certain_in(&self, view: &MemberView) -> bool {
        self.standing(view).is_certain()
    }

    /// Incarnation of this member in a view.
    pub fn incarnation(&self, view: &MemberView) -> Option<u64> {
        view.incarnation(&self.name)
    }

    /// Slots of a directory that had those in `before` ([`Standing::assigned_slots`]); the same at shutdown.
    pub fn assigned_slots(&self, before: &SlotSet) -> AssignedSlots {
        match self.view() {
            Some(view) => self.standing(&view).assigned_slots(before),
            None => AssignedSlots { slots: before.clone(), epoch: Epoch(0) },
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
        let mut list = MemberList::default();
        store_watch::follow(&self.store, RECORDS, |revision, update| {
            if let Some(view) = list.apply(revision.0, update, map) {
                self.publish(view);
            }
        })
        .await;
    }

    /// Registers this member, and again whenever its lease is lost, until `stop`; then deletes the entry.
    pub async fn keep_registered(&self, mut stop: watch::Receiver<bool>) {
        let (mut joining, first) = Joining::begin();
        let (mut outputs, mut lease) = (vec![first], None);
        loop {
            let input = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                input = self.carry_out(outputs, &mut lease) => input,
            };
            outputs = joining.on(input);
        }
        self.set_registration(None);
        if let Some(lease) = lease
            && let Err(error) = lease.release().await
        {
            tracing::warn!(%error, "cannot release the registration; it will expire");
        }
    }

    /// Carries out instructions; returns what follows. `held` is the present lease.
    async fn carry_out(
        &self,
        outputs: Vec<JoinOutput<LeaseId>>,
        held: &mut Option<LeaseGuard>,
    ) -> JoinInput<LeaseId> {
        for output in outputs {
            match (output, held.as_ref()) {
                (JoinOutput::Grant, _) => return self.grant(held).await,
                (JoinOutput::CreateEntry(_), Some(lease)) => {
                    return self.create_entry(lease).await.unwrap_or_else(|error| failed(&error));
                }
                (JoinOutput::Revoke(_), _) => drop(held.take()),
                (JoinOutput::Incarnation(Some(incarnation)), Some(lease)) => {
                    let lease_status = lease.status();
                    self.set_registration(Some(Registration { incarnation, lease_status }));
                    tracing::info!(recovered = "member_not_registered", "member is registered again");
                    tracing::info!(name = %self.name, address = self.address, "member registered");
                }
                (JoinOutput::Incarnation(_) | JoinOutput::CreateEntry(_), _) => self.set_registration(None),
                (JoinOutput::Wait(attempt, time), _) => {
                    sleep(time).await;
                    return JoinInput::WaitOver(attempt);
                }
                (JoinOutput::WaitForName(attempt, time), _) => {
                    return self.wait_for_name(attempt, time).await;
                }
            }
        }
        // The entry is there: its lease is the only thing that can change.
        let Some(lease) = held else { return std::future::pending().await };
        let loss = lease.wait_lost().await;
        tracing::warn!(name = %self.name, %loss, "registration of this member lost; registering again");
        JoinInput::LeaseLost(lease.id())
    }

    async fn grant(&self, held: &mut Option<LeaseGuard>) -> JoinInput<LeaseId> {
        match LeaseGuard::grant(self.store.clone(), self.time_to_live).await {
            Ok(lease) => {
                let lease = held.insert(lease);
                JoinInput::Granted(lease.id(), lease.time_to_live().duration())
            }
            Err(error) => failed(&error),
        }
    }

    /// Waits until this member's name is not in the list of members.
    async fn wait_for_name(&self, attempt: u64, time: Duration) -> JoinInput<LeaseId> {
        let mut updates = self.watch();
        let is_free = |updates: &MembersUpdate| match updates {
            MembersUpdate::Members(view) => view.map.position(&self.name).is_none(),
            MembersUpdate::Closing => true,
        };
        if timeout(time, updates.wait_for(is_free)).await.is_ok() {
            return JoinInput::NameFree;
        }
        let address = self.view().and_then(|view| Some(view.find(&self.name)?.address.clone()));
        tracing::error!(
            name = %self.name,
            address,
            "another member is registered under this name: set a unique member.name for each"
        );
        JoinInput::WaitOver(attempt)
    }

    async fn create_entry(&self, lease: &LeaseGuard) -> Result<JoinInput<LeaseId>, StoreError> {
        let others = self.store.range(Family::Members.prefix().as_bytes(), MEMBERS_MAX).await?;
        if others.entries.len() == MEMBERS_MAX {
            tracing::error!(
                name = %self.name,
                "the maximum of {MEMBERS_MAX} members is registered: waiting until another member stops"
            );
            return Ok(JoinInput::Refused(JoinRefusal::Full));
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
        if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
            return Ok(JoinInput::Created(revision.0));
        }
        let store = self.identity.compare(self.store.as_ref()).await?;
        let name = || self.view().map_or(ListedName::Free, |view| ListedName::of(&view, &self.name));
        Ok(JoinInput::Refused(JoinRefusal::after_conflict(store, name)))
    }

    fn publish(&self, view: &Arc<MemberView>) {
        self.updates.send_if_modified(|updates| {
            let MembersUpdate::Members(known) = updates else { return false };
            tracing::info!(
                epoch = view.map.epoch().0,
                members = view.members.len(),
                "control-plane members changed"
            );
            *known = view.clone();
            true
        });
    }

    /// Sets the registration and notifies watchers.
    fn set_registration(&self, registration: Option<Registration>) {
        *self.registration.write().unwrap_or_else(PoisonError::into_inner) = registration;
        self.updates.send_modify(|_| ());
    }
}

fn failed(error: &StoreError) -> JoinInput<LeaseId> {
    tracing::warn!(condition = "member_not_registered", %error, "cannot register this member; retrying");
    JoinInput::Failed
}

fn map(epoch: Epoch, names: Vec<MemberName>) -> Arc<ShardMap> {
    Arc::new(ShardMap::new(epoch, names).expect("names are unique and within the limit"))
}

fn name(text: &str) -> Option<MemberName> {
    MemberName::new(text).ok()
}

/// Decodes a member entry; logs and skips an invalid one.
pub(crate) fn read(entry: &KeyValue) -> Option<Member> {
    let stored = serde_json::from_slice::<MemberJson>(&entry.value).ok();
    match (Family::Members.name(&entry.key).and_then(name), stored) {
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

#[cfg(test)]
mod tests;
