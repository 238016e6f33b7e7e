//! Pods that run `reprise check` as one StatefulSet, one pod on each of two nodes.
//!
//! Each prints its counters once a second. A test compares them with a baseline.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cluster::Cluster;
use crate::wait::wait_until;

/// Number of pods of a StatefulSet.
pub const PODS: usize = 2;

/// Bound from `apply` to the first hits, on a busy machine.
const HITS_WITHIN: Duration = Duration::from_secs(180);

/// Pods of one StatefulSet, which print counters of this kind.
#[derive(Debug)]
pub struct CheckPods<'a, C> {
    /// Namespace of the pods.
    pub namespace: &'a str,
    /// User id of the processes; the agents must accept it.
    user: u32,
    counters: PhantomData<C>,
}

/// Counters of one line of output: sums, except for the longest duration.
pub trait Counters: Clone + Default + PartialEq + DeserializeOwned {
    /// Name of the StatefulSet, of its label `app` and of the run.
    const NAME: &'static str;

    /// What the command does after the check.
    const ARGUMENT: &'static str;

    /// Returns whether a pod finds all blocks that it should find after the start.
    fn is_ready(&self) -> bool;

    /// Subtracts the sums of an earlier line.
    fn subtract(&mut self, earlier: &Self);

    /// Returns the longest duration since the previous line, in milliseconds.
    fn longest_ms(&mut self) -> &mut u64;
}

/// Engine pods that only hit: each saves a block, and then loads its own and the other's block in a loop and
/// compares every byte (`reprise check --again-for`).
pub type Engines<'a> = CheckPods<'a, EngineCounters>;

/// Engine pods under load: each serves 20 requests a second. It loads cached blocks and compares every byte, and
/// computes and saves missing blocks (`reprise check --requests-for`).
pub type Workers<'a> = CheckPods<'a, RequestCounters>;

/// Requests per second of each worker, unless requests take longer.
pub const REQUESTS_A_SECOND: u64 = 20;

/// Counters that an engine has printed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct EngineCounters {
    /// Blocks that were loaded and right, by source.
    pub hits: BTreeMap<String, u64>,
    /// Lookups of its own block that did not find it on its node.
    pub own_missed: u64,
    /// Lookups of the other engine's block that found nothing.
    pub others_missed: u64,
    /// Sessions that were opened after the first one.
    pub sessions: u64,
    /// The longest time without its own block, in milliseconds.
    pub longest_outage_ms: u64,
}

/// Counters that a worker has printed: sums, except for the longest request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct RequestCounters {
    /// Requests that have ended.
    pub requests: u64,
    /// Requests whose block was loaded and right, by source.
    pub hits: BTreeMap<String, u64>,
    /// Requests whose block was computed.
    pub computed: u64,
    /// Requests whose block is on a device of this node, but was not loaded.
    pub kept_missed: u64,
    /// Failed loads of blocks that the match had found.
    pub loads_failed: u64,
    /// Blocks that the agent accepted.
    pub saved: u64,
    /// Blocks that the agent refused.
    pub saves_failed: u64,
    /// Requests that got neither verified bytes nor a computed block in time, or failed in an unexpected way.
    pub failed: u64,
    /// Words of 8 bytes that differ from the saved content.
    pub wrong_words: u64,
    /// Sessions that were opened after the first one.
    pub sessions: u64,
    /// Duration of the longest request.
    pub longest_request_ms: u64,
}

/// Counters of all pods at a moment.
#[derive(Clone, Debug)]
pub struct Baseline<C> {
    lines: [Vec<C>; PODS],
}

impl<'a, C: Counters> CheckPods<'a, C> {
    /// Returns the pods of a namespace and a user.
    pub const fn new(namespace: &'a str, user: u32) -> CheckPods<'a, C> {
        CheckPods { namespace, user, counters: PhantomData }
    }

    /// Creates the pods, and waits until each finds all blocks that it should find.
    ///
    /// # Panics
    /// If that does not happen in time.
    pub fn start(&self, cluster: &Cluster) {
        cluster.apply(&self.objects());
        wait_until(&format!("pods of {} that hit", C::NAME), HITS_WITHIN, || {
            self.lines(cluster).iter().all(|lines| lines.last().is_some_and(C::is_ready)).then_some(())
        });
    }

    /// Deletes the pods, and waits until they are gone and save nothing further.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn stop(&self, cluster: &Cluster) {
        let delete = ["delete", "statefulset", C::NAME, "--cascade=foreground"];
        cluster.kubectl(&[&["--namespace", self.namespace], &delete[..]].concat());
    }

    /// Returns a baseline for [`CheckPods::since`]. Waits until the counters of all pods can be read: the earlier
    /// counters of a pod that is not in the baseline would count as new.
    ///
    /// # Panics
    /// If the counters of a pod cannot be read in time.
    pub fn now(&self, cluster: &Cluster) -> Baseline<C> {
        wait_until(&format!("the counters of all pods of {}", C::NAME), HITS_WITHIN, || {
            let lines = self.lines(cluster);
            lines.iter().all(|lines| !lines.is_empty()).then_some(Baseline { lines })
        })
    }

    /// Returns the counters since a baseline, for each pod whose process is still the same and has printed a line
    /// since.
    pub fn since(&self, cluster: &Cluster, baseline: &Baseline<C>) -> [Option<C>; PODS] {
        let current = self.lines(cluster);
        std::array::from_fn(|index| {
            let (before, lines) = (&baseline.lines[index], &current[index]);
            // A restarted process counts from zero.
            let is_the_same = lines.starts_with(before) && lines.len() > before.len();
            is_the_same.then(|| difference(before.last(), &lines[before.len()..]))
        })
    }

    /// Returns the sources from which each pod loaded the other's block first; empty if it has not yet. Later
    /// the block is on its own node as well.
    pub fn first_loads(&self, cluster: &Cluster) -> [Vec<String>; PODS] {
        #[derive(Deserialize)]
        struct Checked {
            loaded: Vec<Loaded>,
        }
        #[derive(Deserialize)]
        struct Loaded {
            from: String,
        }
        let first = |index| self.parse_log::<Checked>(cluster, index).into_iter().next();
        let places = |checked: Checked| checked.loaded.into_iter().map(|loaded| loaded.from).collect();
        std::array::from_fn(|index| first(index).map(places).unwrap_or_default())
    }

    /// Returns all counters that each pod has printed, one entry per second.
    fn lines(&self, cluster: &Cluster) -> [Vec<C>; PODS] {
        std::array::from_fn(|index| self.parse_log(cluster, index))
    }

    /// Parses all lines of a pod's log that have this type.
    fn parse_log<T: DeserializeOwned>(&self, cluster: &Cluster, index: usize) -> Vec<T> {
        let pod = format!("{}-{index}", C::NAME);
        let log = cluster.try_kubectl(&["--namespace", self.namespace, "logs", &pod]);
        log.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn objects(&self) -> String {
        let CheckPods { namespace, user, .. } = self;
        let (name, argument) = (C::NAME, C::ARGUMENT);
        format!(
            r#"
apiVersion: apps/v1
kind: StatefulSet
metadata: {{ name: {name}, namespace: {namespace} }}
spec:
  replicas: {PODS}
  serviceName: {name}
  podManagementPolicy: Parallel
  selector: {{ matchLabels: {{ app: {name} }} }}
  template:
    metadata: {{ labels: {{ app: {name} }} }}
    spec:
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      securityContext: {{ runAsUser: {user}, runAsGroup: {user}, seccompProfile: {{ type: RuntimeDefault }} }}
      containers:
        - name: {name}
          image: localhost/reprise:{version}
          args: ["--json", check, "--run={name}", "--of={PODS}", "--index=$(INDEX)", "--within=2m", "{argument}"]
          env:
            - name: INDEX
              valueFrom: {{ fieldRef: {{ fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']" }} }}
          securityContext:
            readOnlyRootFilesystem: true
            allowPrivilegeEscalation: false
            capabilities: {{ drop: [ALL] }}
          resources: {{ requests: {{ cpu: 10m, memory: 32Mi }}, limits: {{ memory: 128Mi }} }}
          volumeMounts: [{{ name: reprise, mountPath: /run/reprise, readOnly: true }}]
      volumes:
        - {{ name: reprise, hostPath: {{ path: /run/reprise, type: Directory }} }}
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - {{ topologyKey: kubernetes.io/hostname, labelSelector: {{ matchLabels: {{ app: {name} }} }} }}
"#,
            version = env!("CARGO_PKG_VERSION"),
        )
    }
}

impl EngineCounters {
    /// Returns the number of loaded blocks, from any source.
    pub fn all_hits(&self) -> u64 {
        self.hits.values().sum()
    }

    /// Returns the number of blocks loaded from the engine's own node.
    pub fn own_hits(&self) -> u64 {
        hits_from(&self.hits, "own ")
    }
}

impl Counters for EngineCounters {
    const NAME: &'static str = "engine";
    const ARGUMENT: &'static str = "--again-for=24h";

    fn is_ready(&self) -> bool {
        true
    }

    fn subtract(&mut self, earlier: &EngineCounters) {
        subtract_hits(&mut self.hits, &earlier.hits);
        self.own_missed -= earlier.own_missed;
        self.others_missed -= earlier.others_missed;
        self.sessions -= earlier.sessions;
    }

    fn longest_ms(&mut self) -> &mut u64 {
        &mut self.longest_outage_ms
    }
}

impl RequestCounters {
    /// Returns the number of blocks from sources with this prefix: `own ` or `peer `.
    pub fn hits_from(&self, place: &str) -> u64 {
        hits_from(&self.hits, place)
    }
}

impl Counters for RequestCounters {
    const NAME: &'static str = "worker";
    const ARGUMENT: &'static str = "--requests-for=24h";

    fn is_ready(&self) -> bool {
        self.hits_from("own ") > 0 && self.hits_from("peer ") > 0
    }

    fn subtract(&mut self, earlier: &RequestCounters) {
        subtract_hits(&mut self.hits, &earlier.hits);
        self.requests -= earlier.requests;
        self.computed -= earlier.computed;
        self.kept_missed -= earlier.kept_missed;
        self.loads_failed -= earlier.loads_failed;
        self.saved -= earlier.saved;
        self.saves_failed -= earlier.saves_failed;
        self.failed -= earlier.failed;
        self.wrong_words -= earlier.wrong_words;
        self.sessions -= earlier.sessions;
    }

    fn longest_ms(&mut self) -> &mut u64 {
        &mut self.longest_request_ms
    }
}

/// Returns the differences between a line and the last of the lines that follow it.
fn difference<C: Counters>(before: Option<&C>, after: &[C]) -> C {
    let mut counters = after.last().cloned().unwrap_or_default();
    counters.subtract(&before.cloned().unwrap_or_default());
    *counters.longest_ms() = after.iter().map(|line| *line.clone().longest_ms()).max().unwrap_or_default();
    counters
}

/// Subtracts the hits of an earlier line, by source.
fn subtract_hits(hits: &mut BTreeMap<String, u64>, earlier: &BTreeMap<String, u64>) {
    for (source, count) in hits {
        *count -= earlier.get(source).copied().unwrap_or_default();
    }
}

/// Returns the hits from sources with this prefix: `own ` or `peer `.
fn hits_from(hits: &BTreeMap<String, u64>, place: &str) -> u64 {
    hits.iter().filter(|(source, _)| source.starts_with(place)).map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_engines_since_a_baseline_are_differences() {
        let counters = |hits: u64, missed: u64, outage: u64| EngineCounters {
            hits: BTreeMap::from([("own DRAM".to_owned(), hits)]),
            own_missed: missed,
            longest_outage_ms: outage,
            ..EngineCounters::default()
        };
        let after = [counters(15, 1, 0), counters(20, 3, 40), counters(30, 3, 0)];
        let since = difference(Some(&counters(10, 1, 900)), &after);
        assert_eq!(since, counters(20, 2, 40));
        assert_eq!((since.all_hits(), since.own_hits()), (20, 20));
    }

    #[test]
    fn counters_of_workers_since_a_baseline_are_differences() {
        let served = |hits: u64, computed: u64, longest: u64| RequestCounters {
            requests: hits + computed,
            hits: BTreeMap::from([("own NVMe".to_owned(), hits), ("peer DRAM".to_owned(), 1)]),
            computed,
            longest_request_ms: longest,
            ..RequestCounters::default()
        };
        let after = [served(15, 7, 3), served(30, 9, 40), served(40, 9, 2)];
        let since = difference(Some(&served(10, 5, 900)), &after);
        assert_eq!((since.requests, since.computed, since.longest_request_ms), (34, 4, 40));
        assert_eq!((since.hits_from("own "), since.hits_from("peer ")), (30, 0));
    }
}
