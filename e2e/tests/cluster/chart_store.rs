//! An etcd of three members, which the operator runs: it goes on without one, and begins anew as docs/KUBERNETES.md says when a member has lost its
//! volume.
//!
//! It is that of a cluster of its own, which has no nodes: beside the release, whose one member of etcd is another test's.

use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Pod};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;

use crate::chart::{condition, running};

/// The cluster, and its tenant.
const NAME: &str = "trio";

/// Pods of its etcd, and their volume claims.
const ETCD: &str = "app.kubernetes.io/instance=trio,app.kubernetes.io/component=etcd";

/// As people wait.
const TIMEOUT: &str = "--timeout=180s";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

const CLUSTER: &str = "
apiVersion: reprise.dev/v1alpha1
kind: KVCacheCluster
metadata: { namespace: reprise, name: trio }
spec:
  etcd: { mode: Managed, managed: { replicas: 3 } }
  controlPlane: { replicas: 1 }
  agents: { nodeSelector: { nobody: here } }
";

/// Its etcd keeps what a tenant may have, so a budget that is applied was written.
fn limit(cluster: &Cluster, limit: &str) {
    cluster.apply(&format!(
        "
apiVersion: reprise.dev/v1alpha1
kind: CacheTenant
metadata: {{ name: {NAME} }}
spec:
  clusters: [{{ namespace: {NAMESPACE}, name: {NAME} }}]
  budget: {{ ssd: {{ limit: {limit} }} }}
"
    ));
    let release = Release::of(cluster);
    wait_until("the budget to be kept", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let tenant = release.object("cachetenant", NAME);
        let is_current = tenant["status"]["observedGeneration"] == tenant["metadata"]["generation"];
        (is_current && condition(&tenant, "BudgetApplied").0 == "True").then_some(())
    });
}

pub(crate) fn of_three(cluster: &mut Cluster) {
    let release = running(cluster);
    cluster.apply(CLUSTER);
    is(release, "ControlPlaneReady");
    let pods = all_are_ready(release);
    for node in cluster.nodes() {
        assert!(pods.iter().any(|pod| pod.node == node.name()), "they are spread: {pods:?}");
    }
    limit(cluster, "1Gi");

    // Without its data a member cannot come back, and the others go on.
    let lost = &pods[2];
    lose_its_data(cluster, lost);
    release.crash(std::slice::from_ref(lost));
    wait_until("it to come without its data, and to say so", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let logs = |more| cluster.try_kubectl(&["--namespace", NAMESPACE, "logs", &lost.name, more]);
        let said =
            |logs: Result<String, String>| logs.is_ok_and(|text| text.contains("already been bootstrapped"));
        (said(logs("--previous=false")) || said(logs("--previous"))).then_some(())
    });
    limit(cluster, "2Gi");
    wait_until("the cluster to say that one is missing", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let said = release.object("kvcc", NAME);
        let mut conditions = said["status"]["conditions"].as_array().into_iter().flatten();
        let etcd = conditions.find(|one| one["type"] == "EtcdReady").expect("it is said");
        // Both others are not ready for a moment when it was their leader.
        (etcd["message"] == "2 of 3 members are ready" && etcd["status"] == "True").then_some(())
    });

    let started = Instant::now();
    begin_anew(release);
    all_are_ready(release);
    is(release, "ControlPlaneReady");
    say(&format!("etcd of three members was emptied and worked again after {:.1?}", started.elapsed()));
    limit(cluster, "3Gi");

    for object in [format!("cachetenant/{NAME}"), format!("kvcc/{NAME}")] {
        release.kubectl(&["delete", &object, TIMEOUT]);
    }
    wait_until("nothing of it to be left", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let left = release.kubectl(&[
            "get",
            "pods,pvc",
            "--selector=app.kubernetes.io/instance=trio",
            "--output=name",
        ]);
        left.is_empty().then_some(())
    });
}

/// What is on the volume of a pod is gone.
fn lose_its_data(cluster: &Cluster, pod: &Pod) {
    let release = Release::of(cluster);
    let claim = release.object("pvc", &format!("data-{}", pod.name));
    let volume = release.object("pv", claim["spec"]["volumeName"].as_str().expect("it is bound"));
    let path = volume["spec"]["local"]["path"].as_str().expect("volumes of tests are folders");
    let node = cluster.nodes().iter().find(|node| node.name() == pod.node).expect("one of them");
    let data = node.root().join(path.trim_start_matches('/')).join("data");
    assert!(data.exists(), "{} is where it is", data.display());
    // It may write something just then.
    wait_until("it to be gone", PODS_WITHIN, || {
        let _ = std::fs::remove_dir_all(&data);
        (!data.exists()).then_some(())
    });
}

/// As docs/KUBERNETES.md says it.
fn begin_anew(release: Release<'_>) {
    let pause = |whether: &str| {
        let patch = format!("{{\"spec\":{{\"paused\":{whether}}}}}");
        release.kubectl(&["patch", "kvcc", NAME, "--type=merge", &format!("--patch={patch}")]);
    };
    pause("true");
    let is_paused = r#"--for=jsonpath={.status.conditions[?(@.type=="Progressing")].reason}=Paused"#;
    release.kubectl(&["wait", &format!("kvcc/{NAME}"), is_paused, TIMEOUT]);
    release.kubectl(&["scale", "statefulset", "trio-etcd", "--replicas=0"]);
    release.kubectl(&["wait", "pod", &format!("--selector={ETCD}"), "--for=delete", TIMEOUT]);
    release.kubectl(&["delete", "pvc", &format!("--selector={ETCD}")]);
    release.kubectl(&["delete", "statefulset", "trio-etcd"]);
    pause("false");
}

/// Waits for a condition of the cluster.
fn is(release: Release<'_>, condition: &str) {
    release.kubectl(&["wait", &format!("kvcc/{NAME}"), &format!("--for=condition={condition}"), TIMEOUT]);
}

fn all_are_ready(release: Release<'_>) -> Vec<Pod> {
    wait_until("all members of etcd to be ready", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let pods = release.pods_of(NAMESPACE, ETCD);
        (pods.len() == 3 && pods.iter().all(|pod| pod.is_ready)).then_some(pods)
    })
}
