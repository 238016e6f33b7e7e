//! Reads lists of a command, as a controller does, and moves its data.

use super::memory::{Mapping, Mappings, read_words, resolve};
use crate::data::Piece;
use crate::spec::{DataPointer, PAGE_BYTES, SglDescriptor, SglKind, Status};

/// Maximum number of segments of an SGL that are followed.
const SEGMENTS_MAX: usize = 64;

/// Replaces `all` by the pieces of memory that a data pointer describes, of `bytes` in all.
///
/// # Errors
/// The status of the command.
pub(super) fn pieces(
    mappings: &Mappings,
    data: DataPointer,
    bytes: u64,
    corrupt: bool,
    all: &mut Vec<Piece>,
) -> Result<(), Status> {
    all.clear();
    match data {
        DataPointer::Prp { first, second } => prp(mappings, (first, second), bytes, corrupt, all),
        DataPointer::Sgl(descriptor) => sgl(mappings, descriptor, bytes, corrupt, all),
    }
}

/// PRP entries (Base 2.0, 4.1.1). A list may continue: the last entry of a page of list is then the next page's.
fn prp(
    mappings: &Mappings,
    (first, second): (u64, u64),
    bytes: u64,
    corrupt: bool,
    all: &mut Vec<Piece>,
) -> Result<(), Status> {
    let page = PAGE_BYTES as u64;
    all.push(Piece { address: first, bytes: bytes.min(page - first % page) });
    let mut left = bytes - all[0].bytes;
    if left == 0 {
        return Ok(());
    }
    if left <= page {
        all.push(Piece { address: second, bytes: left });
        return aligned(all);
    }
    let mut list = second;
    // Each list but the last one describes a page at least; lists that only lead to others have no end.
    for _ in 0..=left.div_ceil(page) {
        if left == 0 {
            break;
        }
        let room = ((page - list % page) / 8) as usize;
        let needed = left.div_ceil(page) as usize;
        let mut words = [0; PAGE_BYTES / 8];
        let entries = &mut words[..room.min(needed)];
        if !read_words(mappings, list, entries) {
            return Err(Status::DATA_TRANSFER);
        }
        if corrupt {
            entries[0] ^= 1 << 62;
        }
        let (entries, next) = match entries.split_last() {
            Some((next, entries)) if needed > room => (entries, Some(*next)),
            _ => (&*entries, None),
        };
        for &address in entries {
            let bytes = left.min(page);
            all.push(Piece { address, bytes });
            left -= bytes;
        }
        match next {
            Some(next) if next.is_multiple_of(page) => list = next,
            Some(_) => return Err(Status::INVALID_FIELD),
            None => {}
        }
    }
    if left > 0 {
        return Err(Status::INVALID_FIELD);
    }
    aligned(all)
}

/// All entries but the first one must start at a page (Base 2.0, 4.1.1).
fn aligned(pieces: &[Piece]) -> Result<(), Status> {
    let odd = pieces.iter().skip(1).any(|piece| !piece.address.is_multiple_of(PAGE_BYTES as u64));
    if odd { Err(Status::INVALID_FIELD) } else { Ok(()) }
}

/// An SGL (Base 2.0, 4.1.2): a data block, or segments of them.
fn sgl(
    mappings: &Mappings,
    descriptor: SglDescriptor,
    bytes: u64,
    corrupt: bool,
    all: &mut Vec<Piece>,
) -> Result<(), Status> {
    let mut next = Some(descriptor);
    for _ in 0..SEGMENTS_MAX {
        let Some(segment) = next.take() else { break };
        if segment.kind == SglKind::DataBlock {
            all.push(Piece { address: segment.address, bytes: segment.bytes.into() });
            break;
        }
        next = sgl_segment(mappings, segment, corrupt, all)?;
    }
    let described: u64 = all.iter().map(|piece| piece.bytes).sum();
    if next.is_some() || described != bytes {
        return Err(Status::SGL_LENGTH);
    }
    Ok(())
}

/// Appends the pieces of a segment; returns the segment that follows.
fn sgl_segment(
    mappings: &Mappings,
    segment: SglDescriptor,
    corrupt: bool,
    all: &mut Vec<Piece>,
) -> Result<Option<SglDescriptor>, Status> {
    let count = segment.bytes as usize / SglDescriptor::BYTES;
    let whole =
        (segment.bytes as usize).is_multiple_of(SglDescriptor::BYTES) && (1..=1 << 16).contains(&count);
    if !whole || !matches!(segment.kind, SglKind::Segment | SglKind::LastSegment) {
        return Err(Status::SGL_TYPE);
    }
    let mut words = vec![0; 2 * count];
    if !read_words(mappings, segment.address, &mut words) {
        return Err(Status::DATA_TRANSFER);
    }
    if corrupt {
        words[0] ^= 1 << 62;
    }
    let mut next = None;
    for (index, words) in words.chunks_exact(2).enumerate() {
        let one = SglDescriptor::of_words([words[0], words[1]]);
        match one.kind {
            SglKind::DataBlock => all.push(Piece { address: one.address, bytes: one.bytes.into() }),
            SglKind::Segment | SglKind::LastSegment
                if segment.kind == SglKind::Segment && index + 1 == count =>
            {
                next = Some(one);
            }
            _ => return Err(Status::SGL_TYPE),
        }
    }
    Ok(next)
}

/// Copies bytes to memory of the driver; false if the range is not mapped.
pub(super) fn copy_in(mappings: &Mappings, address: u64, bytes: &[u8]) -> bool {
    match resolve(mappings, address, bytes.len() as u64) {
        Some((Mapping::Span(span), at)) => span.write_at(at, bytes).is_ok(),
        Some((Mapping::Words(memory), at)) if at.is_multiple_of(8) && bytes.len().is_multiple_of(8) => {
            for (index, word) in bytes.chunks_exact(8).enumerate() {
                let word = crate::spec::le!(word, 0, u64);
                memory.atomic_u64(at + 8 * index).store(word.to_le(), std::sync::atomic::Ordering::Relaxed);
            }
            true
        }
        _ => false,
    }
}

/// Copies bytes from memory of the driver; false if the range is not mapped.
pub(super) fn copy_out(mappings: &Mappings, address: u64, bytes: &mut [u8]) -> bool {
    match resolve(mappings, address, bytes.len() as u64) {
        Some((Mapping::Span(span), at)) => span.read_at(at, bytes).is_ok(),
        Some((Mapping::Words(_), _)) if bytes.len().is_multiple_of(8) => {
            let mut words = vec![0; bytes.len() / 8];
            let read = read_words(mappings, address, &mut words);
            for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            read
        }
        _ => false,
    }
}
