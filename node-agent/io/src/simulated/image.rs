//! Contents of a simulated medium: sparse pages, zero where never written, cheap to copy.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::op::IO_ALIGN;

/// Contents of a medium. A clone shares pages until one of the two changes them.
#[derive(Clone)]
pub struct Image {
    bytes: u64,
    pages: BTreeMap<u64, Arc<[u8; IO_ALIGN]>>,
}

impl Image {
    /// Creates a medium of `bytes` zero bytes.
    pub fn new(bytes: u64) -> Image {
        Image { bytes, pages: BTreeMap::new() }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies out `into.len()` bytes from `offset`. Panics beyond the end.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        self.for_each_page(offset, into.len(), |page, within, piece| {
            let into = &mut into[piece];
            match self.pages.get(&page) {
                Some(bytes) => into.copy_from_slice(&bytes[within..within + into.len()]),
                None => into.fill(0),
            }
        });
    }

    /// Copies `from` to `offset`. Panics beyond the end.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        let mut pages = std::mem::take(&mut self.pages);
        self.for_each_page(offset, from.len(), |page, within, piece| {
            let from = &from[piece];
            let bytes = pages.entry(page).or_insert_with(|| Arc::new([0; IO_ALIGN]));
            Arc::make_mut(bytes)[within..within + from.len()].copy_from_slice(from);
        });
        self.pages = pages;
    }

    /// Inverts one bit (0 to 7) of the byte at `offset`.
    pub fn flip_bit(&mut self, offset: u64, bit: u8) {
        let mut byte = [0];
        self.read(offset, &mut byte);
        self.write(offset, &[byte[0] ^ 1 << (bit & 7)]);
    }

    /// Calls `visit` for each page with page number, offset in the page, and range of the caller's buffer.
    fn for_each_page(
        &self,
        offset: u64,
        len: usize,
        mut visit: impl FnMut(u64, usize, std::ops::Range<usize>),
    ) {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "{len} bytes at {offset} lie outside the image");
        let mut at = 0;
        while at < len {
            let position = offset + at as u64;
            let within = (position % IO_ALIGN as u64) as usize;
            let piece = (IO_ALIGN - within).min(len - at);
            visit(position / IO_ALIGN as u64, within, at..at + piece);
            at += piece;
        }
    }
}

impl PartialEq for Image {
    /// Compares the bytes; a page of zeroes equals one that was never written.
    fn eq(&self, other: &Image) -> bool {
        let covers = |one: &Image, two: &Image| {
            one.pages.iter().all(|(number, page)| match two.pages.get(number) {
                Some(same) => page == same,
                None => page.iter().all(|byte| *byte == 0),
            })
        };
        self.bytes == other.bytes && covers(self, other) && covers(other, self)
    }
}

impl Eq for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = self.pages.len();
        f.debug_struct("Image").field("bytes", &self.bytes).field("pages", &pages).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_across_pages_are_read_back_and_the_rest_is_zero() {
        let mut image = Image::new(1 << 40);
        image.write(4090, b"0123456789");
        let mut read = [9; 14];
        image.read(4088, &mut read);
        assert_eq!(&read, b"\0\x000123456789\0\0");
    }

    #[test]
    fn a_clone_does_not_see_later_changes_and_zeroes_equal_unwritten_pages() {
        let mut image = Image::new(8192);
        let empty = image.clone();
        image.flip_bit(5000, 3);
        assert_ne!(image, empty);
        image.flip_bit(5000, 3);
        assert_eq!(image, empty);
    }
}
