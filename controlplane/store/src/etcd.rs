//! A store in etcd (3.5 or later): every fact under one prefix, so that several installations may share a cluster.
//!
//! etcd's model is this crate's: revisions, conditional transactions, ranges and watches by prefix. What differs:
//!
//! * A revision counts the changes of the whole cluster, of others too; it begins at 1 and not at 0.
//! * The answer to a transaction may be lost on its way: [`StoreError::Unavailable`] then says nothing about the
//!   outcome. Conditions make it safe to read again and decide anew.
//! * History is compacted for all who share the cluster, by whoever keeps it (`--auto-compaction-retention`). A watch
//!   that is cut off opens itself again behind the last change it has reported, and learns then whether that history
//!   is gone.
//!
//! Every call has a deadline. Reads are linearizable.
//!
//! Deliberately absent: a cache of entries (facts are few, and a stale one is worse than a slow one).

use std::fmt;
use std::time::Duration;

use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, ConnectOptions, DeleteOptions, Error as EtcdError,
    EventType, GetOptions, KvClient, Txn, TxnOp, WatchClient, WatchOptions, WatchResponse, WatchStream,
};
use tokio::time::{sleep, timeout};

use crate::contract::{
    Condition, Event, KeyValue, Outcome, Range, Revision, Store, StoreFuture, Transaction, Watch, WatchBatch,
    WatchSource, Write,
};
use crate::error::StoreError;
use crate::state::check;

/// Bytes of the prefix at the most: what is left of etcd's request limit (1.5 MiB) is not its concern.
const PREFIX_BYTES_MAX: usize = 256;
/// One call: an election of etcd takes about a second.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Finding out that an endpoint is silent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection whose other end is gone without a word is noticed within the sum.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);
/// Pauses between attempts to open a watch again: doubling up to the last.
const REOPEN_PAUSE_MIN: Duration = Duration::from_millis(50);
const REOPEN_PAUSE_MAX: Duration = Duration::from_secs(2);
/// gRPC's code for a revision that is compacted away, or not there yet.
const OUT_OF_RANGE: i32 = 11;

/// Where etcd is and what is ours in it.
#[derive(Clone)]
pub struct EtcdSettings {
    /// `http://host:port` of members, at least one.
    pub endpoints: Vec<String>,
    /// What every key begins with, for example `/reprise/`.
    pub prefix: String,
    /// Name and password, where etcd asks for them.
    pub user: Option<(String, String)>,
}

/// See the module. Clones are the same store.
#[derive(Clone)]
pub struct EtcdStore {
    client: Client,
    prefix: Vec<u8>,
}

impl EtcdStore {
    /// Connects.
    ///
    /// # Errors
    /// `Invalid` (no endpoint, or a bad one), `Unavailable` (no member answers, or it refuses the user).
    pub async fn connect(settings: &EtcdSettings) -> Result<EtcdStore, StoreError> {
        if settings.endpoints.is_empty() {
            return Err(StoreError::Invalid("name at least one endpoint of etcd".to_owned()));
        }
        if settings.prefix.len() > PREFIX_BYTES_MAX {
            return Err(StoreError::Invalid(format!(
                "a prefix of {} bytes: at most {PREFIX_BYTES_MAX}",
                settings.prefix.len()
            )));
        }
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(KEEP_ALIVE_EVERY, KEEP_ALIVE_ANSWER)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some((name, password)) = &settings.user {
            options = options.with_user(name, password).with_auto_token_refresh(true);
        }
        let client = within(Client::connect(&settings.endpoints, Some(options))).await?;
        let store = EtcdStore { client, prefix: settings.prefix.clone().into_bytes() };
        // Connections are made when they are needed: without a call nobody knows whether somebody is there.
        store.revision().await?;
        Ok(store)
    }

    fn kv(&self) -> KvClient {
        self.client.kv_client()
    }

    fn full(&self, key: &[u8]) -> Vec<u8> {
        [self.prefix.as_slice(), key].concat()
    }

    fn compare(&self, condition: &Condition) -> Vec<Compare> {
        match condition {
            Condition::Absent { key } => vec![Compare::version(self.full(key), CompareOp::Equal, 0)],
            // The revision of what is not there is 0 to etcd, which somebody might have asked for.
            Condition::Modified { key, revision } => vec![
                Compare::version(self.full(key), CompareOp::Greater, 0),
                Compare::mod_revision(self.full(key), CompareOp::Equal, wire(*revision)),
            ],
        }
    }

    fn operation(&self, write: &Write) -> TxnOp {
        match write {
            Write::Put { key, value } => TxnOp::put(self.full(key), value.as_slice(), None),
            Write::Delete { key } => TxnOp::delete(self.full(key), None::<DeleteOptions>),
        }
    }
}

impl Store for EtcdStore {
    fn get(&self, key: &[u8]) -> StoreFuture<'_, Option<KeyValue>> {
        let key = self.full(key);
        Box::pin(async move {
            let mut answer = within(self.kv().get(key, None)).await?;
            answer.take_kvs().into_iter().next().map(|entry| self.entry(&entry)).transpose()
        })
    }

    fn range(&self, prefix: &[u8], limit: usize) -> StoreFuture<'_, Range> {
        let prefix = self.full(prefix);
        Box::pin(async move {
            // 0 would mean no limit.
            let limit = i64::try_from(limit.max(1)).unwrap_or(i64::MAX);
            let options = match prefix.is_empty() {
                true => GetOptions::new().with_all_keys(),
                false => GetOptions::new().with_prefix(),
            };
            let mut answer = within(self.kv().get(prefix, Some(options.with_limit(limit)))).await?;
            let revision = header_revision(answer.header())?;
            let more = answer.more();
            let entries =
                answer.take_kvs().iter().map(|entry| self.entry(entry)).collect::<Result<_, _>>()?;
            Ok(Range { entries, more, revision })
        })
    }

    fn transact(&self, transaction: Transaction) -> StoreFuture<'_, Outcome> {
        Box::pin(async move {
            check(&transaction)?;
            let conditions: Vec<Compare> =
                transaction.conditions.iter().flat_map(|condition| self.compare(condition)).collect();
            let writes: Vec<TxnOp> = transaction.writes.iter().map(|write| self.operation(write)).collect();
            let answer = within(self.kv().txn(Txn::new().when(conditions).and_then(writes))).await?;
            match answer.succeeded() {
                true => Ok(Outcome::Committed(header_revision(answer.header())?)),
                false => Ok(Outcome::Conflict),
            }
        })
    }

    fn watch(&self, prefix: &[u8], from: Revision) -> StoreFuture<'_, Watch> {
        let prefix = prefix.to_vec();
        Box::pin(async move {
            let mut source = Source {
                store: self.clone(),
                prefix,
                // 0 would mean from now on.
                next: from.0.max(1),
                stream: None,
                pause: REOPEN_PAUSE_MIN,
            };
            source.open().await?;
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
            match within(kv.compact(wire(Revision(to)), Some(options))).await {
                // Somebody has compacted further.
                Err(StoreError::Compacted { .. }) | Ok(_) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn revision(&self) -> StoreFuture<'_, Revision> {
        // Of one key, since permissions may end at the prefix.
        let key = self.full(b"\0");
        Box::pin(async move {
            let answer = within(self.kv().get(key, Some(GetOptions::new().with_count_only()))).await?;
            header_revision(answer.header())
        })
    }
}

impl EtcdStore {
    fn key<'a>(&self, full: &'a [u8]) -> Result<&'a [u8], StoreError> {
        full.strip_prefix(self.prefix.as_slice()).ok_or_else(|| unavailable("a key outside of the prefix"))
    }

    fn entry(&self, entry: &etcd_client::KeyValue) -> Result<KeyValue, StoreError> {
        Ok(KeyValue {
            key: self.key(entry.key())?.to_vec(),
            value: entry.value().to_vec(),
            created: revision(entry.create_revision()),
            modified: revision(entry.mod_revision()),
            version: u64::try_from(entry.version()).unwrap_or(0),
        })
    }
}

/// A watch that outlives its connection.
struct Source {
    store: EtcdStore,
    prefix: Vec<u8>,
    /// The first revision not yet reported.
    next: u64,
    stream: Option<WatchStream>,
    pause: Duration,
}

impl Source {
    async fn open(&mut self) -> Result<(), StoreError> {
        let mut client: WatchClient = self.store.client.watch_client();
        let prefix = self.store.full(&self.prefix);
        let options = match prefix.is_empty() {
            true => WatchOptions::new().with_all_keys(),
            false => WatchOptions::new().with_prefix(),
        };
        let options = options.with_start_revision(wire(Revision(self.next)));
        self.stream = Some(within(client.watch(prefix, Some(options))).await?);
        Ok(())
    }

    /// What an answer says; `None` when it says nothing new.
    fn batch(&mut self, answer: &WatchResponse) -> Result<Option<WatchBatch>, StoreError> {
        if answer.compact_revision() > 0 {
            let oldest = Revision(revision(answer.compact_revision()).0 + 1);
            return Err(StoreError::Compacted { oldest });
        }
        if answer.canceled() {
            return Err(unavailable(answer.cancel_reason()));
        }
        let mut events = Vec::with_capacity(answer.events().len());
        for event in answer.events() {
            let Some(entry) = event.kv() else { continue };
            events.push(match event.event_type() {
                EventType::Put => Event::Put(self.store.entry(entry)?),
                EventType::Delete => Event::Deleted {
                    key: self.store.key(entry.key())?.to_vec(),
                    revision: revision(entry.mod_revision()),
                },
            });
        }
        let Some(last) = events.last().map(Event::revision) else { return Ok(None) };
        self.next = last.0 + 1;
        Ok(Some(WatchBatch { revision: last, events }))
    }
}

impl WatchSource for Source {
    fn next(&mut self) -> StoreFuture<'_, WatchBatch> {
        Box::pin(async move {
            loop {
                let answer = match &mut self.stream {
                    Some(stream) => stream.message().await,
                    None => {
                        sleep(self.pause).await;
                        self.pause = (self.pause * 2).min(REOPEN_PAUSE_MAX);
                        match self.open().await {
                            Ok(()) | Err(StoreError::Unavailable { .. }) => continue,
                            Err(error) => return Err(error),
                        }
                    }
                };
                match answer {
                    Ok(Some(answer)) => match self.batch(&answer) {
                        Ok(Some(batch)) => {
                            self.pause = REOPEN_PAUSE_MIN;
                            return Ok(batch);
                        }
                        Ok(None) => {}
                        Err(error @ StoreError::Compacted { .. }) => return Err(error),
                        Err(_) => self.stream = None,
                    },
                    Ok(None) | Err(_) => self.stream = None,
                }
            }
        })
    }
}

/// A call with its deadline.
async fn within<T>(call: impl Future<Output = Result<T, EtcdError>>) -> Result<T, StoreError> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(translate(&error)),
        Err(_) => Err(unavailable(&format!("no answer within {CALL_TIMEOUT:?}"))),
    }
}

fn translate(error: &EtcdError) -> StoreError {
    match error {
        EtcdError::InvalidArgs(_) | EtcdError::InvalidUri(_) => StoreError::Invalid(error.to_string()),
        EtcdError::GRpcStatus(status) if status.code() as i32 == OUT_OF_RANGE => {
            // Which revision is the oldest is not said; whoever reads the range again learns a later one.
            StoreError::Compacted { oldest: Revision(0) }
        }
        other => unavailable(&other.to_string()),
    }
}

fn unavailable(reason: &str) -> StoreError {
    StoreError::Unavailable { reason: reason.to_owned() }
}

fn header_revision(header: Option<&etcd_client::ResponseHeader>) -> Result<Revision, StoreError> {
    header.map(|header| revision(header.revision())).ok_or_else(|| unavailable("an answer without a header"))
}

fn revision(number: i64) -> Revision {
    Revision(u64::try_from(number).unwrap_or(0))
}

fn wire(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore")
            .field("prefix", &String::from_utf8_lossy(&self.prefix))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for EtcdSettings {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.user.as_ref().map(|(name, _)| name);
        f.debug_struct("EtcdSettings")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("user", &user)
            .finish_non_exhaustive()
    }
}
