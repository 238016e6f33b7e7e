//! The chart's examples, as the operator sees them: it refuses none. The API server's own rules are looked at elsewhere.
//!
//! A file of values is a release of its own, and the files of `resources` are one together. The node has all labels that they select by.

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

use crate::child::ChildKind;
use crate::names::ClusterNames;
use crate::optional::Access;
use crate::plan::held::Held;
use crate::plan::{ClusterPlan, Plan, PoolPlan, Refusal};
use crate::profile::source::Source;
use crate::settings::DefaultImages;
use crate::{allocation, cluster, in_use, pool, profile, tenant};

const API: &str = "reprise.dev/v1alpha1";
/// The node that the allocations name.
const NODE: &str = "worker-1";
/// The pool that they name, and the release that has it.
const LENT: (&str, &str) = ("nvme", "raw-devices.yaml");

/// Files of a folder, by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the examples are there");
    let paths = entries.map(|entry| entry.expect("it can be read").path());
    let mut files: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("it can be read");
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).expect("YAML")).collect()
}

/// The objects that the chart makes of values.
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

/// Our objects of each release, by the name of its file or folder.
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

fn plan(objects: &[Value]) -> Plan {
    let node: Node = serde_json::from_value(json!({
        "metadata": { "name": NODE, "labels": { "reprise.dev/cache": "true", "reprise.dev/scratch": "true" } },
    }))
    .expect("a node");
    let clusters: Vec<Arc<KVCacheCluster>> = of_kind(objects, "KVCacheCluster");
    let pools: Vec<Arc<SSDPool>> = of_kind(objects, "SSDPool");
    Plan::make(&clusters, &pools, &[Arc::new(node)], &Held::default())
}

fn cluster_refused(one: &KVCacheCluster, plan: ClusterPlan) -> Option<Refusal> {
    let names = ClusterNames::of(one);
    let found = cluster::dereference::Found {
        referred: cluster::dereference::Referred {
            names,
            pools: Vec::new(),
            tenants: Vec::new(),
            running: None,
        },
        plan,
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
        volumes: None,
        authority: None,
        etcd: None,
        access: ChildKind::ALL.into_iter().map(|kind| (kind, Access::Usable)).collect(),
    };
    cluster::validate::validate(one, &found)
}

fn pool_refused(one: &SSDPool, plan: PoolPlan) -> Option<Refusal> {
    let usage = in_use::Usage::default();
    let found = pool::dereference::Found { plan, cluster: None, nodes: Vec::new(), reserved: 0, usage };
    pool::validate::validate(one, &found)
}

/// Of one that a cluster selects.
fn profile_refused(one: &SlackProfile) -> Option<Refusal> {
    let windows = one.spec.windows.as_ref().expect("the example has its windows in it");
    let source = Source::Windows(profile::content::inline(windows));
    let selecting = profile::dereference::Selecting { cluster: "inference/chat".to_owned(), ahead: 0 };
    let found = profile::dereference::Found {
        source: source.clone(),
        clusters: vec![selecting],
        nodes: Vec::new(),
        products: BTreeSet::new(),
    };
    profile::validate::accepted(one, &found).or_else(|| profile::validate::valid(one, &source).err())
}

/// On a node of the release that has the pool; its agent has not said anything yet.
fn allocation_refused(one: Arc<GPUQueueAllocation>, lending: &[Value]) -> Option<Refusal> {
    let pools: Vec<Arc<SSDPool>> = of_kind(lending, "SSDPool");
    let name = one.spec.pool_ref.name.as_str();
    assert_eq!(name, LENT.0, "the pool that the allocations name");
    let node: CacheNode = serde_json::from_value(json!({
        "apiVersion": API, "kind": "CacheNode", "metadata": { "name": NODE }, "spec": { "nodeName": NODE },
    }))
    .expect("an object");
    let referring = allocation::dereference::Referring {
        pool: pools.into_iter().find(|pool| pool.name_any() == name),
        plan: plan(lending).pools[name].clone(),
        tenant: None,
        profile: None,
        object: one,
    };
    let found = allocation::dereference::Found {
        node: referring.object.spec.node_name.to_string(),
        presence: allocation::dereference::Presence::Here,
        cache_node: Some(Arc::new(node)),
        lenders: Vec::new(),
        allocations: Vec::new(),
        held: BTreeSet::new(),
        passed_over: BTreeSet::new(),
    };
    allocation::validate::validate(&referring, &found)
}

#[test]
fn no_example_of_the_chart_is_refused() {
    let releases = releases();
    let mut kinds = BTreeSet::new();
    for (release, objects) in &releases {
        let plan = plan(objects);
        for one in of_kind::<KVCacheCluster>(objects, "KVCacheCluster") {
            let own = plan.cluster(&one).cloned().expect("it is planned");
            assert_eq!(own.nodes, [NODE], "{release}");
            assert_eq!(cluster_refused(&one, own), None, "{release}");
        }
        for one in of_kind::<SSDPool>(objects, "SSDPool") {
            let own = plan.pools[&one.name_any()].clone();
            // Before its nodes: one that is refused for its own sake has words for it.
            assert_eq!(pool_refused(&one, own.clone()), None, "{release}");
            assert_eq!(own.nodes, [NODE], "{release}");
        }
        for one in of_kind::<CacheTenant>(objects, "CacheTenant") {
            assert_eq!(tenant::validate::validate(&one), None, "{release}");
        }
        for one in of_kind::<SlackProfile>(objects, "SlackProfile") {
            assert_eq!(profile_refused(&one), None, "{release}");
        }
        for one in of_kind::<GPUQueueAllocation>(objects, "GPUQueueAllocation") {
            assert_eq!(allocation_refused(one, &releases[LENT.1]), None, "{release}");
        }
        kinds.extend(objects.iter().filter_map(|object| object["kind"].as_str()));
    }
    let all = ["CacheTenant", "GPUQueueAllocation", "KVCacheCluster", "SSDPool", "SlackProfile"];
    assert_eq!(kinds, BTreeSet::from(all), "every kind that people write has an example");
}
