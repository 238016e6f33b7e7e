//! Custom resources as JSON, so that the API server gets exactly the tests' text, independent of the Rust
//! types.

use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Error, ResourceExt};
use reprise_crds::{GROUP, VERSION};
use reprise_e2e::{ApiServer, PATIENCE, wait_until};
use serde_json::{Value, json};

/// Field manager of the tests' objects.
const MANAGER: &str = "reprise-e2e";

/// All definitions, generated once.
pub(crate) static DEFINITIONS: LazyLock<Vec<CustomResourceDefinition>> =
    LazyLock::new(reprise_crds::definitions);

/// Applies all definitions, and waits until the server serves them.
pub(crate) fn install_definitions(server: &ApiServer) {
    let admin = server.admin();
    let stored: Api<CustomResourceDefinition> = Api::all(admin.clone());
    for definition in DEFINITIONS.iter() {
        let name = definition.name_any();
        let patch = Patch::Apply(definition);
        let applied = server.block_on(stored.patch(&name, &PatchParams::apply(MANAGER), &patch));
        applied.unwrap_or_else(|error| panic!("cannot apply the definition {name}: {error}"));
    }
    for definition in DEFINITIONS.iter() {
        let objects = api(&admin, &definition.spec.names.kind, "default");
        wait_until(&format!("{} is served", definition.name_any()), PATIENCE, || {
            let stored =
                server.block_on(stored.get(&definition.name_any())).expect("the definition was just applied");
            // The handlers of the objects start a little later.
            let responds = || server.block_on(objects.list(&ListParams::default())).is_ok();
            (holds(&stored, "Established") && responds()).then_some(())
        });
    }
}

/// Returns whether a condition of a definition is true.
pub(crate) fn holds(definition: &CustomResourceDefinition, condition: &str) -> bool {
    let conditions = definition.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|one| one.type_ == condition && one.status == "True"))
}

/// Creates a namespace for a test.
pub(crate) fn space(server: &ApiServer, name: &str) {
    let api: Api<Namespace> = Api::all(server.admin());
    let space = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
    server
        .block_on(api.patch(name, &PatchParams::apply(MANAGER), &Patch::Apply(&space)))
        .expect("a namespace");
}

/// Returns an object of a kind with the required fields only.
pub(crate) fn minimal(kind: &str, name: &str) -> Value {
    let spec = match kind {
        "SSDPool" => json!({ "directory": { "path": "/var/lib/reprise/pool", "size": "1Gi" } }),
        "GPUQueueAllocation" => json!({
            "nodeName": "n1",
            "gpuUuid": "GPU-7e43a1f2-58aa-4a0c-9b1d-0c4de61c9f3a",
            "poolRef": { "name": "fast" },
            "queuePairs": 2,
        }),
        "SlackProfile" => json!({
            "subject": { "model": "llama-3-8b", "gpuProduct": "NVIDIA H200", "engineVersion": "vllm 0.32.0" },
            "configMapRef": { "name": "measured", "key": "measurement" },
        }),
        "CacheNode" => json!({ "nodeName": name }),
        _ => json!({}),
    };
    object(kind, name, &spec)
}

/// Returns an object of a kind.
pub(crate) fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// Returns a client for a kind; for a namespaced kind, in the namespace `space`.
pub(crate) fn api(client: &Client, kind: &str, space: &str) -> Api<DynamicObject> {
    let definition = definition(kind);
    let resource = ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind.to_owned(),
        plural: definition.spec.names.plural.clone(),
    };
    if definition.spec.scope == "Namespaced" {
        Api::namespaced_with(client.clone(), space, &resource)
    } else {
        Api::all_with(client.clone(), &resource)
    }
}

/// Returns the definition of a kind.
pub(crate) fn definition(kind: &str) -> &'static CustomResourceDefinition {
    DEFINITIONS.iter().find(|one| one.spec.names.kind == kind).expect("a kind of Reprise")
}

/// Converts an object for the client.
pub(crate) fn dynamic(object: &Value) -> DynamicObject {
    serde_json::from_value(object.clone()).expect("an object")
}

/// Creates an object as administrator, which must succeed.
pub(crate) fn create(server: &ApiServer, space: &str, object: &Value) -> DynamicObject {
    let kind = object["kind"].as_str().expect("an object has a kind");
    let api = api(&server.admin(), kind, space);
    let created = server.block_on(api.create(&PostParams::default(), &dynamic(object)));
    created.unwrap_or_else(|error| panic!("cannot create {object}: {error}"))
}

/// Returns the code and the message of an error; `None` on success.
pub(crate) fn refusal<T>(outcome: Result<T, Error>) -> Option<(u16, String)> {
    match outcome {
        Ok(_) => None,
        Err(Error::Api(status)) => Some((status.code, status.message)),
        Err(other) => panic!("the server does not respond: {other}"),
    }
}
