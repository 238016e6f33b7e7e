//! What is refused of a cluster: modes that this release does not have, versions that are too far apart, secrets that lack something,
//! and changes of a managed etcd that would risk it. A cluster that is refused is left as it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use reprise_crds::cluster::{
    ClientTransport, EtcdMode, GpuAccessMode, InjectionMode, MonitoringMode, RdmaMode,
};
use reprise_crds::status::Reason;
use reprise_crds::{CacheNode, KVCacheCluster};

use super::dereference::Found;
use super::status::has_reported;
use crate::child::ChildKind;
use crate::optional::Access;
use crate::plan::Refusal;
use crate::settings::DefaultImages;

/// Versions of agents and members may be so far apart, in either direction.
const MINORS_APART_MAX: u64 = 1;

/// Why a cluster is refused, if it is.
pub fn validate(cluster: &KVCacheCluster, found: &Found) -> Option<Refusal> {
    unsupported(cluster)
        .or_else(|| missing(cluster, &found.access))
        .or_else(|| found.plan.refused.clone())
        .or_else(|| skew(&found.images.agent, &found.images.control_plane))
        .or_else(|| skew_of_running(&found.images, found.agents.as_deref(), found.members.as_deref()))
        .or_else(|| skew_of_reported(&found.images.control_plane, &found.cache_nodes))
        .or_else(|| found.store.as_ref().and_then(|look| look.secrets.as_ref().err().cloned()))
        .or_else(|| etcd_change(cluster, found.etcd.as_deref()?))
}

/// Modes that this release does not have.
fn unsupported(cluster: &KVCacheCluster) -> Option<Refusal> {
    let spec = &cluster.spec;
    let refuse = |field: &str, value: &str, instead: &str| {
        let message = format!("{field} is {value}, which this release does not have: {instead}");
        Some(Refusal::new(Reason::Unsupported, message))
    };
    if spec.agents.client_transport != ClientTransport::UnixSocket {
        return refuse("agents.clientTransport", spec.agents.client_transport.as_str(), "use UnixSocket");
    }
    if spec.agents.gpu_access.mode != GpuAccessMode::None {
        return refuse("agents.gpuAccess.mode", spec.agents.gpu_access.mode.as_str(), "use None");
    }
    if spec.agents.rdma.mode != RdmaMode::None {
        return refuse("agents.rdma.mode", spec.agents.rdma.mode.as_str(), "use None; agents speak TCP");
    }
    if spec.injection.mode == InjectionMode::Webhook {
        let instead =
            "use AdmissionPolicy, or None and mount the socket's directory as the connection ConfigMap says";
        return refuse("injection.mode", spec.injection.mode.as_str(), instead);
    }
    None
}

/// Kinds that the cluster needs and that cannot be made here.
fn missing(cluster: &KVCacheCluster, access: &BTreeMap<ChildKind, Access>) -> Option<Refusal> {
    use ChildKind::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, PodMonitor};
    let spec = &cluster.spec;
    let injection: &[ChildKind] = &[MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding];
    let refuse = |field: &str, kinds: &[ChildKind], server: &str, value: &str| {
        let of = |kind: &ChildKind| access.get(kind).copied().unwrap_or(Access::NotServed);
        let (kind, lacks) =
            kinds.iter().map(|kind| (kind, of(kind))).find(|(_, access)| *access != Access::Usable)?;
        let kind = kind.as_str();
        let message = match lacks {
            Access::NotAllowed => format!(
                "{field} needs objects of the kind {kind}, which the operator may not write: set {value} of the chart, or use None"
            ),
            _ => format!(
                "{field} needs the kind {kind}, which the API server does not have: {server}, or use None"
            ),
        };
        Some(Refusal::new(Reason::Unsupported, message))
    };
    if spec.injection.mode == InjectionMode::AdmissionPolicy {
        let server = "use Kubernetes 1.36 or later";
        if let Some(refusal) = refuse("injection.mode", injection, server, "rbac.injection") {
            return Some(refusal);
        }
    }
    if spec.monitoring.mode == MonitoringMode::PodMonitor {
        return refuse("monitoring.mode", &[PodMonitor], "install Prometheus' operator", "rbac.podMonitors");
    }
    None
}

/// Why these images cannot run together. Tags that are no versions say nothing.
fn skew(agent: &str, control_plane: &str) -> Option<Refusal> {
    apart(version(agent)?, version(control_plane)?)
}

/// Why agents and members of these versions do not run together.
fn apart(agents: (u64, u64), members: (u64, u64)) -> Option<Refusal> {
    if agents.0 != members.0 {
        let message = format!(
            "agents of version {}.{} and members of version {}.{} differ in the major version, and are not run together: delete the \
             cluster and apply it anew; blocks on devices stay",
            agents.0, agents.1, members.0, members.1
        );
        return Some(Refusal::new(Reason::VersionSkew, message));
    }
    if agents.1.abs_diff(members.1) <= MINORS_APART_MAX {
        return None;
    }
    let step = if agents < members { (agents.0, agents.1 + 1) } else { (members.0, members.1 + 1) };
    let message = format!(
        "agents of version {}.{} and members of version {}.{} are more than one minor version apart: go through {}.{} first",
        agents.0, agents.1, members.0, members.1, step.0, step.1
    );
    Some(Refusal::new(Reason::VersionSkew, message))
}

/// Why these images cannot come in place of those that run: while one part is changed it meets the other as it was.
fn skew_of_running(
    wanted: &DefaultImages,
    agents: Option<&DynamicObject>,
    members: Option<&DynamicObject>,
) -> Option<Refusal> {
    let running = |workload: Option<&DynamicObject>| {
        workload.filter(|workload| has_ready_pods(workload)).and_then(image_of)
    };
    let of_members = running(members).and_then(|members| skew(&wanted.agent, &members));
    of_members.or_else(|| running(agents).and_then(|agents| skew(&agents, &wanted.control_plane)))
}

/// Why these members cannot come to agents that are there: whatever was asked for since, this is what they have said that they are.
fn skew_of_reported(control_plane: &str, nodes: &[Arc<CacheNode>]) -> Option<Refusal> {
    let members = version(control_plane)?;
    let reported = nodes.iter().filter(|node| has_reported(node));
    let versions = reported.filter_map(|node| minor(node.status.as_ref()?.agent.as_ref()?.version.as_str()));
    versions.filter_map(|agents| apart(agents, members)).next()
}

/// Whether anything of a workload runs: a template of which nothing ever did is nothing to be careful about.
fn has_ready_pods(workload: &DynamicObject) -> bool {
    let status = &workload.data["status"];
    [&status["readyReplicas"], &status["numberReady"]]
        .iter()
        .any(|ready| ready.as_u64().is_some_and(|ready| ready > 0))
}

/// The image of a workload's pods.
pub(super) fn image_of(workload: &DynamicObject) -> Option<String> {
    workload.data["spec"]["template"]["spec"]["containers"][0]["image"].as_str().map(str::to_owned)
}

/// Major and minor version of an image's tag.
pub(super) fn version(image: &str) -> Option<(u64, u64)> {
    let (rest, tag) = image.rsplit_once(':')?;
    if tag.contains('/') || rest.contains('@') {
        return None;
    }
    minor(tag)
}

/// Major and minor version.
fn minor(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// A StatefulSet cannot follow these; by hand they can be done, and then the operator agrees with what is there.
fn etcd_change(cluster: &KVCacheCluster, live: &DynamicObject) -> Option<Refusal> {
    if cluster.spec.etcd.mode != EtcdMode::Managed {
        return None;
    }
    let wanted = cluster.spec.etcd.managed.clone().unwrap_or_default();
    let replicas = live.data["spec"]["replicas"].as_u64()?;
    if replicas != u64::from(wanted.replicas) {
        let message = format!(
            "etcd.managed.replicas is {} and etcd runs with {replicas}: this release does not add members; write {replicas}",
            wanted.replicas
        );
        return Some(Refusal::new(Reason::Unsupported, message));
    }
    let size = &live.data["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"];
    let size = reprise_crds::fields::Quantity::new(size.as_str()?);
    if size.bytes().ok()? != wanted.storage.size.bytes().ok()? {
        let message = format!(
            "etcd.managed.storage.size is {} and etcd's volumes were made with {size}: this release does not grow them; write {size}",
            wanted.storage.size
        );
        return Some(Refusal::new(Reason::Unsupported, message));
    }
    None
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::{SignedDuration, Timestamp};
    use serde_json::{Value, json};

    use super::*;

    fn cluster(spec: Value) -> KVCacheCluster {
        KVCacheCluster::new("c", serde_json::from_value(spec).expect("a spec"))
    }

    #[test]
    fn what_this_release_does_not_have_is_refused_by_its_field() {
        assert_eq!(unsupported(&cluster(json!({}))), None);
        for (spec, words) in [
            (json!({ "agents": { "clientTransport": "NodeLocalService" } }), "agents.clientTransport"),
            (json!({ "agents": { "gpuAccess": { "mode": "Privileged" } } }), "agents.gpuAccess.mode"),
            (json!({ "agents": { "rdma": { "mode": "HostNetwork" } } }), "agents.rdma.mode"),
            (json!({ "injection": { "mode": "Webhook" } }), "injection.mode"),
        ] {
            let refused = unsupported(&cluster(spec)).expect(words);
            assert_eq!(refused.reason, Reason::Unsupported);
            assert!(refused.message.starts_with(words), "{}", refused.message);
        }
    }

    #[test]
    fn a_kind_that_cannot_be_made_here_is_missing_for_who_needs_it_only() {
        let injecting = cluster(json!({ "injection": { "mode": "AdmissionPolicy" } }));
        let monitored = cluster(json!({ "monitoring": { "mode": "PodMonitor" } }));
        let all = |access: Access| ChildKind::ALL.into_iter().map(|kind| (kind, access)).collect();
        for one in [&injecting, &monitored] {
            assert_eq!(missing(one, &all(Access::Usable)), None);
            let words = |access| missing(one, &all(access)).expect("it is missing").message;
            assert!(words(Access::NotServed).contains("does not have"));
            assert!(words(Access::NotAllowed).contains("of the chart"));
        }
        assert_eq!(missing(&cluster(json!({})), &all(Access::NotServed)), None);
    }

    #[test]
    fn versions_more_than_one_minor_apart_are_refused_with_the_one_to_go_through() {
        for (agent, control_plane, words) in [
            ("a:0.1.0", "c:0.1.9", None),
            ("a:0.1.0", "c:v0.2.0", None),
            ("a:0.1.0", "c:0.3.0", Some("go through 0.2")),
            ("a:0.5.0", "c:0.3.0", Some("go through 0.4")),
            ("a:1.0.0", "c:0.9.0", Some("apply it anew")),
            ("registry:5000/a", "c:0.9.0", None),
            ("a@sha256:00", "c:0.9.0", None),
            ("a:latest", "c:0.9.0", None),
        ] {
            let refused = skew(agent, control_plane).map(|refused| refused.message);
            match (words, &refused) {
                (None, None) => {}
                (Some(words), Some(refused)) => assert!(refused.contains(words), "{refused}"),
                _ => panic!("{agent} {control_plane}: {refused:?}"),
            }
        }
    }

    #[test]
    fn what_runs_is_not_replaced_by_what_it_would_not_understand_meanwhile() {
        let runs = |image: &str| -> DynamicObject {
            let pod = json!({ "spec": { "containers": [{ "image": image }] } });
            let status = json!({ "readyReplicas": 1, "numberReady": 1 });
            serde_json::from_value(
                json!({ "metadata": { "name": "w" }, "spec": { "template": pod }, "status": status }),
            )
            .expect("an object")
        };
        let wanted = |tag: &str| DefaultImages {
            agent: format!("a:{tag}"),
            control_plane: format!("c:{tag}"),
            etcd: "e:1".to_owned(),
        };
        let (agents, members) = (runs("a:0.1.0"), runs("c:0.1.0"));
        let refused = |tag: &str| skew_of_running(&wanted(tag), Some(&agents), Some(&members));
        assert_eq!(refused("0.2.0"), None);
        assert_eq!(skew_of_running(&wanted("0.3.0"), None, None), None, "nothing runs yet");
        for (tag, words) in [("0.3.0", "go through 0.2 first"), ("1.0.0", "apply it anew")] {
            let refused = refused(tag).expect("both are too far from both");
            assert_eq!(refused.reason, Reason::VersionSkew);
            assert!(refused.message.contains(words), "{}", refused.message);
        }
        let without_pods = |image: &str| {
            let mut workload = runs(image);
            workload.data["status"] = json!({});
            workload
        };
        let (no_agents, no_members) = (without_pods("a:0.11.0"), without_pods("c:0.11.0"));
        assert_eq!(
            skew_of_running(&wanted("0.1.0"), Some(&no_agents), Some(&no_members)),
            None,
            "nothing of it ever ran"
        );
        let only =
            skew_of_running(&wanted("0.3.0"), Some(&agents), Some(&runs("c:0.2.0"))).expect("of agents");
        assert!(
            only.message.contains("agents of version 0.1 and members of version 0.3"),
            "{}",
            only.message
        );
    }

    #[test]
    fn agents_that_were_not_replaced_yet_are_what_they_say() {
        let node = |version: &str, said: Timestamp| {
            let mut node =
                CacheNode::new("n", serde_json::from_value(json!({ "nodeName": "n" })).expect("a spec"));
            let status = json!({ "lastUpdated": said.to_string(), "agent": { "version": version } });
            node.status = Some(serde_json::from_value(status).expect("a status"));
            Arc::new(node)
        };
        let now = Timestamp::now();
        let refused = |image: &str, nodes: &[Arc<CacheNode>]| {
            skew_of_reported(image, nodes).map(|refused| refused.message).unwrap_or_default()
        };
        let nodes = [node("0.2.0", now), node("0.1.0", now)];
        assert_eq!(refused("c:0.2.0", &nodes), "");
        assert!(refused("c:0.3.0", &nodes).contains("go through 0.2 first"));
        assert_eq!(refused("c@sha256:00", &nodes), "", "nobody knows what it is");
        let gone = node("0.1.0", now - SignedDuration::from_hours(1));
        assert_eq!(refused("c:0.3.0", &[gone]), "", "who has not reported lately does not run");
    }

    #[test]
    fn a_managed_etcd_does_not_change_its_size_under_itself() {
        let live = |replicas: u32, size: &str| -> DynamicObject {
            let spec = json!({
                "replicas": replicas,
                "volumeClaimTemplates": [{ "spec": { "resources": { "requests": { "storage": size } } } }],
            });
            serde_json::from_value(json!({ "metadata": { "name": "c-etcd" }, "spec": spec }))
                .expect("an object")
        };
        let wanted =
            cluster(json!({ "etcd": { "managed": { "replicas": 3, "storage": { "size": "1Gi" } } } }));
        assert_eq!(etcd_change(&wanted, &live(3, "1024Mi")), None);
        let words = |live: &DynamicObject| etcd_change(&wanted, live).expect("refused").message;
        assert!(words(&live(1, "1Gi")).contains("write 1"));
        assert!(words(&live(3, "2Gi")).contains("write 2Gi"));
    }
}
