//! Members over a store in memory, with paused time.

use reprise_controlplane_store::MemoryStore;

use super::*;

const LIFE: Duration = Duration::from_secs(2);

/// A running member; stopped cleanly by [`Running::stop`], killed by dropping it.
struct Running {
    shards: Arc<Shards>,
    stop: watch::Sender<bool>,
    hold: tokio::task::JoinHandle<()>,
    follow: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(store: &Arc<MemoryStore>, text: &str) -> Running {
        let identity = Identity::load_or_create(store.as_ref()).await.expect("created");
        Running::with(store, identity, text)
    }

    fn with(store: &Arc<MemoryStore>, identity: Identity, text: &str) -> Running {
        let life = TimeToLive::new(LIFE).expect("within the limits");
        let shards = Arc::new(Shards::new((store.clone(), identity), name(text), format!("{text}:1"), life));
        let stop = watch::Sender::new(false);
        let (lease_status, following, stopped) = (shards.clone(), shards.clone(), stop.subscribe());
        let hold = tokio::spawn(async move { lease_status.keep_registered(stopped).await });
        let follow = tokio::spawn(async move { following.follow().await });
        Running { shards, stop, hold, follow }
    }

    /// Waits until the member knows exactly these members.
    async fn sees(&self, names: &[&str]) -> Arc<MemberView> {
        let expected: Vec<MemberName> = names.iter().map(|text| name(text)).collect();
        let mut updates = self.shards.watch();
        let seen = updates.wait_for(|updates| match updates {
            MembersUpdate::Members(view) => view.map.members() == expected,
            MembersUpdate::Closing => false,
        });
        drop(
            timeout(LIFE * 10, seen)
                .await
                .unwrap_or_else(|_| panic!("expected {names:?}, got {:?}", self.shards.view())),
        );
        self.shards.view().expect("not shutting down")
    }

    async fn stop(self) {
        self.stop.send_replace(true);
        timeout(LIFE, self.hold).await.expect("in time").expect("no panic");
        self.follow.abort();
    }
}

fn name(text: &str) -> MemberName {
    MemberName::new(text).expect("a name")
}

#[tokio::test(start_paused = true)]
async fn members_agree_on_the_owner_of_every_slot() {
    let store = Arc::new(MemoryStore::new());
    let (a, b) = (Running::start(&store, "a").await, Running::start(&store, "b").await);
    let (of_a, of_b) = (a.sees(&["a", "b"]).await, b.sees(&["a", "b"]).await);
    assert_eq!(of_a, of_b);
    let b_of_a = of_a.find(&name("b")).expect("a member");
    assert_eq!((b_of_a.address.as_str(), b_of_a.version.as_str()), ("b:1", env!("CARGO_PKG_VERSION")));
    assert!(a.shards.is_registered() && b.shards.is_registered());
    let c = Running::start(&store, "c").await;
    let three = a.sees(&["a", "b", "c"]).await;
    assert!(three.map.epoch() > of_a.map.epoch());
    assert_eq!(c.sees(&["a", "b", "c"]).await, three);
    for running in [a, b, c] {
        running.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stopped_member_is_removed_at_once() {
    let store = Arc::new(MemoryStore::new());
    let (a, b) = (Running::start(&store, "a").await, Running::start(&store, "b").await);
    a.sees(&["a", "b"]).await;
    let began = Instant::now();
    b.stop().await;
    a.sees(&["a"]).await;
    assert!(began.elapsed() < LIFE / 2, "{:?}", began.elapsed());
    a.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_without_lease_is_removed_and_registers_with_a_higher_incarnation() {
    let store = Arc::new(MemoryStore::new());
    let (a, b) = (Running::start(&store, "a").await, Running::start(&store, "b").await);
    let before = a.sees(&["a", "b"]).await.find(&name("b")).expect("a member").incarnation;
    let entry = store.get(b"members/b").await.expect("readable").expect("there");
    let mut updates = a.shards.watch();
    updates.borrow_and_update();
    store.revoke(entry.lease.expect("under a lease")).await.expect("the lease exists");
    updates.changed().await.expect("a change");
    let after = a.sees(&["a", "b"]).await.find(&name("b")).expect("a member").incarnation;
    assert!(after > before, "{after} after {before}");
    assert!(b.shards.is_registered());
    a.stop().await;
    b.stop().await;
}

#[tokio::test(start_paused = true)]
async fn waits_for_a_taken_name_and_registers_when_it_is_free() {
    let store = Arc::new(MemoryStore::new());
    let first = Running::start(&store, "a").await;
    first.sees(&["a"]).await;
    let second = Running::start(&store, "a").await;
    sleep(LIFE * 5).await;
    assert!(
        first.shards.is_registered() && !second.shards.is_registered(),
        "the first member keeps the name"
    );
    first.stop().await;
    timeout(LIFE * 5, async {
        while !second.shards.is_registered() {
            sleep(LIFE / 20).await;
        }
    })
    .await
    .expect("the name is free");
    second.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_killed_member_is_removed_within_its_time_to_live() {
    let store = Arc::new(MemoryStore::new());
    let a = Running::start(&store, "a").await;
    // The entry that a killed process leaves behind.
    let lease = store.grant(TimeToLive::new(LIFE).expect("within the limits")).await.expect("granted");
    let put = Write::Put {
        key: b"members/b".to_vec(),
        value: br#"{"address":"b:1"}"#.to_vec(),
        lease: Some(lease.id),
    };
    store.transact(Transaction { conditions: Vec::new(), writes: vec![put] }).await.expect("valid");
    let seen = a.sees(&["a", "b"]).await;
    assert_eq!(seen.find(&name("b")).expect("a member").version, "", "no version in the entry");
    let died = Instant::now();
    a.sees(&["a"]).await;
    assert!(died.elapsed() <= LIFE, "{:?}", died.elapsed());
    a.stop().await;
}

#[tokio::test(start_paused = true)]
async fn ignores_invalid_member_entries() {
    let store = Arc::new(MemoryStore::new());
    for (key, value) in [(&b"members/x"[..], &b"{"[..]), (b"members/a b", br#"{"address":"c:1"}"#)] {
        let write = Write::Put { key: key.to_vec(), value: value.to_vec(), lease: None };
        store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("valid");
    }
    let a = Running::start(&store, "a").await;
    a.sees(&["a"]).await;
    a.stop().await;
}

/// Creates entries of members without a lease.
async fn fill(store: &MemoryStore, members: std::ops::Range<usize>) {
    for number in members {
        let key = format!("members/m{number:04}").into_bytes();
        let put = Write::Put { key, value: br#"{"address":"m:1"}"#.to_vec(), lease: None };
        store.transact(Transaction { conditions: Vec::new(), writes: vec![put] }).await.expect("valid");
    }
}

async fn remove(store: &MemoryStore, key: &str) {
    let writes = vec![Write::Delete { key: key.into() }];
    store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("valid");
}

#[tokio::test(start_paused = true)]
async fn a_member_beyond_the_limit_waits_until_another_is_removed() {
    let store = Arc::new(MemoryStore::new());
    fill(&store, 0..MEMBERS_MAX).await;
    let late = Running::start(&store, "late").await;
    sleep(LIFE * 5).await;
    assert!(!late.shards.is_registered());
    assert_eq!(late.shards.view().expect("follows the store").members.len(), MEMBERS_MAX);
    remove(&store, "members/m0007").await;
    timeout(LIFE * 10, async {
        while late.shards.with_place(|_| ()).is_none() {
            sleep(LIFE / 20).await;
        }
    })
    .await
    .expect("there is room");
    late.stop().await;
}

#[tokio::test(start_paused = true)]
async fn all_members_exclude_the_same_members_beyond_the_limit() {
    let store = Arc::new(MemoryStore::new());
    fill(&store, 0..MEMBERS_MAX + 2).await;
    let early = Running::start(&store, "early").await;
    sleep(LIFE).await;
    remove(&store, "members/m0000").await;
    let late = Running::start(&store, "late").await;
    sleep(LIFE).await;
    let views = [early, late].map(|running| running.shards.view().expect("follows the store"));
    assert_eq!(views[0].map.members(), views[1].map.members());
    assert_eq!(views[0].members.last().map(|last| last.name.as_str()), Some("m1024"));
}

#[tokio::test(start_paused = true)]
async fn a_member_of_a_replaced_store_does_not_register() {
    let store = Arc::new(MemoryStore::new());
    let former = Identity::load_or_create(store.as_ref()).await.expect("created");
    let all = store.range(b"", 10).await.expect("answered");
    let writes = all.entries.into_iter().map(|entry| Write::Delete { key: entry.key }).collect();
    store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("emptied");
    let new = Running::start(&store, "new").await;
    new.sees(&["new"]).await;
    let old = Running::with(&store, former, "old");
    sleep(LIFE * 5).await;
    assert!(!old.shards.is_registered());
    new.sees(&["new"]).await;
    old.stop().await;
    new.stop().await;
}
