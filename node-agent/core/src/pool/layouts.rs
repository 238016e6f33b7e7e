//! The layouts and tenants of the blocks on a device, each pair kept once and named by two bytes.
//!
//! A node serves a handful of models, so a linear search with the last hit first is both the smallest and the
//! fastest table. Names are for memory only: on the device every record carries its whole layout and its tenant.

use reprise_policy::{Layout, TenantId};

/// Different pairs of tenant and layout among the blocks of one device at the most. A node serves tens of models, not
/// hundreds.
pub(super) const LAYOUTS_MAX: usize = 1024;

/// Name of a tenant's layout while at least one slot uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutIndex(pub(super) u16);

/// A tenant's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owned {
    /// Whose blocks they are.
    pub(super) tenant: TenantId,
    /// Their geometry.
    pub(super) layout: Layout,
}

/// The table.
#[derive(Debug, Default)]
pub(super) struct Layouts {
    /// Pairs with the number of slots that use each; unused places are taken again.
    entries: Vec<(Owned, u32)>,
    last: usize,
}

impl Layouts {
    /// Names a pair and counts one more user; `None` when the table is full of others.
    pub(super) fn acquire(&mut self, owned: &Owned) -> Option<LayoutIndex> {
        let position = self.find(owned)?;
        self.entries[position].1 += 1;
        self.last = position;
        Some(LayoutIndex(u16::try_from(position).expect("bounded by LAYOUTS_MAX")))
    }

    /// Counts one user less.
    pub(super) fn release(&mut self, index: LayoutIndex) {
        let users = &mut self.entries[usize::from(index.0)].1;
        *users = users.checked_sub(1).expect("every release follows its acquire");
    }

    /// The pair of that name.
    pub(super) fn get(&self, index: LayoutIndex) -> Owned {
        self.entries[usize::from(index.0)].0
    }

    fn find(&mut self, owned: &Owned) -> Option<usize> {
        if self.entries.get(self.last).is_some_and(|(known, _)| known == owned) {
            return Some(self.last);
        }
        let known = self.entries.iter().position(|(known, users)| known == owned && *users > 0);
        if known.is_some() {
            return known;
        }
        if let Some(unused) = self.entries.iter().position(|(_, users)| *users == 0) {
            self.entries[unused].0 = *owned;
            return Some(unused);
        }
        if self.entries.len() == LAYOUTS_MAX {
            return None;
        }
        self.entries.push((*owned, 0));
        Some(self.entries.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    fn layout(layers: u16, heads: u16) -> Owned {
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
        Owned { tenant: TenantId(heads % 2), layout: spec.validate().expect("valid") }
    }

    #[test]
    fn equal_layouts_share_a_name_and_an_unused_name_is_taken_again() {
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
    fn a_table_full_of_used_layouts_refuses_one_more() {
        let mut layouts = Layouts::default();
        let all: Vec<Owned> =
            (1..=480).flat_map(|layers| (1..=3).map(move |heads| layout(layers, heads))).collect();
        for known in &all[..LAYOUTS_MAX] {
            layouts.acquire(known).expect("room");
        }
        assert_eq!(layouts.acquire(&all[LAYOUTS_MAX]), None);
        assert!(layouts.acquire(&all[5]).is_some());
    }
}
