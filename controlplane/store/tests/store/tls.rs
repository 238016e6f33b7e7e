//! TLS to a real etcd that requires client certificates: trusted clients connect, all others get an error
//! with the remedy.

use std::path::{Path, PathBuf};

use reprise_controlplane_store::{
    EtcdIdentity, EtcdSettings, EtcdStore, EtcdTls, LeaseGuard, Outcome, Revision, Store, StoreError,
    TimeToLive, Transaction, Write,
};
use reprise_testkit::etcd::{Etcd, ServerTls, Setup, built_binary};

use crate::authority::Authority;
use crate::every_store::settings;

/// A server whose certificate names 127.0.0.1 and `etcd.test`, and the files of a client that it trusts.
struct TestEnv {
    folder: tempfile::TempDir,
    authority: Authority,
    server: Etcd,
}

impl TestEnv {
    fn new() -> TestEnv {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::new("ours");
        let file = |name: &str, text: String| write(folder.path(), name, &text);
        let client_authority = file("ca.pem", authority.certificate());
        let (certificate, key) = authority.issue(&["127.0.0.1", "etcd.test"]);
        let tls = ServerTls {
            certificate: file("server.pem", certificate),
            key: file("server-key.pem", key),
            client_authority,
        };
        let (certificate, key) = authority.issue(&["client"]);
        file("client.pem", certificate);
        file("client-key.pem", key);
        let stranger = Authority::new("a stranger");
        file("other-ca.pem", stranger.certificate());
        let (certificate, key) = stranger.issue(&["client"]);
        file("other-client.pem", certificate);
        file("other-client-key.pem", key);
        let setup = Setup::on_loopback(built_binary(), folder.path());
        let server = Etcd::start(Setup { tls: Some(tls), ..setup });
        TestEnv { folder, authority, server }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn identity(&self, name: &str) -> EtcdIdentity {
        EtcdIdentity {
            cert_file: self.file(&format!("{name}.pem")),
            key_file: self.file(&format!("{name}-key.pem")),
        }
    }

    /// Settings that the server accepts, with one change.
    fn settings(&self, change: impl FnOnce(&mut EtcdTls)) -> EtcdSettings {
        let mut tls = EtcdTls {
            ca_file: self.file("ca.pem"),
            identity: Some(self.identity("client")),
            server_name: None,
        };
        change(&mut tls);
        EtcdSettings { tls: Some(tls), ..settings(&self.server, "/reprise/") }
    }

    async fn refused(&self, change: impl FnOnce(&mut EtcdTls)) -> StoreError {
        EtcdStore::connect(&self.settings(change)).await.expect_err("refused")
    }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    path
}

async fn round_trip(store: &EtcdStore) {
    let lease = store.grant(TimeToLive::new(std::time::Duration::from_secs(60)).expect("valid")).await;
    let lease = lease.expect("granted").id;
    let from = Revision(store.revision().await.expect("a read").0 + 1);
    let mut watch = store.watch(b"", from).await.expect("a watch");
    let write = Write::Put { key: b"a".to_vec(), value: b"1".to_vec(), lease: Some(lease) };
    let done = store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await;
    assert!(matches!(done, Ok(Outcome::Committed(_))), "{done:?}");
    assert_eq!(watch.next().await.expect("changes").events.len(), 1);
    store.keep_alive(lease).await.expect("alive");
    assert_eq!(store.get(b"a").await.expect("a read").expect("an entry").value, b"1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connects_with_mutually_trusted_certificates() {
    let env = TestEnv::new();
    let store = EtcdStore::connect(&env.settings(|_| ())).await.expect("trusted");
    round_trip(&store).await;
    let by_name = env.settings(|tls| tls.server_name = Some("etcd.test".to_owned()));
    EtcdStore::connect(&by_name).await.expect("the certificate contains this name");
    let time_to_live = TimeToLive::new(std::time::Duration::from_secs(2)).expect("valid");
    let held = LeaseGuard::grant(std::sync::Arc::new(store), time_to_live).await.expect("granted");
    held.release().await.expect("released");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uses_changed_files_and_keeps_the_connection_if_they_are_refused() {
    let env = TestEnv::new();
    let store = EtcdStore::connect(&env.settings(|_| ())).await.expect("trusted");
    assert!(matches!(store.use_changed_files().await, Ok(false)));
    let (certificate, key) = env.authority.issue(&["client"]);
    write(env.folder.path(), "client.pem", &certificate);
    // The key is still that of the certificate before.
    let torn = store.use_changed_files().await.expect_err("half of a change");
    assert!(matches!(torn, StoreError::Setting(_)), "{torn}");
    write(env.folder.path(), "client-key.pem", &key);
    assert!(matches!(store.use_changed_files().await, Ok(true)));
    assert!(matches!(store.use_changed_files().await, Ok(false)));
    round_trip(&store).await;
    for file in ["client.pem", "client-key.pem"] {
        std::fs::copy(env.file(&format!("other-{file}")), env.file(file)).expect("written");
    }
    let refused = store.use_changed_files().await.expect_err("the server does not trust it");
    assert!(matches!(refused, StoreError::Untrusted { .. }), "{refused}");
    round_trip(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_untrusted_certificates_and_names_the_setting() {
    let env = TestEnv::new();
    let wrong_authority = env.refused(|tls| tls.ca_file = env.file("other-ca.pem")).await;
    let no_certificate = env.refused(|tls| tls.identity = None).await;
    let foreign_identity = env.refused(|tls| tls.identity = Some(env.identity("other-client"))).await;
    let wrong_name = env.refused(|tls| tls.server_name = Some("other.test".to_owned())).await;
    for (refused, words) in [
        (wrong_authority, "store.tls.ca_file"),
        (no_certificate, "store.tls.cert_file"),
        (foreign_identity, "store.tls.cert_file"),
        (wrong_name, "store.tls.server_name"),
    ] {
        assert!(matches!(refused, StoreError::Untrusted { .. }), "{refused}");
        assert!(refused.to_string().contains(words), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_invalid_files_and_names_the_setting() {
    let env = TestEnv::new();
    let text = write(env.folder.path(), "text.pem", "hello");
    let torn = write(env.folder.path(), "torn.pem", "-----BEGIN CERTIFICATE-----\nAAAA");
    let missing = env.file("missing.pem");
    let (good, key) = (env.file("client.pem"), env.file("client-key.pem"));
    let identity = |cert_file: &PathBuf, key_file: &PathBuf| {
        Some(EtcdIdentity { cert_file: cert_file.clone(), key_file: key_file.clone() })
    };
    for (refused, field, words) in [
        (env.refused(|tls| tls.ca_file = missing.clone()).await, "store.tls.ca_file", "cannot read"),
        (
            env.refused(|tls| tls.ca_file = text.clone()).await,
            "store.tls.ca_file",
            "contains no PEM certificate",
        ),
        (env.refused(|tls| tls.ca_file = torn.clone()).await, "store.tls.ca_file", "is not valid PEM"),
        (
            env.refused(|tls| tls.ca_file = key.clone()).await,
            "store.tls.ca_file",
            "contains no PEM certificate",
        ),
        (
            env.refused(|tls| tls.identity = identity(&missing, &key)).await,
            "store.tls.cert_file",
            "cannot read",
        ),
        (env.refused(|tls| tls.identity = identity(&good, &good)).await, "store.tls.key_file", "private key"),
        (env.refused(|tls| tls.identity = identity(&good, &text)).await, "store.tls.key_file", "private key"),
        (
            env.refused(|tls| tls.identity = identity(&good, &env.file("other-client-key.pem"))).await,
            "store.tls.key_file",
            "not the key of",
        ),
        (
            env.refused(|tls| tls.server_name = Some("no name".to_owned())).await,
            "store.tls.server_name",
            "host name",
        ),
    ] {
        assert!(matches!(refused, StoreError::Setting(_)), "{refused}");
        let message = refused.to_string();
        assert!(message.contains(field) && message.contains(words), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scheme_of_an_endpoint_must_match_the_tls_settings() {
    let env = TestEnv::new();
    let without = EtcdSettings { tls: None, ..env.settings(|_| ()) };
    let refused = EtcdStore::connect(&without).await.expect_err("https without TLS");
    assert!(refused.to_string().contains("[store.tls]"), "{refused}");
    let plain: Vec<String> =
        without.endpoints.iter().map(|endpoint| endpoint.replace("https", "http")).collect();
    let with = EtcdSettings { endpoints: plain.clone(), ..env.settings(|_| ()) };
    let refused = EtcdStore::connect(&with).await.expect_err("http with TLS");
    assert!(refused.to_string().contains("https://host:port"), "{refused}");
    let plain = EtcdSettings { endpoints: plain, ..without };
    let refused = EtcdStore::connect(&plain).await.expect_err("etcd requires TLS");
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused}");
}
