//! Properties of the definitions that users see: defaults, columns, names, selection by a field.

use http::header::ACCEPT;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use reprise_crds::{
    CATEGORY, CacheNode, CacheTenant, GPUQueueAllocation, GROUP, KVCacheCluster, SSDPool, SlackProfile,
    VERSION,
};
use reprise_e2e::{ApiServer, PATIENCE, wait_until};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::resources::objects::{DEFINITIONS, api, create, holds, minimal, object, refusal, space};

/// Media type that requests rows and columns, as `kubectl get` does.
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";

pub(crate) fn every_definition_is_served(server: &ApiServer) {
    let admin = server.admin();
    let version = format!("{GROUP}/{VERSION}");
    let served = wait_until("all kinds are discovered", PATIENCE, || {
        let served = server.block_on(admin.list_api_group_resources(&version)).ok()?.resources;
        let found = |plural: &str| served.iter().any(|one| one.name == plural);
        DEFINITIONS.iter().all(|one| found(&one.spec.names.plural)).then_some(served)
    });
    let documented = wait_until("the schemas are published", PATIENCE, || {
        let request =
            http::Request::get(format!("/openapi/v3/apis/{version}")).body(Vec::new()).expect("a request");
        let schemas: Value = server.block_on(admin.request(request)).ok()?;
        let schemas = schemas["components"]["schemas"].clone();
        DEFINITIONS.iter().all(|one| !of_kind(&schemas, &one.spec.names.kind).is_null()).then_some(schemas)
    });
    let stored: Api<CustomResourceDefinition> = Api::all(admin.clone());
    for definition in DEFINITIONS.iter() {
        let names = &definition.spec.names;
        let kind = &names.kind;
        let stored = server.block_on(stored.get(&definition.name_any())).expect("the definition is stored");
        assert!(holds(&stored, "NamesAccepted"), "names of {kind} conflict with another definition");
        assert!(!holds(&stored, "NonStructuralSchema"), "the schema of {kind} is not structural");
        let served = served.iter().find(|one| one.name == names.plural).expect("waited for above");
        assert_eq!(served.short_names, names.short_names, "{kind}");
        assert_eq!(served.categories.as_deref(), Some(&[CATEGORY.to_owned()][..]), "{kind}");
        assert_eq!(served.namespaced, definition.spec.scope == "Namespaced", "{kind}");
        // The text that `kubectl explain` shows.
        let described = &of_kind(&documented, kind)["properties"]["spec"]["description"];
        assert!(described.as_str().is_some_and(|text| !text.is_empty()), "spec of {kind} has a description");
    }
}

fn of_kind(schemas: &Value, kind: &str) -> Value {
    schemas
        .as_object()
        .and_then(|all| all.get(&format!("dev.reprise.{VERSION}.{kind}")))
        .cloned()
        .unwrap_or_default()
}

pub(crate) fn stored_objects_contain_the_defaults(server: &ApiServer) {
    space(server, "defaults");
    assert_server_and_type_defaults_match::<KVCacheCluster>(server);
    assert_server_and_type_defaults_match::<SSDPool>(server);
    assert_server_and_type_defaults_match::<GPUQueueAllocation>(server);
    assert_server_and_type_defaults_match::<SlackProfile>(server);
    assert_server_and_type_defaults_match::<CacheTenant>(server);
    assert_server_and_type_defaults_match::<CacheNode>(server);

    let pool = api(&server.admin(), "SSDPool", "");
    let stored = server.block_on(pool.get("defaults")).expect("created above").data;
    assert_eq!(stored["spec"]["queueDepth"], 128);
    assert_eq!(stored["spec"]["segmentSize"], "64Mi");
    assert_eq!(stored["spec"]["watermarks"]["freePermille"], 30);
}

/// Checks that the server stores the same defaults as the Rust type has.
fn assert_server_and_type_defaults_match<K>(server: &ApiServer)
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Serialize,
{
    let kind = K::kind(&());
    let sent = minimal(&kind, "defaults");
    let read: K = serde_json::from_value(sent.clone()).expect("the type reads the required fields");
    let read = serde_json::to_value(read).expect("the type can be written as JSON");
    let stored = create(server, "defaults", &sent).data;
    assert_eq!(stored["spec"], read["spec"], "{kind}: left the server's defaults, right the type's");
}

pub(crate) fn every_kind_shows_its_columns(server: &ApiServer) {
    space(server, "columns");
    let admin = server.admin();
    let table = |kind: &str| -> Value {
        let api = api(&admin, kind, "columns");
        let request =
            http::Request::get(api.resource_url()).header(ACCEPT, TABLE).body(Vec::new()).expect("a request");
        server.block_on(admin.request(request)).expect("a table")
    };
    for definition in DEFINITIONS.iter() {
        let kind = &definition.spec.names.kind;
        let declared = definition.spec.versions[0].additional_printer_columns.clone().expect("columns");
        let declared: Vec<Value> =
            declared.iter().map(|one| json!([one.name, one.type_, one.priority.unwrap_or(0)])).collect();
        let table = table(kind);
        let shown = table["columnDefinitions"].as_array().expect("columns").iter();
        let shown: Vec<Value> = shown.map(|one| json!([one["name"], one["type"], one["priority"]])).collect();
        assert_eq!(shown[0][0], "Name", "{kind}");
        assert_eq!(shown[1..], declared, "{kind}");
    }

    let pool = "columns";
    create(server, "", &minimal("SSDPool", pool));
    let mut status = minimal("SSDPool", pool);
    status["status"] = json!({
        "nodes": { "selected": 3, "ready": 2, "refused": 1 },
        "devices": { "matched": 5, "open": 4, "faulted": 1 },
        "capacity": { "total": "4Gi", "used": "1Gi", "reserved": "0" },
        "conditions": [{
            "type": "Ready", "status": "False", "reason": "DevicesRefused", "message": "check node n3",
            "observedGeneration": 1, "lastTransitionTime": "2026-11-22T00:00:00Z",
        }],
    });
    let status = serde_json::to_vec(&status).expect("JSON");
    let patch = http::Request::patch(format!("{}/{pool}/status", api(&admin, "SSDPool", "").resource_url()))
        .header(http::header::CONTENT_TYPE, "application/merge-patch+json")
        .body(status);
    let _: Value = server.block_on(admin.request(patch.expect("a request"))).expect("the status is accepted");
    let table = table("SSDPool");
    let names = table["columnDefinitions"].as_array().expect("columns").iter().map(|one| one["name"].clone());
    let rows = table["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["object"]["metadata"]["name"] == pool).expect("the pool's row");
    let cells: serde_json::Map<String, Value> = names
        .zip(row["cells"].as_array().expect("cells").iter().cloned())
        .map(|(name, cell)| (name.as_str().expect("a name").to_owned(), cell))
        .collect();
    for (name, cell) in [
        ("Ready", json!("False")),
        ("Nodes", json!(2)),
        ("Devices", json!(4)),
        ("Total", json!("4Gi")),
        ("Used", json!("1Gi")),
        ("Reason", json!("DevicesRefused")),
    ] {
        assert_eq!(cells.get(name), Some(&cell), "{name} of {cells:?}");
    }
}

pub(crate) fn queue_allocations_are_found_by_their_node(server: &ApiServer) {
    let kind = "GPUQueueAllocation";
    space(server, "selection");
    for (name, node) in [("one", "near"), ("two", "far"), ("three", "near")] {
        let mut spec = minimal(kind, name)["spec"].clone();
        spec["nodeName"] = json!(node);
        create(server, "selection", &object(kind, name, &spec));
    }
    let found = |selector: &str| {
        let api = api(&server.admin(), kind, "selection");
        server.block_on(api.list(&ListParams::default().fields(selector)))
    };
    let names = |selector: &str| {
        let mut names: Vec<String> =
            found(selector).expect("a list").iter().map(ResourceExt::name_any).collect();
        names.sort();
        names
    };
    assert_eq!(names("spec.nodeName=near"), ["one", "three"]);
    assert_eq!(names("spec.nodeName!=near"), ["two"]);
    assert!(names("spec.nodeName=nowhere").is_empty());
    let (code, words) = refusal(found("spec.queuePairs=2")).expect("only declared fields can be selected");
    assert_eq!(code, 400, "{words}");
}
