//! Table of the layouts and tenants of the blocks on a device; each pair has a 16-bit index.
//!
//! A node serves few models, so a linear search that first tries the last hit is both the smallest and the
//! fastest table. Indices exist in memory only: on the device, every record contains its whole layout and
//! tenant.

use reprise_policy::{Layout, TenantId};

/// Maximum pairs of tenant and layout among the blocks of one device. A node serves tens of models, not
/// hundreds.
pub(super) const LAYOUTS_MAX: usize = 1024;

/// Index of a tenant's layout, valid while at least one slot uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutIndex(pub(super) u16);

/// Pair of tenant and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TenantLayout {
    /// Tenant of the blocks.
    pub(super) tenant: TenantId,
    /// Layout of the blocks.
    pub(super) layout: Layout,
}

/// Table of all pairs in use.
#[derive(Debug, Default)]
pub(super) struct Layouts {
    /// Pairs with the number of slots that use each; unused entries are reused.
    entries: Vec<(TenantLayout, u32)>,
    last: usize,
}

impl Layouts {
    /// Returns the index of a pair and counts one more user; `None` if the table is full.
    pub(super) fn acquire(&mut self, tenant_layout: &TenantLayout) -> Option<LayoutIndex> {
        let position = self.find(tenant_layout)?;
        self.entries[position].1 += 1;
        self.last = position;
        Some(LayoutIndex(u16::try_from(position).expect("bounded by LAYOUTS_MAX")))
    }

    /// Counts one user of a pair less.
    pub(super) fn release(&mut self, index: LayoutIndex) {
        let users = &mut self.entries[usize::from(index.0)].1;
        *users = users.checked_sub(1).expect("every release follows its acquire");
    }

    /// Returns the pair of an index.
    pub(super) fn get(&self, index: LayoutIndex) -> TenantLayout {
        self.entries[usize::from(index.0)].0
    }

    fn find(&mut self, tenant_layout: &TenantLayout) -> Option<usize> {
        if self.entries.get(self.last).is_some_and(|(known, _)| known == tenant_layout) {
            return Some(self.last);
        }
        let known = self.entries.iter().position(|(known, users)| known == tenant_layout && *users > 0);
        if known.is_some() {
            return known;
        }
        if let Some(unused) = self.entries.iter().position(|(_, users)| *users == 0) {
            self.entries[unused].0 = *tenant_layout;
            return Some(unused);
        }
        if self.entries.len() == LAYOUTS_MAX {
            return None;
        }
        self.entries.push((*tenant_layout, 0));
        Some(self.entries.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    fn layout(layers: u16, heads: u16) -> TenantLayout {
        let spec = LayoutSpec {
            layers,
            parts: Parts::KeyValue,
            kv_heads: heads,
            head_dim: 8,
            dtype: Dtype::Bf16,
            tokens_per_block: 4,
            tp_rank: 0,
            tp_size: 1,
        };
        TenantLayout { tenant: TenantId(heads % 2), layout: spec.validate().expect("valid") }
    }

    #[test]
    fn equal_layouts_share_an_index_and_unused_indices_are_reused() {
        let mut layouts = Layouts::default();
        let first = layouts.acquire(&layout(1, 1)).expect("room");
        assert_eq!(layouts.acquire(&layout(1, 1)), Some(first));
        let second = layouts.acquire(&layout(2, 1)).expect("room");
        assert_ne!(first, second);
        layouts.release(first);
        layouts.release(first);
        let third = layouts.acquire(&layout(3, 1)).expect("room");
        assert_eq!(third, first);
        assert_eq!((layouts.get(third), layouts.get(second)), (layout(3, 1), layout(2, 1)));
    }

    #[test]
    fn full_table_rejects_another_layout() {
        let mut layouts = Layouts::default();
        let all: Vec<TenantLayout> =
            (1..=480).flat_map(|layers| (1..=3).map(move |heads| layout(layers, heads))).collect();
        for known in &all[..LAYOUTS_MAX] {
            layouts.acquire(known).expect("room");
        }
        assert_eq!(layouts.acquire(&all[LAYOUTS_MAX]), None);
        assert!(layouts.acquire(&all[5]).is_some());
    }
}
