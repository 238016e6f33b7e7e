//! Removal of the blocks of erased tenants, one step at a time.

use reprise_policy::TenantId;

use crate::cache::BlockChange;
use crate::core::AgentCore;
use crate::effect::{Diagnostic, Effect};
use crate::erasures::Erased;

impl AgentCore {
    /// Begins to remove the blocks of a tenant, which gets no slot and is not written from now on.
    pub(super) fn erase_tenant(&mut self, tenant: TenantId) {
        self.erasures.begin(&mut self.cache, self.now, tenant);
    }

    /// Removes the blocks in the next places of the index that belong to erased tenants. Blocks that a device, a peer or
    /// a write uses are left for the next walk.
    pub(super) fn erase_step(&mut self) {
        for (key, class) in self.erasures.step(&self.cache) {
            let tenant = self.cache.tenant_of(class);
            self.retention.unpin(&mut self.cache, &key, class);
            self.prefetch.drop_block(&mut self.cache, &key, class);
            if matches!(self.cache.erase(&key, class), BlockChange::Done(_)) {
                self.erasures.removed(tenant);
            }
        }
        for Erased { tenant, blocks } in self.erasures.end_step(&self.cache, self.now) {
            context!(self).emit(Effect::Diagnostic(Diagnostic::TenantErased { tenant, blocks }));
        }
    }
}
