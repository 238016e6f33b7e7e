//! Words that streams wait for, and signals that advance them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::gpu::{GpuError, HostMemory, Stream};

/// Waits of one stream that are open at most: a page of words, and as many as a mover has requests.
pub(super) const WORDS_MAX: usize = 1024;

/// Words of one stream.
pub(super) struct Words {
    memory: Memory,
    /// Words without an open wait, with the value that each has.
    free: Mutex<VecDeque<(usize, u32)>>,
}

enum Memory {
    Host(Box<[AtomicU32]>),
    Gpu(HostMemory),
}

/// An open wait. Dropping it stores the value for which the stream waits.
#[derive(Debug)]
pub(in crate::store) struct Signal {
    words: Arc<Words>,
    word: usize,
    value: u32,
}

impl Words {
    pub(super) fn on_host() -> Words {
        Words::new(Memory::Host((0..WORDS_MAX).map(|_| AtomicU32::new(0)).collect()))
    }

    /// Uses zeroed pinned memory.
    pub(super) fn on_gpu(memory: HostMemory) -> Words {
        Words::new(Memory::Gpu(memory))
    }

    fn new(memory: Memory) -> Words {
        Words { memory, free: Mutex::new((0..WORDS_MAX).map(|word| (word, 0)).collect()) }
    }

    /// Takes a word; `None` if all have an open wait.
    ///
    /// A stream may still be before an older wait of the same word: it passes with the newer value, too.
    pub(super) fn take(words: &Arc<Words>) -> Option<Signal> {
        let (word, value) = words.free.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        Some(Signal { words: Arc::clone(words), word, value: value.wrapping_add(1) })
    }

    /// Enqueues the wait for a signal of these words.
    pub(super) fn delay(&self, stream: &Stream, signal: &Signal) -> Result<(), GpuError> {
        match &self.memory {
            Memory::Gpu(memory) => stream.wait_word((memory, 4 * signal.word as u64), signal.value),
            Memory::Host(_) => Err(GpuError::Invalid("words of the host for a stream of a GPU".to_owned())),
        }
    }

    /// Reports whether a word of host memory has reached a value, as a stream of a GPU compares.
    pub(super) fn has_reached(&self, word: usize, value: u32) -> bool {
        match &self.memory {
            Memory::Host(words) => words[word].load(Ordering::Acquire).wrapping_sub(value).cast_signed() >= 0,
            Memory::Gpu(_) => false,
        }
    }

    fn advance(&self, word: usize, value: u32) {
        match &self.memory {
            Memory::Host(words) => words[word].store(value, Ordering::Release),
            Memory::Gpu(memory) => {
                if let Err(error) = memory.store_word(4 * word as u64, value) {
                    tracing::error!(%error, word, "cannot advance a stream");
                }
            }
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push_back((word, value));
    }
}

impl Signal {
    /// Returns the index of the word, and the value for which the stream waits.
    pub(super) fn target(&self) -> (usize, u32) {
        (self.word, self.value)
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        self.words.advance(self.word, self.value);
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_on_gpu = matches!(self.memory, Memory::Gpu(_));
        formatter.debug_struct("Words").field("is_on_gpu", &is_on_gpu).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_is_used_again_with_a_later_value_that_older_waits_accept() {
        let words = Arc::new(Words::on_host());
        let first = Words::take(&words).expect("a word");
        let (word, value) = first.target();
        assert!(!words.has_reached(word, value));
        drop(first);
        assert!(words.has_reached(word, value));
        let others: Vec<Signal> = (0..WORDS_MAX).map(|_| Words::take(&words).expect("a word")).collect();
        assert!(Words::take(&words).is_none(), "all words have an open wait");
        let again = others.iter().find(|signal| signal.target().0 == word).expect("all words");
        assert_eq!(again.target(), (word, value + 1));
        assert!(words.has_reached(word, value));
        assert!(!words.has_reached(word, value + 1));
    }

    #[test]
    fn comparison_is_cyclic() {
        let words = Words::on_host();
        words.advance(0, u32::MAX);
        assert!(words.has_reached(0, u32::MAX));
        assert!(!words.has_reached(0, 0), "0 follows the greatest value");
        words.advance(0, 0);
        assert!(words.has_reached(0, u32::MAX));
    }
}
