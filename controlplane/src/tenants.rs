//! Budgets of tenants in the store: what each may have in the whole cluster, and what it is sure of.
//!
//! | key               | value                                             |
//! |-------------------|---------------------------------------------------|
//! | `tenants/<name>`  | JSON: bytes reserved and bytes at most, of DRAM and of NVMe |
//! | `tenants_changed` | empty; every change puts it, so that two at once do not both count as the first |
//!
//! Reservations are checked together against what the nodes have whenever a change makes them more, and again when nodes come
//! and go ([`Tenants::overcommitted`]): then nothing is refused any more, but it is said. A change that promises no more than
//! before is taken also when nodes have gone.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use reprise_controlplane_core::{Amounts, Budget};
use reprise_controlplane_store::{
    Condition, Event, KeyValue, Outcome, Store, StoreError, Transaction, Write,
};
use reprise_policy::TenantName;
use reprise_policy::quota::{self, Quota, QuotaError};
use reprise_policy::tenant::TENANTS_MAX;
use serde::{Deserialize, Serialize};

use crate::followed::{self, News};
use crate::identity::Identity;
use crate::keys::{Family, Key};

const CHANGED: &[u8] = b"tenants_changed";
/// Attempts against concurrent changes. Each failure means that another change succeeded.
const ATTEMPTS_MAX: usize = 16;

/// One kind of room.
type Kind = fn(&Amounts) -> u64;

const ROOMS: [(&str, Kind); 2] = [("dram", |amounts| amounts.dram), ("nvme", |amounts| amounts.nvme)];

/// See the module.
#[derive(Debug)]
pub struct Tenants {
    store: Arc<dyn Store>,
    identity: Identity,
    /// `None` before the first look at the store.
    budgets: RwLock<Option<Arc<BTreeMap<TenantName, Budget>>>>,
}

/// Why a budget is refused.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A budget contradicts itself, or all of them what there is.
    #[error("{room}: {error}")]
    Quota {
        /// DRAM or NVMe.
        room: &'static str,
        /// How.
        error: QuotaError,
    },
    /// What there is to reserve is not known yet.
    #[error("nodes are still registering, or have not reported what they have: try again in a second")]
    Registering,
    /// There are as many as there can be.
    #[error("{TENANTS_MAX} tenants have budgets already: remove one that is not used any more")]
    Full,
    /// Nobody of this name has a budget.
    #[error("tenant '{0}' has no budget: `reprise tenant list` names those that have one")]
    Unknown(TenantName),
    /// The store is not the one that this member has started with.
    #[error("the store was emptied or replaced while this member ran: try again when it has started anew")]
    OtherStore,
    /// Others were always faster.
    #[error("{ATTEMPTS_MAX} concurrent changes came first: try again")]
    Busy,
}

/// The stored form of a budget.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    dram_reserved: u64,
    dram_limit: u64,
    nvme_reserved: u64,
    nvme_limit: u64,
}

impl Tenants {
    /// Budgets of a store that are not known yet. Run [`Tenants::follow`].
    pub fn new(store: Arc<dyn Store>, identity: Identity) -> Tenants {
        Tenants { store, identity, budgets: RwLock::new(None) }
    }

    /// Keeps the budgets those of the store; never returns.
    pub async fn follow(&self) {
        followed::follow(&self.store, Family::Tenants, TENANTS_MAX, |news| self.take(news)).await;
    }

    /// All budgets; `None` as long as the store has not said.
    pub fn budgets(&self) -> Option<Arc<BTreeMap<TenantName, Budget>>> {
        self.budgets.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets a tenant's budget; `capacity` is what the living nodes have, `None` while they have had no time to register.
    ///
    /// # Errors
    /// [`TenantsError`]; nothing has changed then.
    pub async fn set(
        &self,
        name: &TenantName,
        budget: Budget,
        capacity: Option<Amounts>,
    ) -> Result<(), TenantsError> {
        self.change(name, |budgets| {
            let before = reserved(budgets);
            budgets.insert(name.clone(), budget);
            if budgets.len() > TENANTS_MAX {
                return Err(TenantsError::Full);
            }
            check(budgets, before, capacity)?;
            let (key, value) = (key(name), written(&budget));
            Ok(Write::Put { key, value, lease: None })
        })
        .await
    }

    /// Ends a tenant's budget.
    ///
    /// # Errors
    /// [`TenantsError`]; nothing has changed then.
    pub async fn remove(&self, name: &TenantName) -> Result<(), TenantsError> {
        self.change(name, |budgets| match budgets.remove(name) {
            Some(_) => Ok(Write::Delete { key: key(name) }),
            None => Err(TenantsError::Unknown(name.clone())),
        })
        .await
    }

    /// By how much reservations exceed what there is.
    pub fn overcommitted(&self, capacity: Amounts) -> Amounts {
        let Some(budgets) = self.budgets() else { return Amounts::default() };
        let Amounts { dram, nvme } = reserved(&budgets);
        Amounts { dram: dram.saturating_sub(capacity.dram), nvme: nvme.saturating_sub(capacity.nvme) }
    }

    /// Makes a change that `decide` makes of all budgets, unless another comes between.
    async fn change(
        &self,
        name: &TenantName,
        decide: impl Fn(&mut BTreeMap<TenantName, Budget>) -> Result<Write, TenantsError>,
    ) -> Result<(), TenantsError> {
        for _ in 0..ATTEMPTS_MAX {
            let before = match self.store.get(CHANGED).await? {
                Some(entry) => Condition::Modified { key: CHANGED.to_vec(), revision: entry.modified },
                None => Condition::Absent { key: CHANGED.to_vec() },
            };
            let range = self.store.range(Family::Tenants.prefix().as_bytes(), TENANTS_MAX).await?;
            let mut budgets: BTreeMap<TenantName, Budget> = range.entries.iter().filter_map(read).collect();
            let write = decide(&mut budgets)?;
            let changed = Write::Put { key: CHANGED.to_vec(), value: Vec::new(), lease: None };
            let conditions = vec![before, self.identity.unchanged()];
            let transaction = Transaction { conditions, writes: vec![write, changed] };
            if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
                tracing::info!(tenant = %name, revision = revision.0, "the budget of a tenant was changed");
                return Ok(());
            }
            if !self.identity.is_of(self.store.as_ref()).await? {
                return Err(TenantsError::OtherStore);
            }
        }
        Err(TenantsError::Busy)
    }

    fn take(&self, news: News<'_>) {
        let mut budgets = self.budgets.write().unwrap_or_else(PoisonError::into_inner);
        let mut now = match (&news, budgets.as_deref()) {
            (News::Changes(_), Some(known)) => known.clone(),
            (News::Changes(_), None) | (News::All(_), _) => BTreeMap::new(),
        };
        match news {
            News::All(range) => now.extend(range.entries.iter().filter_map(read)),
            News::Changes(batch) => batch.events.iter().for_each(|event| apply(&mut now, event)),
        }
        *budgets = Some(Arc::new(now));
    }
}

fn apply(budgets: &mut BTreeMap<TenantName, Budget>, event: &Event) {
    match event {
        Event::Put(entry) => budgets.extend(read(entry)),
        Event::Deleted { key, .. } => {
            if let Some(name) = name_of(key) {
                budgets.remove(&name);
            }
        }
    }
}

/// All reservations together.
fn reserved(budgets: &BTreeMap<TenantName, Budget>) -> Amounts {
    let sum = |kind: Kind| budgets.values().map(|budget| kind(&budget.reserved)).fold(0, u64::saturating_add);
    Amounts { dram: sum(|amounts| amounts.dram), nvme: sum(|amounts| amounts.nvme) }
}

/// Every budget by itself, and all reservations together where they are more than before.
fn check(
    budgets: &BTreeMap<TenantName, Budget>,
    before: Amounts,
    capacity: Option<Amounts>,
) -> Result<(), TenantsError> {
    let now = reserved(budgets);
    for (room, kind) in ROOMS {
        let refuse = |error| TenantsError::Quota { room, error };
        let quotas: Result<Vec<Quota>, QuotaError> =
            budgets.values().map(|budget| Quota::new(kind(&budget.reserved), kind(&budget.limit))).collect();
        let quotas = quotas.map_err(refuse)?;
        if kind(&now) > kind(&before) {
            let capacity = capacity.ok_or(TenantsError::Registering)?;
            quota::check_reservations(kind(&capacity), 1, quotas).map_err(refuse)?;
        }
    }
    Ok(())
}

fn key(name: &TenantName) -> Vec<u8> {
    Key::Of(Family::Tenants, name.as_str()).bytes()
}

fn name_of(key: &[u8]) -> Option<TenantName> {
    Family::Tenants.name(key).filter(|name| !name.is_empty())?.parse().ok()
}

/// A record that is none of ours is no budget; its key is in the log.
fn read(entry: &KeyValue) -> Option<(TenantName, Budget)> {
    let stored = serde_json::from_slice::<Stored>(&entry.value).ok();
    match (name_of(&entry.key), stored) {
        (Some(name), Some(Stored { dram_reserved, dram_limit, nvme_reserved, nvme_limit })) => {
            let reserved = Amounts { dram: dram_reserved, nvme: nvme_reserved };
            let limit = Amounts { dram: dram_limit, nvme: nvme_limit };
            Some((name, Budget { reserved, limit }))
        }
        _ => {
            let key = String::from_utf8_lossy(&entry.key);
            tracing::error!(%key, "a tenant's record in the store cannot be read: remove it");
            None
        }
    }
}

fn written(budget: &Budget) -> Vec<u8> {
    let Budget { reserved, limit } = budget;
    let stored = Stored {
        dram_reserved: reserved.dram,
        dram_limit: limit.dram,
        nvme_reserved: reserved.nvme,
        nvme_limit: limit.nvme,
    };
    serde_json::to_vec(&stored).expect("a record of numbers is always JSON")
}

#[cfg(test)]
mod tests {
    use reprise_controlplane_store::MemoryStore;

    use super::*;

    const CAPACITY: Option<Amounts> = Some(Amounts { dram: 100, nvme: 1000 });

    fn name(text: &str) -> TenantName {
        text.parse().expect("a name")
    }

    fn budget(reserved: u64, limit: u64) -> Budget {
        Budget { reserved: Amounts::both(reserved), limit: Amounts::both(limit) }
    }

    async fn tenants() -> Arc<Tenants> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let identity = Identity::of(store.as_ref()).await.expect("made");
        Arc::new(Tenants::new(store, identity))
    }

    #[tokio::test]
    async fn what_is_set_is_what_is_followed() {
        let tenants = tenants().await;
        assert!(tenants.budgets().is_none());
        tenants.set(&name("a"), budget(10, 20), CAPACITY).await.expect("there is room");
        let followed = tenants.clone();
        let task = tokio::spawn(async move { followed.follow().await });
        tenants.set(&name("b"), budget(0, 30), CAPACITY).await.expect("there is room");
        tenants.remove(&name("a")).await.expect("it is there");
        let expected = BTreeMap::from([(name("b"), budget(0, 30))]);
        while tenants.budgets().as_deref() != Some(&expected) {
            tokio::task::yield_now().await;
        }
        assert!(matches!(tenants.remove(&name("a")).await, Err(TenantsError::Unknown(_))));
        task.abort();
    }

    #[tokio::test]
    async fn reservations_are_checked_against_limit_and_capacity_and_refused_in_words() {
        let tenants = tenants().await;
        let refused = tenants.set(&name("a"), budget(30, 20), CAPACITY).await.expect_err("above the limit");
        assert!(refused.to_string().starts_with("dram: ") && refused.to_string().contains("raise the limit"));
        tenants.set(&name("a"), budget(60, 200), CAPACITY).await.expect("there is room");
        let refused = tenants.set(&name("b"), budget(50, 50), CAPACITY).await.expect_err("110 of 100");
        assert!(
            refused.to_string().contains("10B more") || refused.to_string().contains("10 more"),
            "{refused}"
        );
        tenants.set(&name("a"), budget(50, 200), CAPACITY).await.expect("lowered");
        tenants.set(&name("b"), budget(50, 50), CAPACITY).await.expect("now there is room");
    }

    #[tokio::test]
    async fn when_nodes_have_gone_reservations_can_be_lowered_and_limits_set_and_none_raised() {
        let tenants = tenants().await;
        tenants.set(&name("a"), budget(60, 200), CAPACITY).await.expect("there is room");
        tenants.set(&name("b"), budget(30, 200), CAPACITY).await.expect("there is room");
        let half = Some(Amounts { dram: 50, nvme: 500 });
        tenants.set(&name("a"), budget(40, 200), half).await.expect("lowered, and still too much");
        tenants.set(&name("a"), budget(40, 300), half).await.expect("as sure as before");
        let refused = tenants.set(&name("a"), budget(41, 300), half).await.expect_err("71 of 50");
        assert!(matches!(refused, TenantsError::Quota { room: "dram", .. }), "{refused}");
    }

    #[tokio::test]
    async fn while_nodes_register_nothing_is_reserved_and_what_reserves_nothing_is_set() {
        let tenants = tenants().await;
        let refused = tenants.set(&name("a"), budget(1, 200), None).await.expect_err("of what?");
        assert!(matches!(refused, TenantsError::Registering), "{refused}");
        tenants.set(&name("a"), budget(0, 200), None).await.expect("it reserves nothing");
    }

    #[tokio::test]
    async fn capacity_that_has_gone_is_told_by_how_much() {
        let tenants = tenants().await;
        tenants.set(&name("a"), budget(60, 200), CAPACITY).await.expect("there is room");
        tenants.take(News::All(&tenants.store.range(b"tenants/", 10).await.expect("readable")));
        assert_eq!(tenants.overcommitted(CAPACITY.expect("known")), Amounts::default());
        let half = Amounts { dram: 50, nvme: 500 };
        assert_eq!(tenants.overcommitted(half), Amounts { dram: 10, nvme: 0 });
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_two_reservations_at_once_that_do_not_fit_together_one_is_refused() {
        let tenants = tenants().await;
        let tasks: Vec<_> = ["a", "b"]
            .map(|text| {
                let tenants = tenants.clone();
                tokio::spawn(async move { tenants.set(&name(text), budget(60, 60), CAPACITY).await.is_ok() })
            })
            .into();
        let mut set = 0;
        for task in tasks {
            set += u32::from(task.await.expect("no panic"));
        }
        assert_eq!(set, 1);
    }
}
