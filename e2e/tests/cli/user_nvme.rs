//! NVMe in user space from the command line: the demo whose engines move blocks with rings, and the benchmark of the
//! driver.

use std::collections::BTreeMap;

use reprise_e2e::TestEnv;
use serde_json::Value;

use super::{assert_form, number, objects, run};

/// Nodes of the demo with rings.
const NODES: u64 = 3;

/// Blocks of a prompt of the trace.
const PROMPT_BLOCKS: u64 = 4;

/// Returns a trace that gets hits in every tier. The engines serve requests in turn:
///
/// | round | prompts | source |
/// |---|---|---|
/// | 1 | new ones, private and shared | computed |
/// | 2 | private ones, on the same node | own NVMe |
/// | 3 | shared ones, on the next node | peer NVMe, which fills DRAM of both nodes |
/// | 4 | shared ones, on the node after | peer DRAM |
/// | 5 | shared ones, on the same node as in round 3 | own DRAM |
fn trace() -> String {
    let (private, shared) = (0..NODES, NODES..3 * NODES);
    let round = |prompts: std::ops::Range<u64>, shift: u64| {
        // The request at position p is served by engine p % NODES, and each group has a multiple of NODES requests.
        let (first, count) = (prompts.start, prompts.end - prompts.start);
        (0..count).map(move |at| first + at / NODES * NODES + (at + NODES - shift) % NODES)
    };
    let prompts = round(private.clone(), 0)
        .chain(round(shared.clone(), 0))
        .chain(round(private, 0))
        .chain(round(shared.clone(), 1))
        .chain(round(shared.clone(), 2))
        .chain(round(shared, 1));
    let line = |prompt: u64| {
        let hash_ids: Vec<u64> = (0..PROMPT_BLOCKS).map(|block| 1 + prompt * PROMPT_BLOCKS + block).collect();
        let (timestamp, input_length) = (0, 512 * PROMPT_BLOCKS);
        serde_json::json!({
            "timestamp": timestamp, "input_length": input_length, "output_length": 1, "hash_ids": hash_ids
        })
    };
    prompts.map(|prompt| format!("{}\n", line(prompt))).collect()
}

#[test]
fn the_demo_with_rings_hits_every_tier_and_states_the_backend_and_its_traffic() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    for node in ["node-1", "node-2", "node-3"] {
        env.watch_log(env.folder().join(format!("{node}.log")));
    }
    let folder = env.folder().to_str().expect("our folders have plain names");
    let file = env.folder().join("trace.jsonl");
    std::fs::write(&file, trace()).expect("the folder is writable");
    let trace = file.to_str().expect("our folders have plain names");
    let demo = ["--json", "demo", "--engine-path", "rings", "--trace", trace, "--dir", folder];
    let nodes = NODES.to_string();
    let sizes = ["--nodes", nodes.as_str(), "--arena", "32MiB", "--pool", "256MiB"];
    let summary = objects(&[&demo[..], &sizes[..]].concat()).remove(0);
    assert_eq!((number(&summary, "/mismatches"), number(&summary, "/errors")), (0, 0), "{summary}");
    assert_eq!(summary["engine_path"], "rings");
    assert_eq!(summary["tiers_without_hits"], serde_json::json!([]), "{summary}");
    let before = number(&summary, "/durable_before_kill");
    assert!(before >= PROMPT_BLOCKS, "the killed node had durable blocks: {summary}");
    assert!(
        number(&summary, "/durable_after_restart") + number(&summary, "/durable_left") >= before,
        "{summary}"
    );

    let rings = &summary["rings"];
    assert_eq!(rings["backend"], "gpu-queue-emulated");
    let block_bytes = number(&summary, "/block_bytes");
    let (loaded, saved) = (number(rings, "/blocks_loaded"), number(rings, "/blocks_saved"));
    // The replay loads from NVMe, and the checks before and after the kill load each durable block.
    let after = number(&summary, "/durable_after_restart");
    assert!(loaded >= number(&summary, "/hits/own_nvme") + before + after - number(rings, "/loads_by_arena"));
    assert!(number(rings, "/bytes_read") >= loaded * (block_bytes + 4096), "{rings}");
    assert!(number(rings, "/bytes_written") >= saved * block_bytes, "{rings}");
    let (batches, contexts) = (number(rings, "/batches"), number(rings, "/contexts"));
    assert!(batches > 0 && contexts > batches, "batches have several contexts: {rings}");
    for tier in ["own_dram", "peer_dram", "peer_nvme"] {
        let in_replay = number(&summary, &format!("/hits/{tier}"));
        assert!(number(rings, &format!("/arena/{tier}")) >= in_replay, "{tier}: {summary}");
    }
}

#[test]
fn the_demo_rejects_unknown_paths_and_sizes_that_rings_cannot_move() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    for (arguments, words) in [
        (["--engine-path", "ring", "--scale", "256"], "[possible values: arena, rings]"),
        (["--engine-path", "rings", "--scale", "1024"], "use --scale 256 or less"),
    ] {
        let output = run(&[&["demo", "--dir", folder], &arguments[..]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(words), "{arguments:?} printed: {stderr}");
    }
    assert!(!env.folder().join("cluster.json").exists(), "nothing was started");
}

#[test]
fn bench_nvme_reports_the_emulation_and_figures_next_to_the_kernel() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    let mut lines = objects(&["bench", "nvme", "--repetitions", "1", "--dir", folder, "--json"]);
    let first = lines.remove(0);
    assert_eq!((&first["benchmark"], &first["device"]), (&"nvme".into(), &"none".into()));
    assert!(first["code"].as_str().is_some_and(|code| code.contains("emulated")), "{first}");
    assert!(first["reason"].as_str().is_some_and(|reason| reason.contains("--pci")), "{first}");
    assert_form(&lines);
    let figures: BTreeMap<&str, &Value> =
        lines.iter().map(|line| (line["name"].as_str().expect("a name"), line)).collect();
    for depth in [1, 32] {
        let name = format!("nvme.read_4kib_depth_{depth}");
        let rate = figures[name.as_str()];
        assert!(rate["value"].as_f64().is_some_and(|value| value > 100.0), "{rate}");
        assert!(rate["reference"].as_str().is_some_and(|text| text.contains("io_uring")), "{rate}");
        let [p50, p99] = ["p50", "p99"].map(|quantile| figures[format!("{name}_{quantile}").as_str()]);
        assert_eq!(p50["unit"], "us");
        assert!(
            p50["value"].as_f64() > Some(0.0) && p50["value"].as_f64() <= p99["value"].as_f64(),
            "{p50} {p99}"
        );
    }
    assert_eq!(figures["nvme.read_2mib_sequential_depth_8"]["unit"], "GB/s");
}

#[test]
fn bench_nvme_rejects_a_controller_that_it_cannot_use_with_the_steps() {
    let env = TestEnv::new();
    let folder = env.folder().to_str().expect("our folders have plain names");
    // No machine has a function at the end of the last bus of this domain.
    for (address, words) in [
        ("ffff:ff:1f.7", "1. no function is at the PCI address ffff:ff:1f.7"),
        ("nvme0", "invalid PCI address \"nvme0\""),
    ] {
        let output = run(&["bench", "nvme", "--pci", address, "--dir", folder]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(words), "{address} printed: {stderr}");
    }
}
