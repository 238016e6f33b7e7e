//! Pods that are engines, as far as a cache can tell: each saves a block, and then loads its own and the other's again and again, every
//! byte compared (`reprise check --again-for`). One on each of two nodes.
//!
//! Once a second each says how many blocks came from where, and how many did not. A test looks at what has been said since a moment
//! ([`Engines::now`], [`Engines::since`]).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cluster::Cluster;
use crate::wait::wait_until;

/// How many.
pub const ENGINES: usize = 2;

/// From `apply` to blocks that were found, on a machine that is busy.
const HITS_WITHIN: Duration = Duration::from_secs(180);

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// What they are, for the agents of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Engines<'a> {
    /// Where.
    pub namespace: &'a str,
    /// Who runs in them; the agents must let it connect.
    pub user: u32,
}

/// What one has said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Said {
    /// Blocks that came and were right, by where they came from.
    pub hits: BTreeMap<String, u64>,
    /// Looks for its own block that did not find it on its node.
    pub own_missed: u64,
    /// Looks for the other's that found nothing.
    pub others_missed: u64,
    /// Sessions after the first.
    pub sessions: u64,
    /// The longest time without its own block.
    pub longest_outage_ms: u64,
}

/// How far the engines were.
#[derive(Clone, Debug)]
pub struct Moment {
    lines: [Vec<Said>; ENGINES],
}

impl Said {
    /// Blocks that came, from wherever.
    pub fn all_hits(&self) -> u64 {
        self.hits.values().sum()
    }

    /// Blocks that came from the engine's own node.
    pub fn own_hits(&self) -> u64 {
        self.hits.iter().filter(|(source, _)| source.starts_with("own ")).map(|(_, count)| count).sum()
    }
}

impl Engines<'_> {
    /// Starts them, and waits until all have found all blocks.
    ///
    /// # Panics
    /// When they do not.
    pub fn start(self, cluster: &Cluster) {
        cluster.apply(&self.objects());
        wait_until("engines that hit", HITS_WITHIN, || {
            std::thread::sleep(PAUSE);
            self.lines(cluster).iter().all(|lines| !lines.is_empty()).then_some(())
        });
    }

    /// Removes them.
    ///
    /// # Panics
    /// When that fails.
    pub fn stop(self, cluster: &Cluster) {
        cluster.kubectl(&["--namespace", self.namespace, "delete", "statefulset", "engine"]);
    }

    /// How far they are, once all can be asked: what an engine had said before would count as said since.
    ///
    /// # Panics
    /// When one of them cannot be asked for long.
    pub fn now(self, cluster: &Cluster) -> Moment {
        wait_until("all engines to say how far they are", HITS_WITHIN, || {
            let lines = self.lines(cluster);
            lines.iter().all(|lines| !lines.is_empty()).then_some(Moment { lines })
        })
    }

    /// What they have said since a moment, as differences: of each engine whose process is still that of the moment.
    pub fn since(self, cluster: &Cluster, moment: &Moment) -> [Option<Said>; ENGINES] {
        let now = self.lines(cluster);
        let mut index = 0;
        now.map(|lines| {
            let before = &moment.lines[index];
            index += 1;
            // A process that was started again begins anew.
            let is_the_same = lines.starts_with(before) && lines.len() > before.len();
            is_the_same
                .then(|| difference(&before.last().cloned().unwrap_or_default(), &lines[before.len()..]))
        })
    }

    /// Where the other's block came from when an engine found it first, of those that have said so. Later it is on its own node as well.
    pub fn first_loads(self, cluster: &Cluster) -> [Vec<String>; ENGINES] {
        #[derive(Deserialize)]
        struct Checked {
            loaded: Vec<Loaded>,
        }
        #[derive(Deserialize)]
        struct Loaded {
            from: String,
        }
        let first = |index| self.said::<Checked>(cluster, index).into_iter().next();
        let places = |checked: Checked| checked.loaded.into_iter().map(|loaded| loaded.from).collect();
        std::array::from_fn(|index| first(index).map(places).unwrap_or_default())
    }

    /// How they were from second to second.
    fn lines(self, cluster: &Cluster) -> [Vec<Said>; ENGINES] {
        std::array::from_fn(|index| self.said(cluster, index))
    }

    /// All of a kind that one has said.
    fn said<T: DeserializeOwned>(self, cluster: &Cluster, index: usize) -> Vec<T> {
        let pod = format!("engine-{index}");
        let said = cluster.try_kubectl(&["--namespace", self.namespace, "logs", &pod]);
        let said = said.unwrap_or_default();
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
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

/// What has happened between a line and the last of those that follow.
fn difference(before: &Said, after: &[Said]) -> Said {
    let last = after.last().cloned().unwrap_or_default();
    let of = |source: &String| before.hits.get(source).copied().unwrap_or_default();
    Said {
        hits: last.hits.iter().map(|(source, count)| (source.clone(), count - of(source))).collect(),
        own_missed: last.own_missed - before.own_missed,
        others_missed: last.others_missed - before.others_missed,
        sessions: last.sessions - before.sessions,
        longest_outage_ms: after.iter().map(|said| said.longest_outage_ms).max().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_since_a_moment_is_what_has_changed() {
        let said = |hits: u64, missed: u64, outage: u64| Said {
            hits: BTreeMap::from([("own DRAM".to_owned(), hits)]),
            own_missed: missed,
            longest_outage_ms: outage,
            ..Said::default()
        };
        let since = difference(&said(10, 1, 900), &[said(15, 1, 0), said(20, 3, 40), said(30, 3, 0)]);
        assert_eq!(since, said(20, 2, 40));
        assert_eq!((since.all_hits(), since.own_hits()), (20, 20));
    }
}
