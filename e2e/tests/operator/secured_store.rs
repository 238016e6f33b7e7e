//! A store of somebody else with TLS and users: a real etcd, and secrets that are wrong in one way after the other until none is.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use reprise_e2e::{PATIENCE, ServerTls, wait_until};
use serde_json::{Value, json};

use crate::lab::Lab;

const USER: &str = "member";
const PASSWORD: &str = "correct horse";
/// Of the conditions while something is wrong.
const UNREACHABLE: [&str; 3] = ["EtcdReady", "False", "EtcdUnreachable"];

/// Who signs certificates.
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

    /// A certificate for a name or address, and its key.
    fn issue(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new([name.to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.0).expect("signed");
        (signed.pem(), key.serialize_pem())
    }
}

fn secret(lab: &Lab, name: &str, data: &Value) {
    lab.apply(
        &json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name }, "stringData": data }),
    );
}

/// Waits until the cluster says why it cannot use the store, in one of these words. What was wrong before may be said still.
fn wait_words(lab: &Lab, words: &[&str]) -> String {
    wait_until(&format!("one of {words:?} is said"), PATIENCE, || {
        let said = lab.wait_condition("KVCacheCluster", "c", UNREACHABLE);
        words.iter().any(|words| said.contains(words)).then_some(said)
    })
}

#[test]
fn an_etcd_with_tls_and_users_is_used_once_every_secret_is_right() {
    let mut lab = Lab::new();
    let (ours, stranger) = (Authority::new("ours"), Authority::new("a stranger"));
    let file = |name: &str, text: &str| -> PathBuf {
        let path = lab.world.folder().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let (certificate, key) = ours.issue("127.0.0.1");
    let tls = ServerTls {
        certificate: file("etcd.pem", &certificate),
        key: file("etcd-key.pem", &key),
        client_authority: file("etcd-ca.pem", &ours.certificate()),
    };
    lab.etcd.admit_only(USER, PASSWORD);
    lab.etcd.kill();
    lab.etcd.restart_with_tls(tls);

    let (certificate, key) = ours.issue("client");
    secret(&lab, "ca", &json!({ "ca.crt": stranger.certificate() }));
    secret(&lab, "client", &json!({ "tls.crt": certificate, "tls.key": key }));
    secret(&lab, "user", &json!({ "password": "wrong" }));
    let operator = lab.operator();
    lab.cluster(json!({ "etcd": { "mode": "External", "external": {
        "endpoints": [lab.etcd.endpoint()],
        "tls": { "caSecretRef": { "name": "ca", "key": "ca.crt" }, "clientSecretRef": { "name": "client" } },
        "user": { "name": USER, "passwordSecretRef": { "name": "user", "key": "password" } },
    } } }));
    // Whom etcd's certificate is not of.
    let said = wait_words(&lab, &["invalid peer certificate", "UnknownIssuer"]);
    assert!(said.contains(&lab.etcd.endpoint()), "{said}");
    secret(&lab, "ca", &json!({ "ca.crt": ours.certificate() }));
    // Now it is believed, and the password is wrong.
    let said = wait_words(&lab, &["authentication failed"]);
    assert!(said.contains("user member") && said.contains("Secret user"), "{said}");
    assert!(!said.contains("wrong"), "no password is told: {said}");
    // Members are started anew with what is right by then.
    let digest = || {
        let set = lab.wait_for("StatefulSet", "c-controlplane");
        set.data["spec"]["template"]["metadata"]["annotations"]["reprise.dev/secrets"].clone()
    };
    let before = digest();
    assert!(before.is_string(), "{before}");
    secret(&lab, "user", &json!({ "password": PASSWORD }));
    lab.wait_condition("KVCacheCluster", "c", ["EtcdReady", "True", "AsDesired"]);
    wait_until("members are told", PATIENCE, || (digest() != before).then_some(()));
    operator.kill();
}
