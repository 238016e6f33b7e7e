//! Blocks whose bytes are the keyed function of their identity: written into reserved slots, and compared with
//! what a load returns, so that a load of the wrong block is detected.

use std::time::Duration;

use reprise_client::{BlockStatus, ClientError, CopyError, Load, Reservation, Source};
use reprise_policy::Layout;

use crate::kv_function;

/// Result of a load for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The block was loaded and every byte is right.
    Verified(Source),
    /// The agent reports that the block is not available.
    Missing(BlockStatus),
    /// The client found that the checksums do not match.
    Corrupt,
    /// The checksums match, but this number of 8-byte words differ from the saved ones.
    Wrong {
        /// Number of words.
        words: u64,
    },
}

impl Outcome {
    /// Returns whether the block was loaded and is right.
    pub fn is_verified(self) -> bool {
        matches!(self, Outcome::Verified(_))
    }
}

/// Returns the bytes of an object as a `usize`.
pub fn object_bytes(layout: &Layout) -> usize {
    usize::try_from(layout.object_bytes()).expect("objects fit in memory")
}

/// Writes a block's bytes into a reserved slot.
///
/// # Errors
/// As `Reservation::fill_object`.
pub fn write(reservation: &mut Reservation, layout: &Layout, identity: &[u8]) -> Result<(), ClientError> {
    let mut object = vec![0; object_bytes(layout)];
    for index in 0..layout.objects() {
        kv_function::fill(identity, index, &mut object);
        reservation.fill_object(index, &object)?;
    }
    Ok(())
}

/// Compares every byte of a load, layer by layer; `identities` are those of its blocks.
///
/// # Errors
/// As `Load::wait_layer`, which waits for each layer within `patience`.
///
/// # Panics
/// If the load has another number of blocks.
pub fn compare<I: AsRef<[u8]>>(
    load: &Load,
    layout: &Layout,
    identities: &[I],
    patience: Duration,
) -> Result<Vec<Outcome>, ClientError> {
    let mut object = vec![0; object_bytes(layout)];
    let mut words = vec![0; identities.len()];
    let mut missed: Vec<Option<Outcome>> = vec![None; identities.len()];
    for layer in 0..layout.layers() {
        load.wait_layer(layer, patience)?;
        for (block, identity) in identities.iter().enumerate() {
            for index in layer * layout.parts()..(layer + 1) * layout.parts() {
                match load.copy_object(block, index, &mut object) {
                    Ok(()) => words[block] += kv_function::mismatches(identity.as_ref(), index, &object),
                    Err(error) => {
                        missed[block].get_or_insert(missing(error));
                    }
                }
            }
        }
    }
    let outcome = |block: usize| match (words[block], missed[block]) {
        (0, None) => Outcome::Verified(load.blocks()[block].source().expect("a copied block has a source")),
        (0, Some(missed)) => missed,
        (words, _) => Outcome::Wrong { words },
    };
    Ok((0..identities.len()).map(outcome).collect())
}

/// Maps the error of a copy to the outcome of its block.
fn missing(error: CopyError) -> Outcome {
    match error {
        CopyError::Corrupt { .. } => Outcome::Corrupt,
        CopyError::Unavailable { status, .. } => Outcome::Missing(status),
        other => panic!("unexpected error of a valid copy: {other}"),
    }
}
