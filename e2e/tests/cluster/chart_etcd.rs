//! An etcd of three members that the operator runs: it survives the loss of one member, and can be recreated
//! as in docs/kubernetes/operate.md when a member has lost its volume.
//!
//! It belongs to a separate cluster without nodes, since other tests use the release's etcd with one member.

use std::time::Instant;

use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Pod};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::wait_until;

use crate::chart::{condition, running};

/// Name of the cluster and of its tenant.
const NAME: &str = "trio";

/// Labels of its etcd's pods and volume claims.
const ETCD: &str = "app.kubernetes.io/instance=trio,app.kubernetes.io/component=etcd";

/// Timeout of each kubectl command.
const TIMEOUT: &str = "--timeout=180s";

const CLUSTER: &str = "
apiVersion: reprise.dev/v1alpha1
kind: KVCacheCluster
metadata: { namespace: reprise, name: trio }
spec:
  etcd: { mode: Managed, managed: { replicas: 3 } }
  controlPlane: { replicas: 1 }
  agents: { nodeSelector: { no-node-has: this-label } }
";

/// Sets the tenant's budget and waits until it is applied, which requires a write to the cluster's etcd.
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
    wait_until("the budget to be applied", PODS_WITHIN, || {
        let tenant = release.object("cachetenant", NAME);
        let is_current = tenant["status"]["observedGeneration"] == tenant["metadata"]["generation"];
        (is_current && condition(&tenant, "BudgetApplied").0 == "True").then_some(())
    });
}

pub(crate) fn of_three_members(cluster: &mut Cluster) {
    let release = running(cluster);
    cluster.apply(CLUSTER);
    wait_for(release, "ControlPlaneReady");
    let pods = all_are_ready(release);
    for node in cluster.nodes() {
        assert!(pods.iter().any(|pod| pod.node == node.name()), "etcd's pods are on all nodes: {pods:?}");
    }
    limit(cluster, "1Gi");

    // Without its data a member cannot rejoin, and the other two continue.
    let lost = &pods[2];
    delete_data(cluster, lost);
    release.crash(std::slice::from_ref(lost));
    wait_until("the member to report that its data are missing", PODS_WITHIN, || {
        let logs = |more| cluster.try_kubectl(&["--namespace", NAMESPACE, "logs", &lost.name, more]);
        let is_reported =
            |logs: Result<String, String>| logs.is_ok_and(|text| text.contains("already been bootstrapped"));
        (is_reported(logs("--previous=false")) || is_reported(logs("--previous"))).then_some(())
    });
    limit(cluster, "2Gi");
    wait_until("the cluster to report the missing member", PODS_WITHIN, || {
        let cluster = release.object("kvcc", NAME);
        let mut conditions = cluster["status"]["conditions"].as_array().into_iter().flatten();
        let etcd = conditions.find(|one| one["type"] == "EtcdReady").expect("the condition exists");
        // The other two are not ready for a moment if it was the leader.
        (etcd["message"] == "2 of 3 members are ready" && etcd["status"] == "True").then_some(())
    });

    let started = Instant::now();
    recreate_etcd(release);
    all_are_ready(release);
    wait_for(release, "ControlPlaneReady");
    print_line(&format!("an etcd of three members was recreated within {:.1?}", started.elapsed()));
    limit(cluster, "3Gi");

    for object in [format!("cachetenant/{NAME}"), format!("kvcc/{NAME}")] {
        release.kubectl(&["delete", &object, TIMEOUT]);
    }
    wait_until("all its objects to be deleted", PODS_WITHIN, || {
        let remaining = release.kubectl(&[
            "get",
            "pods,pvc",
            "--selector=app.kubernetes.io/instance=trio",
            "--output=name",
        ]);
        remaining.is_empty().then_some(())
    });
}

/// Deletes the data on the volume of a pod.
fn delete_data(cluster: &Cluster, pod: &Pod) {
    let release = Release::of(cluster);
    let claim = release.object("pvc", &format!("data-{}", pod.name));
    let volume = release.object("pv", claim["spec"]["volumeName"].as_str().expect("the claim is bound"));
    let path = volume["spec"]["local"]["path"].as_str().expect("volumes of tests are folders");
    let node = cluster.nodes().iter().find(|node| node.name() == pod.node).expect("a node of the cluster");
    let data = node.root().join(path.trim_start_matches('/')).join("data");
    assert!(data.exists(), "{} exists", data.display());
    // etcd may create a file meanwhile, and then removing the folder fails.
    wait_until("the data to be deleted", PODS_WITHIN, || {
        let _ = std::fs::remove_dir_all(&data);
        (!data.exists()).then_some(())
    });
}

/// Recreates etcd by the steps in docs/kubernetes/operate.md.
fn recreate_etcd(release: Release<'_>) {
    let pause = |paused: &str| {
        let patch = format!("{{\"spec\":{{\"paused\":{paused}}}}}");
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
fn wait_for(release: Release<'_>, condition: &str) {
    release.kubectl(&["wait", &format!("kvcc/{NAME}"), &format!("--for=condition={condition}"), TIMEOUT]);
}

fn all_are_ready(release: Release<'_>) -> Vec<Pod> {
    wait_until("all members of etcd to be ready", PODS_WITHIN, || {
        let pods = release.pods_of(NAMESPACE, ETCD);
        (pods.len() == 3 && pods.iter().all(|pod| pod.is_ready)).then_some(pods)
    })
}
