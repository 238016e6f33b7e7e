//! Simulated nodes in addition to the real nodes of a cluster. kwok reports that they and their pods run;
//! Kubernetes' scheduler and controllers treat them as any node; this process writes the reports that their
//! agents would write.
//!
//! The nodes have a taint, so that only pods meant for them are scheduled there, and a label for
//! `KVCacheCluster`s.
//!
//! Deliberately absent: blocks, sessions, and registrations with members. Only what the operator reads is
//! simulated.

use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::programs;
use crate::process::ChildProcess;
use crate::tree;
use crate::wait::wait_until;

/// Label and taint of the simulated nodes.
const PLAYED: &str = "reprise.dev/played";
/// Label with the pool of a simulated node.
const POOL: &str = "reprise.dev/played-pool";
/// Name of the cluster on the simulated nodes, and of its namespace.
pub const CLUSTER: &str = "played";
/// Size of a pool on each node.
const POOL_SIZE: &str = "1Gi";
/// Reported used bytes: the number of steps of a device, and the size of a step in MiB.
const USED_STEPS: i64 = 256;
const USED_STEP_MIB: i64 = 4;
/// Field manager of the reports, which is the agents'.
const AGENT: &str = "reprise-agent";
/// Calls in flight at most.
const AT_ONCE: usize = 16;
/// Interval between two reports of an agent.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Bound from `apply` until 1,000 nodes are ready, on two cores.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// Size of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Number of simulated nodes.
    pub nodes: usize,
    /// Number of pools, each on an equal share of the nodes.
    pub pools: usize,
}

/// Simulated nodes. The simulation ends when this is dropped.
#[derive(Debug)]
pub struct Fleet {
    scale: Scale,
    _kwok: ChildProcess,
}

impl Fleet {
    /// Creates the nodes, and waits until all are ready.
    ///
    /// # Panics
    /// If they do not become ready.
    pub fn start(cluster: &Cluster, scale: Scale) -> Fleet {
        let mut kwok = Command::new(programs::kwok());
        kwok.arg(format!("--kubeconfig={}", cluster.kubeconfig().display()))
            .arg(format!("--config={}", tree().join("e2e/kwok/stages.yaml").display()))
            .arg("--manage-all-nodes=false")
            .arg(format!("--manage-nodes-with-label-selector={PLAYED}=true"))
            // The cluster's controllers do not expect leases of these nodes.
            .arg("--node-lease-duration-seconds=0");
        let fleet = Fleet { scale, _kwok: cluster.spawn("kwok", kwok) };
        cluster.apply(&fleet.node_objects());
        wait_until("all simulated nodes to be ready", READY_WITHIN, || {
            fleet.all_nodes_have(cluster, "Ready").then_some(())
        });
        fleet
    }

    /// Returns the pools, and a cluster with these on the simulated nodes; its members and its etcd run on
    /// real nodes.
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
    # These agents hold no blocks, so they need not be replaced one at a time.
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

    /// Writes one report for every agent, according to its `CacheNode`, as fast as the API server accepts
    /// them.
    ///
    /// # Panics
    /// If the API server refuses a report.
    pub fn report_all(&self, cluster: &Cluster) {
        cluster.block_on(self.reporters(cluster).report_all());
    }

    /// Writes reports at the agents' rate, evenly distributed over `time`, each with more used bytes.
    ///
    /// # Panics
    /// If the API server refuses a report.
    pub fn report_for(&self, cluster: &Cluster, time: Duration) {
        cluster.block_on(self.reporters(cluster).report_for(time));
    }

    fn reporters(&self, cluster: &Cluster) -> Reporters {
        let nodes = (0..self.scale.nodes).map(node_name).collect();
        Reporters { api: cache_nodes(cluster.client()), nodes, used }
    }

    /// Returns whether every simulated node has a `CacheNode` that satisfies `holds`.
    ///
    /// # Panics
    /// If the API server does not respond.
    pub fn all(&self, cluster: &Cluster, holds: impl Fn(&DynamicObject) -> bool) -> bool {
        let api = cache_nodes(cluster.client());
        let listed = cluster.block_on(api.list(&ListParams::default())).expect("the API server responds");
        let simulated: Vec<&DynamicObject> =
            listed.items.iter().filter(|node| is_simulated(&node.name_any())).collect();
        simulated.len() == self.scale.nodes && simulated.into_iter().all(holds)
    }

    /// Returns whether this condition of every simulated node is true.
    ///
    /// # Panics
    /// If the API server does not respond.
    pub fn all_nodes_have(&self, cluster: &Cluster, condition: &str) -> bool {
        let nodes: Api<NodeObject> = Api::all(cluster.client());
        let params = ListParams::default().labels(&format!("{PLAYED}=true"));
        let listed = cluster.block_on(nodes.list(&params)).expect("the API server responds");
        let holds = |node: &NodeObject| {
            let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
            conditions.into_iter().flatten().any(|one| one.type_ == condition && one.status == "True")
        };
        listed.items.len() == self.scale.nodes && listed.items.iter().all(holds)
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

fn is_simulated(node: &str) -> bool {
    node.starts_with("played-")
}

/// Returns the name of a pool.
pub fn pool_name(pool: usize) -> String {
    format!("pool-{pool:02}")
}

/// Returns a client for `CacheNode`s.
pub fn cache_nodes(client: Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("reprise.dev", "v1alpha1", "CacheNode");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, "cachenodes"))
}

/// Returns the used bytes that a node reports: one step more in each report, and from the start again when it
/// is full.
fn used(node: &str, now: Timestamp) -> String {
    let number = node.rsplit('-').next().and_then(|number| number.parse::<i64>().ok());
    let number = number.expect("the name of a simulated node ends with its number");
    let reports = now.as_second() / i64::try_from(REPORT_EVERY.as_secs()).expect("some seconds");
    format!("{}Mi", (reports + number) % USED_STEPS * USED_STEP_MIB)
}

/// Agents of nodes that only report.
#[derive(Clone, Debug)]
pub struct Reporters {
    /// Client for `CacheNode`s.
    pub api: Api<DynamicObject>,
    /// Names of the nodes.
    pub nodes: Vec<String>,
    /// Used bytes that a node reports at a time.
    pub used: fn(&str, Timestamp) -> String,
}

impl Reporters {
    /// Writes one report for every agent, as fast as the API server accepts them.
    ///
    /// # Panics
    /// If the API server refuses a report.
    pub async fn report_all(&self) {
        let mut running = JoinSet::new();
        for node in &self.nodes {
            self.spawn(&mut running, node).await;
        }
        running.join_all().await;
    }

    /// Writes reports at the agents' rate, evenly distributed over `time`.
    ///
    /// # Panics
    /// If the API server refuses a report.
    pub async fn report_for(&self, time: Duration) {
        let every = REPORT_EVERY / u32::try_from(self.nodes.len()).expect("some thousand nodes");
        let until = Instant::now() + time;
        let mut ticks = tokio::time::interval(every);
        let mut running = JoinSet::new();
        for node in self.nodes.iter().cycle() {
            ticks.tick().await;
            if Instant::now() >= until {
                break;
            }
            self.spawn(&mut running, node).await;
        }
        running.join_all().await;
    }

    /// Starts one report; waits while as many as permitted are in flight.
    async fn spawn(&self, running: &mut JoinSet<()>, node: &str) {
        while running.len() >= AT_ONCE {
            let ended = running.join_next().await.expect("the set is not empty");
            ended.expect("the API server accepts a report");
        }
        let (api, node, used) = (self.api.clone(), node.to_owned(), self.used);
        running.spawn(async move { report(&api, &node, used).await });
    }
}

/// Writes the report of an agent that has applied its node's spec. A node without a spec reports nothing.
async fn report(api: &Api<DynamicObject>, name: &str, used: fn(&str, Timestamp) -> String) {
    let Some(node) = api.get_opt(name).await.expect("the API server responds") else { return };
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
    let written = api.patch_status(name, &params, &Patch::Apply(&status)).await;
    written.unwrap_or_else(|error| panic!("cannot write the report of {name}: {error}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_report_has_a_different_amount_within_the_device() {
        let at = |report: i64| {
            let every = i64::try_from(REPORT_EVERY.as_secs()).expect("some seconds");
            Timestamp::from_second(report * every).expect("a time")
        };
        assert_eq!(used("played-0000", at(0)), "0Mi");
        assert_eq!(used("played-0003", at(252)), "1020Mi");
        assert_eq!(used("played-0003", at(253)), "0Mi");
        let differs = |report: i64| used("played-0007", at(report)) != used("played-0007", at(report + 1));
        assert!((0..600).all(differs));
    }
}
