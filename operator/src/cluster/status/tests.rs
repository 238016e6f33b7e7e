//! What is said of transports and raw devices that are wanted and not to be had, or only perhaps.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_crds::SSDPool;
use reprise_crds::status::set;
use reprise_policy::identity::PodBindings;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::cluster::dereference::{NamedPool, Referred};
use crate::plan::{ClusterPlan, PoolPlan};
use crate::settings::DefaultImages;

fn object<K: DeserializeOwned>(kind: &str, name: &str, spec: Value) -> K {
    let whole = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": kind,
        "metadata": { "name": name, "namespace": "n", "uid": name }, "spec": spec,
    });
    serde_json::from_value(whole).expect("an object")
}

/// What is found of a cluster whose agents have these modes, with a pool of this spec.
fn said(modes: Value, pool: Value) -> Vec<Finding> {
    said_of(modes, pool, |_| ())
}

/// The same, with something else about it.
fn said_of(modes: Value, pool: Value, change: impl FnOnce(&mut Found)) -> Vec<Finding> {
    let (cluster, mut found) = found(modes, pool);
    change(&mut found);
    of(&cluster, &found, None, None).1
}

fn found(modes: Value, pool: Value) -> (KVCacheCluster, Found) {
    let cluster: KVCacheCluster =
        object("KVCacheCluster", "c", json!({ "pools": [{ "name": "p" }], "agents": modes }));
    let pool: SSDPool = object("SSDPool", "p", pool);
    let plan = PoolPlan { cluster: Some("n/c".to_owned()), ..PoolPlan::default() };
    let named = NamedPool { name: "p".to_owned(), pool: Some(Arc::new(pool)), plan };
    let found = Found {
        referred: Referred {
            names: ClusterNames::of(&cluster),
            pools: vec![named],
            tenants: Vec::new(),
            running: None,
        },
        plan: ClusterPlan::default(),
        cache_nodes: Vec::new(),
        bindings: PodBindings::default(),
        profiles: BTreeMap::new(),
        images: DefaultImages {
            agent: "agent:1".to_owned(),
            control_plane: "controlplane:1".to_owned(),
            etcd: "etcd:1".to_owned(),
        },
        store: None,
        agents: None,
        members: None,
        said_by_members: None,
        etcd: None,
        volumes: None,
        authority: None,
        access: BTreeMap::new(),
    };
    (cluster, found)
}

fn one(findings: &[Finding], kind: Type) -> Finding {
    findings.iter().find(|finding| finding.kind == kind).cloned().unwrap_or_else(|| panic!("no {kind}"))
}

fn directory() -> Value {
    json!({ "directory": { "path": "/p", "size": "1Gi" } })
}

#[test]
fn agents_that_speak_tcp_where_rdma_is_wanted_say_so_and_work() {
    let plain = said(json!({}), directory());
    let as_wanted = one(&plain, Type::TransportFallback);
    assert_eq!((as_wanted.status, as_wanted.reason), (ConditionStatus::False, Reason::AsDesired));
    for rdma in [
        json!({ "mode": "DevicePlugin", "resourceName": "rdma/shared" }),
        json!({ "mode": "SrIov", "resourceName": "example.com/vf" }),
        json!({ "mode": "Dra", "deviceClassName": "rdma.example.com" }),
        json!({ "mode": "HostNetwork" }),
    ] {
        let wanted = said(json!({ "rdma": rdma }), directory());
        let fallback = one(&wanted, Type::TransportFallback);
        assert_eq!((fallback.status, fallback.reason), (ConditionStatus::True, Reason::Unsupported));
        let mode = rdma["mode"].as_str().expect("a mode");
        assert!(fallback.message.starts_with("agents speak TCP: "), "{}", fallback.message);
        assert!(fallback.message.contains(mode), "{}", fallback.message);
        for kind in [Type::Ready, Type::Degraded, Type::Accepted, Type::AgentsReady] {
            assert_eq!(one(&wanted, kind), one(&plain, kind), "{mode}");
        }
    }
}

#[test]
fn a_cluster_with_raw_devices_is_told_when_nothing_gives_them_to_the_pods() {
    let raw = || json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let bound = |modes: Value, pool: Value| one(&said(modes, pool), Type::PoolsBound);
    let told = bound(json!({}), raw());
    assert_eq!(told.status, ConditionStatus::True, "some runtimes allow them");
    assert!(told.message.contains("raw devices of p") && told.message.contains("agents.deviceAccess.mode"));
    let plugin = json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" });
    for (modes, pool) in [
        (json!({}), directory()),
        (json!({ "deviceAccess": { "mode": "Privileged" } }), raw()),
        (json!({ "deviceAccess": plugin }), raw()),
    ] {
        assert_eq!(bound(modes, pool).message, "1 pools are bound");
    }
}

/// A cluster on a node, with an etcd of these numbers of members: wanted, and ready.
fn with_etcd(found: &mut Found, wanted: u32, ready: u32) {
    found.plan.nodes.push("n1".to_owned());
    let etcd = json!({
        "metadata": { "name": "c-etcd", "generation": 1 },
        "spec": { "replicas": wanted, "template": { "spec": { "containers": [{ "image": found.images.etcd }] } } },
        "status": { "observedGeneration": 1, "readyReplicas": ready, "updatedReplicas": wanted },
    });
    found.etcd = Some(Arc::new(serde_json::from_value(etcd).expect("an object")));
}

#[test]
fn a_cluster_whose_authority_of_certificates_is_lost_is_degraded_and_works() {
    let plain = said_of(json!({}), directory(), |found| with_etcd(found, 1, 1));
    let lost = said_of(json!({}), directory(), |found| {
        with_etcd(found, 1, 1);
        found.authority = Some(Refusal::new(Reason::SecretInvalid, "put it back"));
    });
    for found in &plain {
        let now = one(&lost, found.kind);
        if found.kind == Type::Degraded {
            assert_eq!((found.status, found.reason), (ConditionStatus::False, Reason::AsDesired));
            assert_eq!((now.status, now.reason), (ConditionStatus::True, Reason::SecretInvalid));
            assert_eq!(now.message, "put it back");
        } else {
            assert_eq!(now, *found);
        }
    }
    assert_eq!(one(&lost, Type::EtcdReady).status, ConditionStatus::True);
}

#[test]
fn an_etcd_that_answers_without_a_member_is_ready_and_the_cluster_degraded_once_all_could_have_come() {
    let (mut cluster, mut found) = found(json!({}), directory());
    let mut degraded = |wanted: u8, ready: u32, since: Duration| {
        with_etcd(&mut found, u32::from(wanted), ready);
        let managed = json!({ "mode": "Managed", "managed": { "replicas": wanted } });
        cluster.spec.etcd = serde_json::from_value(managed).expect("a store");
        let answers = Finding::yes(Type::EtcdReady, Reason::AsDesired, "");
        let mut conditions = Vec::new();
        let began = Time(Timestamp::now() - SignedDuration::try_from(since).expect("minutes"));
        set(&mut conditions, &answers, 1, &began);
        cluster.status = Some(KVCacheClusterStatus { conditions, ..KVCacheClusterStatus::default() });
        let said = of(&cluster, &found, None, None).1;
        assert_eq!(one(&said, Type::EtcdReady).status, ConditionStatus::True, "{ready} of {wanted}");
        one(&said, Type::Degraded)
    };
    let names = ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "c".to_owned() };
    for ready in [0, 1, 3] {
        assert_eq!(EtcdMembers { desired: 3, ready }.missing(&names), None, "{ready} of 3");
    }
    let (new, settled) = (Duration::from_secs(5), MEMBERS_COME_WITHIN + Duration::from_secs(1));
    for (wanted, ready, since) in [(1, 1, settled), (3, 3, settled), (3, 2, new)] {
        assert_eq!(degraded(wanted, ready, since).reason, Reason::AsDesired, "{ready} of {wanted}");
    }
    for (wanted, ready, more) in
        [(3, 2, "without 1 more"), (5, 4, "without 2 more"), (5, 3, "without 1 more")]
    {
        let said = degraded(wanted, ready, settled);
        assert_eq!((said.status, said.reason), (ConditionStatus::True, Reason::MembersMissing));
        assert!(said.message.contains(more) && said.message.contains("c-etcd"), "{}", said.message);
    }
}

#[test]
fn an_etcd_whose_members_are_replaced_one_after_the_other_makes_no_cluster_degraded() {
    let (mut cluster, mut found) = found(json!({}), directory());
    with_etcd(&mut found, 3, 2);
    let managed = json!({ "mode": "Managed", "managed": { "replicas": 3 } });
    cluster.spec.etcd = serde_json::from_value(managed).expect("a store");
    let mut conditions = Vec::new();
    let began = Time(Timestamp::now() - SignedDuration::from_hours(1));
    set(&mut conditions, &Finding::yes(Type::EtcdReady, Reason::AsDesired, ""), 1, &began);
    cluster.status = Some(KVCacheClusterStatus { conditions, ..KVCacheClusterStatus::default() });
    assert!(missing_member(&cluster, &found).is_some());
    found.images.etcd = "etcd:2".to_owned();
    assert_eq!(missing_member(&cluster, &found), None, "another image is wanted");
    with_etcd(&mut found, 3, 2);
    let mut etcd = (*found.etcd.clone().expect("set above")).clone();
    etcd.data["status"]["updatedReplicas"] = json!(1);
    found.etcd = Some(Arc::new(etcd));
    assert_eq!(missing_member(&cluster, &found), None, "one of three has it");
}

#[test]
fn an_etcd_whose_members_are_all_replaced_is_not_ready_even_while_they_still_are() {
    let said = said_of(json!({}), directory(), |found| with_etcd(found, 0, 1));
    let etcd = one(&said, Type::EtcdReady);
    assert_eq!((etcd.status, etcd.reason), (ConditionStatus::False, Reason::Progressing));
    assert!(etcd.message.contains("replaced at once"), "{}", etcd.message);
}
