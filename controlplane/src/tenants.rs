//! Tenant budgets in the store: reservation and limit of each tenant for the whole cluster.
//!
//! | key               | value                                             |
//! |-------------------|---------------------------------------------------|
//! | `tenants/<name>`  | JSON: reserved bytes and limit in bytes, of DRAM and of NVMe |
//! | `tenants_changed` | empty; rewritten by every change, which makes concurrent changes conflict |
//!
//! A change that raises the sum of reservations is checked against the capacity of the nodes. Later losses of
//! capacity are reported ([`Tenants::overcommitted`]), but do not invalidate reservations. A change that does
//! not raise the sum is accepted even then.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use reprise_controlplane_core::store_writes::{ATTEMPTS_MAX, Unchanged, WriteAttempts, WriteRejection};
use reprise_controlplane_core::{Budget, RecordUpdate};
use reprise_controlplane_store::{KeyValue, Outcome, Store, StoreError, Transaction, Write};
use reprise_policy::quota::{self, Quota, QuotaError};
use reprise_policy::tenant::TENANTS_MAX;
use reprise_policy::{Amounts, TenantName};
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::registry::condition;
use crate::store_keys::{Family, Key};
use crate::store_watch::{self, Records};

const CHANGED: &[u8] = b"tenants_changed";

const RECORDS: Records<TenantName, Budget> =
    Records { family: Family::Tenants, limit: TENANTS_MAX, name, read: |entry| Some(read(entry)?.1) };

/// Selects the amount of one resource.
type AmountOf = fn(&Amounts) -> u64;

const RESOURCES: [(&str, AmountOf); 2] = [("dram", |amounts| amounts.dram), ("nvme", |amounts| amounts.nvme)];

/// The tenant budgets, as followed from the store.
#[derive(Debug)]
pub struct Tenants {
    store: Arc<dyn Store>,
    identity: Identity,
    /// `None` until the store has been read.
    budgets: RwLock<Option<Arc<BTreeMap<TenantName, Budget>>>>,
}

/// Reasons to reject a change of a budget.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The budget is inconsistent, or reservations exceed the capacity.
    #[error("{room}: {error}")]
    Quota {
        /// Resource: `dram` or `nvme`.
        room: &'static str,
        /// Violated rule.
        error: QuotaError,
    },
    /// The capacity of the nodes is not known yet.
    #[error("nodes are still registering or have not reported their capacity: retry in a second")]
    Registering,
    /// The maximum number of tenants has budgets.
    #[error("{TENANTS_MAX} tenants already have budgets: remove an unused one")]
    Full,
    /// The tenant has no budget.
    #[error("tenant '{0}' has no budget: `reprise tenant list` lists tenants with a budget")]
    Unknown(TenantName),
    /// The store has another identity than at the start of this member.
    #[error("the store was emptied or replaced while this member ran: retry after its restart")]
    OtherStore,
    /// Every attempt conflicted with another change.
    #[error("{ATTEMPTS_MAX} attempts conflicted with concurrent changes: retry")]
    Busy,
}

impl From<WriteRejection> for TenantsError {
    fn from(rejection: WriteRejection) -> TenantsError {
        match rejection {
            WriteRejection::OtherStore => TenantsError::OtherStore,
            WriteRejection::Busy => TenantsError::Busy,
        }
    }
}

/// A budget as stored.
#[derive(Debug, Serialize, Deserialize)]
struct BudgetJson {
    dram_reserved: u64,
    dram_limit: u64,
    nvme_reserved: u64,
    nvme_limit: u64,
}

impl Tenants {
    /// Creates budgets that are unknown until [`Tenants::follow`] runs.
    pub fn new(store: Arc<dyn Store>, identity: Identity) -> Tenants {
        Tenants { store, identity, budgets: RwLock::new(None) }
    }

    /// Follows the budgets in the store; never returns.
    pub async fn follow(&self) {
        store_watch::follow(&self.store, RECORDS, |_, update| self.apply_update(update)).await;
    }

    /// All budgets; `None` until the store has been read.
    pub fn budgets(&self) -> Option<Arc<BTreeMap<TenantName, Budget>>> {
        self.budgets.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets a tenant's budget. `capacity` is the capacity of the live nodes, or `None` while nodes are still
    /// registering.
    ///
    /// # Errors
    /// A [`TenantsError`]; nothing was changed.
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
            let (key, value) = (key(name), encode(&budget));
            Ok(Write::Put { key, value, lease: None })
        })
        .await
    }

    /// Removes a tenant's budget.
    ///
    /// # Errors
    /// A [`TenantsError`]; nothing was changed.
    pub async fn remove(&self, name: &TenantName) -> Result<(), TenantsError> {
        self.change(name, |budgets| match budgets.remove(name) {
            Some(_) => Ok(Write::Delete { key: key(name) }),
            None => Err(TenantsError::Unknown(name.clone())),
        })
        .await
    }

    /// Bytes by which reservations exceed the capacity.
    pub fn overcommitted(&self, capacity: Amounts) -> Amounts {
        let Some(budgets) = self.budgets() else { return Amounts::default() };
        let Amounts { dram, nvme } = reserved(&budgets);
        Amounts { dram: dram.saturating_sub(capacity.dram), nvme: nvme.saturating_sub(capacity.nvme) }
    }

    /// Applies the change that `decide` derives from all budgets; retries on conflicts.
    async fn change(
        &self,
        name: &TenantName,
        decide: impl Fn(&mut BTreeMap<TenantName, Budget>) -> Result<Write, TenantsError>,
    ) -> Result<(), TenantsError> {
        let mut attempts = WriteAttempts::default();
        loop {
            let changed_at = self.store.get(CHANGED).await?.map(|entry| Unchanged::At(entry.modified.0));
            let before = condition(CHANGED.to_vec(), changed_at.unwrap_or(Unchanged::Absent));
            let range = self.store.range(Family::Tenants.prefix().as_bytes(), TENANTS_MAX).await?;
            let mut budgets: BTreeMap<TenantName, Budget> = range.entries.iter().filter_map(read).collect();
            let write = decide(&mut budgets)?;
            let changed = Write::Put { key: CHANGED.to_vec(), value: Vec::new(), lease: None };
            let conditions = vec![before, self.identity.unchanged()];
            let transaction = Transaction { conditions, writes: vec![write, changed] };
            if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
                tracing::info!(tenant = %name, revision = revision.0, "tenant budget changed");
                return Ok(());
            }
            attempts.retry(self.identity.compare(self.store.as_ref()).await?)?;
        }
    }

    fn apply_update(&self, update: RecordUpdate<TenantName, Budget>) {
        let mut budgets = self.budgets.write().unwrap_or_else(PoisonError::into_inner);
        update.apply_to(Arc::make_mut(budgets.get_or_insert_default()));
    }
}

/// Sum of all reservations.
fn reserved(budgets: &BTreeMap<TenantName, Budget>) -> Amounts {
    let sum =
        |kind: AmountOf| budgets.values().map(|budget| kind(&budget.reserved)).fold(0, u64::saturating_add);
    Amounts { dram: sum(|amounts| amounts.dram), nvme: sum(|amounts| amounts.nvme) }
}

/// Checks each budget, and the sum of reservations against the capacity if it was raised.
fn check(
    budgets: &BTreeMap<TenantName, Budget>,
    before: Amounts,
    capacity: Option<Amounts>,
) -> Result<(), TenantsError> {
    let now = reserved(budgets);
    for (room, kind) in RESOURCES {
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
    Key::Record(Family::Tenants, name.as_str()).bytes()
}

fn name(text: &str) -> Option<TenantName> {
    (!text.is_empty()).then_some(text)?.parse().ok()
}

/// Decodes a budget record; logs and skips an invalid one.
pub(crate) fn read(entry: &KeyValue) -> Option<(TenantName, Budget)> {
    let stored = serde_json::from_slice::<BudgetJson>(&entry.value).ok();
    match (Family::Tenants.name(&entry.key).and_then(name), stored) {
        (Some(name), Some(BudgetJson { dram_reserved, dram_limit, nvme_reserved, nvme_limit })) => {
            let reserved = Amounts { dram: dram_reserved, nvme: nvme_reserved };
            let limit = Amounts { dram: dram_limit, nvme: nvme_limit };
            Some((name, Budget { reserved, limit }))
        }
        _ => {
            let key = String::from_utf8_lossy(&entry.key);
            tracing::error!(%key, "ignoring an invalid tenant record: remove it from the store");
            None
        }
    }
}

fn encode(budget: &Budget) -> Vec<u8> {
    let Budget { reserved, limit } = budget;
    let stored = BudgetJson {
        dram_reserved: reserved.dram,
        dram_limit: limit.dram,
        nvme_reserved: reserved.nvme,
        nvme_limit: limit.nvme,
    };
    serde_json::to_vec(&stored).expect("numbers serialize to JSON")
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
        let identity = Identity::load_or_create(store.as_ref()).await.expect("made");
        Arc::new(Tenants::new(store, identity))
    }

    #[tokio::test]
    async fn follows_the_budgets_that_were_set() {
        let tenants = tenants().await;
        assert!(tenants.budgets().is_none());
        tenants.set(&name("a"), budget(10, 20), CAPACITY).await.expect("there is room");
        let followed = tenants.clone();
        let task = tokio::spawn(async move { followed.follow().await });
        tenants.set(&name("b"), budget(0, 30), CAPACITY).await.expect("there is room");
        tenants.remove(&name("a")).await.expect("it exists");
        let expected = BTreeMap::from([(name("b"), budget(0, 30))]);
        while tenants.budgets().as_deref() != Some(&expected) {
            tokio::task::yield_now().await;
        }
        assert!(matches!(tenants.remove(&name("a")).await, Err(TenantsError::Unknown(_))));
        task.abort();
    }

    #[tokio::test]
    async fn rejects_reservations_above_limit_or_capacity_and_states_the_remedy() {
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
    async fn after_loss_of_nodes_reservations_can_be_lowered_but_not_raised() {
        let tenants = tenants().await;
        tenants.set(&name("a"), budget(60, 200), CAPACITY).await.expect("there is room");
        tenants.set(&name("b"), budget(30, 200), CAPACITY).await.expect("there is room");
        let half = Some(Amounts { dram: 50, nvme: 500 });
        tenants.set(&name("a"), budget(40, 200), half).await.expect("lowered, and still too much");
        tenants.set(&name("a"), budget(40, 300), half).await.expect("same reservation as before");
        let refused = tenants.set(&name("a"), budget(41, 300), half).await.expect_err("71 of 50");
        assert!(matches!(refused, TenantsError::Quota { room: "dram", .. }), "{refused}");
    }

    #[tokio::test]
    async fn accepts_only_budgets_without_reservation_while_nodes_register() {
        let tenants = tenants().await;
        let refused = tenants.set(&name("a"), budget(1, 200), None).await.expect_err("capacity is unknown");
        assert!(matches!(refused, TenantsError::Registering), "{refused}");
        tenants.set(&name("a"), budget(0, 200), None).await.expect("no reservation");
    }

    #[tokio::test]
    async fn reports_overcommitted_bytes_after_loss_of_capacity() {
        let tenants = tenants().await;
        tenants.set(&name("a"), budget(60, 200), CAPACITY).await.expect("there is room");
        tenants.apply_update(RECORDS.listing(&tenants.store.range(b"tenants/", 10).await.expect("readable")));
        assert_eq!(tenants.overcommitted(CAPACITY.expect("known")), Amounts::default());
        let half = Amounts { dram: 50, nvme: 500 };
        assert_eq!(tenants.overcommitted(half), Amounts { dram: 10, nvme: 0 });
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn rejects_one_of_two_concurrent_reservations_that_exceed_the_capacity() {
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
