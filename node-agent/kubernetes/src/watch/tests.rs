//! What an agent is told of what was kept, and of objects that come and go. No server is asked.

use std::sync::{Arc, Mutex};

use reprise_crds::fields::ForeignSignatures;

use super::*;
use crate::desired::Data;

const NODE: &str = "n";

/// A server that nobody asks.
const KUBECONFIG: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{ "name": "c", "cluster": { "server": "http://127.0.0.1:1" } }],
    "users": [{ "name": "c", "user": {} }],
    "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "c" } }]
}"#;

/// A loop that is not run, and what it tells.
struct Watched {
    watch: NodeWatch,
    told: Arc<Mutex<Vec<Desired>>>,
    folder: tempfile::TempDir,
}

impl Watched {
    fn start(kept: Option<(i64, &Value)>) -> Watched {
        let folder = tempfile::tempdir().expect("a folder");
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, KUBECONFIG).expect("written");
        if let Some((generation, spec)) = kept {
            StateDirectory::new(folder.path(), NODE).save(generation, spec).expect("kept");
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
        let told: Arc<Mutex<Vec<Desired>>> = Arc::default();
        let tells = told.clone();
        let tell = move |desired| tells.lock().expect("nobody panics").push(desired);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let watch = runtime.block_on(NodeWatch::new(settings, tell)).expect("a client");
        Watched { watch, told, folder }
    }

    fn told(&self) -> Vec<Desired> {
        std::mem::take(&mut self.told.lock().expect("nobody panics"))
    }

    fn kept(&self) -> Option<i64> {
        let kept = StateDirectory::new(self.folder.path(), NODE).load().expect("readable");
        kept.map(|kept| kept.generation)
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
fn what_was_kept_destroys_nothing_until_the_server_says_so_again() {
    let spec = json!({
        "nodeName": NODE,
        "mode": "Draining",
        "claims": [claim("going", &json!({ "wipe": true })), claim("staying", &json!({ "foreignSignatures": "Wipe" }))],
    });
    let mut watched = Watched::start(Some((3, &spec)));
    let told = watched.told();
    let [kept] = &told[..] else { panic!("it is told once: {told:?}") };
    assert_eq!((kept.generation, kept.mode), (3, Some(reprise_crds::fields::NodeMode::Draining)));
    let [claim] = &kept.claims[..] else { panic!("nothing is wiped: {:?}", kept.claims) };
    assert_eq!((claim.pool.as_str(), claim.foreign), ("staying", ForeignSignatures::Refuse));

    watched.watch.seen(&object(3, &spec));
    let told = watched.told();
    let [said] = &told[..] else { panic!("the server says it: {told:?}") };
    assert_eq!((said.claims[0].data, said.claims[1].foreign), (Data::Wiped, ForeignSignatures::Wipe));
    watched.watch.seen(&object(3, &spec));
    assert!(watched.told().is_empty(), "that is nothing new");
}

#[test]
fn queue_pairs_are_kept_once_a_status_was_taken_into_that_object() {
    let claim =
        json!({ "uid": "q", "allocation": "n/q", "controllers": [{ "serial": "S", "queuePairs": 1 }] });
    let spec = json!({ "nodeName": NODE, "queues": [claim] });
    let of = |uid: &str, generation: i64| {
        let mut object = object(generation, &spec);
        object.metadata.uid = Some(uid.to_owned());
        object
    };
    let mut watched = Watched::start(Some((57, &spec)));
    let queues = |watched: &Watched| -> Vec<Option<usize>> {
        watched.told().iter().map(|desired| desired.queues.as_ref().map(Vec::len)).collect()
    };
    assert_eq!(queues(&watched), [None]);
    let facts = |told: u64| Facts { told, ..crate::status::tests::facts() };
    assert_eq!(watched.watch.next_write(Some(&facts(1))), None, "there may be no such object");
    watched.watch.seen(&of("u-1", 57));
    assert_eq!(queues(&watched), [None]);
    assert_eq!(watched.watch.next_write(Some(&facts(1))), None, "they were found for what was kept");
    assert!(watched.watch.next_write(Some(&facts(2))).is_some());
    watched.watch.known(57);
    assert_eq!(queues(&watched), [Some(1)]);
    watched.watch.known(57);
    assert_eq!(queues(&watched), [], "once");
    watched.watch.seen(&of("u-1", 58));
    assert_eq!(queues(&watched), [Some(1)]);
    // Another object of the same name, that the watch has not seen go.
    watched.watch.seen(&of("u-2", 58));
    assert_eq!(queues(&watched), [None]);
    assert_eq!(watched.watch.next_write(Some(&facts(4))), None, "they are of the other object");
    assert!(!watched.watch.is_followed(&of("u-1", 58)) && watched.watch.is_followed(&of("u-2", 58)));
    // The spec has changed since it was read: it is waited for.
    watched.watch.known(59);
    assert_eq!(queues(&watched), [None]);
    watched.watch.seen(&of("u-2", 59));
    assert_eq!(queues(&watched), [Some(1)]);
    // One that wants none: what is kept by the one before is let go of.
    let mut none = of("u-3", 1);
    none.data["spec"] = json!({ "nodeName": NODE });
    watched.watch.seen(&none);
    assert_eq!(queues(&watched), [None]);
    watched.watch.known(1);
    assert_eq!(queues(&watched), [Some(0)]);
    watched.watch.seen(&of("u-3", 2));
    assert_eq!(queues(&watched), [Some(1)]);
    // Another cluster's, after it was gone: it lets go of them.
    watched.watch.gone();
    let mut other = of("u-4", 1);
    other.data["spec"]["clusterRef"] = json!({ "namespace": "n", "name": "d" });
    watched.watch.seen(&other);
    assert_eq!(queues(&watched), [Some(0)]);
    assert_eq!(watched.watch.next_write(Some(&facts(99))), None);
}

#[test]
fn a_deleted_object_is_not_started_from_again_and_one_that_is_made_anew_is_told() {
    let spec = json!({ "nodeName": NODE, "claims": [claim("p", &json!({}))] });
    let mut watched = Watched::start(None);
    watched.watch.seen(&object(1, &spec));
    assert_eq!((watched.told().len(), watched.kept()), (1, Some(1)));
    watched.watch.gone();
    assert_eq!((watched.told().len(), watched.kept()), (0, None), "the node goes on as it is");
    assert!(watched.watch.told.is_none(), "there is nothing to write a status of");
    watched.watch.seen(&object(1, &spec));
    assert_eq!((watched.told().len(), watched.kept()), (1, Some(1)));
}

#[test]
fn the_object_of_another_cluster_is_not_followed_nor_what_was_kept_of_it() {
    let spec = |cluster: &str| {
        json!({
            "nodeName": NODE, "clusterRef": { "namespace": "n", "name": cluster }, "claims": [claim("p", &json!({}))],
        })
    };
    let mut watched = Watched::start(Some((1, &spec("other"))));
    assert!(watched.told().is_empty(), "it was kept by another one's agent");
    watched.watch.seen(&object(1, &spec("other")));
    assert_eq!((watched.told().len(), watched.kept()), (0, Some(1)), "which may need it");
    watched.watch.seen(&object(1, &spec("c")));
    assert_eq!((watched.told().len(), watched.kept()), (1, Some(1)));
    watched.watch.seen(&object(2, &spec("other")));
    assert_eq!((watched.told().len(), watched.kept()), (0, None), "the node goes on as it is");
    assert!(watched.watch.told.is_none(), "there is nothing to write a status of");
    watched.watch.seen(&object(3, &spec("c")));
    assert_eq!((watched.told().len(), watched.kept()), (1, Some(3)));
}
