//! Imports: fills of a tenant's blocks from those of a public tenant on this node.

use crate::cache::{Cache, ImportStart, PublicCopy};
use crate::context::Context;
use crate::effect::{CopyBatch, Effect, LossReason, ReadBatch};
use crate::transfer::fetch::{ArenaSpace, Reads};
use crate::transfer::{Fill, FillSource, Transfer};
use crate::waiter::{FillRequest, Import, LocalImports, Replicas, WaiterId};

/// What the fill of an import reads.
#[derive(Debug)]
pub(super) enum ImportSource {
    /// A copy on this node.
    Local(PublicCopy),
    /// A copy on a peer.
    Peer,
}

impl ImportSource {
    /// Copy on this node that is read.
    pub(super) fn local(&self) -> Option<&PublicCopy> {
        match self {
            ImportSource::Local(copy) => Some(copy),
            ImportSource::Peer => None,
        }
    }
}

impl Transfer {
    /// Starts the imports of a request. Their sources were acquired before, so that no import evicts another's source.
    pub(super) fn import(&mut self, cache: &mut Cache, cx: &mut Context, request: &mut FillRequest) {
        let Some(LocalImports { size_class, blocks }) = request.imports.take() else { return };
        let (owner, object) = request.object;
        let (mut reads, mut copies, mut room) = (Reads::default(), Vec::new(), ArenaSpace::Maybe);
        for Import { block, key, copy } in blocks {
            let waiter = WaiterId { object, block, owner };
            // An earlier block with the same key may have started the fill.
            if let Some(fill) = cache.fill_of_key(&key, size_class) {
                cache.release_public(copy);
                self.attach(cache, fill, waiter, true);
                continue;
            }
            let begun = match room {
                ArenaSpace::Maybe => cache.begin_import((key, size_class), &copy, self.fills.next_id()),
                ArenaSpace::None => Err(LossReason::NoSpace),
            };
            let (lease, start) = match begun {
                Ok(begun) => begun,
                Err(reason) => {
                    if reason == LossReason::NoSpace {
                        room = ArenaSpace::None;
                    }
                    cache.release_public(copy);
                    self.refuse(waiter, reason);
                    continue;
                }
            };
            let origin = match start {
                ImportStart::Copy(block) => {
                    copies.push(block);
                    FillSource::Arena
                }
                ImportStart::Read(device, read) => {
                    reads.push((device, cache.size_class(size_class).tenant), read);
                    self.device_reads += 1;
                    self.reads.begin(device, cache.size_class_of(&lease).slot_bytes, cx.now);
                    FillSource::Device(device)
                }
            };
            // A failed import is not tried again from this node.
            let fill = Fill {
                class: request.class,
                import: Some(ImportSource::Local(copy)),
                ..Fill::new(lease, origin, Some(Replicas::default()))
            };
            let fill = self.fills.insert(fill).slot();
            self.attach(cache, fill, waiter, false);
        }
        for ((device, tenant), blocks) in reads.by_device {
            let (class, layout) = (request.class, request.layout);
            let batch = ReadBatch { tenant, class, blocks, layout, read_bytes: request.read_bytes };
            cx.emit(Effect::ReadBlocks { device, batch });
        }
        if !copies.is_empty() {
            let tenant = cache.size_class(size_class).tenant;
            cx.emit(Effect::CopyBlocks(CopyBatch { tenant, layout: request.layout, blocks: copies }));
        }
    }
}
