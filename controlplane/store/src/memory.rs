//! A store in process memory, for tests and throw-away clusters.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::StoreError;
use crate::local::{Durable, Local, LocalStore, PendingChange};
use crate::state::State;

/// A store in memory. Clones share its contents.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    local: Arc<Local<NoPersistence>>,
}

#[derive(Debug)]
pub(crate) struct NoPersistence;

impl MemoryStore {
    /// Creates an empty store.
    pub fn new() -> MemoryStore {
        MemoryStore { local: Local::new(PathBuf::new(), NoPersistence, State::default()) }
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

impl LocalStore for MemoryStore {
    type Durable = NoPersistence;

    fn local(&self) -> &Arc<Local<NoPersistence>> {
        &self.local
    }
}

impl Durable for NoPersistence {
    const BLOCKS: bool = false;

    fn save(&mut self, _: &PendingChange<'_>) -> Result<(), StoreError> {
        Ok(())
    }
}
