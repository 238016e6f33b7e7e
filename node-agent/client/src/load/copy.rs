//! Verified copies of a load's objects into the engine's memory.
//!
//! The checksum is computed over the destination, piece by piece while the piece is in cache. The verified
//! bytes are therefore the bytes that the engine computes on, even if another process changes the arena. A
//! mismatch is reported to the agent, once for each block. Hot path: no allocation; per object two loads from
//! the progress page and one from the answer's frame.

use reprise_buffers::Span;

use super::{BlockStatus, Load, Verify};
use crate::error::CopyError;

impl Load {
    /// Copies one object to `dst`, which must have the length of an object.
    ///
    /// # Errors
    /// [`CopyError`]; the contents of `dst` are then unspecified, and the block counts as missed.
    pub fn copy_object(&self, block: usize, object: u32, dst: &mut [u8]) -> Result<(), CopyError> {
        self.copy_objects(block, object, &mut [dst])
    }

    /// Copies the parts of one layer of a block, one destination for each.
    ///
    /// # Errors
    /// As [`Load::copy_object`].
    pub fn copy_layer(&self, block: usize, layer: u32, dsts: &mut [&mut [u8]]) -> Result<(), CopyError> {
        let parts = self.session.layout().parts();
        check_size("objects", u64::from(parts), dsts.len())?;
        self.copy_objects(block, layer.saturating_mul(parts), dsts)
    }

    /// Copies a whole block to scattered memory, one destination for each object, in layer-major order.
    ///
    /// # Errors
    /// As [`Load::copy_object`].
    pub fn copy_block_scattered(&self, block: usize, dsts: &mut [&mut [u8]]) -> Result<(), CopyError> {
        check_size("objects", u64::from(self.session.layout().objects()), dsts.len())?;
        self.copy_objects(block, 0, dsts)
    }

    /// Copies a whole block to one contiguous destination of the block's length.
    ///
    /// # Errors
    /// As [`Load::copy_object`].
    pub fn copy_block(&self, block: usize, dst: &mut [u8]) -> Result<(), CopyError> {
        let layout = self.session.layout();
        check_size("bytes", layout.block_bytes(), dst.len())?;
        let span = self.readable(block, 0, layout.objects())?;
        let objects = dst.chunks_exact_mut(layout.object_bytes() as usize);
        (0..).zip(objects).try_for_each(|(object, dst)| self.copy_verified(span, block, object, dst))
    }

    /// Copies consecutive objects from `first` on, one destination for each.
    ///
    /// # Errors
    /// As [`Load::copy_object`].
    pub fn copy_objects(&self, block: usize, first: u32, dsts: &mut [&mut [u8]]) -> Result<(), CopyError> {
        let object_bytes = self.session.layout().object_bytes();
        let count = u32::try_from(dsts.len()).unwrap_or(u32::MAX);
        let span = self.readable(block, first, count)?;
        for (object, dst) in (first..).zip(dsts.iter_mut()) {
            check_size("bytes", object_bytes, dst.len())?;
            self.copy_verified(span, block, object, dst)?;
        }
        Ok(())
    }

    /// Returns the block's payload if these objects of it may be read now.
    fn readable(&self, block: usize, first: u32, count: u32) -> Result<&Span, CopyError> {
        let layout = self.session.layout();
        let out_of_range =
            CopyError::OutOfRange { block, object: first.saturating_add(count.saturating_sub(1)) };
        let end = first.checked_add(count).filter(|end| *end <= layout.objects()).ok_or(out_of_range)?;
        let loaded = self.blocks.get(block).ok_or(out_of_range)?;
        // Read layers before failures: this order guarantees that a failure set before the layers were
        // announced is seen.
        let ready = self.ready_layers();
        let status = self.status(block);
        let span = match loaded.span() {
            Some(span) if status == BlockStatus::Ok => span,
            _ => return Err(CopyError::Unavailable { block, status }),
        };
        let layers_needed = end.div_ceil(layout.parts());
        if layers_needed > ready {
            return Err(CopyError::NotReady { layer: layers_needed - 1, ready });
        }
        Ok(span)
    }

    /// Copies and verifies one object; `dst` has its length.
    fn copy_verified(&self, span: &Span, block: usize, object: u32, dst: &mut [u8]) -> Result<(), CopyError> {
        let out_of_range = CopyError::OutOfRange { block, object };
        let from = span.slice(object as usize * dst.len(), dst.len()).map_err(|_| out_of_range)?;
        match self.verify {
            Verify::Off => from.copy_out(dst),
            Verify::Always => {
                let expected = self.blocks[block].checksum(object).ok_or(out_of_range)?;
                if from.copy_out_checked(dst) != expected {
                    self.suspect(block);
                    return Err(CopyError::Corrupt { block, object });
                }
            }
        }
        Ok(())
    }
}

fn check_size(unit: &'static str, expected: u64, found: usize) -> Result<(), CopyError> {
    if found as u64 == expected {
        return Ok(());
    }
    Err(CopyError::WrongSize { unit, expected, found: found as u64 })
}
