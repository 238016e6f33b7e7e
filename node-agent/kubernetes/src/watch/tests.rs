//! Deliveries of persisted specs and of objects that appear and disappear, without a server.

use std::sync::{Arc, Mutex};

use reprise_crds::fields::ForeignSignatures;

use super::*;
use crate::desired::DataPolicy;

const NODE: &str = "n";

/// A server that is never contacted.
const KUBECONFIG: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{ "name": "c", "cluster": { "server": "http://127.0.0.1:1" } }],
    "users": [{ "name": "c", "user": {} }],
    "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "c" } }]
}"#;

/// A loop that is not run, and its deliveries.
struct Fixture {
    watch: NodeWatch,
    delivered: Arc<Mutex<Vec<Desired>>>,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn start(persisted: Option<(i64, &Value)>) -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, KUBECONFIG).expect("written");
        if let Some((generation, spec)) = persisted {
            StateDirectory::new(folder.path(), NODE).save(generation, spec).expect("saved");
        }
        let settings = NodeSettings {
            node: NODE.to_owned(),
            version: "0.1.0".to_owned(),
            pod: None,
            cluster: Some("n/c".to_owned()),
            access: Access::Kubeconfig(kubeconfig),
            state: StateDirectory::new(folder.path(), NODE),
            status_every: Duration::from_secs(10),
        };
        let delivered: Arc<Mutex<Vec<Desired>>> = Arc::default();
        let deliveries = delivered.clone();
        let deliver = move |desired| deliveries.lock().expect("not poisoned").push(desired);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let watch = runtime.block_on(NodeWatch::new(settings, deliver)).expect("a client");
        Fixture { watch, delivered, folder }
    }

    fn delivered(&self) -> Vec<Desired> {
        std::mem::take(&mut self.delivered.lock().expect("not poisoned"))
    }

    fn persisted(&self) -> Option<i64> {
        let persisted = StateDirectory::new(self.folder.path(), NODE).load().expect("readable");
        persisted.map(|persisted| persisted.generation)
    }
}

fn claim(pool: &str, more: &Value) -> Value {
    let mut claim =
        json!({ "pool": pool, "uid": pool, "generation": 1, "globs": ["/dev/disk/by-id/nvme-*"] });
    for (name, value) in more.as_object().expect("fields") {
        claim[name] = value.clone();
    }
    claim
}

fn object(generation: i64, spec: &Value) -> DynamicObject {
    let object = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
        "metadata": { "name": NODE, "generation": generation }, "spec": spec,
    });
    serde_json::from_value(object).expect("an object")
}

#[test]
fn persisted_spec_destroys_nothing_until_the_server_confirms_it() {
    let spec = json!({
        "nodeName": NODE,
        "mode": "Draining",
        "claims": [claim("going", &json!({ "wipe": true })), claim("staying", &json!({ "foreignSignatures": "Wipe" }))],
    });
    let mut fixture = Fixture::start(Some((3, &spec)));
    let delivered = fixture.delivered();
    let [persisted] = &delivered[..] else { panic!("expected one delivery: {delivered:?}") };
    assert_eq!((persisted.generation, persisted.mode), (3, Some(reprise_crds::fields::NodeMode::Draining)));
    let [claim] = &persisted.claims[..] else { panic!("expected one claim: {:?}", persisted.claims) };
    assert_eq!((claim.pool.as_str(), claim.foreign), ("staying", ForeignSignatures::Refuse));

    fixture.watch.on_object(&object(3, &spec));
    let delivered = fixture.delivered();
    let [confirmed] = &delivered[..] else { panic!("expected one delivery: {delivered:?}") };
    assert_eq!(
        (confirmed.claims[0].data, confirmed.claims[1].foreign),
        (DataPolicy::Wipe, ForeignSignatures::Wipe)
    );
    fixture.watch.on_object(&object(3, &spec));
    assert!(fixture.delivered().is_empty(), "nothing has changed");
}

#[test]
fn queue_pairs_are_delivered_once_a_status_was_accepted_for_the_object() {
    let claim =
        json!({ "uid": "q", "allocation": "n/q", "controllers": [{ "serial": "S", "queuePairs": 1 }] });
    let spec = json!({ "nodeName": NODE, "queues": [claim] });
    let of = |uid: &str, generation: i64| {
        let mut object = object(generation, &spec);
        object.metadata.uid = Some(uid.to_owned());
        object
    };
    let mut fixture = Fixture::start(Some((57, &spec)));
    let queues = |fixture: &Fixture| -> Vec<Option<usize>> {
        fixture.delivered().iter().map(|desired| desired.queues.as_ref().map(Vec::len)).collect()
    };
    assert_eq!(queues(&fixture), [None]);
    let facts = |sequence: u64| Facts { sequence, ..crate::status::tests::facts() };
    assert_eq!(fixture.watch.next_write(Some(&facts(1))), None, "no object is known");
    fixture.watch.on_object(&of("u-1", 57));
    assert_eq!(queues(&fixture), [None]);
    assert_eq!(fixture.watch.next_write(Some(&facts(1))), None, "the facts are for the persisted spec");
    assert!(fixture.watch.next_write(Some(&facts(2))).is_some());
    fixture.watch.confirm_object(57);
    assert_eq!(queues(&fixture), [Some(1)]);
    fixture.watch.confirm_object(57);
    assert_eq!(queues(&fixture), [], "delivered once");
    fixture.watch.on_object(&of("u-1", 58));
    assert_eq!(queues(&fixture), [Some(1)]);
    // Another object of the same name; the watch missed the deletion of the first.
    fixture.watch.on_object(&of("u-2", 58));
    assert_eq!(queues(&fixture), [None]);
    assert_eq!(fixture.watch.next_write(Some(&facts(4))), None, "the facts are for the other object");
    assert!(!fixture.watch.is_current(&of("u-1", 58)) && fixture.watch.is_current(&of("u-2", 58)));
    // The spec has changed since it was read: wait for the change.
    fixture.watch.confirm_object(59);
    assert_eq!(queues(&fixture), [None]);
    fixture.watch.on_object(&of("u-2", 59));
    assert_eq!(queues(&fixture), [Some(1)]);
    // An object without grants: reservations for the previous one are released.
    let mut none = of("u-3", 1);
    none.data["spec"] = json!({ "nodeName": NODE });
    fixture.watch.on_object(&none);
    assert_eq!(queues(&fixture), [None]);
    fixture.watch.confirm_object(1);
    assert_eq!(queues(&fixture), [Some(0)]);
    fixture.watch.on_object(&of("u-3", 2));
    assert_eq!(queues(&fixture), [Some(1)]);
    // An object of another cluster, after a deletion: reservations are released.
    fixture.watch.on_deleted();
    let mut other_owner = of("u-4", 1);
    other_owner.data["spec"]["clusterRef"] = json!({ "namespace": "n", "name": "d" });
    fixture.watch.on_object(&other_owner);
    assert_eq!(queues(&fixture), [Some(0)]);
    assert_eq!(fixture.watch.next_write(Some(&facts(99))), None);
}

#[test]
fn persisted_spec_is_removed_with_its_object_and_a_recreated_object_is_delivered() {
    let spec = json!({ "nodeName": NODE, "claims": [claim("p", &json!({}))] });
    let mut fixture = Fixture::start(None);
    fixture.watch.on_object(&object(1, &spec));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (1, Some(1)));
    fixture.watch.on_deleted();
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (0, None), "the current state is kept");
    assert!(fixture.watch.delivered.is_none(), "no status is written");
    fixture.watch.on_object(&object(1, &spec));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (1, Some(1)));
}

#[test]
fn object_and_persisted_spec_of_another_cluster_are_ignored() {
    let spec = |cluster: &str| {
        json!({
            "nodeName": NODE, "clusterRef": { "namespace": "n", "name": cluster }, "claims": [claim("p", &json!({}))],
        })
    };
    let mut fixture = Fixture::start(Some((1, &spec("other"))));
    assert!(fixture.delivered().is_empty(), "the spec belongs to another cluster's agent");
    fixture.watch.on_object(&object(1, &spec("other")));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (0, Some(1)), "the other agent may need it");
    fixture.watch.on_object(&object(1, &spec("c")));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (1, Some(1)));
    fixture.watch.on_object(&object(2, &spec("other")));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (0, None), "the current state is kept");
    assert!(fixture.watch.delivered.is_none(), "no status is written");
    fixture.watch.on_object(&object(3, &spec("c")));
    assert_eq!((fixture.delivered().len(), fixture.persisted()), (1, Some(3)));
}
