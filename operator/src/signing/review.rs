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
    pub request: SigningRequest,
    pub names: ClusterNames,
    /// Host names in the certificate, by which the pod is reached.
    pub hosts: Vec<String>,
    pub valid: time::Duration,
    /// Verb on the cluster that the requester must be permitted to use; `None` for pods.
    pub verb: Option<&'static str>,
}

/// Decides about a request. `find` returns a cluster with certificates by namespace and name.
///
/// # Errors
/// The request is denied, with the reason.
pub fn review(
    request: &CertificateSigningRequest,
    find: impl FnOnce(&str, &str) -> Option<ClusterNames>,
) -> Result<Grant, String> {
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
    let (mut hosts, mut verb) = (Vec::new(), None);
    match &signing.identity().role {
        Role::Agent(node) => {
            check_account(request, &names, &names.agent())?;
            let bound = extra(request, NODE_NAME)?;
            if bound != node {
                return Err(format!("the requester's pod is on node {bound}, not on {node}"));
            }
            extra(request, POD_NAME)?;
        }
        Role::Member => {
            check_member(request, &names, &names.control_plane())?;
        }
        Role::Etcd => {
            let pod = check_member(request, &names, &names.etcd())?;
            hosts = names.etcd_hosts(pod).into();
        }
        Role::Admin => verb = Some("administer"),
        Role::Console => verb = Some("observe"),
        Role::Operator => return Err("only the operator has this identity".to_owned()),
    }
    let longest = if verb.is_some() { CERTIFICATE_VALID_MIN } else { CERTIFICATE_VALID };
    let wanted = spec.expiration_seconds.map(|seconds| time::Duration::seconds(seconds.into()));
    let valid = wanted.unwrap_or(longest).clamp(CERTIFICATE_VALID_MIN, longest);
    Ok(Grant { request: signing, names, hosts, valid, verb })
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
    use reprise_identity::{Identity, NewRequest};
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects::names;

    const OF_AGENT: &str = "reprise://c.n/agent/n1";
    const OF_MEMBER: &str = "reprise://c.n/member";
    const OF_ETCD: &str = "reprise://c.n/etcd";
    const AGENT: &str = "system:serviceaccount:n:c-agent";
    const MEMBER: &str = "system:serviceaccount:n:c-controlplane";
    const ETCD: &str = "system:serviceaccount:n:c-etcd";

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
    fn pods_get_the_identity_of_their_account_pod_and_node_only_and_people_need_a_verb() {
        let hosts: &[&str] = &["c-etcd-2.c-etcd.n.svc", "c-etcd-2.c-etcd.n.svc.cluster.local"];
        let (long, day) = (CERTIFICATE_VALID, CERTIFICATE_VALID_MIN);
        for (identity, user, pod, hosts, verb, valid) in [
            (OF_AGENT, AGENT, "c-agent-x", &[][..], None, long),
            (OF_MEMBER, MEMBER, "c-controlplane-2", &[], None, long),
            (OF_ETCD, ETCD, "c-etcd-2", hosts, None, long),
            ("reprise://c.n/admin", "jane", "", &[], Some("administer"), day),
            ("reprise://c.n/console", "jane", "", &[], Some("observe"), day),
        ] {
            let year = json!({ "expirationSeconds": 31_536_000 });
            let grant = review(&request(identity, user, pod, &year), find).expect(identity);
            assert_eq!(grant.request.identity().to_string(), identity);
            assert_eq!((grant.names, grant.verb, grant.valid), (names(), verb, valid), "{identity}");
            assert_eq!(grant.hosts, hosts);
        }
        let none = json!({});
        let extra = |fields: Value| json!({ "extra": fields });
        let node = |nodes: &[&str]| extra(json!({ NODE_NAME: nodes }));
        for (identity, user, pod, more, words) in [
            ("reprise://c.n/agent/n2", AGENT, "c-agent-x", &none, "on node n1, not on n2"),
            (OF_AGENT, MEMBER, "c-controlplane-0", &none, "not system:serviceaccount:n:c-agent"),
            (OF_AGENT, "system:serviceaccount:m:c-agent", "p", &none, "the requester is"),
            (OF_AGENT, "n1", "p", &none, "the requester is n1"),
            (OF_AGENT, AGENT, "p", &extra(json!({})), "has no authentication"),
            (OF_AGENT, AGENT, "p", &node(&["n1"]), "pod-name"),
            (OF_AGENT, AGENT, "p", &node(&["n1", "n2"]), "has no"),
            (OF_MEMBER, AGENT, "c-controlplane-0", &none, "not system:serviceaccount:n:c-controlplane"),
            (OF_MEMBER, MEMBER, "c-controlplane-x", &none, "is not a member"),
            (OF_MEMBER, MEMBER, "other", &none, "is not a member"),
            (OF_ETCD, MEMBER, "c-etcd-0", &none, "not system:serviceaccount:n:c-etcd"),
            (OF_MEMBER, ETCD, "c-etcd-0", &none, "not system:serviceaccount:n:c-controlplane"),
            (OF_ETCD, ETCD, "c-etcd-0x", &none, "is not a member"),
            ("reprise://c.n/operator", AGENT, "p", &none, "only the operator"),
            ("reprise://d.n/agent/n1", AGENT, "p", &none, "no KVCacheCluster d.n"),
            ("reprise://c/agent/n1", AGENT, "p", &none, "no KVCacheCluster c "),
            (OF_AGENT, AGENT, "p", &json!({ "usages": ["cert sign"] }), "invalid usage"),
            (OF_AGENT, AGENT, "p", &json!({ "request": "bm9uZQ==" }), "invalid certificate request"),
        ] {
            let message = review(&request(identity, user, pod, more), find).expect_err(identity);
            assert!(message.contains(words), "{words}: {message}");
        }
    }
}
