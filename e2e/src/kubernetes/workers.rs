//! Engine pods under load, one on each of two nodes: each serves 20 requests a second. It loads cached blocks
//! and compares every byte, and computes and saves missing blocks (`reprise check --requests-for`).
//!
//! Each prints its counters once a second. A test compares them with a baseline ([`Workers::now`],
//! [`Workers::since`]). [`super::Engines`] in contrast only hit.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use super::cluster::Cluster;
use crate::wait::wait_until;

/// Number of worker pods.
pub const WORKERS: usize = 2;

/// Requests per second of each worker, unless requests take longer (`reprise check --requests-for`).
pub const REQUESTS_A_SECOND: u64 = 20;

/// Bound from `apply` to hits on both nodes, on a busy machine.
const HITS_WITHIN: Duration = Duration::from_secs(180);

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// The worker pods of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Workers<'a> {
    /// Namespace of the pods.
    pub namespace: &'a str,
    /// User id of the processes; the agents must accept it.
    pub user: u32,
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

/// Counters of all workers at a moment, for [`Workers::since`].
#[derive(Clone, Debug)]
pub struct WorkerBaseline {
    lines: [Vec<RequestCounters>; WORKERS],
}

impl RequestCounters {
    /// Returns the number of blocks from sources with this prefix: `own ` or `peer `.
    pub fn hits_from(&self, place: &str) -> u64 {
        self.hits.iter().filter(|(source, _)| source.starts_with(place)).map(|(_, count)| count).sum()
    }
}

impl Workers<'_> {
    /// Starts the pods, and waits until each worker hits on its own node and on the other one.
    ///
    /// # Panics
    /// If that does not happen in time.
    pub fn start(self, cluster: &Cluster) {
        cluster.apply(&self.objects());
        wait_until("workers that hit", HITS_WITHIN, || {
            std::thread::sleep(PAUSE);
            let hits = |lines: &Vec<RequestCounters>| {
                lines.last().is_some_and(|last| last.hits_from("own ") > 0 && last.hits_from("peer ") > 0)
            };
            self.lines(cluster).iter().all(hits).then_some(())
        });
    }

    /// Deletes the pods, and waits until they are gone and save nothing further.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn stop(self, cluster: &Cluster) {
        cluster.kubectl(&[
            "--namespace",
            self.namespace,
            "delete",
            "statefulset",
            "worker",
            "--cascade=foreground",
        ]);
    }

    /// Returns a baseline. Waits until the counters of all workers can be read: the earlier counters of a
    /// worker that is not in the baseline would count as new.
    ///
    /// # Panics
    /// If the counters of a worker cannot be read in time.
    pub fn now(self, cluster: &Cluster) -> WorkerBaseline {
        wait_until("the counters of all workers", HITS_WITHIN, || {
            let lines = self.lines(cluster);
            lines.iter().all(|lines| !lines.is_empty()).then_some(WorkerBaseline { lines })
        })
    }

    /// Returns the counters since a baseline, for each worker whose process is still the same and has printed
    /// a line since.
    pub fn since(self, cluster: &Cluster, baseline: &WorkerBaseline) -> [Option<RequestCounters>; WORKERS] {
        let current = self.lines(cluster);
        std::array::from_fn(|index| {
            let (before, lines) = (&baseline.lines[index], &current[index]);
            // A restarted process counts from zero.
            let is_the_same = lines.starts_with(before) && lines.len() > before.len();
            is_the_same
                .then(|| difference(&before.last().cloned().unwrap_or_default(), &lines[before.len()..]))
        })
    }

    /// Returns all counters that each worker has printed.
    fn lines(self, cluster: &Cluster) -> [Vec<RequestCounters>; WORKERS] {
        std::array::from_fn(|index| {
            let log =
                cluster.try_kubectl(&["--namespace", self.namespace, "logs", &format!("worker-{index}")]);
            log.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
        })
    }

    fn objects(self) -> String {
        let Workers { namespace, user } = self;
        format!(
            r#"
apiVersion: apps/v1
kind: StatefulSet
metadata: {{ name: worker, namespace: {namespace} }}
spec:
  replicas: {WORKERS}
  serviceName: worker
  podManagementPolicy: Parallel
  selector: {{ matchLabels: {{ app: worker }} }}
  template:
    metadata: {{ labels: {{ app: worker }} }}
    spec:
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      securityContext: {{ runAsUser: {user}, runAsGroup: {user}, seccompProfile: {{ type: RuntimeDefault }} }}
      containers:
        - name: worker
          image: localhost/reprise:{version}
          args: ["--json", check, "--run=workers", "--of={WORKERS}", "--index=$(INDEX)", "--within=2m", "--requests-for=24h"]
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
            - {{ topologyKey: kubernetes.io/hostname, labelSelector: {{ matchLabels: {{ app: worker }} }} }}
"#,
            version = env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Returns the differences between a line and the last of the lines that follow it.
fn difference(before: &RequestCounters, after: &[RequestCounters]) -> RequestCounters {
    let last = after.last().cloned().unwrap_or_default();
    let of = |source: &String| before.hits.get(source).copied().unwrap_or_default();
    RequestCounters {
        requests: last.requests - before.requests,
        hits: last.hits.iter().map(|(source, count)| (source.clone(), count - of(source))).collect(),
        computed: last.computed - before.computed,
        kept_missed: last.kept_missed - before.kept_missed,
        loads_failed: last.loads_failed - before.loads_failed,
        saved: last.saved - before.saved,
        saves_failed: last.saves_failed - before.saves_failed,
        failed: last.failed - before.failed,
        wrong_words: last.wrong_words - before.wrong_words,
        sessions: last.sessions - before.sessions,
        longest_request_ms: after.iter().map(|served| served.longest_request_ms).max().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_since_a_baseline_are_differences() {
        let served = |hits: u64, computed: u64, longest: u64| RequestCounters {
            requests: hits + computed,
            hits: BTreeMap::from([("own NVMe".to_owned(), hits), ("peer DRAM".to_owned(), 1)]),
            computed,
            longest_request_ms: longest,
            ..RequestCounters::default()
        };
        let since = difference(&served(10, 5, 900), &[served(15, 7, 3), served(30, 9, 40), served(40, 9, 2)]);
        assert_eq!((since.requests, since.computed, since.longest_request_ms), (34, 4, 40));
        assert_eq!((since.hits_from("own "), since.hits_from("peer ")), (30, 0));
    }
}
