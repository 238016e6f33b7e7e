//! A release on a real API server: every object is taken, definitions outlive it, and a change, a way back and the end leave nothing
//! that should not be there. There are no controllers, so hooks, which are Jobs, are looked at and not waited for.

use std::path::{Path, PathBuf};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams};
use kube::core::params::ValidationDirective;
use kube::discovery::{self, Scope};
use kube::{Client, ResourceExt};
use reprise_e2e::{ApiServer, PATIENCE, World, tree, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::helm::{NAMESPACE, RELEASE, chart, examples, helm, path, render, render_set, sets};

/// Kinds whose definitions are not on this server.
const OF_OTHERS: [&str; 3] = ["ServiceMonitor", "PodMonitor", "SeccompProfile"];

/// Most that a release takes of the 1 MiB that a Secret may have: there is room for as many objects again.
const RELEASE_BYTES_MAX: usize = 512 << 10;

/// Lifetime of Helm's token.
const TOKEN_SECONDS: i64 = 3600;

/// A server, and how Helm talks to it.
struct Cluster {
    server: ApiServer,
    admin: Client,
    connection: [String; 5],
    _world: World,
}

impl Cluster {
    fn start() -> Cluster {
        let world = World::new();
        let server = world.api_server();
        let admin = server.admin();
        let token = server.block_on(helms_token(&admin));
        let connection = [
            format!("--kube-apiserver={}", server.url()),
            format!("--kube-token={token}"),
            // Its certificate is of this test's own authority.
            "--kube-insecure-skip-tls-verify".to_owned(),
            format!("--namespace={NAMESPACE}"),
            "--no-hooks".to_owned(),
        ];
        Cluster { server, admin, connection, _world: world }
    }

    /// Helm must do it.
    fn helm(&self, arguments: &[&str]) -> String {
        let mut all: Vec<&str> = arguments.to_vec();
        all.extend(self.connection.iter().map(String::as_str));
        let said = helm(&all);
        assert!(said.worked, "{arguments:?}: {}", said.errors);
        said.output
    }

    /// What the server makes of an object, without making it when `dry`.
    fn apply(&self, object: &Value, dry: Dry) -> Result<(), String> {
        let (group, version) = split(object["apiVersion"].as_str().expect("a version"));
        let kind = GroupVersionKind::gvk(group, version, object["kind"].as_str().expect("a kind"));
        self.server.block_on(async {
            let found = discovery::pinned_kind(&self.admin, &kind).await;
            let (resource, about) = found.map_err(|error| format!("{kind:?}: {error}"))?;
            let api: Api<DynamicObject> = match about.scope {
                Scope::Cluster => Api::all_with(self.admin.clone(), &resource),
                Scope::Namespaced => Api::namespaced_with(self.admin.clone(), NAMESPACE, &resource),
            };
            let mut params = PatchParams::apply("reprise-e2e").validation(ValidationDirective::Strict);
            params.dry_run = dry == Dry::Run;
            let name = object["metadata"]["name"].as_str().expect("a name");
            let applied = api.patch(name, &params, &Patch::Apply(object)).await;
            applied.map(|_| ()).map_err(|error| format!("{} {name}: {error}", kind.kind))
        })
    }

    /// Names of the objects of a kind that a release made.
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
enum Dry {
    Run,
    Real,
}

fn split(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// A namespace, and an account in it that may do everything.
async fn helms_token(admin: &Client) -> String {
    let params = PatchParams::apply("reprise-e2e");
    let space = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } });
    let spaces: Api<Namespace> = Api::all(admin.clone());
    spaces.patch(NAMESPACE, &params, &Patch::Apply(&space)).await.expect("a namespace");
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
    status.and_then(|status| status.token).expect("an answer of 2xx has a token")
}

/// The objects that the hook's Job applies, out of the ConfigMap that it mounts.
fn initial_objects(files: &[PathBuf]) -> Vec<Value> {
    let documents = render_set(files);
    let map = documents
        .iter()
        .find(|one| one.object["metadata"]["name"] == "reprise-objects" && one.object["kind"] == "ConfigMap");
    let data = map.map(|one| one.object["data"].clone()).unwrap_or_default();
    let texts = data.as_object().into_iter().flat_map(|data| data.values());
    texts.map(|text| serde_yaml_ng::from_str(text.as_str().expect("text")).expect("YAML")).collect()
}

/// Objects of a file for people.
fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("an example");
    serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect()
}

#[test]
fn a_release_comes_changes_goes_back_and_goes_and_its_definitions_stay() {
    let cluster = Cluster::start();
    takes_every_object(&cluster);

    let [lab, external, _] = examples().try_into().expect("three");
    let chart = chart();
    cluster.helm(&["install", RELEASE, path(&chart), "--values", path(&lab)]);
    assert_eq!(cluster.definitions().len(), 6);
    fits_its_secret(&cluster);
    takes_the_initial_objects(&cluster);

    // Other values: what they add comes, what they leave out goes.
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy"), Vec::<String>::new());
    cluster.helm(&["upgrade", RELEASE, path(&chart), "--values", path(&external)]);
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy").len(), 4);
    cluster.helm(&["rollback", RELEASE, "1"]);
    assert_eq!(cluster.names("networking.k8s.io", "NetworkPolicy"), Vec::<String>::new());
    assert_eq!(cluster.definitions().len(), 6);

    cluster.helm(&["uninstall", RELEASE]);
    assert_eq!(cluster.definitions().len(), 6, "they stay, and with them what was made of them");
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
        // Without controllers nobody finishes a deletion in the foreground; Helm asks for the background.
        wait_until(&format!("{kind}s are gone"), PATIENCE, || {
            let left = cluster.names(group, kind);
            left.is_empty().then_some(())
        });
    }

    // What stayed is taken over by the next release of that name.
    cluster.helm(&["install", RELEASE, path(&chart)]);
    assert_eq!(cluster.definitions().len(), 6);
}

/// All that any set renders to, hooks included.
fn takes_every_object(cluster: &Cluster) {
    let mut taken = 0;
    for (name, files) in sets() {
        for document in render_set(&files) {
            if OF_OTHERS.map(Value::from).contains(&document.object["kind"]) {
                continue;
            }
            cluster.apply(&document.object, Dry::Run).unwrap_or_else(|error| panic!("{name}: {error}"));
            taken += 1;
        }
    }
    assert!(taken > 100, "{taken} objects");
    let bad = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" }, "datas": {} });
    let refused = cluster.apply(&bad, Dry::Run).expect_err("a field that is not known");
    assert!(refused.contains("datas"), "{refused}");
}

/// Helm keeps the whole release in one Secret.
fn fits_its_secret(cluster: &Cluster) {
    let secrets: Api<Secret> = Api::namespaced(cluster.admin.clone(), NAMESPACE);
    let stored = cluster.server.block_on(secrets.get(&format!("sh.helm.release.v1.{RELEASE}.v1")));
    let data = stored.expect("the release is there").data.expect("data");
    let bytes: usize = data.values().map(|value| value.0.len()).sum();
    reprise_e2e::seed::say(&format!("a release takes {bytes} bytes of its Secret"));
    assert!((10 << 10..RELEASE_BYTES_MAX).contains(&bytes), "{bytes} bytes");
}

/// Objects of the examples keep the definitions' rules, which no schema of values has.
fn takes_the_initial_objects(cluster: &Cluster) {
    wait_until("definitions are served", PATIENCE, || {
        let minimal = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "a" }, "spec": {} });
        cluster.apply(&minimal, Dry::Run).ok()
    });
    for (name, files) in sets() {
        for object in initial_objects(&files) {
            cluster.apply(&object, Dry::Run).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
    let resources = tree().join("charts/reprise/examples/resources");
    for file in ["cluster.yaml", "pool.yaml", "profile.yaml", "queues.yaml"] {
        for mut object in documents(&resources.join(file)) {
            object["metadata"].as_object_mut().expect("metadata").remove("namespace");
            cluster.apply(&object, Dry::Run).unwrap_or_else(|error| panic!("{file}: {error}"));
        }
    }
    for mut object in documents(&resources.join("engine.yaml")) {
        object["metadata"].as_object_mut().expect("metadata").remove("namespace");
        object["metadata"]["name"] = json!("engine");
        // Nobody makes the account that every pod has by default.
        let account =
            json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default" } });
        cluster.apply(&account, Dry::Real).expect("an account");
        cluster.apply(&object, Dry::Run).expect("an engine's pod");
    }
}

#[test]
fn definitions_can_be_left_out_and_monitors_follow_what_the_server_has() {
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
    let there = [auto.as_slice(), &["--api-versions", "monitoring.coreos.com/v1"]].concat();
    assert!(kinds(&there).contains(&"ServiceMonitor".to_owned()));
}
