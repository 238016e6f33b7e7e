//! Page-aligned buffers of one owner, for header and journal pages on their way from or to a device.
//!
//! A device may store to a buffer while a [`Span`] of it exists. Its bytes are therefore a slice only while no span
//! of it is left: looking at them earlier is a mistake of the program and panics. An I/O completion gives the span
//! back; drop it, then look (or copy out of the span).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::PAGE_BYTES;
use crate::error::BufferError;
use crate::memory::Memory;
use crate::span::Span;

/// Zeroed heap memory of whole pages, page-aligned (2 MiB-aligned from 2 MiB on), owned by one.
pub struct PageBuffer {
    memory: Arc<Memory>,
}

/// Keeps single pages for the next user instead of freeing them.
#[derive(Debug)]
pub struct PageBufferPool {
    idle: Mutex<Vec<PageBuffer>>,
    idle_max: usize,
}

impl PageBuffer {
    /// `bytes` zero bytes; an error unless that is a positive multiple of 4096.
    pub fn new(bytes: usize) -> Result<PageBuffer, BufferError> {
        Ok(PageBuffer { memory: Arc::new(Memory::heap(bytes)?) })
    }

    /// All of it, for an I/O operation. Its bytes are out of reach until every clone of the span is gone.
    pub fn span(&mut self) -> Span {
        Span::of(&self.memory, 0, self.memory.bytes() as u64).expect("a buffer lies inside itself")
    }

    /// Whether a span of it exists, so that its bytes are out of reach.
    pub fn is_lent(&self) -> bool {
        let lent = Arc::strong_count(&self.memory) > 1;
        // Pairs with the release decrement of the last span's drop: what was stored before is visible after.
        fence(Ordering::Acquire);
        lent
    }

    fn assert_not_lent(&self) {
        assert!(
            !self.is_lent(),
            "a page buffer was looked at while a span of it exists: drop the span first"
        );
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    /// Panics while a span of the buffer exists.
    fn deref(&self) -> &[u8] {
        self.assert_not_lent();
        // SAFETY: allocated, zeroed, and `bytes` long. Nobody else can reach it: no span exists, and none can come
        // into being while the slice lives, for `span` needs `&mut self`.
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
    /// A pool that keeps at most `idle_max` pages (of 4096 bytes) that nobody uses.
    pub fn new(idle_max: usize) -> PageBufferPool {
        PageBufferPool { idle: Mutex::new(Vec::with_capacity(idle_max)), idle_max }
    }

    /// A page of zeros.
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

    /// Gives a page back. One that is still lent, is not a single page, or is one too many is let go instead: its
    /// memory goes with its last span.
    pub fn give(&self, page: PageBuffer) {
        if page.is_lent() || page.memory.bytes() != PAGE_BYTES {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.idle_max {
            idle.push(page);
        }
    }
}
