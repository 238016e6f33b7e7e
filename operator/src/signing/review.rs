//! Decides whether a requester may have the identity that it asks for. Pure.
//!
//! | identity | granted to |
//! |---|---|
//! | `agent/NODE` | a pod of the agents' service account that is bound to this node |
//! | `member` | a pod of the members' service account, with the name of a member |
//! | `etcd` | a pod of etcd's service account, with the name of a member of etcd |
//! | `admin` | accounts that may `administer` the KVCacheCluster |
//! | `console` | accounts that may `observe` the KVCacheCluster |
//! | `operator` | no requester: the operator issues its certificate itself |
//!
//! The API server writes account, pod and node from the requester's token into the request, and refuses requests that
//! set them. A token has a pod and a node only if the kubelet of that node has requested it for that pod.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use reprise_identity::authority::{CERTIFICATE_VALID, CERTIFICATE_VALID_MIN};
use reprise_identity::{Role, SigningRequest};

use crate::reconcile::names::ClusterNames;

/// Fields that the API server adds to the accounts of pods.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// Uses of a certificate that processes need.
pub(crate) const USAGES: [&str; 3] = ["digital signature", "client auth", "server auth"];

/// Certificate that the operator issues.
#[derive(Debug, PartialEq, Eq)]
pub struct Grant {
    /// Request with the identity and the public key.
    pub request: SigningRequest,
    /// Cluster whose authority signs.
    pub names: ClusterNames,
    /// Host names in the certificate, by which the pod is reached.
    pub hosts: Vec<String>,
    /// Validity of the certificate.
    pub valid: time::Duration,
}

/// Permission that the requester needs.
#[derive(Debug, PartialEq, Eq)]
pub struct Permission {
    /// Verb on the cluster.
    pub verb: &'static str,
    /// The cluster.
    pub names: ClusterNames,
}

/// Answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Issue a certificate.
    Grant(Grant),
    /// Issue a certificate if the requester has a permission.
    Ask(Grant, Permission),
    /// Deny the request, with the reason.
    Deny(String),
}

/// Decides about a request. `find` returns a cluster with certificates by namespace and name.
pub fn review(
    request: &CertificateSigningRequest,
    find: impl FnOnce(&str, &str) -> Option<ClusterNames>,
) -> Verdict {
    match decide(request, find) {
        Ok(verdict) => verdict,
        Err(message) => Verdict::Deny(message),
    }
}

fn decide(
    request: &CertificateSigningRequest,
    find: impl FnOnce(&str, &str) -> Option<ClusterNames>,
) -> Result<Verdict, String> {
    let spec = &request.spec;
    let text = String::from_utf8_lossy(&spec.request.0);
    let signing = SigningRequest::parse(&text).map_err(|error| error.to_string())?;
    let is_known = |usage: &String| USAGES.contains(&usage.as_str());
    if let Some(other) = spec.usages.iter().flatten().find(|usage| !is_known(usage)) {
        return Err(format!("invalid usage \"{other}\": expected {}", USAGES.join(", ")));
    }
    let cluster = signing.identity().cluster.clone();
    let names = cluster.split_once('.').and_then(|(name, namespace)| find(namespace, name));
    let names = names.ok_or_else(|| {
        format!("there is no KVCacheCluster {cluster} with certificates: expected NAME.NAMESPACE")
    })?;
    let longest = match signing.identity().role {
        Role::Admin | Role::Console => CERTIFICATE_VALID_MIN,
        _ => CERTIFICATE_VALID,
    };
    let wanted = spec.expiration_seconds.map(|seconds| time::Duration::seconds(seconds.into()));
    let valid = wanted.unwrap_or(longest).clamp(CERTIFICATE_VALID_MIN, longest);
    let role = signing.identity().role.clone();
    let mut grant = Grant { request: signing, names: names.clone(), hosts: Vec::new(), valid };
    match role {
        Role::Agent(node) => {
            check_account(request, &names, &names.agent())?;
            let bound = extra(request, NODE_NAME)?;
            if bound != node {
                return Err(format!("the requester's pod is on node {bound}, not on {node}"));
            }
            extra(request, POD_NAME)?;
            Ok(Verdict::Grant(grant))
        }
        Role::Member => {
            check_member(request, &names, &names.control_plane())?;
            Ok(Verdict::Grant(grant))
        }
        Role::Etcd => {
            let pod = check_member(request, &names, &names.etcd())?;
            grant.hosts = names.etcd_hosts(pod).into();
            Ok(Verdict::Grant(grant))
        }
        Role::Admin => Ok(Verdict::Ask(grant, Permission { verb: "administer", names })),
        Role::Console => Ok(Verdict::Ask(grant, Permission { verb: "observe", names })),
        Role::Operator => Err("only the operator has this identity".to_owned()),
    }
}

/// Checks that the requester is a pod of a StatefulSet, whose service account has the same name. Returns its name.
fn check_member<'a>(
    request: &'a CertificateSigningRequest,
    names: &ClusterNames,
    set: &str,
) -> Result<&'a str, String> {
    check_account(request, names, set)?;
    let pod = extra(request, POD_NAME)?;
    let index = pod.strip_prefix(set).and_then(|rest| rest.strip_prefix('-'));
    if index.is_none_or(|index| index.parse::<u32>().is_err()) {
        return Err(format!("pod {pod} is not a member of {set}"));
    }
    Ok(pod)
}

/// Checks that the requester has a service account of the cluster's namespace.
fn check_account(
    request: &CertificateSigningRequest,
    names: &ClusterNames,
    account: &str,
) -> Result<(), String> {
    let user = request.spec.username.as_deref().unwrap_or_default();
    let expected = format!("system:serviceaccount:{}:{account}", names.namespace);
    if user == expected { Ok(()) } else { Err(format!("the requester is {user}, not {expected}")) }
}

/// Returns the only value of a field of the requester's account.
fn extra<'a>(request: &'a CertificateSigningRequest, field: &str) -> Result<&'a str, String> {
    let values = request.spec.extra.as_ref().and_then(|extra| extra.get(field));
    match values.map(Vec::as_slice) {
        Some([value]) => Ok(value),
        _ => Err(format!("the requester's token has no {field}: use the token of a pod")),
    }
}

#[cfg(test)]
mod tests {
    use reprise_identity::{Authority, Identity, NewRequest};
    use serde_json::{Value, json};

    use super::*;

    const AGENT: &str = "system:serviceaccount:n:c-agent";
    const MEMBER: &str = "system:serviceaccount:n:c-controlplane";
    const ETCD: &str = "system:serviceaccount:n:c-etcd";

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    fn request(identity: &str, user: &str, pod: &str, more: &Value) -> CertificateSigningRequest {
        let identity: Identity = identity.parse().expect("an identity");
        let new = NewRequest::create(&identity).expect("valid");
        let mut spec = json!({
            "signerName": "reprise.dev/process", "username": user,
            "request": k8s_openapi::ByteString(new.request.into_bytes()),
            "usages": USAGES,
            "extra": { NODE_NAME: ["n1"], POD_NAME: [pod] },
        });
        spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        serde_json::from_value(json!({ "metadata": { "name": "r" }, "spec": spec })).expect("a request")
    }

    fn find(namespace: &str, name: &str) -> Option<ClusterNames> {
        (namespace == "n" && name == "c").then(names)
    }

    #[test]
    fn pods_get_the_identity_of_their_account_pod_and_node_only() {
        let hosts: &[&str] = &["c-etcd-2.c-etcd.n.svc", "c-etcd-2.c-etcd.n.svc.cluster.local"];
        for (identity, user, pod, hosts) in [
            ("reprise://c.n/agent/n1", AGENT, "c-agent-x", &[][..]),
            ("reprise://c.n/member", MEMBER, "c-controlplane-2", &[]),
            ("reprise://c.n/etcd", ETCD, "c-etcd-2", hosts),
        ] {
            let Verdict::Grant(grant) = review(&request(identity, user, pod, &json!({})), find) else {
                panic!("{identity} is denied")
            };
            assert_eq!(grant.request.identity().to_string(), identity);
            assert_eq!((&grant.names, grant.valid), (&names(), CERTIFICATE_VALID));
            assert_eq!(grant.hosts, hosts);
            let authority = Authority::create("c.n").expect("valid");
            let certificate =
                authority.sign(&grant.request, &grant.hosts, grant.valid).expect("a valid period");
            assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"));
        }
        for (identity, user, pod, more, words) in [
            ("reprise://c.n/agent/n2", AGENT, "c-agent-x", json!({}), "on node n1, not on n2"),
            (
                "reprise://c.n/agent/n1",
                MEMBER,
                "c-controlplane-0",
                json!({}),
                "not system:serviceaccount:n:c-agent",
            ),
            ("reprise://c.n/agent/n1", "system:serviceaccount:m:c-agent", "p", json!({}), "the requester is"),
            ("reprise://c.n/agent/n1", "n1", "p", json!({}), "the requester is n1"),
            ("reprise://c.n/agent/n1", AGENT, "p", json!({ "extra": {} }), "has no authentication"),
            ("reprise://c.n/agent/n1", AGENT, "p", json!({ "extra": { NODE_NAME: ["n1"] } }), "pod-name"),
            ("reprise://c.n/agent/n1", AGENT, "p", json!({ "extra": { NODE_NAME: ["n1", "n2"] } }), "has no"),
            (
                "reprise://c.n/member",
                AGENT,
                "c-controlplane-0",
                json!({}),
                "not system:serviceaccount:n:c-controlplane",
            ),
            ("reprise://c.n/member", MEMBER, "c-controlplane-x", json!({}), "is not a member"),
            ("reprise://c.n/member", MEMBER, "other", json!({}), "is not a member"),
            ("reprise://c.n/etcd", MEMBER, "c-etcd-0", json!({}), "not system:serviceaccount:n:c-etcd"),
            (
                "reprise://c.n/member",
                ETCD,
                "c-etcd-0",
                json!({}),
                "not system:serviceaccount:n:c-controlplane",
            ),
            ("reprise://c.n/etcd", ETCD, "c-etcd-0x", json!({}), "is not a member"),
            ("reprise://c.n/operator", AGENT, "p", json!({}), "only the operator"),
            ("reprise://d.n/agent/n1", AGENT, "p", json!({}), "no KVCacheCluster d.n"),
            ("reprise://c/agent/n1", AGENT, "p", json!({}), "no KVCacheCluster c "),
            ("reprise://c.n/agent/n1", AGENT, "p", json!({ "usages": ["cert sign"] }), "invalid usage"),
            (
                "reprise://c.n/agent/n1",
                AGENT,
                "p",
                json!({ "request": "bm9uZQ==" }),
                "invalid certificate request",
            ),
        ] {
            let verdict = review(&request(identity, user, pod, &more), find);
            let Verdict::Deny(message) = verdict else { panic!("{identity} is granted to {user}") };
            assert!(message.contains(words), "{words}: {message}");
        }
    }

    #[test]
    fn people_need_a_permission_and_get_certificates_of_a_day() {
        for (role, verb) in [("admin", "administer"), ("console", "observe")] {
            let asked = request(
                &format!("reprise://c.n/{role}"),
                "jane",
                "",
                &json!({ "expirationSeconds": 31_536_000 }),
            );
            let Verdict::Ask(grant, permission) = review(&asked, find) else { panic!("not asked") };
            assert_eq!(permission, Permission { verb, names: names() });
            assert_eq!(grant.valid, CERTIFICATE_VALID_MIN);
        }
    }
}
