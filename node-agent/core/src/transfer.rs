//! Transfers: blocks on their way into the arena.

mod waits;

pub(crate) use waits::{WaitList, Waits};
