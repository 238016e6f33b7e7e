//! Pairs of tenant and layout, as 16-bit numbers.
//!
//! A block is visible to a session exactly when their shapes are equal: one comparison covers "another tenant's
//! block" and "a block of another layout". A shape lives while sessions, blocks or frames have it; when the table
//! is full, one that nobody has makes room.

use reprise_policy::{Layout, TenantId};

use super::arena::{Arena, ClassId};
use super::limits::SHAPES_MAX;
use super::tenants::TenantIndex;

/// Number of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ShapeId(pub(super) u16);

/// A tenant's layout.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) tenant: TenantId,
    pub(super) tenant_index: TenantIndex,
    pub(super) layout: Layout,
    /// Where its slots come from.
    pub(super) class: ClassId,
    /// Bytes of one slot.
    pub(super) slot_bytes: u64,
    /// Whether the operator knows that no device can hold its blocks.
    unstorable: Unstorable,
    uses: u64,
}

/// Whether somebody was told that blocks of a shape fit no device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unstorable {
    Untold,
    Told,
}

/// The table; see the module.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    shapes: Vec<Shape>,
}

impl Shapes {
    /// The number of a tenant's layout; `None` when there are too many.
    pub(super) fn intern(
        &mut self,
        (tenant, tenant_index): (TenantId, TenantIndex),
        layout: Layout,
        arena: &mut Arena,
    ) -> Option<ShapeId> {
        if let Some(known) = self.find(tenant, layout) {
            return Some(known);
        }
        let (slot_bytes, unstorable) = (layout.slot_bytes(), Unstorable::Untold);
        if self.shapes.len() < SHAPES_MAX {
            let class = arena.join_class(tenant, slot_bytes);
            self.shapes.push(Shape { tenant, tenant_index, layout, class, slot_bytes, unstorable, uses: 0 });
            return Some(ShapeId((self.shapes.len() - 1) as u16));
        }
        let vacant = self.shapes.iter().position(|shape| shape.uses == 0)?;
        arena.leave_class(self.shapes[vacant].class);
        let class = arena.join_class(tenant, slot_bytes);
        self.shapes[vacant] = Shape { tenant, tenant_index, layout, class, slot_bytes, unstorable, uses: 0 };
        Some(ShapeId(vacant as u16))
    }

    /// The number of a tenant's layout that is in the table.
    pub(super) fn find(&self, tenant: TenantId, layout: Layout) -> Option<ShapeId> {
        let known = self.shapes.iter().position(|shape| shape.tenant == tenant && shape.layout == layout);
        known.map(|known| ShapeId(known as u16))
    }

    /// Shapes that somebody has.
    pub(super) fn in_use(&self) -> usize {
        self.shapes.iter().filter(|shape| shape.uses > 0).count()
    }

    pub(super) fn get(&self, id: ShapeId) -> &Shape {
        &self.shapes[usize::from(id.0)]
    }

    /// Objects of a block.
    pub(super) fn objects(&self, id: ShapeId) -> usize {
        self.get(id).layout.objects() as usize
    }

    /// Notes that the operator is told that no device can hold the shape's blocks; whether that is news.
    pub(super) fn tell_unstorable(&mut self, id: ShapeId) -> bool {
        let shape = &mut self.shapes[usize::from(id.0)];
        std::mem::replace(&mut shape.unstorable, Unstorable::Told) == Unstorable::Untold
    }

    /// A session, block or frame has the shape from now on.
    pub(super) fn hold(&mut self, id: ShapeId) {
        self.shapes[usize::from(id.0)].uses += 1;
    }

    /// It has it no longer.
    pub(super) fn release(&mut self, id: ShapeId) {
        let uses = &mut self.shapes[usize::from(id.0)].uses;
        *uses = uses.checked_sub(1).expect("every release follows a hold");
    }

    /// Who has each shape, for the audit.
    pub(super) fn uses(&self) -> impl Iterator<Item = u64> {
        self.shapes.iter().map(|shape| shape.uses)
    }
}

const _: () = assert!(SHAPES_MAX <= u16::MAX as usize, "shape numbers are 16 bits");
