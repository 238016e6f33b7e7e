//! A store that forgets with its process: for tests and throw-away clusters.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::StoreError;
use crate::local::{Durable, Local, LocalStore, Next};
use crate::state::State;

/// See the module. Clones are the same store.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    local: Arc<Local<Forgetful>>,
}

#[derive(Debug)]
pub(crate) struct Forgetful;

impl MemoryStore {
    /// An empty store.
    pub fn new() -> MemoryStore {
        MemoryStore { local: Local::new(PathBuf::new(), Forgetful, State::default()) }
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

impl LocalStore for MemoryStore {
    type Durable = Forgetful;

    fn local(&self) -> &Arc<Local<Forgetful>> {
        &self.local
    }
}

impl Durable for Forgetful {
    const WAITS: bool = false;

    fn save(&mut self, _: &Next<'_>) -> Result<(), StoreError> {
        Ok(())
    }
}
