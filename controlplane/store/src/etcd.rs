//! A store in etcd (3.5 or later). All keys share one prefix, so several installations may share a cluster.
//!
//! | key                     | value                                        |
//! |-------------------------|----------------------------------------------|
//! | `<prefix>schema`        | schema version of these keys, decimal; written first |
//! | `<prefix>entries/<key>` | value of the entry                           |
//!
//! The [`Store`] interface follows etcd's model. Differences from the local stores:
//!
//! * A revision counts the changes of the whole cluster, including those of other users. It starts at 1, not
//!   0.
//! * The reply to a transaction may be lost. [`StoreError::Unavailable`] then leaves its outcome open;
//!   because of the conditions it is safe to read again and retry.
//! * History is compacted for all users of the cluster, by etcd itself (`--auto-compaction-retention`) or
//!   another user. A watch whose connection breaks reopens after its last reported change, and detects then
//!   whether that history is compacted.
//!
//! Files of certificates and the password may change while the store is in use ([`EtcdStore::use_changed_files`]).
//!
//! Every call has a deadline. Reads are linearizable. An etcd whose revision went backwards, because it was
//! restored or emptied, is detected (`etcd/revision_check.rs`).
//!
//! Not supported: caching entries, because they are few and stale ones do harm; the system's certificate
//! authorities, because etcd clusters use their own.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions, GetResponse,
    KvClient, PutOptions, Txn, TxnOp,
};

use self::calls::{revision, unavailable, wire, within};
use self::revision_check::RevisionCheck;
use self::settings::Files;
use self::watch::EtcdWatch;
use crate::contract::{
    Condition, KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch, Write,
};
use crate::error::StoreError;
use crate::lease::{Lease, LeaseId, TimeToLive};
use crate::state::check;

mod calls;
mod revision_check;
mod settings;
mod tls;
mod watch;

pub use settings::{EtcdIdentity, EtcdSettings, EtcdTls, EtcdUser};

/// Schema version of the keys above. Other versions are rejected with [`StoreError::Schema`].
const SCHEMA: u64 = 1;
const SCHEMA_KEY: &[u8] = b"schema";
const ENTRIES_PREFIX: &[u8] = b"entries/";
/// Entries per page of a range. 512 × (64 KiB and a key) fit in a message.
const PAGE_ENTRIES: usize = 512;
/// Maximum size of a reply in bytes. A watch from an old revision gets up to 1,000 revisions in one reply.
const MESSAGE_BYTES_MAX: usize = 128 << 20;
/// Attempts to read a range whose revision was compacted between two pages.
const RANGE_ATTEMPTS_MAX: usize = 3;

/// A store in etcd. Clones share the connection.
#[derive(Clone)]
pub struct EtcdStore {
    connection: Arc<Connection>,
    /// Prefix of the keys of all entries.
    prefix: Vec<u8>,
    revisions: Arc<RevisionCheck>,
}

/// The client in use, and the files from which it was made.
struct Connection {
    settings: EtcdSettings,
    client: RwLock<Client>,
    files: Mutex<Files>,
}

impl EtcdStore {
    /// Connects to etcd and checks the schema version.
    ///
    /// # Errors
    /// `Setting` (a setting or one of its files is invalid), `Unavailable` (no endpoint answers), `Denied`
    /// (the user is rejected), `Untrusted` (the TLS handshake fails), `Schema` (keys of another version).
    pub async fn connect(settings: &EtcdSettings) -> Result<EtcdStore, StoreError> {
        let files = EtcdStore::blocking(settings, EtcdSettings::files).await?;
        let client = EtcdStore::open(settings).await?;
        let prefix = [settings.prefix.as_bytes(), ENTRIES_PREFIX].concat();
        let connection =
            Connection { settings: settings.clone(), client: RwLock::new(client), files: Mutex::new(files) };
        Ok(EtcdStore { connection: Arc::new(connection), prefix, revisions: Arc::default() })
    }

    /// Compares the files of certificates and of the password with those in use, and connects with changed ones. Returns
    /// whether they changed. The connection before stays in use until etcd answers with the new files. Open watches stay
    /// on their connection until it breaks.
    ///
    /// # Errors
    /// As for [`EtcdStore::connect`], with the changed files. A single error may come from files that are being replaced.
    pub async fn use_changed_files(&self) -> Result<bool, StoreError> {
        let Connection { settings, client, files } = &*self.connection;
        let found = EtcdStore::blocking(settings, EtcdSettings::files).await?;
        if found == *files.lock().unwrap_or_else(PoisonError::into_inner) {
            return Ok(false);
        }
        let new = EtcdStore::open(settings).await?;
        *client.write().unwrap_or_else(PoisonError::into_inner) = new;
        *files.lock().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(true)
    }

    /// Runs a function that blocks.
    async fn blocking<T: Send + 'static>(
        settings: &EtcdSettings,
        function: impl FnOnce(&EtcdSettings) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let settings = settings.clone();
        let result = tokio::task::spawn_blocking(move || function(&settings)).await;
        result.map_err(|error| unavailable(&error.to_string()))
    }

    /// Connects with the present files, and checks the schema version.
    async fn open(settings: &EtcdSettings) -> Result<Client, StoreError> {
        let (options, tls) = EtcdStore::blocking(settings, EtcdSettings::load).await??;
        // Boxed, because the client's future is large.
        let opened = Box::pin(EtcdStore::open_with(settings, options)).await;
        if let (Err(StoreError::Unavailable { .. }), Some(tls)) = (&opened, tls)
            && let Some(reason) = tls.diagnose(&settings.endpoints).await
        {
            return Err(StoreError::Untrusted { reason });
        }
        opened
    }

    async fn open_with(settings: &EtcdSettings, options: ConnectOptions) -> Result<Client, StoreError> {
        let client = within(Client::connect(&settings.endpoints, Some(options))).await?;
        // The client connects lazily, so only a call shows whether etcd answers.
        EtcdStore::check_schema(&client, [settings.prefix.as_bytes(), SCHEMA_KEY].concat()).await?;
        Ok(client)
    }

    /// Writes the schema version if it is missing, and rejects any other.
    async fn check_schema(client: &Client, key: Vec<u8>) -> Result<(), StoreError> {
        let mut kv = client.kv_client();
        let version = SCHEMA.to_string();
        let first = Txn::new()
            .when([Compare::version(key.clone(), CompareOp::Equal, 0)])
            .and_then([TxnOp::put(key.clone(), version.clone(), None)]);
        within(kv.txn(first)).await?;
        let found = within(kv.get(key.clone(), None)).await?;
        let found = found.kvs().first().map_or("", |entry| entry.value_str().unwrap_or("not text"));
        let place = || format!("key {} of etcd", String::from_utf8_lossy(&key));
        match found.parse() {
            Ok(SCHEMA) => Ok(()),
            Ok(found) => Err(StoreError::Schema { place: place(), found, supported: SCHEMA }),
            Err(_) => Err(StoreError::Invalid(format!(
                "invalid schema version '{found}' in {}: another program seems to use these keys, set another store.prefix",
                place()
            ))),
        }
    }

    fn client(&self) -> RwLockReadGuard<'_, Client> {
        self.connection.client.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn kv(&self) -> KvClient {
        self.client().kv_client().max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Reads a key or range with the revision of the reply.
    async fn read(
        &self,
        key: Vec<u8>,
        options: Option<GetOptions>,
    ) -> Result<(GetResponse, Revision), StoreError> {
        let before = self.revisions.begin_call();
        let answer = within(self.kv().get(key, options)).await?;
        let revision = self.revisions.check_answer(before, answer.header())?;
        Ok((answer, revision))
    }

    fn full(&self, key: &[u8]) -> Vec<u8> {
        [self.prefix.as_slice(), key].concat()
    }

    fn compare(&self, condition: &Condition) -> Vec<Compare> {
        match condition {
            Condition::Absent { key } => vec![Compare::version(self.full(key), CompareOp::Equal, 0)],
            // etcd reports revision 0 for missing keys, so require existence as well.
            Condition::Modified { key, revision } => vec![
                Compare::version(self.full(key), CompareOp::Greater, 0),
                Compare::mod_revision(self.full(key), CompareOp::Equal, wire(revision.0)),
            ],
        }
    }

    fn operation(&self, write: &Write) -> TxnOp {
        match write {
            Write::Put { key, value, lease } => {
                let options = lease.map(|lease| PutOptions::new().with_lease(wire(lease.number())));
                TxnOp::put(self.full(key), value.as_slice(), options)
            }
            Write::Delete { key } => TxnOp::delete(self.full(key), None::<DeleteOptions>),
        }
    }

    /// Reads a range at one revision, page by page.
    async fn pages(&self, prefix: &[u8], limit: usize) -> Result<Range, StoreError> {
        let mut range = Range { entries: Vec::new(), more: true, revision: Revision(0) };
        let mut start = prefix.to_vec();
        while range.more {
            let page = limit.saturating_sub(range.entries.len()).min(PAGE_ENTRIES);
            // A limit of 0 means unlimited in etcd: request one entry to learn whether there are more.
            let options = GetOptions::new()
                .with_range(end_of(prefix))
                .with_limit(wire(page.max(1) as u64))
                .with_revision(wire(range.revision.0));
            let (answer, revision) = self.read(start, Some(options)).await?;
            if range.revision == Revision(0) {
                range.revision = revision;
            }
            if page == 0 {
                range.more = !answer.kvs().is_empty();
                break;
            }
            for entry in answer.kvs() {
                range.entries.push(self.entry(entry)?);
            }
            range.more = answer.more();
            start = answer.kvs().last().map_or_else(Vec::new, |entry| [entry.key(), b"\0"].concat());
            if range.entries.len() >= limit {
                break;
            }
        }
        Ok(range)
    }

    fn key<'a>(&self, full: &'a [u8]) -> Result<&'a [u8], StoreError> {
        full.strip_prefix(self.prefix.as_slice())
            .ok_or_else(|| unavailable("etcd returned a key outside of the prefix"))
    }

    fn entry(&self, entry: &etcd_client::KeyValue) -> Result<KeyValue, StoreError> {
        Ok(KeyValue {
            key: self.key(entry.key())?.to_vec(),
            value: entry.value().to_vec(),
            created: revision(entry.create_revision()),
            modified: revision(entry.mod_revision()),
            version: u64::try_from(entry.version()).unwrap_or(0),
            lease: lease_id(entry.lease()),
        })
    }
}

impl Store for EtcdStore {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        let key = self.full(key);
        Box::pin(async move {
            let (mut answer, _) = self.read(key, None).await?;
            answer.take_kvs().into_iter().next().map(|entry| self.entry(&entry)).transpose()
        })
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        let prefix = self.full(prefix);
        Box::pin(async move {
            for _ in 0..RANGE_ATTEMPTS_MAX {
                match self.pages(&prefix, limit).await {
                    Err(StoreError::Compacted { .. }) => {}
                    range => return range,
                }
            }
            Err(unavailable("the revision was compacted while a range was read"))
        })
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        Box::pin(async move {
            check(&transaction)?;
            let conditions: Vec<Compare> =
                transaction.conditions.iter().flat_map(|condition| self.compare(condition)).collect();
            let writes: Vec<TxnOp> = transaction.writes.iter().map(|write| self.operation(write)).collect();
            let before = self.revisions.begin_call();
            let answer = within(self.kv().txn(Txn::new().when(conditions).and_then(writes))).await?;
            let revision = self.revisions.check_answer(before, answer.header())?;
            match answer.succeeded() {
                true => Ok(Outcome::Committed(revision)),
                false => Ok(Outcome::Conflict),
            }
        })
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        let prefix = prefix.to_vec();
        Box::pin(async move {
            let source = EtcdWatch::start(self.clone(), prefix, from).await?;
            Ok(Watch::new(Box::new(source)))
        })
    }

    fn compact(&self, oldest: Revision) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let to = oldest.0.saturating_sub(1);
            if to == 0 {
                return Ok(());
            }
            let mut kv = self.kv();
            let options = CompactionOptions::new().with_physical();
            match within(kv.compact(wire(to), Some(options))).await {
                // Already compacted further.
                Err(StoreError::Compacted { .. }) | Ok(_) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        // Read a single key, because permissions may end at the prefix.
        let key = self.full(b"\0");
        Box::pin(async move {
            self.read(key, Some(GetOptions::new().with_count_only())).await.map(|(_, revision)| revision)
        })
    }

    fn grant(&self, time_to_live: TimeToLive) -> StoreFuture<'_, Lease> {
        Box::pin(async move {
            let mut leases = self.client().lease_client();
            let answer = within(leases.grant(wire(time_to_live.seconds()), None)).await?;
            let id =
                lease_id(answer.id()).ok_or_else(|| unavailable("etcd granted a lease without an id"))?;
            let granted = TimeToLive::of_seconds(u64::try_from(answer.ttl()).unwrap_or(0));
            Ok(Lease { id, time_to_live: granted })
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            // `keep_alive` returns after the first reply; drop the stream for more.
            let mut leases = self.client().lease_client();
            within(leases.keep_alive(wire(lease.number()))).await.map(drop)
        })
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let mut leases = self.client().lease_client();
            within(leases.revoke(wire(lease.number()))).await.map(drop)
        })
    }
}

/// Converts a lease number of etcd; 0 means no lease, and assigned numbers are positive.
fn lease_id(number: i64) -> Option<LeaseId> {
    u64::try_from(number).ok().and_then(LeaseId::new)
}

/// End of the range of keys with `prefix`, which must contain a byte below 255.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    end
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore")
            .field("prefix", &String::from_utf8_lossy(&self.prefix))
            .finish_non_exhaustive()
    }
}
