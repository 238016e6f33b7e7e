//! Certificates of an installation: every port of agents, members and etcd answers only to them, also after the authority
//! was replaced.

use std::path::Path;
use std::time::Duration;

use reprise_e2e::kubernetes::release::{Component, NAMESPACE, Pod, RELEASE, container_ids};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::{Admin, wait_until};
use reprise_identity::{Expected, Role, Security};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::chart::{condition, running};

/// Bound on the answer of a port to an attempt without a certificate: handshakes end after 5 s.
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);
/// Bound from the replacement of the authority to new certificates in all pods: the kubelet updates ConfigMaps within two
/// minutes, and pods then wait for three.
const RENEWED_WITHIN: Duration = Duration::from_secs(480);
/// HTTP/2 preface and an empty SETTINGS frame: what a gRPC client without TLS sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// First byte of the only answer that a TLS server gives to other bytes, RFC 8446 §5.1.
const TLS_ALERT: u8 = 0x15;
/// Request of a page with states.
const STATUS: &[u8] = b"GET /status HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
/// Request of etcd's version.
const VERSION: &[u8] = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

/// Ports of a pod's first container, by name.
fn ports(release: Release<'_>, pod: &Pod) -> Vec<(String, String)> {
    let pod = release.object("pod", &pod.name);
    let address = pod["status"]["podIP"].as_str().expect("a pod that runs has an address");
    let ports = pod["spec"]["containers"][0]["ports"].as_array().expect("all components have ports").iter();
    let named = |port: &Value| {
        let name = port["name"].as_str().expect("ports have names").to_owned();
        (name, format!("{address}:{}", port["containerPort"]))
    };
    ports.map(named).collect()
}

/// Sends bytes without TLS, and returns all bytes of the answer.
async fn plain(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.expect("the port is open");
    // The server may have closed the connection.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = timeout(ANSWERED_WITHIN, stream.read_to_end(&mut answer)).await.expect("the server closes it");
    answer
}

/// Asks a port of etcd for its version with these certificates, and returns all bytes of the answer.
async fn ask_etcd(files: &Path, address: &str) -> Vec<u8> {
    let mut answer = Vec::new();
    // etcd refuses a certificate after the handshake.
    let dialled = Security::read(files).expect("valid files").dial(address, Expected::Role(Role::Etcd)).await;
    if let Ok(mut stream) = dialled {
        let _ = stream.write_all(VERSION).await;
        let _ =
            timeout(ANSWERED_WITHIN, stream.read_to_end(&mut answer)).await.expect("the server closes it");
    }
    answer
}

/// Only members are clients of etcd. All have certificates of the same authority.
pub(crate) fn etcd_answers_only_to_members(cluster: &mut Cluster) {
    let release = running(cluster);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let agent = Role::Agent(cluster.nodes()[0].name().to_owned());
    let others = [agent, Role::Etcd, Role::Operator, Role::Admin, Role::Console];
    for pod in release.pods(Component::Etcd) {
        for (name, address) in ports(release, &pod).into_iter().filter(|(name, _)| name != "metrics") {
            let answer = |role: &Role| {
                let files = release.certificates(role).expect("the installation has certificates");
                runtime.block_on(ask_etcd(&files, &address))
            };
            let is_answered = answer(&Role::Member).starts_with(b"HTTP/1.1 200 ");
            assert_eq!(is_answered, name == "client", "{name} of {}: a member", pod.name);
            // The certificate of another pod of etcd is accepted from that pod's address only.
            for role in &others {
                let answer = answer(role);
                assert!(
                    answer.is_empty(),
                    "{name} of {}: {role}: {}",
                    pod.name,
                    String::from_utf8_lossy(&answer)
                );
            }
        }
    }
}

pub(crate) fn every_port_answers_only_to_certificates(cluster: &mut Cluster) {
    let release = running(cluster);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let kvcc = release.object("kvcc", RELEASE);
    assert_eq!(condition(&kvcc, "CertificatesReady"), ("True", "AsDesired"));
    let mut tried = Vec::new();
    for component in [Component::Agents, Component::Members] {
        for pod in release.pods(component) {
            let role = match component {
                Component::Agents => Role::Agent(pod.node.clone()),
                _ => Role::Member,
            };
            let own = release.certificates(&Role::Admin).expect("the installation has certificates");
            let admin = Security::read(&own).expect("valid files");
            for (name, address) in ports(release, &pod) {
                let other = Expected::Role(Role::Operator);
                runtime.block_on(async {
                    let wrong = admin.dial(&address, other).await;
                    assert!(wrong.is_err(), "{name} of {}: its certificate is of another role", pod.name);
                    // Peers greet after the handshake, so all ports complete one.
                    admin.dial(&address, Expected::Role(role.clone())).await.unwrap_or_else(|error| {
                        panic!("{name} of {} has no valid certificate: {error}", pod.name)
                    });
                    let bytes = if name == "admin" { STATUS } else { PREFACE };
                    let answer = plain(&address, bytes).await;
                    let is_refused = match name.as_str() {
                        "admin" => answer.starts_with(b"HTTP/1.1 403 "),
                        _ => answer.is_empty() || answer[0] == TLS_ALERT,
                    };
                    assert!(is_refused, "{name} of {}: {}", pod.name, String::from_utf8_lossy(&answer));
                });
                tried.push(name);
            }
            let (code, _) =
                Admin::at(release.admin(&pod).address()).get("/healthz").expect("probes are open");
            assert_eq!(code, 200, "probes need no certificate");
        }
    }
    tried.sort_unstable();
    assert_eq!(tried, ["admin", "admin", "admin", "admin", "grpc", "grpc", "peers", "peers"]);
}

pub(crate) fn pods_follow_another_authority_without_a_restart(cluster: &mut Cluster) {
    let release = running(cluster);
    let pods = || [release.pods(Component::Agents), release.pods(Component::Members)].concat();
    let before = pods();
    let etcd = release.pods(Component::Etcd);
    let fingerprint = |pod: &Pod| release.admin(pod).json("/status")["tls"]["fingerprint"].clone();
    let old: Vec<Value> = before.iter().map(fingerprint).collect();
    release.kubectl(&["delete", "secret", &format!("{RELEASE}-ca")]);
    wait_until("another authority", ANSWERED_WITHIN, || release.certificates(&Role::Console));
    wait_until("certificates of the new authority in all pods", RENEWED_WITHIN, || {
        // Certificates of the new authority are refused until a pod trusts both.
        let answer = |pod: &Pod| release.admin(pod).get("/status").ok().filter(|(code, _)| *code == 200);
        let answers: Option<Vec<(u16, String)>> = before.iter().map(answer).collect();
        let is_new = |((_, text), old): (&(u16, String), &Value)| {
            let page: Value = serde_json::from_str(text).expect("a page of JSON");
            page["tls"]["fingerprint"] != *old
        };
        answers?.iter().zip(&old).all(is_new).then_some(())
    });
    assert_eq!(container_ids(&pods()), container_ids(&before), "no container has restarted");
    // etcd reads trusted authorities only when it starts.
    release.wait_until_replaced(Component::Etcd, &etcd, etcd.len());
    // Blocks still pass between the nodes.
    assert!(release.test().contains("peer "), "blocks came from the other node in {NAMESPACE}");
}
