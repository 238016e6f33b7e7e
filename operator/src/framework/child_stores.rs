//! The operator's copy of the children, filled by watches, and which optional kinds of children are usable.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use kube::runtime::reflector::store::{Writer, WriterDropped};
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;

use crate::framework::child::ChildKind;

/// Whether objects of a kind can be created here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KindAccess {
    Usable,
    NotServed,
    /// The operator has no permission to list them, and thus none to write them.
    NotAllowed,
}

/// Writers of the stores, one for each watched kind.
pub type ChildWriters = Vec<(ChildKind, Writer<DynamicObject>)>;

/// Objects that the operator created, by kind. Secrets are not watched as a kind.
#[derive(Debug)]
pub struct ChildStores {
    stores: BTreeMap<ChildKind, Store<DynamicObject>>,
    /// Availability of optional kinds, once it is known.
    access: watch::Sender<BTreeMap<ChildKind, KindAccess>>,
}

impl ChildStores {
    /// Creates empty stores and their writers.
    pub fn new() -> (ChildStores, ChildWriters) {
        let watched = ChildKind::ALL.into_iter().filter(|kind| *kind != ChildKind::Secret);
        let writers: ChildWriters = watched.map(|kind| (kind, Writer::new(kind.resource()))).collect();
        let stores = writers.iter().map(|(kind, writer)| (*kind, writer.as_reader())).collect();
        (ChildStores { stores, access: watch::Sender::default() }, writers)
    }

    /// Waits until the stores of all kinds that are always served are filled, and the others are known.
    ///
    /// # Errors
    /// A watch has ended, because the process is ending.
    pub async fn wait_until_ready(&self) -> Result<(), WriterDropped> {
        for (_, store) in self.stores.iter().filter(|(kind, _)| !kind.is_optional()) {
            store.wait_until_ready().await?;
        }
        let is_known = |access: &BTreeMap<ChildKind, KindAccess>| {
            ChildKind::ALL.into_iter().all(|kind| !kind.is_optional() || access.contains_key(&kind))
        };
        // An error is impossible: `self` holds the sender.
        let _ = self.access.subscribe().wait_for(is_known).await;
        Ok(())
    }

    /// Returns whether the operator can create children of a kind.
    pub fn access(&self, kind: ChildKind) -> KindAccess {
        let unknown = if kind.is_optional() { KindAccess::NotServed } else { KindAccess::Usable };
        self.access.borrow().get(&kind).copied().unwrap_or(unknown)
    }

    /// Records the availability of an optional kind. A kind is usable once its store has been filled.
    pub(crate) fn set_access(&self, kind: ChildKind, access: KindAccess) {
        let is_new = self.access.send_if_modified(|known| known.insert(kind, access) != Some(access));
        if is_new {
            tracing::info!(kind = kind.as_str(), ?access, "availability of an optional kind changed");
        }
    }

    /// Returns a child by its name.
    pub fn get(&self, kind: ChildKind, namespace: Option<&str>, name: &str) -> Option<Arc<DynamicObject>> {
        let mut reference = ObjectRef::new_with(name, kind.resource());
        if let Some(namespace) = namespace {
            reference = reference.within(namespace);
        }
        self.stores.get(&kind)?.get(&reference)
    }

    /// Returns all children of a kind.
    pub fn all(&self, kind: ChildKind) -> Vec<Arc<DynamicObject>> {
        self.stores.get(&kind).map(Store::state).unwrap_or_default()
    }
}
