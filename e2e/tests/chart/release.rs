//! A release on a real API server: every object is accepted, definitions outlive the release, and an upgrade,
//! a rollback and an uninstall leave nothing else behind. There are no controllers, so hooks, which are Jobs,
//! do not run.

use std::path::{Path, PathBuf};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams};
use kube::core::params::ValidationDirective;
use kube::discovery::{self, Scope};
use kube::{Client, ResourceExt};
use reprise_e2e::{ApiServer, PATIENCE, TestEnv, tree, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chart::helm::{NAMESPACE, RELEASE, chart, examples, helm, path, render, render_set, sets};

/// Kinds of third parties, whose definitions are not on this server.
const THIRD_PARTY_KINDS: [&str; 3] = ["ServiceMonitor", "PodMonitor", "SeccompProfile"];

/// Bound on the release's Secret, whose limit is 1 MiB: half of it is kept free for future objects.
const RELEASE_BYTES_MAX: usize = 512 << 10;

/// Lifetime of Helm's token in seconds.
const TOKEN_SECONDS: i64 = 3600;

/// An API server, and Helm's arguments to connect to it.
struct Cluster {
    server: ApiServer,
    admin: Client,
    connection: [String; 5],
    _world: TestEnv,
}

impl Cluster {
    fn start() -> Cluster {
        let env = TestEnv::new();
        let server = env.api_server();
        let admin = server.admin();
        let token = server.block_on(helms_token(&admin));
        let connection = [
            format!("--kube-apiserver={}", server.url()),
            format!("--kube-token={token}"),
            // The certificate is signed by this test's own authority.
            "--kube-insecure-skip-tls-verify".to_owned(),
            format!("--namespace={NAMESPACE}"),
            "--no-hooks".to_owned(),
        ];
        Cluster { server, admin, connection, _world: env }
    }

    /// Runs Helm, which must succeed.
    fn helm(&self, arguments: &[&str]) -> String {
        let mut all: Vec<&str> = arguments.to_vec();
        all.extend(self.connection.iter().map(String::as_str));
        let output = helm(&all);
        assert!(output.success, "{arguments:?}: {}", output.stderr);
        output.stdout
    }

    /// Applies an object, or only validates it with `DryRun::Yes`.
    fn apply(&self, object: &Value, dry: DryRun) -> Result<(), String> {
        let (group, version) = split(object["apiVersion"].as_str().expect("a version"));
        let kind = GroupVersionKind::gvk(group, version, object["kind"].as_str().expect("a kind"));
        self.server.block_on(async {
            let found = discovery::pinned_kind(&self.admin, &kind).await;
            let (resource, about) = found.map_err(|error| format!("{kind:?}: {error}"))?;
            let api: Api<DynamicObject> = match about.scope {
                Scope::Cluster => Api::all_with(self.admin.clone(), &resource),
                Scope::Namespaced => {
                    let namespace = object["metadata"]["namespace"].as_str().unwrap_or(NAMESPACE);
                    Api::namespaced_with(self.admin.clone(), namespace, &resource)
                }
            };
            let mut params = PatchParams::apply("reprise-e2e").validation(ValidationDirective::Strict);
            params.dry_run = dry == DryRun::Yes;
            let name = object["metadata"]["name"].as_str().expect("a name");
            let applied = api.patch(name, &params, &Patch::Apply(object)).await;
            applied.map(|_| ()).map_err(|error| format!("{} {name}: {error}", kind.kind))
        })
    }

    /// Returns the names of a kind's objects that contain `reprise`.
    fn names(&self, group: &str, kind: &str) -> Vec<String> {
        let kind = GroupVersionKind::gvk(group, "v1", kind);
        self.server.block_on(async {
            let (resource, _) =
                discovery::pinned_kind(&self.admin, &kind).await.expect("a kind of Kubernetes");
            let api: Api<DynamicObject> = Api::all_with(self.admin.clone(), &resource);
            let found = api.list(&ListParams::default()).await.expect("the administrator may list");
            let mut names: Vec<String> = found.items.iter().map(ResourceExt::name_any).collect();
            names.retain(|name| name.contains("reprise"));
            names
        })
    }

    fn definitions(&self) -> Vec<String> {
        self.names("apiextensions.k8s.io", "CustomResourceDefinition")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DryRun {
    Yes,
    No,
}

fn split(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// Creates namespaces and an account that has all permissions, and returns a token of the account.
async fn helms_token(admin: &Client) -> String {
    let params = PatchParams::apply("reprise-e2e");
    let spaces: Api<Namespace> = Api::all(admin.clone());
    // The last ones are those of Secrets with keys, in everything.yaml.
    for name in [NAMESPACE, "team-a", "team-b"] {
        let space = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
        spaces.patch(name, &params, &Patch::Apply(&space)).await.expect("a namespace");
    }
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), NAMESPACE);
    let account =
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "installer" } });
    accounts.patch("installer", &params, &Patch::Apply(&account)).await.expect("an account");
    let rights = "rbac.authorization.k8s.io";
    let binding = json!({
        "apiVersion": format!("{rights}/v1"), "kind": "ClusterRoleBinding", "metadata": { "name": "installer" },
        "roleRef": { "apiGroup": rights, "kind": "ClusterRole", "name": "cluster-admin" },
        "subjects": [{ "kind": "ServiceAccount", "name": "installer", "namespace": NAMESPACE }],
    });
    let bindings: Api<ClusterRoleBinding> = Api::all(admin.clone());
    bindings.patch("installer", &params, &Patch::Apply(&binding)).await.expect("a binding");
    let spec = TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let issued = accounts.create_token_request("installer", &PostParams::default(), &request).await;
    let status = issued.expect("the server issues tokens").status;
    status.and_then(|status| status.token).expect("a response of 2xx has a token")
}

/// Returns the objects that the hook's Job applies, from the ConfigMap that it mounts.
fn initial_objects(files: &[PathBuf]) -> Vec<Value> {
    let documents = render_set(files);
    let map = documents
        .iter()
        .find(|one| one.object["metadata"]["name"] == "reprise-objects" && one.object["kind"] == "ConfigMap");
    let data = map.map(|one| one.object["data"].clone()).unwrap_or_default();
    let texts = data.as_object().into_iter().flat_map(|data| data.values());
    texts.map(|text| serde_yaml_ng::from_str(text.as_str().expect("text")).expect("YAML")).collect()
}

/// Parses the objects of an example file.
fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("an example");
    serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect()
}

#[test]
fn a_release_is_installed_upgraded_rolled_back_and_uninstalled_and_keeps_its_definitions() {
    let cluster = Cluster::start();
    accepts_every_object(&cluster);

    let [lab, external, _] = examples().try_into().expect("three");
    let chart = chart();
    let without_policies = ["--set", "networkPolicies.create=false"];
    let install = ["install", RELEASE, path(&chart), "--values", path(&lab)];
    cluster.helm(&[&install[..], &without_policies].concat());
    assert_eq!(cluster.definitions().len(), 6);
    fits_its_secret(&cluster);
    accepts_the_initial_objects(&cluster);

    // With other values, an upgrade creates the added objects, and a rollback deletes them.
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy"), Vec::<String>::new());
    cluster.helm(&["upgrade", RELEASE, path(&chart), "--values", path(&external)]);
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy").len(), 4);
    cluster.helm(&["rollback", RELEASE, "1"]);
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy"), Vec::<String>::new());
    assert_eq!(cluster.definitions().len(), 6);

    cluster.helm(&["uninstall", RELEASE]);
    assert_eq!(cluster.definitions().len(), 6, "definitions stay, and with them the custom resources");
    for (group, kind) in [
        ("apps", "Deployment"),
        ("rbac.authorization.k8s.io", "ClusterRole"),
        ("rbac.authorization.k8s.io", "ClusterRoleBinding"),
        ("rbac.authorization.k8s.io", "Role"),
        ("policy", "PodDisruptionBudget"),
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy"),
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicyBinding"),
        ("", "ServiceAccount"),
        ("", "ConfigMap"),
        ("", "Service"),
        ("", "Secret"),
    ] {
        // Without controllers, a foreground deletion would not finish; Helm uses background deletion.
        wait_until(&format!("{kind}s are deleted"), PATIENCE, || {
            let remaining = cluster.names(group, kind);
            remaining.is_empty().then_some(())
        });
    }

    // The next release of this name adopts the definitions.
    cluster.helm(&["install", RELEASE, path(&chart)]);
    assert_eq!(cluster.definitions().len(), 6);
}

/// Validates every object of every set, hooks included.
fn accepts_every_object(cluster: &Cluster) {
    let mut accepted = 0;
    for (name, files) in sets() {
        for document in render_set(&files) {
            if THIRD_PARTY_KINDS.map(Value::from).contains(&document.object["kind"]) {
                continue;
            }
            cluster.apply(&document.object, DryRun::Yes).unwrap_or_else(|error| panic!("{name}: {error}"));
            accepted += 1;
        }
    }
    assert!(accepted > 100, "{accepted} objects");
    let bad = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" }, "datas": {} });
    let refused = cluster.apply(&bad, DryRun::Yes).expect_err("an unknown field");
    assert!(refused.contains("datas"), "{refused}");
}

/// Checks the size of the Secret in which Helm stores the whole release.
fn fits_its_secret(cluster: &Cluster) {
    let secrets: Api<Secret> = Api::namespaced(cluster.admin.clone(), NAMESPACE);
    let stored = cluster.server.block_on(secrets.get(&format!("sh.helm.release.v1.{RELEASE}.v1")));
    let data = stored.expect("the release is stored").data.expect("data");
    let bytes: usize = data.values().map(|value| value.0.len()).sum();
    reprise_e2e::seed::print_line(&format!("a release takes {bytes} bytes of its Secret"));
    assert!((10 << 10..RELEASE_BYTES_MAX).contains(&bytes), "{bytes} bytes");
}

/// Validates the objects of the examples against the rules of the definitions, which the values' schema
/// lacks.
fn accepts_the_initial_objects(cluster: &Cluster) {
    wait_until("definitions are served", PATIENCE, || {
        let minimal = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "a" }, "spec": {} });
        cluster.apply(&minimal, DryRun::Yes).ok()
    });
    for (name, files) in sets() {
        for object in initial_objects(&files) {
            cluster.apply(&object, DryRun::Yes).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
    let resources = tree().join("charts/reprise/examples/resources");
    for file in ["cluster.yaml", "pool.yaml", "profile.yaml", "queues.yaml"] {
        for mut object in documents(&resources.join(file)) {
            object["metadata"].as_object_mut().expect("metadata").remove("namespace");
            cluster.apply(&object, DryRun::Yes).unwrap_or_else(|error| panic!("{file}: {error}"));
        }
    }
    for mut object in documents(&resources.join("engine.yaml")) {
        object["metadata"].as_object_mut().expect("metadata").remove("namespace");
        object["metadata"]["name"] = json!("engine");
        // No controller creates the default service account.
        let account =
            json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default" } });
        cluster.apply(&account, DryRun::No).expect("an account");
        cluster.apply(&object, DryRun::Yes).expect("an engine's pod");
    }
}

#[test]
fn definitions_are_optional_and_monitors_depend_on_the_servers_api_versions() {
    let kinds = |more: &[&str]| -> Vec<String> {
        let documents = render(&[], more);
        documents.iter().map(|one| one.object["kind"].as_str().expect("a kind").to_owned()).collect()
    };
    assert!(!kinds(&["--set", "crds.install=false"]).contains(&"CustomResourceDefinition".to_owned()));
    let jobs = |more: &[&str]| kinds(more).iter().filter(|kind| *kind == "Job").count();
    assert_eq!(jobs(&[]), 2, "definitions before an upgrade, objects before the end");
    assert_eq!(jobs(&["--set", "crds.upgradeHook=false"]), 1);
    assert_eq!(jobs(&["--set", "crds.upgradeHook=false", "--set", "hooks.deleteObjects=false"]), 0);
    let auto = ["--set", "monitoring.serviceMonitor=Auto"];
    assert!(!kinds(&auto).contains(&"ServiceMonitor".to_owned()));
    let with_monitoring = [auto.as_slice(), &["--api-versions", "monitoring.coreos.com/v1"]].concat();
    assert!(kinds(&with_monitoring).contains(&"ServiceMonitor".to_owned()));
}
