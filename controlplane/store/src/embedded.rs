//! A store in one file (redb): every committed transaction survives `kill -9` and power loss.
//!
//! Tables, schema version 2:
//!
//! | table     | key                         | value                                        |
//! |-----------|-----------------------------|----------------------------------------------|
//! | `meta`    | `schema`, `revision`, `compacted`, `last_lease` | u64                      |
//! | `entries` | key                         | created, modified, version, lease, value     |
//! | `history` | revision, index             | put?, created, version, lease, key, value    |
//! | `leases`  | number                      | time to live in seconds                      |
//!
//! A lease of 0 means no lease. Expiry times are not stored: after opening, each lease has its whole time to
//! live.
//!
//! The file is created under a temporary name and linked into place when complete, so that a crash leaves no
//! incomplete store. redb locks the file, and a second opener gets an error. Writes run on the runtime's
//! blocking threads, one after another, and complete even if the caller is cancelled.

use std::fs;
use std::io::ErrorKind;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError,
};
use reprise_policy::Tick;

use crate::contract::{Event, KeyValue, Revision};
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};
use crate::local::{Durable, Local, LocalStore, PendingChange};
use crate::state::{LeaseChange, State};

/// Schema version of the tables above. Other versions are rejected with [`StoreError::Schema`].
const SCHEMA: u64 = 2;
/// Size of redb's page cache. Reads use the in-memory state, so the cache only serves writes.
const CACHE_BYTES: usize = 4 << 20;

const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");
const ENTRIES: TableDefinition<'static, &[u8], EntryRow> = TableDefinition::new("entries");
const HISTORY: TableDefinition<'static, (u64, u32), HistoryRow> = TableDefinition::new("history");
const LEASES: TableDefinition<'static, u64, u64> = TableDefinition::new("leases");

/// Columns: created, modified, version, lease, value.
type EntryRow = (u64, u64, u64, u64, &'static [u8]);
/// Columns: put or deleted, created, version, lease, key, value.
type HistoryRow = (bool, u64, u64, u64, &'static [u8], &'static [u8]);

/// A store in one file. Clones share it.
#[derive(Clone, Debug)]
pub struct EmbeddedStore {
    local: Arc<Local<File>>,
}

#[derive(Debug)]
pub(crate) struct File {
    path: PathBuf,
    database: Database,
}

impl EmbeddedStore {
    /// Opens the store, or creates it if the file does not exist. Blocks, so call it before serving.
    pub fn open(path: &Path) -> Result<EmbeddedStore, StoreError> {
        let exists = path.try_exists().map_err(|error| io(path, "find", &error))?;
        if !exists {
            create(path)?;
        }
        // redb panics on some kinds of damage, such as a flipped bit in an allocator page. Unwinding closes
        // the file, and no state that the panic touched is used again.
        let opened = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let mut database = open_database(path)?;
            verify(path, &mut database)?;
            let state = load(path, &database)?;
            Ok((database, state))
        }));
        let (database, state) = opened.unwrap_or_else(|_| {
            Err(StoreError::Corrupt {
                path: path.to_owned(),
                reason: "its pages are inconsistent".to_owned(),
            })
        })?;
        let file = File { path: path.to_owned(), database };
        Ok(EmbeddedStore { local: Local::new(path.to_owned(), file, state) })
    }
}

impl LocalStore for EmbeddedStore {
    type Durable = File;

    fn local(&self) -> &Arc<Local<File>> {
        &self.local
    }
}

impl Durable for File {
    const BLOCKS: bool = true;

    fn save(&mut self, next: &PendingChange<'_>) -> Result<(), StoreError> {
        save(&self.database, next).map_err(|error| io(&self.path, "write", &error))
    }
}

/// Writes a change in one durable transaction.
fn save(database: &Database, next: &PendingChange<'_>) -> Result<(), redb::Error> {
    let PendingChange { change, revision, compacted } = *next;
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        meta.insert("revision", revision)?;
        meta.insert("compacted", change.compact_to)?;
        let mut leases = write.open_table(LEASES)?;
        match &change.lease {
            None => {}
            Some(LeaseChange::Granted(lease)) => {
                meta.insert("last_lease", lease.id.number())?;
                leases.insert(lease.id.number(), lease.time_to_live.seconds())?;
            }
            Some(LeaseChange::Gone(lease)) => {
                leases.remove(lease.number())?;
            }
        }
        let mut entries = write.open_table(ENTRIES)?;
        let mut history = write.open_table(HISTORY)?;
        for (index, event) in (0..).zip(&change.events) {
            let place = (revision, index);
            match event {
                Event::Put(KeyValue { key, value, created, modified, version, lease }) => {
                    let (key, value) = (key.as_slice(), value.as_slice());
                    let lease = lease.map_or(0, LeaseId::number);
                    entries.insert(key, (created.0, modified.0, *version, lease, value))?;
                    history.insert(place, (true, created.0, *version, lease, key, value))?;
                }
                Event::Deleted { key, .. } => {
                    entries.remove(key.as_slice())?;
                    history.insert(place, (false, 0, 0, 0, key.as_slice(), [].as_slice()))?;
                }
            }
        }
        if change.compact_to > compacted {
            history.retain_in(..(change.compact_to + 1, 0), |_, _| false)?;
        }
    }
    write.commit()?;
    Ok(())
}

/// Reads the whole store into memory.
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
        value.map(|value| value.value()).ok_or_else(|| foreign(path, &format!("missing {name}")))
    };
    let found = number("schema")?;
    if found != SCHEMA {
        return Err(StoreError::Schema { place: path.display().to_string(), found, supported: SCHEMA });
    }
    let mut state = State {
        revision: number("revision")?,
        compacted: number("compacted")?,
        last_lease: number("last_lease")?,
        ..State::default()
    };
    read_entries(&read, &mut state).map_err(corrupt)?;
    Ok(state)
}

fn read_entries(read: &redb::ReadTransaction, state: &mut State) -> Result<(), redb::Error> {
    for lease in read.open_table(LEASES)?.iter()? {
        let (number, seconds) = lease?;
        let Some(id) = LeaseId::new(number.value()) else { continue };
        state.leases.insert(Lease { id, time_to_live: TimeToLive::of_seconds(seconds.value()) }, Tick(0));
    }
    for entry in read.open_table(ENTRIES)?.iter()? {
        let (key, row) = entry?;
        let (key, (created, modified, version, lease, value)) = (key.value().to_vec(), row.value());
        let (created, modified, lease) = (Revision(created), Revision(modified), LeaseId::new(lease));
        if let Some(lease) = lease {
            state.leases.attach(lease, key.clone());
        }
        let entry = KeyValue { key: key.clone(), value: value.to_vec(), created, modified, version, lease };
        state.entries.insert(key, entry);
    }
    for event in read.open_table(HISTORY)?.iter()? {
        let (place, row) = event?;
        let revision = Revision(place.value().0);
        let (put, created, version, lease, key, value) = row.value();
        let key = key.to_vec();
        state.history.push_back(match put {
            true => Event::Put(KeyValue {
                key,
                value: value.to_vec(),
                created: Revision(created),
                modified: revision,
                version,
                lease: LeaseId::new(lease),
            }),
            false => Event::Deleted { key, revision },
        });
    }
    Ok(())
}

/// Creates an empty store under a temporary name and links it into place when complete. If another process
/// was faster, its store is kept.
fn create(path: &Path) -> Result<(), StoreError> {
    let refused = |error: std::io::Error| io(path, "create", &error);
    let mut temporary = path.to_owned().into_os_string();
    temporary.push(format!(".creating-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    // Left over from a crashed process with the same id.
    let _ = fs::remove_file(&temporary);
    let created = Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create(&temporary)
        .map_err(|error| store_error(path, "create", error))
        .and_then(|database| initialise(&database).map_err(|error| io(path, "create", &error)));
    let linked = created.and_then(|()| match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(refused(error)),
        _ => Ok(()),
    });
    // Only the temporary name remains if this fails.
    let _ = fs::remove_file(&temporary);
    linked?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(refused)
}

fn initialise(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    {
        let mut meta = write.open_table(META)?;
        for (name, value) in [("schema", SCHEMA), ("revision", 0), ("compacted", 0), ("last_lease", 0)] {
            meta.insert(name, value)?;
        }
        write.open_table(ENTRIES)?;
        write.open_table(HISTORY)?;
        write.open_table(LEASES)?;
    }
    write.commit()?;
    Ok(())
}

fn open_database(path: &Path) -> Result<Database, StoreError> {
    Database::builder()
        .set_cache_size(CACHE_BYTES)
        .open(path)
        .map_err(|error| store_error(path, "open", error))
}

/// Verifies the checksums of all pages, because a wrong epoch would break fencing. There are few pages. redb
/// itself verifies them only after a crash.
fn verify(path: &Path, database: &mut Database) -> Result<(), StoreError> {
    match database.check_integrity() {
        Ok(true) => Ok(()),
        Ok(false) => Err(StoreError::Corrupt {
            path: path.to_owned(),
            reason: "checksum mismatch; the file now contains the recoverable part".to_owned(),
        }),
        Err(error) => Err(store_error(path, "verify", error)),
    }
}

fn store_error(path: &Path, action: &'static str, error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() },
        DatabaseError::Storage(StorageError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
            foreign(path, &error)
        }
        DatabaseError::Storage(StorageError::Corrupted(reason)) => {
            StoreError::Corrupt { path: path.to_owned(), reason }
        }
        DatabaseError::UpgradeRequired(version) => {
            foreign(path, &format!("redb file format {version} of an older program"))
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
