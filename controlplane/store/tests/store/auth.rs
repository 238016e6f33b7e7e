//! Users of a real etcd: authorized users can work, all others get an error with the remedy.

use std::path::Path;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Permission, PermissionType, RoleRevokePermissionOptions};
use reprise_controlplane_store::{
    EtcdSettings, EtcdStore, EtcdUser, Outcome, Revision, Store, StoreError, TimeToLive, Transaction, Write,
};
use reprise_testkit::etcd::{Etcd, Setup, built_binary};
use reprise_testkit::process::LaunchOptions;
use tokio::time::{sleep, timeout};

use crate::every_store::settings;

const PREFIX: &str = "/reprise/";
/// End of the range of keys with the prefix.
const PREFIX_END: &str = "/reprise0";
const PASSWORD: &str = "correct horse";
/// Lifetime of an unused token; etcd checks once a second.
const TOKEN_TTL: Duration = Duration::from_secs(1);
const TOKEN_FORGOTTEN: Duration = Duration::from_millis(2500);

/// A server whose user `member` may read and write under the prefix only.
struct TestEnv {
    folder: tempfile::TempDir,
    server: Etcd,
    root: Client,
}

impl TestEnv {
    async fn new() -> TestEnv {
        let folder = tempfile::tempdir().expect("a folder");
        let seconds = TOKEN_TTL.as_secs().to_string();
        let arguments = ["--auth-token", "simple", "--auth-token-ttl", &seconds].map(str::to_owned).to_vec();
        let launch = LaunchOptions { arguments, ..LaunchOptions::default() };
        let setup = Setup::on_loopback(built_binary(), folder.path());
        let server = Etcd::start(Setup { launch, ..setup });
        let endpoints = [server.endpoint()];
        let mut open = Client::connect(&endpoints, None).await.expect("etcd answers");
        open.role_add("member").await.expect("a role");
        let permission = Permission::new(PermissionType::Readwrite, PREFIX).with_range_end(PREFIX_END);
        open.role_grant_permission("member", permission).await.expect("a permission");
        for (user, role) in [("root", "root"), ("member", "member")] {
            open.user_add(user, PASSWORD, None).await.expect("a user");
            open.user_grant_role(user, role).await.expect("a role");
        }
        open.auth_enable().await.expect("enabled");
        let options = ConnectOptions::new().with_user("root", PASSWORD).with_auto_token_refresh(true);
        let root = Client::connect(&endpoints, Some(options)).await.expect("root");
        TestEnv { folder, server, root }
    }

    fn settings(&self, name: &str, password: &str) -> EtcdSettings {
        let user = Some(user(self.folder.path(), name, password));
        EtcdSettings { user, ..settings(&self.server, PREFIX) }
    }

    async fn member(&self) -> EtcdStore {
        EtcdStore::connect(&self.settings("member", PASSWORD)).await.expect("admitted")
    }
}

/// A user with a password file that ends with a line break, as editors write it.
fn user(folder: &Path, name: &str, password: &str) -> EtcdUser {
    let password_file = folder.join("password");
    std::fs::write(&password_file, format!("{password}\n")).expect("written");
    EtcdUser { name: name.to_owned(), password_file }
}

fn put(key: &str, value: &str) -> Transaction {
    let write = Write::Put { key: key.into(), value: value.into(), lease: None };
    Transaction { conditions: Vec::new(), writes: vec![write] }
}

fn assert_denied(refused: &StoreError) {
    assert!(matches!(refused, StoreError::Denied { .. }), "{refused}");
    assert!(refused.to_string().contains("store.user"), "{refused}");
    assert!(!refused.to_string().contains(PASSWORD), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authorized_user_can_work_under_its_prefix() {
    let env = TestEnv::new().await;
    let store = env.member().await;
    let from = Revision(store.revision().await.expect("a read").0 + 1);
    let mut watch = store.watch(b"", from).await.expect("a watch");
    let time_to_live = TimeToLive::new(Duration::from_secs(60)).expect("valid");
    let lease = store.grant(time_to_live).await.expect("granted").id;
    let write = Write::Put { key: b"a".to_vec(), value: b"1".to_vec(), lease: Some(lease) };
    let done = store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await;
    assert!(matches!(done, Ok(Outcome::Committed(_))), "{done:?}");
    assert_eq!(watch.next().await.expect("changes").events.len(), 1);
    store.keep_alive(lease).await.expect("alive");
    assert_eq!(store.range(b"", 10).await.expect("a range").entries.len(), 1);
    store.revoke(lease).await.expect("revoked");
    assert_eq!(watch.next().await.expect("changes").events.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_other_users_without_revealing_passwords() {
    let env = TestEnv::new().await;
    let elsewhere = EtcdSettings { prefix: "/other/".to_owned(), ..env.settings("member", PASSWORD) };
    let without_user = settings(&env.server, PREFIX);
    for settings in [elsewhere, without_user] {
        assert_denied(&EtcdStore::connect(&settings).await.expect_err("refused"));
    }
    for (name, password) in [("member", "wrong"), ("stranger", PASSWORD)] {
        let settings = env.settings(name, password);
        assert!(!format!("{settings:?}").contains(password), "{settings:?}");
        let refused = EtcdStore::connect(&settings).await.expect_err("refused");
        assert_denied(&refused);
        assert!(!refused.to_string().contains(password), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_a_user_when_authentication_is_disabled() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let settings =
        EtcdSettings { user: Some(user(folder.path(), "member", PASSWORD)), ..settings(&server, PREFIX) };
    let refused = EtcdStore::connect(&settings).await.expect_err("authentication is not enabled");
    assert_denied(&refused);
    assert!(refused.to_string().contains("not enabled"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_the_setting_of_an_unreadable_password() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Etcd::start_in(folder.path());
    let missing = EtcdUser { name: "member".to_owned(), password_file: folder.path().join("missing") };
    for (user, words) in [(user(folder.path(), "member", ""), "is empty"), (missing, "cannot read")] {
        let settings = EtcdSettings { user: Some(user), ..settings(&server, PREFIX) };
        let refused = EtcdStore::connect(&settings).await.expect_err("refused");
        assert!(matches!(refused, StoreError::Setting(_)), "{refused}");
        let message = refused.to_string();
        assert!(message.contains("store.user.password_file") && message.contains(words), "{message}");
    }
}

/// The expiry of a token cannot be observed, because a request would renew it. So time must pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_watches_and_leases_survive_token_expiry() {
    let env = TestEnv::new().await;
    let store = env.member().await;
    let time_to_live = TimeToLive::new(Duration::from_secs(60)).expect("valid");
    let lease = store.grant(time_to_live).await.expect("granted").id;
    let from = Revision(store.revision().await.expect("a read").0 + 1);
    let mut early = store.watch(b"", from).await.expect("a watch");
    sleep(TOKEN_FORGOTTEN).await;
    let done = store.transact(put("a", "1")).await;
    assert!(matches!(done, Ok(Outcome::Committed(_))), "{done:?}");
    assert_eq!(early.next().await.expect("changes").events.len(), 1);
    sleep(TOKEN_FORGOTTEN).await;
    let mut late = store.watch(b"", from).await.expect("a watch");
    let changes = timeout(Duration::from_secs(60), late.next()).await.expect("opens with a current token");
    assert!(!changes.expect("changes").events.is_empty());
    sleep(TOKEN_FORGOTTEN).await;
    store.keep_alive(lease).await.expect("alive");
    sleep(TOKEN_FORGOTTEN).await;
    store.revoke(lease).await.expect("revoked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_and_watches_report_revoked_permissions() {
    let mut env = TestEnv::new().await;
    let store = env.member().await;
    let options = RoleRevokePermissionOptions::new().with_range_end(PREFIX_END);
    env.root.role_revoke_permission("member", PREFIX, Some(options)).await.expect("revoked");
    assert_denied(&store.get(b"a").await.expect_err("refused"));
    assert_denied(&store.transact(put("a", "1")).await.expect_err("refused"));
    assert_denied(&store.watch(b"", Revision(1)).await.expect_err("refused"));
}
