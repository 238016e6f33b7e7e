//! An external etcd with TLS and users. Wrong secrets are corrected one by one until the store is reachable.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use reprise_e2e::{PATIENCE, ServerTls, wait_until};
use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

const USER: &str = "member";
const PASSWORD: &str = "correct horse";
/// Condition while the store is unreachable.
const UNREACHABLE: [&str; 3] = ["EtcdReady", "False", "EtcdUnreachable"];

/// Certificate authority of the test.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed"))
    }

    fn certificate(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for a name or address. Returns the certificate and its key as PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new([name.to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.0).expect("signed");
        (signed.pem(), key.serialize_pem())
    }
}

fn secret(k8s: &TestCluster, name: &str, data: &Value) {
    k8s.apply(
        &json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name }, "stringData": data }),
    );
}

/// Waits until the condition's message contains one of these texts: it may still report an earlier error.
fn wait_words(k8s: &TestCluster, words: &[&str]) -> String {
    wait_until(&format!("the message contains one of {words:?}"), PATIENCE, || {
        let message = k8s.wait_condition("KVCacheCluster", "c", UNREACHABLE);
        words.iter().any(|words| message.contains(words)).then_some(message)
    })
}

#[test]
fn etcd_with_tls_and_users_is_reached_once_secrets_are_correct() {
    let mut k8s = TestCluster::new();
    let (ours, stranger) = (Authority::new("ours"), Authority::new("a stranger"));
    let file = |name: &str, text: &str| -> PathBuf {
        let path = k8s.env.folder().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let (certificate, key) = ours.issue("127.0.0.1");
    let tls = ServerTls {
        certificate: file("etcd.pem", &certificate),
        key: file("etcd-key.pem", &key),
        client_authority: file("etcd-ca.pem", &ours.certificate()),
    };
    k8s.etcd.admit_only(USER, PASSWORD);
    k8s.etcd.kill();
    k8s.etcd.restart_with_tls(tls);

    let (certificate, key) = ours.issue("client");
    secret(&k8s, "ca", &json!({ "ca.crt": stranger.certificate() }));
    secret(&k8s, "client", &json!({ "tls.crt": certificate, "tls.key": key }));
    secret(&k8s, "user", &json!({ "password": "wrong" }));
    let _operator = k8s.operator();
    k8s.cluster(json!({ "etcd": { "mode": "External", "external": {
        "endpoints": [k8s.etcd.endpoint()],
        "tls": { "caSecretRef": { "name": "ca", "key": "ca.crt" }, "clientSecretRef": { "name": "client" } },
        "user": { "name": USER, "passwordSecretRef": { "name": "user", "key": "password" } },
    } } }));
    // The configured authority has not signed etcd's certificate.
    let message = wait_words(&k8s, &["invalid peer certificate", "UnknownIssuer"]);
    assert!(message.contains(&k8s.etcd.endpoint()), "{message}");
    secret(&k8s, "ca", &json!({ "ca.crt": ours.certificate() }));
    // The certificate is valid now, but the password is wrong.
    let message = wait_words(&k8s, &["authentication failed"]);
    assert!(message.contains("user member") && message.contains("Secret user"), "{message}");
    assert!(!message.contains("wrong"), "the message contains the password: {message}");
    // Corrected secrets restart the members.
    let digest = || {
        let set = k8s.wait_for("StatefulSet", "c-controlplane");
        set.data["spec"]["template"]["metadata"]["annotations"]["reprise.dev/secrets"].clone()
    };
    let before = digest();
    assert!(before.is_string(), "{before}");
    secret(&k8s, "user", &json!({ "password": PASSWORD }));
    k8s.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    wait_until("the members' pod template has the new digest", PATIENCE, || {
        (digest() != before).then_some(())
    });
}
