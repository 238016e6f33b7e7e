//! Validates the chart's examples as the operator does. The API server's rules are tested elsewhere.
//!
//! Each values file is a separate release, and the files in `resources` form one release. The node has all
//! labels that they select.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool, SlackProfile};
use reprise_policy::identity::PodBindings;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::framework::refusal::Refusal;
use crate::reconcile::assignment::current::CurrentAssignment;
use crate::reconcile::assignment::{Assignment, ClusterAssignment, PoolAssignment};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::{cluster, deletion_guard, pool, profile, tenant};
use crate::settings::DefaultImages;

const API: &str = "reprise.dev/v1alpha1";
/// Node of the example allocations.
const NODE: &str = "worker-1";
/// Pool of the example allocations, and the release with it.
const GRANTED_POOL: (&str, &str) = ("nvme", "raw-devices.yaml");

/// Returns the files of a folder by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the examples");
    let paths = entries.map(|entry| entry.expect("a readable entry").path());
    let mut files: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("a readable file");
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).expect("YAML")).collect()
}

/// Returns the objects that the chart renders from values.
fn of_values(values: &Value) -> Vec<Value> {
    let made = |kind: &str, name: &str, spec: &Value| {
        let metadata = json!({ "name": name, "namespace": "reprise" });
        json!({ "apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec })
    };
    let mut objects = vec![made("KVCacheCluster", "reprise", &values["cluster"])];
    for (kind, field) in [("SSDPool", "pools"), ("CacheTenant", "tenants")] {
        let named = values[field].as_object().into_iter().flatten();
        objects.extend(named.map(|(name, spec)| made(kind, name, spec)));
    }
    objects
}

/// Returns our objects of each release, by the name of its file or folder.
fn releases() -> BTreeMap<String, Vec<Value>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/reprise/examples");
    let name = |file: &Path| file.file_name().expect("a file").to_string_lossy().into_owned();
    let mut releases: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for file in files(&folder) {
        let objects = documents(&file).iter().flat_map(of_values).collect();
        releases.insert(name(&file), objects);
    }
    let resources = files(&folder.join("resources"));
    let ours = resources.iter().flat_map(|file| documents(file)).filter(|object| object["apiVersion"] == API);
    releases.insert("resources".to_owned(), ours.collect());
    releases
}

fn of_kind<K: DeserializeOwned>(objects: &[Value], kind: &str) -> Vec<Arc<K>> {
    let those = objects.iter().filter(|object| object["kind"] == kind);
    let read = |object: &Value| serde_json::from_value(object.clone()).expect("an object of its kind");
    those.map(|object| Arc::new(read(object))).collect()
}

fn assignment(objects: &[Value]) -> Assignment {
    let node: Node = serde_json::from_value(json!({
        "metadata": { "name": NODE, "labels": { "reprise.dev/cache": "true", "reprise.dev/scratch": "true" } },
    }))
    .expect("a node");
    let clusters: Vec<Arc<KVCacheCluster>> = of_kind(objects, "KVCacheCluster");
    let pools: Vec<Arc<SSDPool>> = of_kind(objects, "SSDPool");
    Assignment::compute(&clusters, &pools, &[Arc::new(node)], &CurrentAssignment::default())
}

fn cluster_refusal(one: &KVCacheCluster, assignment: ClusterAssignment) -> Option<Refusal> {
    let names = ClusterNames::of(one);
    let found = cluster::inputs::ClusterInputs {
        agent_config: cluster::inputs::AgentConfigInputs {
            names,
            pools: Vec::new(),
            tenants: Vec::new(),
            running: None,
        },
        assignment,
        cache_nodes: Vec::new(),
        bindings: PodBindings::default(),
        profiles: BTreeMap::new(),
        images: DefaultImages {
            agent: "agent:1".to_owned(),
            control_plane: "controlplane:1".to_owned(),
            etcd: "etcd:1".to_owned(),
            operator: "operator:1".to_owned(),
        },
        store: None,
        agents: None,
        members: None,
        control_plane_state: None,
        volumes: None,
        authority: None,
        certificates: crate::reconcile::authority::AuthorityState::Present(
            crate::reconcile::authority::tests::any_authority(),
        ),
        etcd: None,
        access: ChildKind::ALL.into_iter().map(|kind| (kind, KindAccess::Usable)).collect(),
    };
    cluster::validate::validate(one, &found)
}

fn pool_refusal(one: &SSDPool, assignment: PoolAssignment) -> Option<Refusal> {
    let guard = deletion_guard::DeletionGuard::default();
    let found =
        pool::dereference::PoolInputs { assignment, cluster: None, nodes: Vec::new(), reserved: 0, guard };
    pool::validate::validate(one, &found)
}

/// Validates a profile as if a cluster selects it.
fn profile_refusal(one: &SlackProfile) -> Option<Refusal> {
    let measurement = serde_json::to_string(&one.spec.measurement).expect("JSON");
    let revision = profile::source::revision(one, "spec.measurement", &measurement);
    let found = profile::dereference::ProfileInputs {
        revision: revision.clone(),
        clusters: vec!["inference/chat".to_owned()],
        full: None,
        nodes: Vec::new(),
        products: BTreeSet::new(),
    };
    profile::validate::validate(one, &found).or(revision.err())
}

/// Validates an allocation on a node of the release with the pool, whose agent has not reported yet.
fn allocation_refusal(one: Arc<GPUQueueAllocation>, lending: &[Value]) -> Option<Refusal> {
    let pools: Vec<Arc<SSDPool>> = of_kind(lending, "SSDPool");
    let name = one.spec.pool_ref.name.as_str();
    assert_eq!(name, GRANTED_POOL.0, "the pool that the allocations name");
    let node: CacheNode = serde_json::from_value(json!({
        "apiVersion": API, "kind": "CacheNode", "metadata": { "name": NODE }, "spec": { "nodeName": NODE },
    }))
    .expect("an object");
    let allocation = crate::reconcile::allocation::dereference::ResolvedAllocation {
        pool: pools.into_iter().find(|pool| pool.name_any() == name),
        assignment: assignment(lending).pools[name].clone(),
        profile: None,
        object: one,
    };
    let found = crate::reconcile::allocation::dereference::GrantInputs {
        node: allocation.object.spec.node_name.to_string(),
        presence: crate::reconcile::allocation::dereference::NodePresence::Present,
        cache_node: Some(Arc::new(node)),
        is_silent: false,
        lenders: Vec::new(),
        allocations: Vec::new(),
        fresh_finalizers: BTreeSet::new(),
        skipped: BTreeSet::new(),
    };
    crate::reconcile::allocation::validate::validate(&allocation, &found)
}

#[test]
fn accepts_all_examples_of_the_chart() {
    let releases = releases();
    let mut kinds = BTreeSet::new();
    for (release, objects) in &releases {
        let assignment = assignment(objects);
        for one in of_kind::<KVCacheCluster>(objects, "KVCacheCluster") {
            let own = assignment.cluster(&one).cloned().expect("an assignment");
            assert_eq!(own.nodes, [NODE], "{release}");
            assert_eq!(cluster_refusal(&one, own), None, "{release}");
        }
        for one in of_kind::<SSDPool>(objects, "SSDPool") {
            let own = assignment.pools[&one.name_any()].clone();
            // Check this first: the message of a rejected pool is more helpful than its missing nodes.
            assert_eq!(pool_refusal(&one, own.clone()), None, "{release}");
            assert_eq!(own.nodes, [NODE], "{release}");
        }
        for one in of_kind::<CacheTenant>(objects, "CacheTenant") {
            assert_eq!(tenant::validate::validate(&one), None, "{release}");
        }
        for one in of_kind::<SlackProfile>(objects, "SlackProfile") {
            assert_eq!(profile_refusal(&one), None, "{release}");
        }
        for one in of_kind::<GPUQueueAllocation>(objects, "GPUQueueAllocation") {
            assert_eq!(allocation_refusal(one, &releases[GRANTED_POOL.1]), None, "{release}");
        }
        kinds.extend(objects.iter().filter_map(|object| object["kind"].as_str()));
    }
    let all = ["CacheTenant", "GPUQueueAllocation", "KVCacheCluster", "SSDPool", "SlackProfile"];
    assert_eq!(kinds, BTreeSet::from(all), "every kind that users create has an example");
}
