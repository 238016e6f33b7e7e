//! Page-aligned private buffers, for header and journal pages of device I/O.
//!
//! A device may store to a buffer while a [`Span`] of it exists. The bytes are therefore only accessible as a
//! slice while no span exists; an earlier access is a bug and panics. An I/O completion returns the span:
//! drop it, then read the buffer (or copy out of the span).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::PAGE_BYTES;
use crate::error::BufferError;
use crate::memory::Memory;
use crate::span::Span;

/// Zeroed heap memory of whole pages with one owner; page-aligned (2 MiB-aligned from 2 MiB on).
pub struct PageBuffer {
    memory: Arc<Memory>,
}

/// A pool that reuses single pages instead of freeing them.
#[derive(Debug)]
pub struct PageBufferPool {
    idle: Mutex<Vec<PageBuffer>>,
    idle_max: usize,
}

impl PageBuffer {
    /// Allocates `bytes` zero bytes; an error unless that is a positive multiple of 4096.
    pub fn new(bytes: usize) -> Result<PageBuffer, BufferError> {
        Ok(PageBuffer { memory: Arc::new(Memory::heap(bytes)?) })
    }

    /// Returns the whole buffer for an I/O operation. Its bytes are inaccessible until every clone of the
    /// span is dropped.
    pub fn span(&mut self) -> Span {
        Span::of(&self.memory, 0, self.memory.bytes() as u64).expect("a buffer lies inside itself")
    }

    /// Reports whether a span exists, so that the bytes are inaccessible.
    pub fn is_lent(&self) -> bool {
        let lent = Arc::strong_count(&self.memory) > 1;
        // Pairs with the release decrement of the last span's drop: earlier stores are visible afterwards.
        fence(Ordering::Acquire);
        lent
    }

    fn assert_not_lent(&self) {
        assert!(!self.is_lent(), "a page buffer was accessed while a span of it exists: drop the span first");
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    /// Panics while a span of the buffer exists.
    fn deref(&self) -> &[u8] {
        self.assert_not_lent();
        // SAFETY: allocated, zeroed, and `bytes` long. No other code can reach it: no span exists, and none
        // can come into being while the slice lives, for `span` needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.bytes()) }
    }
}

impl DerefMut for PageBuffer {
    /// Panics while a span of the buffer exists.
    fn deref_mut(&mut self) -> &mut [u8] {
        self.assert_not_lent();
        // SAFETY: as for `deref`; `&mut self` makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.memory.bytes()) }
    }
}

impl fmt::Debug for PageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageBuffer")
            .field("bytes", &self.memory.bytes())
            .field("lent", &self.is_lent())
            .finish()
    }
}

impl PageBufferPool {
    /// Creates a pool that keeps at most `idle_max` unused pages (of 4096 bytes).
    pub fn new(idle_max: usize) -> PageBufferPool {
        PageBufferPool { idle: Mutex::new(Vec::with_capacity(idle_max)), idle_max }
    }

    /// Returns a page of zeros.
    pub fn take(&self) -> PageBuffer {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(mut page) => {
                page.fill(0);
                page
            }
            None => PageBuffer::new(PAGE_BYTES).expect("one page is a whole number of pages"),
        }
    }

    /// Returns a page to the pool. A page that still has a span, a buffer of several pages, or a page that
    /// exceeds the limit is dropped instead; its memory is freed with its last span.
    pub fn put(&self, page: PageBuffer) {
        if page.is_lent() || page.memory.bytes() != PAGE_BYTES {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.idle_max {
            idle.push(page);
        }
    }
}
