//! Many nodes that nobody runs, beside those of a cluster: kwok says that they are ready and that their pods run, the scheduler and the
//! controllers of Kubernetes do with them what they do with any, and this process plays what their agents would tell the API server.
//!
//! They have a taint, so only pods that are meant for them get there, and a label, by which a `KVCacheCluster` selects them.
//!
//! Deliberately absent: blocks, sessions and members that hear of these nodes. What is played is what the operator sees.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::programs;
use crate::process::Running;
use crate::tree;
use crate::wait::wait_until;

/// Label and taint of these nodes.
const PLAYED: &str = "reprise.dev/played";
/// Label of these nodes: the pool that they are of.
const POOL: &str = "reprise.dev/played-pool";
/// Namespace of the cluster that has them, and its name.
pub const CLUSTER: &str = "played";
/// What a pool has on each.
const POOL_SIZE: &str = "1Gi";
/// Agents tell used bytes in so many steps of a device, each of so many MiB.
const USED_STEPS: i64 = 256;
const USED_STEP_MIB: i64 = 4;
/// Who tells what agents tell.
const AGENT: &str = "reprise-agent";
/// Calls under way.
const AT_ONCE: usize = 16;
/// An agent reports so often.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// From `apply` to 1,000 ready nodes, on two cores.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// Between two looks at all nodes.
const PAUSE: Duration = Duration::from_millis(500);

/// How many there are.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Nodes.
    pub nodes: usize,
    /// Pools, each on as many of the nodes as any other.
    pub pools: usize,
}

/// Nodes that are played. They end with the handle.
#[derive(Debug)]
pub struct Fleet {
    scale: Scale,
    _kwok: Running,
}

impl Fleet {
    /// Makes them, and waits until all are ready.
    ///
    /// # Panics
    /// When they do not become ready.
    pub fn start(cluster: &Cluster, scale: Scale) -> Fleet {
        let mut kwok = Command::new(programs::kwok());
        kwok.arg(format!("--kubeconfig={}", cluster.kubeconfig().display()))
            .arg(format!("--config={}", tree().join("e2e/kwok/stages.yaml").display()))
            .arg("--manage-all-nodes=false")
            .arg(format!("--manage-nodes-with-label-selector={PLAYED}=true"))
            // The cluster's controllers wait for nobody to say that these nodes live.
            .arg("--node-lease-duration-seconds=0");
        let fleet = Fleet { scale, _kwok: cluster.spawn("kwok", kwok) };
        cluster.apply(&fleet.node_objects());
        wait_until("all played nodes to be ready", READY_WITHIN, || {
            std::thread::sleep(PAUSE);
            fleet.all_nodes_say(cluster, "Ready").then_some(())
        });
        fleet
    }

    /// Pools, and a cluster that has them on these nodes; its members and its etcd are on nodes that are not played.
    pub fn objects(&self) -> String {
        let mut objects = format!(
            "
apiVersion: v1
kind: Namespace
metadata:
  name: {CLUSTER}
  labels: {{ pod-security.kubernetes.io/enforce: privileged }}
---
apiVersion: reprise.dev/v1alpha1
kind: KVCacheCluster
metadata: {{ name: {CLUSTER}, namespace: {CLUSTER} }}
spec:
  cache: {{ dram: 256Mi, regionSize: 64Mi }}
  controlPlane: {{ replicas: 2 }}
  etcd: {{ managed: {{ replicas: 1 }} }}
  agents:
    nodeSelector: {{ {PLAYED}: \"true\" }}
    tolerations: [{{ key: {PLAYED}, operator: Exists }}]
    # One after the other is for agents that hold something.
    updateStrategy: {{ maxUnavailable: 100 }}
  pools:
"
        );
        for pool in 0..self.scale.pools {
            objects.push_str(&format!("    - name: {}\n", pool_name(pool)));
        }
        for pool in 0..self.scale.pools {
            let name = pool_name(pool);
            objects.push_str(&format!(
                "---
apiVersion: reprise.dev/v1alpha1
kind: SSDPool
metadata: {{ name: {name} }}
spec:
  directory: {{ path: /data/{name}, size: {POOL_SIZE} }}
  nodeSelector: {{ matchLabels: {{ {POOL}: {name} }} }}
"
            ));
        }
        objects
    }

    /// Every agent does what its `CacheNode` says and reports once, as fast as the API server takes it.
    ///
    /// # Panics
    /// When the API server does not take it.
    pub fn report_all(&self, cluster: &Cluster) {
        let api = cache_nodes(cluster.client());
        cluster.block_on(async {
            let gate = Arc::new(Semaphore::new(AT_ONCE));
            let mut running = JoinSet::new();
            for number in 0..self.scale.nodes {
                let (api, gate) = (api.clone(), Arc::clone(&gate));
                running.spawn(async move {
                    let _turn = gate.acquire().await.expect("nobody closes it");
                    report(&api, &node_name(number)).await;
                });
            }
            while let Some(ended) = running.join_next().await {
                ended.expect("the API server takes a report");
            }
        });
    }

    /// Every agent reports as often as agents do, evenly over time, each time that its device has got fuller.
    ///
    /// # Panics
    /// When the API server does not take it.
    pub fn report_for(&self, cluster: &Cluster, time: Duration) {
        let api = cache_nodes(cluster.client());
        let every = REPORT_EVERY / u32::try_from(self.scale.nodes).expect("some thousand nodes");
        cluster.block_on(async {
            let until = Instant::now() + time;
            let mut ticks = tokio::time::interval(every);
            let mut running = JoinSet::new();
            for number in (0..self.scale.nodes).cycle() {
                ticks.tick().await;
                if Instant::now() >= until {
                    break;
                }
                while running.len() >= AT_ONCE {
                    running.join_next().await.expect("some run").expect("the API server takes a report");
                }
                let api = api.clone();
                running.spawn(async move { report(&api, &node_name(number)).await });
            }
            while let Some(ended) = running.join_next().await {
                ended.expect("the API server takes a report");
            }
        });
    }

    /// Whether every node has a `CacheNode` of which this holds.
    ///
    /// # Panics
    /// When the API server does not answer.
    pub fn all(&self, cluster: &Cluster, holds: impl Fn(&DynamicObject) -> bool) -> bool {
        let api = cache_nodes(cluster.client());
        let listed = cluster.block_on(api.list(&ListParams::default())).expect("the API server answers");
        let ours: Vec<&DynamicObject> =
            listed.items.iter().filter(|node| is_played(&node.name_any())).collect();
        ours.len() == self.scale.nodes && ours.into_iter().all(holds)
    }

    /// Whether this condition of every node is true.
    ///
    /// # Panics
    /// When the API server does not answer.
    pub fn all_nodes_say(&self, cluster: &Cluster, condition: &str) -> bool {
        let nodes: Api<NodeObject> = Api::all(cluster.client());
        let params = ListParams::default().labels(&format!("{PLAYED}=true"));
        let listed = cluster.block_on(nodes.list(&params)).expect("the API server answers");
        let says = |node: &NodeObject| {
            let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
            conditions.into_iter().flatten().any(|one| one.type_ == condition && one.status == "True")
        };
        listed.items.len() == self.scale.nodes && listed.items.iter().all(says)
    }

    fn node_objects(&self) -> String {
        let node = |number: usize| {
            format!(
                "---
apiVersion: v1
kind: Node
metadata:
  name: {name}
  labels: {{ {PLAYED}: \"true\", {POOL}: {pool}, kubernetes.io/hostname: {name}, kubernetes.io/os: linux }}
spec:
  taints: [{{ key: {PLAYED}, effect: NoSchedule }}]
",
                name = node_name(number),
                pool = pool_name(number % self.scale.pools),
            )
        };
        (0..self.scale.nodes).map(node).collect()
    }
}

fn node_name(number: usize) -> String {
    format!("played-{number:04}")
}

fn is_played(node: &str) -> bool {
    node.starts_with("played-")
}

/// Name of a pool.
pub fn pool_name(pool: usize) -> String {
    format!("pool-{pool:02}")
}

/// A client of the custom resources of nodes.
fn cache_nodes(client: Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("reprise.dev", "v1alpha1", "CacheNode");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, "cachenodes"))
}

/// What is used of a node's device: one step more from report to report, and nothing after all of it.
fn used(node: &str, now: Timestamp) -> String {
    let number = node.rsplit('-').next().and_then(|number| number.parse::<i64>().ok());
    let number = number.expect("the name of a played node ends with its number");
    let reports = now.as_second() / i64::try_from(REPORT_EVERY.as_secs()).expect("some seconds");
    format!("{}Mi", (reports + number) % USED_STEPS * USED_STEP_MIB)
}

/// What an agent says that has done what its node's spec says. A node without a spec has none to say it.
async fn report(api: &Api<DynamicObject>, name: &str) {
    let Some(node) = api.get_opt(name).await.expect("the API server answers") else { return };
    let (spec, generation) = (&node.data["spec"], node.metadata.generation);
    let claims = spec["claims"].as_array().cloned().unwrap_or_default();
    let now = Timestamp::now();
    let (used, now) = (used(name, now), now.to_string());
    let device = |claim: &Value| {
        json!({
            "path": claim["file"], "pool": claim["pool"], "state": "Open", "size": claim["size"], "used": used,
            "engine": claim["engine"],
        })
    };
    let pool = |claim: &Value| json!({ "pool": claim["pool"], "uid": claim["uid"], "generation": claim["generation"] });
    let status = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": name },
        "status": {
            "observedGeneration": generation,
            "lastUpdated": now,
            "agent": { "version": env!("CARGO_PKG_VERSION") },
            "capacity": { "dramTotal": "256Mi", "dramUsed": "0", "ssdTotal": POOL_SIZE, "ssdUsed": used },
            "devices": claims.iter().map(device).collect::<Vec<Value>>(),
            "applied": {
                "configurationDigest": spec["configurationDigest"],
                "pools": claims.iter().map(pool).collect::<Vec<Value>>(),
            },
            "conditions": [{
                "type": "AgentReady", "status": "True", "reason": "AsDesired", "lastTransitionTime": now,
                "observedGeneration": generation,
            }],
        },
    });
    let params = PatchParams::apply(AGENT).force();
    let taken = api.patch_status(name, &params, &Patch::Apply(&status)).await;
    taken.unwrap_or_else(|error| panic!("the report of {name} is not taken: {error}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_report_tells_another_amount_that_fits_the_device() {
        let at = |report: i64| {
            let every = i64::try_from(REPORT_EVERY.as_secs()).expect("some seconds");
            Timestamp::from_second(report * every).expect("a time")
        };
        assert_eq!(used("played-0000", at(0)), "0Mi");
        assert_eq!(used("played-0003", at(252)), "1020Mi");
        assert_eq!(used("played-0003", at(253)), "0Mi");
        let is_news = |report: i64| used("played-0007", at(report)) != used("played-0007", at(report + 1));
        assert!((0..600).all(is_news));
    }
}
