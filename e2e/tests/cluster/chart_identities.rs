//! Tenants that name their pods, on real ones: an injected pod of the namespace is told its tenant, gets a token from its kubelet, and saves and
//! loads as that tenant; a pod of another namespace, and one without its token, are refused in words.

use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::release::PODS_WITHIN;
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;

use crate::chart::condition;

/// The tenant, the namespace that it names, and one that it does not.
const OBJECTS: &str = "
apiVersion: v1
kind: Namespace
metadata: { name: chat, labels: { team: b, engines: 'yes' } }
---
apiVersion: v1
kind: Namespace
metadata: { name: elsewhere, labels: { engines: 'yes' } }
---
apiVersion: reprise.dev/v1alpha1
kind: CacheTenant
metadata: { name: team-b }
spec: { namespaceSelector: { matchLabels: { team: b } } }
";

/// The kubelet brings a ConfigMap within its period and the age of its cache, a minute each at the most.
const BOUND_WITHIN: Duration = Duration::from_secs(180);

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// What a pod shows beside what it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shows {
    /// The tenant and the token that it was injected with.
    Both,
    /// The tenant's name only.
    NameOnly,
    /// The name, and a token that it made its kubelet give it.
    OwnToken,
}

pub(crate) fn a_tenant_names_its_pods(cluster: &Cluster, release: Release<'_>) {
    cluster.apply(OBJECTS);
    let started = Instant::now();
    wait_until("all agents to know whose pods are whose", BOUND_WITHIN, || {
        std::thread::sleep(PAUSE);
        let tenant = release.object("ctenant", "team-b");
        let conditions = tenant["status"]["conditions"].as_array()?;
        conditions.iter().any(|one| one["type"] == "PodsBound").then_some(())?;
        (condition(&tenant, "PodsBound") == ("True", "AsDesired")).then_some(())
    });
    say(&format!("agents knew whose the pods of a namespace are after {:.1?}", started.elapsed()));
    start(cluster, "chat", "ours", Shows::Both);
    start(cluster, "chat", "shy", Shows::NameOnly);
    start(cluster, "elsewhere", "stranger", Shows::OwnToken);
    let said = ends(cluster, "chat", "ours", "Succeeded");
    assert!(said.contains("saved"), "{said}");
    let said = ends(cluster, "chat", "shy", "Failed");
    assert!(
        said.contains("kept for the pods that its CacheTenant names") && said.contains("shows no token"),
        "{said}"
    );
    let said = ends(cluster, "elsewhere", "stranger", "Failed");
    assert!(said.contains("service account elsewhere/default are not among them"), "{said}");
    cluster.kubectl(&["delete", "namespace", "chat", "elsewhere", "--timeout=120s"]);
    cluster.kubectl(&["delete", "ctenant", "team-b", "--timeout=120s"]);
}

/// A pod that saves a block as the tenant, loads it again, and ends.
fn start(cluster: &Cluster, space: &str, name: &str, shows: Shows) {
    let token = match shows {
        Shows::Both => "\"--token-file=$(REPRISE_TOKEN_FILE)\", ",
        Shows::OwnToken => "\"--token-file=/token/token\", ",
        Shows::NameOnly => "",
    };
    let tenant = if shows == Shows::Both { "$(REPRISE_TENANT)" } else { "team-b" };
    // Who is refused tries again until then: the agent may not know yet.
    let within = if shows == Shows::Both { "30s" } else { "5s" };
    cluster.apply(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{ name: {name}, namespace: {space}, labels: {{ reprise.dev/inject: reprise }} }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  # Whom agents let connect.
  securityContext: {{ runAsUser: 0, runAsGroup: 0 }}
  containers:
    - name: engine
      image: localhost/reprise:{version}
      args: [check, "--run={name}", "--tenant={tenant}", {token}"--socket=$(REPRISE_SOCKET)", "--within={within}"]
      volumeMounts: [{{ name: token, mountPath: /token, readOnly: true }}]
      resources: {{ requests: {{ cpu: 10m, memory: 32Mi }}, limits: {{ memory: 128Mi }} }}
  volumes:
    - name: token
      projected: {{ sources: [{{ serviceAccountToken: {{ audience: reprise.dev, path: token }} }}] }}
"#,
        version = env!("CARGO_PKG_VERSION"),
    ));
}

/// Waits until a pod has ended so; gives what it said.
fn ends(cluster: &Cluster, space: &str, name: &str, wanted: &str) -> String {
    let phase = wait_until(&format!("pod {name} to end"), PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let phase =
            cluster.kubectl(&["--namespace", space, "get", "pod", name, "--output=jsonpath={.status.phase}"]);
        ["Succeeded", "Failed"].contains(&phase.trim()).then_some(phase)
    });
    let said = cluster.kubectl(&["--namespace", space, "logs", name]);
    assert_eq!(phase.trim(), wanted, "{name}: {said}");
    said
}
