//! API servers and etcds that tests use one after the other.
//!
//! An API server takes seconds of processor time to start, and most tests only store objects in it. So a test returns
//! its servers, and the next test gets them with the content that they had at first: later objects are
//! deleted, and others restored, in their etcd. A process that a test may have stopped or restarted is not returned.
//!
//! All idle processes end with the last test that uses one: a test program has no other end of all tests.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Client, GetOptions};
use reprise_e2e::{ApiServer, Etcd, PATIENCE, TestEnv, wait_until};
use tokio::runtime::Runtime;

/// Time without a change after which the content is complete. Definitions get their conditions after they are applied.
const UNCHANGED_FOR: Duration = Duration::from_secs(1);

/// Keys that API servers write on their own: their identities, as leases.
const OWN_KEYS: &[u8] = b"/registry/leases/kube-system/";

/// API servers with definitions, namespaces and nodes.
pub(crate) static API_SERVERS: Pool<ApiServer> = Pool::new();
/// Empty etcds, for control planes.
pub(crate) static ETCDS: Pool<Etcd> = Pool::new();

/// A process whose content is in an etcd.
pub(crate) trait Stored: Sized + 'static {
    /// Prefix of its keys.
    const PREFIX: &str;

    /// Returns the URL of the etcd.
    fn endpoint(&self) -> String;

    /// Returns the logs of its processes.
    fn logs(&self) -> Vec<PathBuf>;
}

/// Idle processes of a kind.
pub(crate) struct Pool<T: Stored> {
    state: Mutex<State<T>>,
}

struct State<T> {
    idle: Vec<Ready<T>>,
    /// Number of processes that tests use now.
    used: usize,
}

/// A process with its folder, and its first content. The fields are dropped in this order.
struct Ready<T> {
    process: T,
    content: Content,
    _env: TestEnv,
}

/// A process that a test uses. It returns to its pool when dropped, unless it was borrowed mutably.
pub(crate) struct Lent<T: Stored> {
    ready: Option<Ready<T>>,
    pool: &'static Pool<T>,
    is_altered: bool,
}

/// Keys of an etcd with the revision of their last change, and their values.
struct Content(BTreeMap<Vec<u8>, (i64, Vec<u8>)>);

impl<T: Stored> Pool<T> {
    const fn new() -> Pool<T> {
        Pool { state: Mutex::new(State { idle: Vec::new(), used: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an idle process, or starts one and fills it. Its logs belong to the test with the environment `env`.
    /// Without `reuse` no other test uses the process, before or after.
    pub(crate) fn lend(
        &'static self,
        env: &TestEnv,
        reuse: bool,
        start: impl FnOnce(&TestEnv) -> T,
        fill: impl FnOnce(&T),
    ) -> Lent<T> {
        let idle = {
            let mut state = self.state();
            state.used += 1;
            if reuse { state.idle.pop() } else { None }
        };
        // Counted from here on, also if the start fails.
        let mut lent = Lent { ready: idle, pool: self, is_altered: !reuse };
        if let Some(ready) = &mut lent.ready {
            ready.content.restore(&ready.process);
        } else {
            let own = TestEnv::new();
            let process = start(&own);
            fill(&process);
            let content = Content::once_unchanged(&process);
            lent.ready = Some(Ready { process, content, _env: own });
        }
        for log in lent.logs() {
            env.watch_log(log);
        }
        lent
    }
}

impl<T: Stored> Deref for Lent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.ready.as_ref().expect("returned only when dropped").process
    }
}

impl<T: Stored> DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.is_altered = true;
        &mut self.ready.as_mut().expect("returned only when dropped").process
    }
}

impl<T: Stored> Drop for Lent<T> {
    fn drop(&mut self) {
        let is_usable = !self.is_altered && !std::thread::panicking();
        let mut state = self.pool.state();
        state.used -= 1;
        let mut ended: Vec<Ready<T>> = Vec::new();
        match self.ready.take() {
            Some(ready) if is_usable => state.idle.push(ready),
            other => ended.extend(other),
        }
        if state.used == 0 {
            ended.append(&mut state.idle);
        }
        // Processes end without the lock.
        drop(state);
        drop(ended);
    }
}

impl Content {
    /// Reads the content once it no longer changes.
    fn once_unchanged<T: Stored>(process: &T) -> Content {
        let mut before = Content::of(process);
        wait_until("an API server has its first content", PATIENCE, || {
            std::thread::sleep(UNCHANGED_FOR);
            let now = Content::of(process);
            let is_same = now.0 == before.0;
            before = now;
            is_same.then_some(())
        });
        before
    }

    fn of<T: Stored>(process: &T) -> Content {
        let found = run(async {
            let mut etcd = connect(process).await;
            let all = Some(GetOptions::new().with_prefix());
            etcd.get(T::PREFIX, all).await.expect("etcd answers")
        });
        let entry =
            |one: &etcd_client::KeyValue| (one.key().to_vec(), (one.mod_revision(), one.value().to_vec()));
        let lasting = found.kvs().iter().filter(|one| !one.key().starts_with(OWN_KEYS));
        Content(lasting.map(entry).collect())
    }

    /// Deletes new keys, and restores the others.
    fn restore<T: Stored>(&mut self, process: &T) {
        run(async {
            let mut etcd = connect(process).await;
            let keys = Some(GetOptions::new().with_prefix().with_keys_only());
            let found = etcd.get(T::PREFIX, keys).await.expect("etcd answers");
            let now: BTreeMap<&[u8], i64> =
                found.kvs().iter().map(|one| (one.key(), one.mod_revision())).collect();
            for key in now.keys().filter(|key| !self.0.contains_key(**key) && !key.starts_with(OWN_KEYS)) {
                etcd.delete(*key, None).await.expect("etcd answers");
            }
            for (key, (revision, value)) in &mut self.0 {
                if now.get(key.as_slice()) == Some(revision) {
                    continue;
                }
                let stored = etcd.put(key.clone(), value.clone(), None).await.expect("etcd answers");
                *revision = stored.header().expect("every answer has a header").revision();
            }
        });
    }
}

impl Stored for ApiServer {
    const PREFIX: &str = "/registry/";

    fn endpoint(&self) -> String {
        self.store_endpoint()
    }

    fn logs(&self) -> Vec<PathBuf> {
        ApiServer::logs(self).to_vec()
    }
}

impl Stored for Etcd {
    const PREFIX: &str = "";

    fn endpoint(&self) -> String {
        Etcd::endpoint(self)
    }

    fn logs(&self) -> Vec<PathBuf> {
        Vec::new()
    }
}

async fn connect<T: Stored>(process: &T) -> Client {
    Client::connect([process.endpoint()], None).await.expect("the etcd runs")
}

fn run<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime: Runtime = runtime.expect("a runtime can be built");
    runtime.block_on(future)
}
