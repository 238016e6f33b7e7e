//! The members of the control plane: this one's place among them, and the map of hash slots that follows from all.
//!
//! | key              | value |
//! |------------------|-------|
//! | `members/<name>` | JSON: address, version of the program; goes with the lease of the process that put it |
//!
//! ```text
//!   joining ──the name is free──► registered ──the lease is lost──► joining
//!      ▲ │
//!      └─┘ the name is taken: by this member's former process, for as long as its lease lives, or by another
//! ```
//!
//! The map is a function of what is under `members/` ([`ShardMap`]); every member computes it for itself. Its epoch is a
//! revision at which this was the list, so a higher epoch is a later list. A member's incarnation is the revision that
//! created its entry: higher with every registration under a name.
//!
//! A map has at most [`MEMBERS_MAX`] members. Who finds so many others does not register and says so. Of those that do so at the
//! same moment some may be too many: they have no place in the map, the same ones for everybody, and answer for nothing.
//!
//! A member answers for its slots while its registration is certain, by its own clock. When it is not, it keeps what it
//! knows of them, and answers for none, until it is registered again or another is given them.
//!
//! Deliberately absent: what is in the slots (`cluster.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use reprise_controlplane_store::{
    Condition, Event, HeldLease, Holding, KeyValue, Loss, Outcome, Revision, Store, StoreError, TimeToLive,
    Transaction, Write,
};
use reprise_policy::shards::{MEMBERS_MAX, MemberName, ShardMap};
use reprise_policy::{Epoch, SlotSet};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::followed::{self, News};
use crate::identity::Identity;
use crate::keys::{Family, Key};

/// What this member tells others that it is.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Records that are read: more than a map has, so that all see the same first ones, however many come too many at once.
const RECORDS_MAX: usize = 4 * MEMBERS_MAX;
/// Pause after the store failed.
const RETRY_AFTER: Duration = Duration::from_millis(250);
/// Lives of a lease that a former process of this name may still have: one, and the store may be late to notice.
const FORMER_LIVES: u32 = 2;

/// See the module.
#[derive(Debug)]
pub struct Shards {
    store: Arc<dyn Store>,
    /// Of the store that this member has started with.
    identity: Identity,
    name: MemberName,
    address: String,
    time_to_live: TimeToLive,
    news: watch::Sender<MemberNews>,
    registration: RwLock<Option<Registration>>,
}

/// This member's entry in the store.
#[derive(Clone, Debug)]
struct Registration {
    incarnation: u64,
    /// Of its lease.
    holding: watch::Receiver<Holding>,
}

/// What watchers get.
#[derive(Clone, Debug)]
pub enum MemberNews {
    /// The members now.
    Members(Arc<MemberView>),
    /// This member is going away.
    Closing,
}

/// The members at an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Who owns what.
    pub map: ShardMap,
    /// In the order of the map.
    pub members: Vec<Member>,
}

/// A registered member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: MemberName,
    /// `host:port` of its gRPC services.
    pub address: String,
    /// Higher with every registration under the name.
    pub incarnation: u64,
    /// Of its program; empty where it does not say.
    pub version: String,
}

/// The stored form of a member.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    address: String,
    /// Members that were built before this was told have none.
    #[serde(default)]
    version: String,
}

/// Whether a registration was made.
enum Joined {
    /// At this revision.
    At(Revision),
    NameTaken,
    /// The store is another than the one that this member has started with: it is about to end.
    OtherStore,
    /// There are as many others as a map has.
    Full,
}

impl Shards {
    /// A member that is not registered yet. Run [`Shards::follow`] and [`Shards::hold`].
    pub fn new(
        (store, identity): (Arc<dyn Store>, Identity),
        name: MemberName,
        address: String,
        time_to_live: TimeToLive,
    ) -> Shards {
        let nobody = MemberView::of(Revision(0), &BTreeMap::new());
        let news = watch::Sender::new(MemberNews::Members(Arc::new(nobody)));
        Shards { store, identity, name, address, time_to_live, news, registration: RwLock::new(None) }
    }

    /// This member's name.
    pub fn name(&self) -> &MemberName {
        &self.name
    }

    /// Forgets all members that the store names: they are former ones of a store that only this process has.
    ///
    /// # Errors
    /// The store's.
    pub async fn forget_former(&self) -> Result<(), StoreError> {
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

    /// The map, when this member's place in it is certain at this instant: only then may it answer for its slots.
    pub fn certain_map(&self) -> Option<Arc<MemberView>> {
        self.view().filter(|view| self.is_certain_in(view))
    }

    /// Whether this member's registration is certain at this instant, and the view has it: one from before the registration is out of date.
    pub fn is_certain_in(&self, view: &MemberView) -> bool {
        self.certain_incarnation().is_some_and(|own| self.incarnation(view) == Some(own))
    }

    /// This member's incarnation in a view.
    pub fn incarnation(&self, view: &MemberView) -> Option<u64> {
        view.find(&self.name).map(|own| own.incarnation)
    }

    /// The slots to keep, of those that were kept before: this member's own, or, while its registration is not
    /// certain, what nobody else has been given.
    pub fn kept(&self, before: &SlotSet) -> SlotSet {
        match (self.certain_map(), self.view()) {
            (Some(view), _) => view.map.owned_by(&self.name),
            (None, Some(view)) => before.without(&view.map.owned_by_others(&self.name)),
            (None, None) => before.clone(),
        }
    }

    fn certain_incarnation(&self) -> Option<u64> {
        let registration = self.registration.read().unwrap_or_else(PoisonError::into_inner);
        let Registration { incarnation, holding } = registration.as_ref()?;
        let certain = matches!(&*holding.borrow(), Holding::Held { until } if Instant::now() < *until);
        certain.then_some(*incarnation)
    }

    /// The members as last seen; nobody before the store has answered.
    pub fn view(&self) -> Option<Arc<MemberView>> {
        match &*self.news.borrow() {
            MemberNews::Members(view) => Some(view.clone()),
            MemberNews::Closing => None,
        }
    }

    /// The members now and whenever they change.
    pub fn watch(&self) -> watch::Receiver<MemberNews> {
        self.news.subscribe()
    }

    /// Ends all watches.
    pub fn close(&self) {
        self.news.send_replace(MemberNews::Closing);
    }

    /// Follows the members in the store; never returns.
    pub async fn follow(&self) {
        let mut members = BTreeMap::new();
        followed::follow(&self.store, Family::Members, RECORDS_MAX, |news| {
            match news {
                News::All(range) => {
                    let all = range.entries.iter().filter_map(read);
                    members = all.map(|member| (member.name.clone(), member)).collect();
                }
                News::Changes(batch) => batch.events.iter().for_each(|event| apply(&mut members, event)),
            }
            self.publish(news.revision(), &members);
        })
        .await;
    }

    /// Registers this member and registers it again whenever its lease is lost, until `stop`; then gives it back.
    pub async fn hold(&self, mut stop: watch::Receiver<bool>) {
        loop {
            let joined = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                joined = self.join() => joined,
            };
            match joined {
                Ok((lease, incarnation)) => {
                    tracing::info!(recovered = "member_not_registered", "this member is registered again");
                    if self.keep(lease, incarnation, &mut stop).await == Loss::Released {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        condition = "member_not_registered",
                        %error,
                        "this member cannot be registered now; trying again"
                    );
                    sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    /// Waits until the lease is lost, or gives it back.
    async fn keep(&self, lease: HeldLease, incarnation: Revision, stop: &mut watch::Receiver<bool>) -> Loss {
        self.set_registration(Some(Registration { incarnation: incarnation.0, holding: lease.holding() }));
        tracing::info!(name = %self.name, address = self.address, "member registered");
        let loss = tokio::select! {
            loss = lease.lost() => loss,
            _ = stop.wait_for(|stop| *stop) => Loss::Released,
        };
        self.set_registration(None);
        if loss == Loss::Released {
            if let Err(error) = lease.release().await {
                tracing::warn!(%error, "the registration could not be given back; it expires");
            }
        } else {
            tracing::warn!(name = %self.name, %loss, "the registration of this member is lost; registering again");
        }
        loss
    }

    /// Puts this member's entry under a new lease, as soon as its name is free.
    async fn join(&self) -> Result<(HeldLease, Revision), StoreError> {
        loop {
            let lease = HeldLease::grant(self.store.clone(), self.time_to_live).await?;
            let former = lease.time_to_live().duration() * FORMER_LIVES;
            match self.put_under(&lease).await? {
                Joined::At(revision) => return Ok((lease, revision)),
                Joined::NameTaken => drop(lease),
                Joined::OtherStore => {
                    drop(lease);
                    sleep(former).await;
                    continue;
                }
                Joined::Full => {
                    drop(lease);
                    tracing::error!(
                        name = %self.name,
                        "{MEMBERS_MAX} members are registered, as many as can be: this one waits until others are stopped"
                    );
                    sleep(former).await;
                    continue;
                }
            }
            let mut news = self.watch();
            let is_free = |news: &MemberNews| match news {
                MemberNews::Members(view) => view.map.position(&self.name).is_none(),
                MemberNews::Closing => true,
            };
            if timeout(former, news.wait_for(is_free)).await.is_err() {
                let address = self.view().and_then(|view| Some(view.find(&self.name)?.address.clone()));
                tracing::error!(
                    name = %self.name,
                    address,
                    "another member is registered under this name: give each a member.name of its own"
                );
            }
        }
    }

    async fn put_under(&self, lease: &HeldLease) -> Result<Joined, StoreError> {
        let others = self.store.range(Family::Members.prefix().as_bytes(), MEMBERS_MAX).await?;
        if others.entries.len() == MEMBERS_MAX {
            return Ok(Joined::Full);
        }
        let key = Key::Of(Family::Members, self.name.as_str()).bytes();
        let stored = Stored { address: self.address.clone(), version: VERSION.to_owned() };
        let value = serde_json::to_vec(&stored).expect("a record of strings is always JSON");
        let transaction = Transaction {
            // Epochs of maps begin anew in another store: in it, those of this member would be taken for others.
            conditions: vec![self.identity.unchanged(), Condition::Absent { key: key.clone() }],
            writes: vec![Write::Put { key, value, lease: Some(lease.id()) }],
        };
        Ok(match self.store.transact(transaction).await? {
            Outcome::Committed(revision) => Joined::At(revision),
            Outcome::Conflict if self.identity.is_of(self.store.as_ref()).await? => Joined::NameTaken,
            Outcome::Conflict => Joined::OtherStore,
        })
    }

    /// Makes a list of members known, if it is another than the last.
    fn publish(&self, revision: Revision, members: &BTreeMap<MemberName, Member>) {
        self.news.send_if_modified(|news| {
            let MemberNews::Members(known) = news else { return false };
            if known.members.iter().eq(members.values().take(MEMBERS_MAX)) {
                return false;
            }
            let view = MemberView::of(revision, members);
            tracing::info!(
                epoch = view.map.epoch().0,
                members = view.members.len(),
                "members of the control plane"
            );
            *known = Arc::new(view);
            true
        });
    }

    /// Whoever watches hears of it.
    fn set_registration(&self, registration: Option<Registration>) {
        *self.registration.write().unwrap_or_else(PoisonError::into_inner) = registration;
        self.news.send_modify(|_| ());
    }
}

impl MemberView {
    fn of(revision: Revision, members: &BTreeMap<MemberName, Member>) -> MemberView {
        let names = members.keys().take(MEMBERS_MAX).cloned();
        let map =
            ShardMap::new(Epoch(revision.0), names).expect("names in a map are unique, and not too many");
        MemberView { map, members: members.values().take(MEMBERS_MAX).cloned().collect() }
    }

    /// The member of this name.
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

/// A record that is none of ours is no member; its key is in the log.
fn read(entry: &KeyValue) -> Option<Member> {
    let stored = serde_json::from_slice::<Stored>(&entry.value).ok();
    match (name_of(&entry.key), stored) {
        (Some(name), Some(Stored { address, version })) => {
            Some(Member { name, address, incarnation: entry.created.0, version })
        }
        _ => {
            let key = String::from_utf8_lossy(&entry.key);
            tracing::error!(%key, "a member's record in the store cannot be read: remove it");
            None
        }
    }
}

fn name_of(key: &[u8]) -> Option<MemberName> {
    MemberName::new(Family::Members.name(key)?).ok()
}

#[cfg(test)]
mod tests;
