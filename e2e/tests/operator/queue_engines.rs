//! Queue pairs of an emulated controller, from the allocation to the engine: a real operator, a real agent, and engines
//! whose rings save and load blocks through them.

use std::collections::BTreeSet;

use http::header::ACCEPT;
use reprise_client::CommitOptions;
use reprise_e2e::content::{keys, small};
use reprise_e2e::{Agent, Engine, PATIENCE, wait_until};
use reprise_policy::BlockKey;
use reprise_testkit::kv_function;
use reprise_testkit::rings::{RingLoad, RingPath, RingPathSettings};
use serde_json::{Value, json};

use crate::operator::queue_agents::agent_at;
use crate::operator::queues::{GRANTED, KIND, create_allocation, wait_deleted};
use crate::operator::test_cluster::{NAMESPACE, TestCluster};

/// Queue pairs of the allocation.
const PAIRS: u32 = 4;

/// Blocks of an engine's KV memory.
const SLOTS: usize = 4;

/// Media type that requests rows and columns, as `kubectl get` does.
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";

const NOT_REQUESTED: [&str; 3] = ["Programmed", "False", "NotRequested"];
const PROGRAMMED: [&str; 3] = ["Programmed", "True", "AsDesired"];

/// An engine with its rings.
struct RingEngine {
    path: RingPath,
    engine: Engine,
}

impl RingEngine {
    /// Opens a session and registers KV memory.
    fn open(agent: &Agent, pairs: u32) -> Result<RingEngine, String> {
        let engine = agent.engine(small());
        let settings =
            RingPathSettings { pairs, depth: 64, timeout: PATIENCE, ..RingPathSettings::default() };
        let path = RingPath::open(engine.client(), SLOTS, settings).map_err(|error| format!("{error:#}"))?;
        Ok(RingEngine { path, engine })
    }

    /// Saves a block with ring writes, for which the engine requests its queue pairs, and loads it with ring reads.
    fn save_and_load(&mut self, number: u64) -> Result<(), String> {
        let key: BlockKey = keys(&[number])[0];
        let mut bytes = vec![0; small().object_bytes() as usize];
        for object in 0..small().objects() {
            kv_function::fill(&key.0, object, &mut bytes);
            self.path.object(0, object as usize).copy_in(&bytes).expect("KV memory is writable");
        }
        let saved = self.path.save(&[(0, key)], CommitOptions::default(), PATIENCE);
        saved.map_err(|error| format!("{error:#}"))?;
        let loaded = self.path.load(&[(1, key)]).map_err(|error| format!("{error:#}"))?;
        assert_eq!(loaded, [RingLoad::Verified]);
        Ok(())
    }
}

/// Returns a cell of the allocation in the table that `kubectl get gqa` prints.
fn cell(k8s: &TestCluster, name: &str, column: &str) -> Value {
    let request = http::Request::get(k8s.api(KIND).resource_url()).header(ACCEPT, TABLE).body(Vec::new());
    let table: Value =
        k8s.server.block_on(k8s.client().request(request.expect("a request"))).expect("a table");
    let columns = table["columnDefinitions"].as_array().expect("columns");
    let at = columns.iter().position(|one| one["name"] == column).expect("the definition has the column");
    let rows = table["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["object"]["metadata"]["name"] == name).expect("the object's row");
    row["cells"][at].clone()
}

/// Returns the queue pairs in the status of the allocation and in that of the agent: numbers and generation.
fn numbers(k8s: &TestCluster, agent: &Agent) -> [(BTreeSet<u64>, Option<u64>); 2] {
    let of = |queues: &Value, generation: &Value| {
        let queues = queues.as_array().into_iter().flatten();
        (queues.map(|queue| queue.as_u64().expect("a number")).collect(), generation.as_u64())
    };
    let allocation = k8s.get(KIND, "a").expect("the object exists").data["status"]["allocations"][0].clone();
    let grant = agent.admin().json("/status")["queue_grants"][0].clone();
    [of(&allocation["queues"], &allocation["generation"]), of(&grant["queues"], &grant["generation"])]
}

#[test]
fn engine_uses_granted_queue_pairs_whose_numbers_are_in_the_status() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.env.require("this NVMe controller is EMULATED");
    k8s.env.require("queue pairs revoked");
    k8s.pool("p", "/pool", json!({ "engine": "UserNvme", "fallbackEngine": "None" }));
    k8s.cluster(json!({ "pools": [{ "name": "p" }] }));
    let root = k8s.env.folder().join("n1-root");
    std::fs::create_dir_all(root.join("pool")).expect("a folder");
    let agent = agent_at(&k8s, &root);
    wait_until("the agent emulates a controller", PATIENCE, || {
        let node = k8s.get("CacheNode", "n1")?;
        let controller = &node.data["status"]["controllers"][0];
        (controller["pool"] == "p").then_some(())
    });

    let refused = RingEngine::open(&agent, PAIRS).err().expect("nothing is granted");
    assert!(refused.contains("create a GPUQueueAllocation"), "{refused}");
    create_allocation(&k8s, "a", json!({ "queuePairs": PAIRS, "depth": 64 }));
    k8s.wait_condition(KIND, "a", GRANTED);
    k8s.wait_message(KIND, "a", NOT_REQUESTED, &["no engine has requested them yet"]);
    assert_eq!(cell(&k8s, "a", "Queues"), Value::Null);

    let mut first = RingEngine::open(&agent, PAIRS).expect("queue pairs are granted");
    first.save_and_load(1).expect("saved with queue pairs");
    k8s.wait_condition(KIND, "a", PROGRAMMED);
    let [(queues, generation), reported] = numbers(&k8s, &agent);
    assert_eq!((queues.len(), &(queues.clone(), generation)), (PAIRS as usize, &reported));
    let (least, last) = (queues.first().expect("four"), queues.last().expect("four"));
    assert_eq!(cell(&k8s, "a", "Queues"), json!(format!("{least}-{last}")), "{queues:?}");
    assert_eq!(cell(&k8s, "a", "Programmed"), "True");
    let grant = agent.admin().json("/status")["queue_grants"][0].clone();
    assert_eq!(grant["allocation"], format!("{NAMESPACE}/a"));
    let mut second = RingEngine::open(&agent, 1).expect("an allocation exists");
    let refused = second.save_and_load(2).expect_err("the other engine has all of them");
    assert!(refused.contains("at most 0 left"), "{refused}");

    // The pod of the engine is deleted: its session ends.
    drop(first);
    k8s.wait_condition(KIND, "a", NOT_REQUESTED);
    assert_eq!(cell(&k8s, "a", "Queues"), Value::Null);
    second.save_and_load(3).expect("the queue pairs are free again");
    wait_until("one queue pair to be reported", PATIENCE, || {
        k8s.wait_condition(KIND, "a", NOT_REQUESTED).contains("1 of 4").then_some(())
    });
    let [(queues, later), reported] = numbers(&k8s, &agent);
    assert_eq!(&(queues.clone(), later), &reported);
    assert!(queues.len() == 1 && later > generation, "{queues:?} {later:?} {generation:?}");

    // The end of the allocation reaches the engine, and its queue pairs are deleted before the object is gone.
    k8s.delete(KIND, "a");
    wait_deleted(&k8s, "a");
    assert_eq!(agent.admin().json("/status")["queue_grants"], json!([]));
    let revoked = wait_until("the engine learns of it", PATIENCE, || second.path.revoked());
    assert!(revoked.contains("GPUQueueAllocation"), "{revoked}");
    second.engine.save_durably(&[4]);
    let refused = RingEngine::open(&agent, 1).err().expect("nothing is granted");
    assert!(refused.contains("create a GPUQueueAllocation"), "{refused}");
}
