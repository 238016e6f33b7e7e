//! Observed probability of reuse by tenant and position in a chain.
//!
//! Tenants are separate: a batch of unique prompts of one must not refuse the blocks of another. Blocks whose position
//! is unknown are a separate class, because the heads of chains are reused most.

use super::Reuse;
use crate::eviction::Group;

/// Classes of positions: unknown, 0, 1, 2 to 3, 4 to 7, … 2^31 and above.
const CLASSES: usize = 34;

/// Blocks that count as used before anything is known: at first, every block is admitted.
const PRIOR: u64 = 64;

/// Observed blocks of a class at which its counts are halved, so that old observations lose weight.
const HALVED_AT: u64 = 1 << 16;

/// Blocks committed and used again, by tenant: 544 bytes for each that has committed some.
#[derive(Debug, Default)]
pub(super) struct ReuseByTenant {
    tenants: Vec<Option<Box<ReuseByPosition>>>,
}

/// Blocks of a tenant committed and used again, by position.
#[derive(Debug)]
struct ReuseByPosition {
    classes: [Class; CLASSES],
}

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    committed: u64,
    reused: u64,
}

impl ReuseByTenant {
    pub(super) fn committed(&mut self, tenant: Group, position: Option<u32>) {
        self.class_mut(tenant, position).committed();
    }

    pub(super) fn reused(&mut self, tenant: Group, position: Option<u32>) {
        self.class_mut(tenant, position).reused();
    }

    /// Odds that a block is used (again): used blocks of all blocks. A block with a use has shown that its class
    /// does not describe it.
    pub(super) fn odds(&self, tenant: Group, position: Option<u32>, reuse: Reuse) -> (u64, u64) {
        let known = self.tenants.get(usize::from(tenant.0)).and_then(Option::as_ref);
        let class = known.map(|known| known.classes[class_of(position)]).unwrap_or_default();
        match reuse {
            Reuse::Used => (1, 1),
            Reuse::None => (class.reused + PRIOR, class.committed + PRIOR),
        }
    }

    fn class_mut(&mut self, tenant: Group, position: Option<u32>) -> &mut Class {
        let at = usize::from(tenant.0);
        if self.tenants.len() <= at {
            self.tenants.resize_with(at + 1, || None);
        }
        let none = || Box::new(ReuseByPosition { classes: [Class::default(); CLASSES] });
        &mut self.tenants[at].get_or_insert_with(none).classes[class_of(position)]
    }
}

impl Class {
    fn committed(&mut self) {
        self.committed += 1;
        if self.committed >= HALVED_AT {
            self.committed /= 2;
            self.reused /= 2;
        }
    }

    fn reused(&mut self) {
        // Blocks that were committed before the agent started are used too.
        self.reused = (self.reused + 1).min(self.committed);
    }
}

fn class_of(position: Option<u32>) -> usize {
    position.map_or(0, |position| (1 + u32::BITS - position.leading_zeros()) as usize)
}
