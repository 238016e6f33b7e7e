//! Descriptions of the memory of a command: PRP lists and SGLs, built from pieces of memory.

use crate::backing::Backing;
use crate::error::NvmeError;
use crate::queue::QueuePair;
use crate::spec::{DataPointer, PAGE_BYTES, PRP_LIST_ENTRIES, SglDescriptor, SglKind};

/// A piece of memory: address for the controller, and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// How commands describe their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFormat {
    /// Lists of pages. Every controller has them.
    Prp,
    /// Lists of pieces.
    Sgl,
}

impl std::fmt::Display for DataFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DataFormat::Prp => "PRP",
            DataFormat::Sgl => "SGL",
        })
    }
}

impl DataFormat {
    /// Maximum size of the data of one command whose pieces are whole pages: what one page of list can describe.
    pub const BYTES_MAX: u64 = (PRP_LIST_ENTRIES * PAGE_BYTES) as u64;

    /// Maximum number of pieces of one command: descriptors of one page.
    pub const PIECES_MAX: usize = PAGE_BYTES / SglDescriptor::BYTES;

    /// Describes pieces for the next command of a queue, whose page takes the list.
    ///
    /// # Errors
    /// `Invalid` if the pieces are empty or more than one page of list can describe, if a piece is not whole pages for
    /// a PRP list, or if the queue is full.
    pub fn describe<B: Backing>(
        self,
        queue: &QueuePair<B>,
        pieces: &[Piece],
    ) -> Result<DataPointer, NvmeError> {
        let (id, list) =
            queue.next_list().ok_or_else(|| NvmeError::Invalid(format!("queue {} is full", queue.id())))?;
        match self {
            DataFormat::Prp => prp(pieces, list, |index, word| queue.set_list_word(id, index, word)),
            DataFormat::Sgl => sgl(pieces, list, |index, word| queue.set_list_word(id, index, word)),
        }
    }
}

/// PRP entries (Base 2.0, 4.1.1): all pages but the first start at a multiple of the page size, and so do pieces here.
fn prp(pieces: &[Piece], list: u64, mut set: impl FnMut(usize, u64)) -> Result<DataPointer, NvmeError> {
    let page = PAGE_BYTES as u64;
    let aligned = |piece: &Piece| piece.address.is_multiple_of(page) && piece.bytes.is_multiple_of(page);
    if let Some(piece) = pieces.iter().find(|piece| !aligned(piece) || piece.bytes == 0) {
        return Err(NvmeError::Invalid(format!("{piece:?} is not whole pages")));
    }
    let total: u64 = pieces.iter().map(|piece| piece.bytes).sum();
    if total == 0 || total > DataFormat::BYTES_MAX {
        return Err(NvmeError::Invalid(format!("{total} bytes of data: 1 to {}", DataFormat::BYTES_MAX)));
    }
    let mut pages = pieces
        .iter()
        .flat_map(|piece| (0..piece.bytes / page).map(move |index| piece.address + index * page));
    let first = pages.next().unwrap_or_default();
    let count = total / page;
    if count <= 2 {
        return Ok(DataPointer::prp(first, pages.next().unwrap_or(0)));
    }
    pages.enumerate().for_each(|(index, address)| set(index, address));
    Ok(DataPointer::prp(first, list))
}

/// An SGL (Base 2.0, 4.1.2): one data block in the command, or one last segment of data blocks.
fn sgl(pieces: &[Piece], list: u64, mut set: impl FnMut(usize, u64)) -> Result<DataPointer, NvmeError> {
    if pieces.is_empty() || pieces.len() > DataFormat::PIECES_MAX {
        let max = DataFormat::PIECES_MAX;
        return Err(NvmeError::Invalid(format!("{} pieces of data: 1 to {max}", pieces.len())));
    }
    // Some controllers require multiples of 4 (Base 2.0, 5.17.2.1, SGLS).
    let describe = |piece: &Piece| match u32::try_from(piece.bytes) {
        Ok(bytes) if bytes > 0 && (piece.address | piece.bytes).is_multiple_of(4) => {
            Ok(SglDescriptor::data(piece.address, bytes))
        }
        _ => Err(NvmeError::Invalid(format!(
            "{piece:?} is not a multiple of 4 bytes at an address that is one"
        ))),
    };
    if let [piece] = pieces {
        return Ok(DataPointer::Sgl(describe(piece)?));
    }
    for (index, piece) in pieces.iter().enumerate() {
        let [low, high] = describe(piece)?.words();
        set(2 * index, low);
        set(2 * index + 1, high);
    }
    let bytes = (pieces.len() * SglDescriptor::BYTES) as u32;
    Ok(DataPointer::Sgl(SglDescriptor { address: list, bytes, kind: SglKind::LastSegment }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: u64 = 0x9000;

    fn piece(address: u64, bytes: u64) -> Piece {
        Piece { address, bytes }
    }

    type Build = fn(&[Piece], u64, &mut dyn FnMut(usize, u64)) -> Result<DataPointer, NvmeError>;

    fn of(pieces: &[Piece], build: Build) -> Result<(DataPointer, Vec<u64>), NvmeError> {
        let mut list = Vec::new();
        let pointer = build(pieces, LIST, &mut |index, word| {
            assert_eq!(index, list.len(), "words are set in order");
            list.push(word);
        })?;
        Ok((pointer, list))
    }

    fn prp_of(pieces: &[Piece]) -> Result<(DataPointer, Vec<u64>), NvmeError> {
        of(pieces, |pieces, list, set| prp(pieces, list, set))
    }

    fn sgl_of(pieces: &[Piece]) -> Result<(DataPointer, Vec<u64>), NvmeError> {
        of(pieces, |pieces, list, set| sgl(pieces, list, set))
    }

    #[test]
    fn one_or_two_pages_need_no_list() {
        let (pointer, list) = prp_of(&[piece(0x1000, 4096)]).expect("valid");
        assert_eq!((pointer, list.len()), (DataPointer::prp(0x1000, 0), 0));
        let (pointer, list) = prp_of(&[piece(0x1000, 4096), piece(0x7000, 4096)]).expect("valid");
        assert_eq!((pointer, list.len()), (DataPointer::prp(0x1000, 0x7000), 0));
    }

    #[test]
    fn further_pages_are_listed_in_order() {
        let (pointer, list) = prp_of(&[piece(0x1000, 8192), piece(0x7000, 8192)]).expect("valid");
        assert_eq!(pointer, DataPointer::prp(0x1000, LIST));
        assert_eq!(list, [0x2000, 0x7000, 0x8000]);
    }

    #[test]
    fn a_list_holds_exactly_the_largest_transfer() {
        let (_, list) = prp_of(&[piece(0, DataFormat::BYTES_MAX)]).expect("valid");
        assert_eq!(list.len(), PRP_LIST_ENTRIES - 1);
        assert!(prp_of(&[piece(0, DataFormat::BYTES_MAX), piece(0x1000, 4096)]).is_err());
    }

    #[test]
    fn parts_of_pages_are_refused_in_a_prp_list_and_possible_in_an_sgl() {
        for odd in [piece(0x1200, 4096), piece(0x1000, 512), piece(0x1000, 0)] {
            assert!(prp_of(&[odd]).is_err(), "{odd:?}");
        }
        let (pointer, list) = sgl_of(&[piece(0x1200, 512), piece(0x8000, 3584)]).expect("valid");
        let bytes = 2 * SglDescriptor::BYTES as u32;
        assert_eq!(
            pointer,
            DataPointer::Sgl(SglDescriptor { address: LIST, bytes, kind: SglKind::LastSegment })
        );
        assert_eq!(list, [0x1200, 512, 0x8000, 3584]);
    }

    #[test]
    fn one_piece_lies_in_the_command_itself() {
        let (pointer, list) = sgl_of(&[piece(0x1000, 1 << 20)]).expect("valid");
        assert_eq!((pointer, list.len()), (DataPointer::Sgl(SglDescriptor::data(0x1000, 1 << 20)), 0));
    }

    #[test]
    fn more_pieces_than_a_page_describes_are_refused() {
        let most = vec![piece(0x1000, 4096); DataFormat::PIECES_MAX];
        assert_eq!(sgl_of(&most).expect("valid").1.len(), PAGE_BYTES / 8);
        assert!(sgl_of(&[most, vec![piece(0, 4096)]].concat()).is_err());
        assert!(sgl_of(&[]).is_err() && sgl_of(&[piece(0, 1 << 32)]).is_err());
        assert!(sgl_of(&[piece(2, 8)]).is_err() && sgl_of(&[piece(4, 6)]).is_err());
    }
}
