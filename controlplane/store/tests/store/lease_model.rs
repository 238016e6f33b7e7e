//! Compares the local stores with a simple model: random grants, keep-alives, revocations, writes, passing
//! time and restarts.
//!
//! A failing case is printed with all its steps.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use reprise_controlplane_store::{
    EmbeddedStore, Event, LeaseId, MemoryStore, Outcome, Revision, Store, StoreError, TimeToLive,
    Transaction, Write,
};
use tokio::time::advance;

#[derive(Clone, Debug)]
enum Step {
    Grant {
        seconds: u64,
    },
    KeepAlive {
        lease: usize,
    },
    Revoke {
        lease: usize,
    },
    /// Keys, each with the index of its lease, if any.
    Put {
        writes: BTreeMap<u8, Option<usize>>,
    },
    Delete {
        key: u8,
    },
    Pass {
        milliseconds: u64,
    },
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lease = 0usize..6;
    let writes = prop::collection::btree_map(0u8..6, prop::option::weighted(0.8, lease.clone()), 1..4);
    let step = prop_oneof![
        3 => (1u64..6).prop_map(|seconds| Step::Grant { seconds }),
        3 => lease.clone().prop_map(|lease| Step::KeepAlive { lease }),
        1 => lease.prop_map(|lease| Step::Revoke { lease }),
        6 => writes.prop_map(|writes| Step::Put { writes }),
        1 => (0u8..6).prop_map(|key| Step::Delete { key }),
        3 => prop_oneof![Just(1000), 1u64..4000].prop_map(|milliseconds| Step::Pass { milliseconds }),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..60)
}

/// A model of a store with leases.
#[derive(Default)]
struct Model {
    now: Duration,
    revision: u64,
    entries: BTreeMap<u8, Option<LeaseId>>,
    /// All granted leases with time to live and expiry; `None` after the end of a lease.
    leases: Vec<(LeaseId, Duration, Option<Duration>)>,
}

impl Model {
    fn is_alive(&self, lease: LeaseId) -> bool {
        self.leases.iter().any(|(id, _, end)| *id == lease && end.is_some())
    }

    fn end(&mut self, lease: LeaseId) {
        let before = self.entries.len();
        self.entries.retain(|_, under| *under != Some(lease));
        self.revision += u64::from(self.entries.len() < before);
        self.leases.iter_mut().filter(|(id, _, _)| *id == lease).for_each(|(_, _, end)| *end = None);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let mut ended: Vec<_> = self
            .leases
            .iter()
            .filter_map(|(id, _, end)| end.filter(|end| *end <= self.now).map(|end| (end, *id)))
            .collect();
        ended.sort();
        ended.into_iter().for_each(|(_, lease)| self.end(lease));
    }

    fn renew(&mut self, chosen: impl Fn(LeaseId) -> bool) {
        let now = self.now;
        for (id, time_to_live, end) in &mut self.leases {
            if chosen(*id) && end.is_some() {
                *end = Some(now + *time_to_live);
            }
        }
    }
}

/// A granted lease by its index.
fn chosen(model: &Model, number: usize) -> Option<LeaseId> {
    model.leases.get(number).map(|(id, _, _)| *id)
}

fn is_gone<T>(answer: Result<T, StoreError>) -> bool {
    match answer {
        Ok(_) => false,
        Err(StoreError::LeaseGone) => true,
        Err(other) => panic!("{other}"),
    }
}

async fn take(store: &dyn Store, model: &mut Model, step: &Step) {
    match step {
        Step::Grant { seconds } => {
            let time_to_live = Duration::from_secs(*seconds);
            let lease = store.grant(TimeToLive::new(time_to_live).expect("valid")).await.expect("granted");
            assert!(
                model.leases.iter().all(|(id, _, _)| *id != lease.id),
                "{} was assigned before",
                lease.id
            );
            model.leases.push((lease.id, time_to_live, Some(model.now + time_to_live)));
        }
        Step::KeepAlive { lease } => {
            let Some(lease) = chosen(model, *lease) else { return };
            assert_eq!(is_gone(store.keep_alive(lease).await), !model.is_alive(lease));
            model.renew(|id| id == lease);
        }
        Step::Revoke { lease } => {
            let Some(lease) = chosen(model, *lease) else { return };
            assert_eq!(is_gone(store.revoke(lease).await), !model.is_alive(lease));
            model.end(lease);
        }
        Step::Put { writes } => put(store, model, writes).await,
        Step::Delete { key } => {
            let write = Write::Delete { key: vec![*key] };
            let transaction = Transaction { conditions: Vec::new(), writes: vec![write] };
            store.transact(transaction).await.expect("valid");
            model.revision += u64::from(model.entries.remove(key).is_some());
        }
        Step::Pass { milliseconds } => {
            let time = Duration::from_millis(*milliseconds);
            advance(time).await;
            model.pass(time);
        }
        Step::Restart => model.renew(|_| true),
    }
}

async fn put(store: &dyn Store, model: &mut Model, writes: &BTreeMap<u8, Option<usize>>) {
    let under: BTreeMap<u8, Option<LeaseId>> =
        writes.iter().map(|(key, lease)| (*key, lease.and_then(|lease| chosen(model, lease)))).collect();
    let writes = under
        .iter()
        .map(|(key, lease)| Write::Put { key: vec![*key], value: Vec::new(), lease: *lease })
        .collect();
    let answer = store.transact(Transaction { conditions: Vec::new(), writes }).await;
    if under.values().flatten().all(|lease| model.is_alive(*lease)) {
        model.revision += 1;
        assert_eq!(answer.expect("valid"), Outcome::Committed(Revision(model.revision)));
        model.entries.extend(under);
    } else {
        assert!(is_gone(answer), "a lease of {under:?} has ended");
    }
}

async fn compare(store: &dyn Store, model: &Model) {
    let range = store.range(b"", 100).await.expect("a range");
    let entries: BTreeMap<u8, _> = range.entries.iter().map(|entry| (entry.key[0], entry.lease)).collect();
    assert_eq!((&entries, range.revision), (&model.entries, Revision(model.revision)));
    let mut watch = store.watch(b"", Revision(1)).await.expect("a watch");
    let (mut replayed, mut revision) = (BTreeMap::new(), 0);
    while revision < model.revision {
        for event in watch.next().await.expect("changes").events {
            revision = event.revision().0;
            match event {
                Event::Put(entry) => replayed.insert(entry.key[0], entry.lease),
                Event::Deleted { key, .. } => replayed.remove(&key[0]),
            };
        }
    }
    assert_eq!(replayed, model.entries, "the state that the events produce");
}

fn run(steps: &[Step], mut restart: impl FnMut(Option<Box<dyn Store>>) -> Box<dyn Store>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let mut store = restart(None);
        let mut model = Model::default();
        for step in steps {
            if matches!(step, Step::Restart) {
                store = restart(Some(store));
            }
            take(&*store, &mut model, step).await;
            compare(&*store, &model).await;
        }
    });
}

fn embedded(path: &Path) -> Box<dyn Store> {
    Box::new(EmbeddedStore::open(path).expect("a store"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn the_memory_store_behaves_like_the_model(steps in steps()) {
        // Its contents end with the process, so it is not restarted.
        let steps: Vec<_> = steps.into_iter().filter(|step| !matches!(step, Step::Restart)).collect();
        run(&steps, |_| Box::new(MemoryStore::new()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn the_embedded_store_behaves_like_the_model(steps in steps()) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store");
        run(&steps, |open| {
            drop(open);
            embedded(&path)
        });
    }
}
