//! The public tenant: its blocks may be read by sessions of all tenants and by all agents of the cluster.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use reprise_policy::TenantName;

/// Public tenant of this node, if there is one; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PublicTenant {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    name: RwLock<Option<TenantName>>,
    /// Whether it was logged that its blocks cannot be read here.
    is_failure_logged: AtomicBool,
}

impl PublicTenant {
    /// Creates the handle with the tenant of the configuration.
    pub(crate) fn new(name: Option<TenantName>) -> PublicTenant {
        let public = PublicTenant::default();
        *public.shared.name.write().unwrap_or_else(PoisonError::into_inner) = name;
        public
    }

    /// Returns the public tenant.
    pub(crate) fn current(&self) -> Option<TenantName> {
        self.shared.name.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the public tenant; returns whether it has changed.
    pub(crate) fn set(&self, name: Option<&TenantName>) -> bool {
        let mut current = self.shared.name.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = current.as_ref() != name;
        if is_new {
            *current = name.cloned();
            tracing::info!(tenant = name.map(TenantName::as_str), "the public tenant has changed");
            self.shared.is_failure_logged.store(false, Ordering::Relaxed);
        }
        is_new
    }

    /// Whether a tenant is the public one.
    pub(crate) fn is(&self, tenant: &TenantName) -> bool {
        self.shared.name.read().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(tenant)
    }

    /// Records that blocks of the public tenant cannot be read here; returns whether that is new.
    pub(crate) fn is_first_failure(&self) -> bool {
        !self.shared.is_failure_logged.swap(true, Ordering::Relaxed)
    }
}
