//! A store in one file (redb): every committed transaction survives `kill -9` and power loss.
//!
//! Tables, schema version 1:
//!
//! | table     | key                         | value                                        |
//! |-----------|-----------------------------|----------------------------------------------|
//! | `meta`    | `schema`, `revision`, `compacted` | u64                                    |
//! | `entries` | key                         | created, modified, version, value            |
//! | `history` | revision, index             | put?, created, version, key, value           |
//!
//! The file is created under another name and linked into place when it is complete, so that a crash meanwhile leaves
//! no half store behind. redb locks the file; a second opener is refused. Writes run on the runtime's blocking threads, one
//! after the other, to their end even when the caller has gone.

use std::fs;
use std::future::ready;
use std::io::ErrorKind;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError,
};

use crate::contract::{Event, KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch};
use crate::error::StoreError;
use crate::shared::Shared;
use crate::state::{Plan, State};

/// Version of the tables above. Another one is refused: see [`StoreError::Schema`].
const SCHEMA: u64 = 1;
/// redb's page cache. The content is in memory anyway; this is for the pages of a write.
const CACHE_BYTES: usize = 4 << 20;

const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");
const ENTRIES: TableDefinition<'static, &[u8], (u64, u64, u64, &[u8])> = TableDefinition::new("entries");
const HISTORY: TableDefinition<'static, (u64, u32), HistoryRow> = TableDefinition::new("history");

/// Put or deleted, created, version, key, value.
type HistoryRow = (bool, u64, u64, &'static [u8], &'static [u8]);

/// See the module. Clones are the same store.
#[derive(Clone, Debug)]
pub struct EmbeddedStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Held from plan to apply: transactions come one after the other, while readers go on.
    database: Mutex<Database>,
}

impl EmbeddedStore {
    /// Opens the store, or creates it when there is no such file. Blocks: call it before serving.
    pub fn open(path: &Path) -> Result<EmbeddedStore, StoreError> {
        let exists = path.try_exists().map_err(|error| io(path, "find", &error))?;
        if !exists {
            create(path)?;
        }
        // redb answers some damage with a panic (seen: a flipped bit in its allocator's page). The unwinding closes the
        // file, and nothing of what it touched is used again.
        let opened = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let mut database = open_database(path)?;
            verify(path, &mut database)?;
            let state = load(path, &database)?;
            Ok((database, state))
        }));
        let (database, state) = opened.unwrap_or_else(|_| {
            Err(StoreError::Corrupt {
                path: path.to_owned(),
                reason: "its pages contradict each other".to_owned(),
            })
        })?;
        let inner =
            Inner { path: path.to_owned(), shared: Shared::new(state), database: Mutex::new(database) };
        Ok(EmbeddedStore { inner: Arc::new(inner) })
    }

    /// Runs a write on a blocking thread, to its end.
    fn write<T: Send + 'static>(
        &self,
        action: &'static str,
        write: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> StoreFuture<'_, T> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let path = inner.path.clone();
            let done = tokio::task::spawn_blocking(move || write(&inner)).await;
            done.unwrap_or_else(|error| Err(io(&path, action, &error)))
        })
    }
}

impl Store for EmbeddedStore {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        Box::pin(ready(Ok(self.inner.shared.read().entries.get(key).cloned())))
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        Box::pin(ready(Ok(self.inner.shared.read().range(prefix, limit))))
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        self.write("write", move |inner| inner.commit(&transaction))
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        Box::pin(ready(self.inner.shared.watch(prefix, from)))
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        self.write("compact", move |inner| inner.compact(oldest.0.saturating_sub(1)))
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        Box::pin(ready(Ok(Revision(self.inner.shared.read().revision))))
    }
}

impl Inner {
    fn lock(&self) -> Result<MutexGuard<'_, Database>, StoreError> {
        self.database
            .lock()
            .map_err(|_| io(&self.path, "write", &"an earlier write panicked: restart the control plane"))
    }

    fn commit(&self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        let database = self.lock()?;
        let (plan, current, compacted) = {
            let state = self.shared.read();
            (state.plan(transaction)?, state.revision, state.compacted)
        };
        match plan {
            Plan::Conflict => Ok(Outcome::Conflict),
            Plan::Nothing => Ok(Outcome::Committed(Revision(current))),
            Plan::Commit { events, compact_to } => {
                let delta = Delta { revision: current + 1, events: &events, compacted, compact_to };
                save(&database, &delta).map_err(|error| io(&self.path, "write", &error))?;
                self.shared.write().apply(events, compact_to);
                self.shared.moved(current + 1);
                Ok(Outcome::Committed(Revision(current + 1)))
            }
        }
    }

    fn compact(&self, to: u64) -> Result<(), StoreError> {
        let database = self.lock()?;
        let (revision, compacted) = {
            let state = self.shared.read();
            (state.revision, state.compacted)
        };
        let compact_to = to.min(revision);
        if compact_to > compacted {
            let delta = Delta { revision, events: &[], compacted, compact_to };
            save(&database, &delta).map_err(|error| io(&self.path, "compact", &error))?;
            self.shared.write().compact(compact_to);
        }
        Ok(())
    }
}

/// What one write changes in the file.
struct Delta<'a> {
    revision: u64,
    events: &'a [Event],
    /// History that is gone already.
    compacted: u64,
    /// History that goes with this write.
    compact_to: u64,
}

/// One durable write.
fn save(database: &Database, delta: &Delta<'_>) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        meta.insert("revision", delta.revision)?;
        meta.insert("compacted", delta.compact_to)?;
        let mut entries = write.open_table(ENTRIES)?;
        let mut history = write.open_table(HISTORY)?;
        for (index, event) in (0..).zip(delta.events) {
            let place = (delta.revision, index);
            match event {
                Event::Put(KeyValue { key, value, created, modified, version }) => {
                    entries.insert(key.as_slice(), (created.0, modified.0, *version, value.as_slice()))?;
                    history.insert(place, (true, created.0, *version, key.as_slice(), value.as_slice()))?;
                }
                Event::Deleted { key, .. } => {
                    entries.remove(key.as_slice())?;
                    history.insert(place, (false, 0, 0, key.as_slice(), [].as_slice()))?;
                }
            }
        }
        if delta.compact_to > delta.compacted {
            history.retain_in(..(delta.compact_to + 1, 0), |_, _| false)?;
        }
    }
    write.commit()?;
    Ok(())
}

/// Reads the whole store.
fn load(path: &Path, database: &Database) -> Result<State, StoreError> {
    let corrupt =
        |error: redb::Error| StoreError::Corrupt { path: path.to_owned(), reason: error.to_string() };
    let read = database.begin_read().map_err(|error| corrupt(error.into()))?;
    let meta = read.open_table(META).map_err(|error| match error {
        TableError::Storage(error) => corrupt(error.into()),
        other => foreign(path, &other),
    })?;
    let number = |name: &str| -> Result<u64, StoreError> {
        let value = meta.get(name).map_err(|error| corrupt(error.into()))?;
        value.map(|value| value.value()).ok_or_else(|| foreign(path, &format!("it has no {name}")))
    };
    let found = number("schema")?;
    if found != SCHEMA {
        return Err(StoreError::Schema { path: path.to_owned(), found, supported: SCHEMA });
    }
    let mut state =
        State { revision: number("revision")?, compacted: number("compacted")?, ..State::default() };
    read_entries(&read, &mut state).map_err(corrupt)?;
    Ok(state)
}

fn read_entries(read: &redb::ReadTransaction, state: &mut State) -> Result<(), redb::Error> {
    for entry in read.open_table(ENTRIES)?.iter()? {
        let (key, value) = entry?;
        let (created, modified, version, value) = value.value();
        let (created, modified) = (Revision(created), Revision(modified));
        let entry = KeyValue { key: key.value().to_vec(), value: value.to_vec(), created, modified, version };
        state.entries.insert(entry.key.clone(), entry);
    }
    for event in read.open_table(HISTORY)?.iter()? {
        let (place, event) = event?;
        let revision = Revision(place.value().0);
        let (put, created, version, key, value) = event.value();
        state.history.push_back(if put {
            let created = Revision(created);
            Event::Put(KeyValue {
                key: key.to_vec(),
                value: value.to_vec(),
                created,
                modified: revision,
                version,
            })
        } else {
            Event::Deleted { key: key.to_vec(), revision }
        });
    }
    Ok(())
}

/// Creates an empty store under a name of its own and links it into place when it is complete. When somebody else was
/// faster, theirs stands.
fn create(path: &Path) -> Result<(), StoreError> {
    let refused = |error: std::io::Error| io(path, "create", &error);
    let mut temporary = path.to_owned().into_os_string();
    temporary.push(format!(".creating-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    // Left by a crash of a process with our number.
    let _ = fs::remove_file(&temporary);
    let created = Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create(&temporary)
        .map_err(|error| refuse(path, "create", error))
        .and_then(|database| initialise(&database).map_err(|error| io(path, "create", &error)));
    let linked = created.and_then(|()| match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(refused(error)),
        _ => Ok(()),
    });
    // Only a name is lost when this fails.
    let _ = fs::remove_file(&temporary);
    linked?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(refused)
}

fn initialise(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        for (name, value) in [("schema", SCHEMA), ("revision", 0), ("compacted", 0)] {
            meta.insert(name, value)?;
        }
        write.open_table(ENTRIES)?;
        write.open_table(HISTORY)?;
    }
    write.commit()?;
    Ok(())
}

fn open_database(path: &Path) -> Result<Database, StoreError> {
    Database::builder().set_cache_size(CACHE_BYTES).open(path).map_err(|error| refuse(path, "open", error))
}

/// Checks the checksum of every page: they are few, and a wrong epoch would undo the fencing. (redb itself checks
/// them only after a crash.)
fn verify(path: &Path, database: &mut Database) -> Result<(), StoreError> {
    match database.check_integrity() {
        Ok(true) => Ok(()),
        Ok(false) => Err(StoreError::Corrupt {
            path: path.to_owned(),
            reason: "checksums did not match; what could be saved is in the file now".to_owned(),
        }),
        Err(error) => Err(refuse(path, "verify", error)),
    }
}

fn refuse(path: &Path, action: &'static str, error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() },
        DatabaseError::Storage(StorageError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
            foreign(path, &error)
        }
        DatabaseError::Storage(StorageError::Corrupted(reason)) => {
            StoreError::Corrupt { path: path.to_owned(), reason }
        }
        DatabaseError::UpgradeRequired(version) => {
            foreign(path, &format!("it is of redb's file format {version}, written by an older program"))
        }
        other => io(path, action, &other),
    }
}

fn foreign(path: &Path, reason: &dyn std::fmt::Display) -> StoreError {
    StoreError::Foreign { path: path.to_owned(), reason: reason.to_string() }
}

fn io(path: &Path, action: &'static str, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, reason: error.to_string() }
}
