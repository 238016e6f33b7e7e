//! Tenants with a namespace selector, on real pods. An injected pod of the namespace gets its tenant's name,
//! gets a token from its kubelet, and saves and loads as that tenant. A pod of another namespace and a pod
//! without its token are rejected.

use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::release::PODS_WITHIN;
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::wait_until;

use crate::chart::condition;

/// The tenant, a namespace that it selects, and one that it does not.
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

/// Bound on the kubelet's delivery of a ConfigMap or Secret: its sync period plus its cache's age, at most a minute
/// each.
pub(crate) const BOUND_WITHIN: Duration = Duration::from_secs(180);

/// Credentials that a pod presents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Credentials {
    /// The tenant's name and the token from the injection.
    Both,
    /// The tenant's name without a token.
    NameOnly,
    /// The name, and a token that the pod itself requests from its kubelet.
    OwnToken,
}

pub(crate) fn a_tenant_names_its_pods(cluster: &Cluster, release: Release<'_>) {
    cluster.apply(OBJECTS);
    let started = Instant::now();
    wait_until("all agents to apply the tenants' pods", BOUND_WITHIN, || {
        let tenant = release.object("ctenant", "team-b");
        let conditions = tenant["status"]["conditions"].as_array()?;
        conditions.iter().any(|one| one["type"] == "PodsBound").then_some(())?;
        (condition(&tenant, "PodsBound") == ("True", "AsDesired")).then_some(())
    });
    print_line(&format!("agents applied a tenant's namespace after {:.1?}", started.elapsed()));
    start(cluster, "chat", "member", Credentials::Both);
    start(cluster, "chat", "tokenless", Credentials::NameOnly);
    start(cluster, "elsewhere", "stranger", Credentials::OwnToken);
    let log = log_after_end(cluster, "chat", "member", "Succeeded");
    assert!(log.contains("saved"), "{log}");
    let log = log_after_end(cluster, "chat", "tokenless", "Failed");
    assert!(
        log.contains("kept for the pods that its CacheTenant names") && log.contains("shows no token"),
        "{log}"
    );
    let log = log_after_end(cluster, "elsewhere", "stranger", "Failed");
    assert!(log.contains("service account elsewhere/default are not among them"), "{log}");
    cluster.kubectl(&["delete", "namespace", "chat", "elsewhere", "--timeout=120s"]);
    cluster.kubectl(&["delete", "ctenant", "team-b", "--timeout=120s"]);
}

/// Creates a pod that saves a block as the tenant, loads it again, and exits.
fn start(cluster: &Cluster, space: &str, name: &str, credentials: Credentials) {
    let token = match credentials {
        Credentials::Both => "\"--token-file=$(REPRISE_TOKEN_FILE)\", ",
        Credentials::OwnToken => "\"--token-file=/token/token\", ",
        Credentials::NameOnly => "",
    };
    let tenant = if credentials == Credentials::Both { "$(REPRISE_TENANT)" } else { "team-b" };
    // A rejected client retries until then: the agent may not have the binding or the salt yet.
    let within = if credentials == Credentials::Both { "180s" } else { "5s" };
    cluster.apply(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{ name: {name}, namespace: {space}, labels: {{ reprise.dev/inject: reprise }} }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  # Agents accept root.
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

/// Waits until a pod has ended with this phase. Returns its log.
fn log_after_end(cluster: &Cluster, space: &str, name: &str, wanted: &str) -> String {
    let phase = wait_until(&format!("pod {name} to end"), PODS_WITHIN, || {
        let phase =
            cluster.kubectl(&["--namespace", space, "get", "pod", name, "--output=jsonpath={.status.phase}"]);
        ["Succeeded", "Failed"].contains(&phase.trim()).then_some(phase)
    });
    let log = cluster.kubectl(&["--namespace", space, "logs", name]);
    assert_eq!(phase.trim(), wanted, "{name}: {log}");
    log
}
