//! Pods that are engines at work, one on each of two nodes: each serves 20 requests a second, loads what its cache finds, every byte
//! compared, and computes and saves what it does not (`reprise check --requests-for`).
//!
//! Once a second each says what came of its requests. A test looks at what has been said since a moment ([`Workers::now`],
//! [`Workers::since`]). They are beside [`super::Engines`], which only hit.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use super::cluster::Cluster;
use crate::wait::wait_until;

/// How many.
pub const WORKERS: usize = 2;

/// What each asks for in a second, where nothing takes longer than the time between two (`reprise check --requests-for`).
pub const REQUESTS_A_SECOND: u64 = 20;

/// From `apply` to requests that hit what was saved here and there, on a machine that is busy.
const HITS_WITHIN: Duration = Duration::from_secs(180);

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// Engines at work, for the agents of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Workers<'a> {
    /// Where.
    pub namespace: &'a str,
    /// Who runs in them; the agents must let it connect.
    pub user: u32,
}

/// What one has said: sums, but for the longest time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Served {
    /// Requests that ended.
    pub requests: u64,
    /// Those whose block came and was right, by where it came from.
    pub hits: BTreeMap<String, u64>,
    /// Those whose block was computed.
    pub computed: u64,
    /// Those for a block that is on a device of this node, and did not come.
    pub kept_missed: u64,
    /// Loads of blocks that somebody had, and that did not come.
    pub loads_failed: u64,
    /// Blocks that the agent took.
    pub saved: u64,
    /// Blocks that it did not take.
    pub saves_failed: u64,
    /// Requests that ended neither with verified bytes nor with a computed block in time, or not as they may.
    pub failed: u64,
    /// Words of 8 bytes that are not what was saved.
    pub wrong_words: u64,
    /// Sessions after the first.
    pub sessions: u64,
    /// The longest request.
    pub longest_request_ms: u64,
}

/// How far the workers were.
#[derive(Clone, Debug)]
pub struct Working {
    lines: [Vec<Served>; WORKERS],
}

impl Served {
    /// Blocks that came from the worker's own node, or from a peer.
    pub fn hits_from(&self, place: &str) -> u64 {
        self.hits.iter().filter(|(source, _)| source.starts_with(place)).map(|(_, count)| count).sum()
    }
}

impl Workers<'_> {
    /// Starts them, and waits until each hits what it has saved and what the other has.
    ///
    /// # Panics
    /// When they do not.
    pub fn start(self, cluster: &Cluster) {
        cluster.apply(&self.objects());
        wait_until("workers that hit", HITS_WITHIN, || {
            std::thread::sleep(PAUSE);
            let hits = |lines: &Vec<Served>| {
                lines.last().is_some_and(|last| last.hits_from("own ") > 0 && last.hits_from("peer ") > 0)
            };
            self.lines(cluster).iter().all(hits).then_some(())
        });
    }

    /// Removes them, and waits until they are gone: nobody saves any more.
    ///
    /// # Panics
    /// When that fails.
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

    /// How far they are, once all can be asked: what a worker had said before would count as said since.
    ///
    /// # Panics
    /// When one of them cannot be asked for long.
    pub fn now(self, cluster: &Cluster) -> Working {
        wait_until("all workers to say how far they are", HITS_WITHIN, || {
            let lines = self.lines(cluster);
            lines.iter().all(|lines| !lines.is_empty()).then_some(Working { lines })
        })
    }

    /// What they have said since a moment, as differences: of each worker whose process is still that of the moment, and which has said
    /// something since.
    pub fn since(self, cluster: &Cluster, moment: &Working) -> [Option<Served>; WORKERS] {
        let now = self.lines(cluster);
        std::array::from_fn(|index| {
            let (before, lines) = (&moment.lines[index], &now[index]);
            // A process that was started again begins anew.
            let is_the_same = lines.starts_with(before) && lines.len() > before.len();
            is_the_same
                .then(|| difference(&before.last().cloned().unwrap_or_default(), &lines[before.len()..]))
        })
    }

    /// All that they have said.
    fn lines(self, cluster: &Cluster) -> [Vec<Served>; WORKERS] {
        std::array::from_fn(|index| {
            let said =
                cluster.try_kubectl(&["--namespace", self.namespace, "logs", &format!("worker-{index}")]);
            said.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
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

/// What has happened between a line and the last of those that follow.
fn difference(before: &Served, after: &[Served]) -> Served {
    let last = after.last().cloned().unwrap_or_default();
    let of = |source: &String| before.hits.get(source).copied().unwrap_or_default();
    Served {
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
    fn what_was_served_since_a_moment_is_what_has_changed() {
        let served = |hits: u64, computed: u64, longest: u64| Served {
            requests: hits + computed,
            hits: BTreeMap::from([("own NVMe".to_owned(), hits), ("peer DRAM".to_owned(), 1)]),
            computed,
            longest_request_ms: longest,
            ..Served::default()
        };
        let since = difference(&served(10, 5, 900), &[served(15, 7, 3), served(30, 9, 40), served(40, 9, 2)]);
        assert_eq!((since.requests, since.computed, since.longest_request_ms), (34, 4, 40));
        assert_eq!((since.hits_from("own "), since.hits_from("peer ")), (30, 0));
    }
}
