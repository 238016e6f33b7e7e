//! Engine pods that only hit: each saves a block, and then loads its own and the other's block in a loop and
//! compares every byte (`reprise check --again-for`). There is one on each of two nodes.
//!
//! Each prints its counters once a second. A test compares the counters with a baseline ([`Engines::now`],
//! [`Engines::since`]).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cluster::Cluster;
use crate::wait::wait_until;

/// Number of engine pods.
pub const ENGINES: usize = 2;

/// Bound from `apply` to the first hits, on a busy machine.
const HITS_WITHIN: Duration = Duration::from_secs(180);

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// The engine pods of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Engines<'a> {
    /// Namespace of the pods.
    pub namespace: &'a str,
    /// User id of the processes; the agents must accept it.
    pub user: u32,
}

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

/// Counters of all engines at a moment, for [`Engines::since`].
#[derive(Clone, Debug)]
pub struct EngineBaseline {
    lines: [Vec<EngineCounters>; ENGINES],
}

impl EngineCounters {
    /// Returns the number of loaded blocks, from any source.
    pub fn all_hits(&self) -> u64 {
        self.hits.values().sum()
    }

    /// Returns the number of blocks loaded from the engine's own node.
    pub fn own_hits(&self) -> u64 {
        self.hits.iter().filter(|(source, _)| source.starts_with("own ")).map(|(_, count)| count).sum()
    }
}

impl Engines<'_> {
    /// Starts the pods, and waits until all engines have found all blocks.
    ///
    /// # Panics
    /// If they do not in time.
    pub fn start(self, cluster: &Cluster) {
        cluster.apply(&self.objects());
        wait_until("engines that hit", HITS_WITHIN, || {
            std::thread::sleep(PAUSE);
            self.lines(cluster).iter().all(|lines| !lines.is_empty()).then_some(())
        });
    }

    /// Deletes the engine pods.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn stop(self, cluster: &Cluster) {
        cluster.kubectl(&["--namespace", self.namespace, "delete", "statefulset", "engine"]);
    }

    /// Returns a baseline. Waits until the counters of all engines can be read: the earlier counters of an
    /// engine that is not in the baseline would count as new.
    ///
    /// # Panics
    /// If the counters of an engine cannot be read in time.
    pub fn now(self, cluster: &Cluster) -> EngineBaseline {
        wait_until("the counters of all engines", HITS_WITHIN, || {
            let lines = self.lines(cluster);
            lines.iter().all(|lines| !lines.is_empty()).then_some(EngineBaseline { lines })
        })
    }

    /// Returns the counters since a baseline, for each engine whose process is still the same.
    pub fn since(self, cluster: &Cluster, moment: &EngineBaseline) -> [Option<EngineCounters>; ENGINES] {
        let current = self.lines(cluster);
        let mut index = 0;
        current.map(|lines| {
            let before = &moment.lines[index];
            index += 1;
            // A restarted process counts from zero.
            let is_the_same = lines.starts_with(before) && lines.len() > before.len();
            is_the_same
                .then(|| difference(&before.last().cloned().unwrap_or_default(), &lines[before.len()..]))
        })
    }

    /// Returns the sources from which each engine loaded the other's block first; empty if it has not yet.
    /// Later the block is on its own node as well.
    pub fn first_loads(self, cluster: &Cluster) -> [Vec<String>; ENGINES] {
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

    /// Returns all counters that each engine has printed, one entry per second.
    fn lines(self, cluster: &Cluster) -> [Vec<EngineCounters>; ENGINES] {
        std::array::from_fn(|index| self.parse_log(cluster, index))
    }

    /// Parses all lines of an engine's log that have this type.
    fn parse_log<T: DeserializeOwned>(self, cluster: &Cluster, index: usize) -> Vec<T> {
        let pod = format!("engine-{index}");
        let log = cluster.try_kubectl(&["--namespace", self.namespace, "logs", &pod]);
        let log = log.unwrap_or_default();
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn objects(self) -> String {
        let Engines { namespace, user } = self;
        format!(
            r#"
apiVersion: apps/v1
kind: StatefulSet
metadata: {{ name: engine, namespace: {namespace} }}
spec:
  replicas: {ENGINES}
  serviceName: engine
  podManagementPolicy: Parallel
  selector: {{ matchLabels: {{ app: engine }} }}
  template:
    metadata: {{ labels: {{ app: engine }} }}
    spec:
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      securityContext: {{ runAsUser: {user}, runAsGroup: {user}, seccompProfile: {{ type: RuntimeDefault }} }}
      containers:
        - name: engine
          image: localhost/reprise:{version}
          args: ["--json", check, "--run=engines", "--of={ENGINES}", "--index=$(INDEX)", "--within=2m", "--again-for=24h"]
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
            - {{ topologyKey: kubernetes.io/hostname, labelSelector: {{ matchLabels: {{ app: engine }} }} }}
"#,
            version = env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Returns the differences between a line and the last of the lines that follow it.
fn difference(before: &EngineCounters, after: &[EngineCounters]) -> EngineCounters {
    let last = after.last().cloned().unwrap_or_default();
    let of = |source: &String| before.hits.get(source).copied().unwrap_or_default();
    EngineCounters {
        hits: last.hits.iter().map(|(source, count)| (source.clone(), count - of(source))).collect(),
        own_missed: last.own_missed - before.own_missed,
        others_missed: last.others_missed - before.others_missed,
        sessions: last.sessions - before.sessions,
        longest_outage_ms: after.iter().map(|counters| counters.longest_outage_ms).max().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_since_a_baseline_are_differences() {
        let counters = |hits: u64, missed: u64, outage: u64| EngineCounters {
            hits: BTreeMap::from([("own DRAM".to_owned(), hits)]),
            own_missed: missed,
            longest_outage_ms: outage,
            ..EngineCounters::default()
        };
        let since =
            difference(&counters(10, 1, 900), &[counters(15, 1, 0), counters(20, 3, 40), counters(30, 3, 0)]);
        assert_eq!(since, counters(20, 2, 40));
        assert_eq!((since.all_hits(), since.own_hits()), (20, 20));
    }
}
