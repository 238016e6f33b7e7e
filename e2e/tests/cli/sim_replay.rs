//! `reprise sim replay` on the samples in the tree, and on the complete traces next to the checkout.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{number, objects, run};

/// Sample of the conversation trace, and of the agentic traces.
const SAMPLES: [&str; 2] = ["conversation_sample.jsonl", "agentic_sample.tar.xz"];

fn sample(name: &str) -> String {
    text(Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/data").join(name))
}

fn text(path: PathBuf) -> String {
    path.into_os_string().into_string().expect("our folders have plain names")
}

/// Path of a complete trace, if this machine has it. A test without it writes to the terminal, past the capture of
/// passed tests.
fn complete(name: &str) -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if path.exists() {
        return Some(text(path));
    }
    let _ =
        writeln!(std::io::stderr(), "SKIPPED: {} is absent: its figures were not checked", path.display());
    None
}

fn replay(arguments: &[&str]) -> Vec<Value> {
    objects(&[&["sim", "replay", "--json"], arguments].concat())
}

/// Hit ratio in hundredths of a percent, rounded.
fn hundredths(outcome: &Value) -> u64 {
    (outcome["hit_ratio"].as_f64().expect("a ratio") * 1e4).round() as u64
}

fn refusal(arguments: &[&str]) -> String {
    let output = run(&[&["sim", "replay"], arguments].concat());
    assert!(!output.status.success(), "{arguments:?} is refused");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn conversation_trace_has_the_published_hit_ratios_under_plain_lru() {
    let Some(trace) = complete("conversation_trace.jsonl") else { return };
    let sizes = ["--capacity", "1000,10000,30000,50000", "--unlimited", "--chains", "ignored"];
    let lines = replay(&[&["--trace", &trace][..], &sizes].concat());
    assert_eq!((number(&lines[0], "/requests"), number(&lines[0], "/references")), (12_031, 288_500));
    let ratios: Vec<u64> = lines[1..].iter().map(hundredths).collect();
    assert_eq!(ratios, [445, 2112, 3257, 3546, 3664]);
}

#[test]
fn agentic_traces_have_the_published_counts_and_hit_ratio() {
    let Some(trace) = complete("agentic_traces.tar.xz") else { return };
    let lines = replay(&["--trace", &trace, "--unlimited"]);
    let of = |name| number(&lines[0], name);
    assert_eq!((of("/requests"), of("/sessions")), (49_334, 710));
    assert_eq!((of("/references"), of("/distinct_blocks")), (94_310_647, 3_450_959));
    assert_eq!(hundredths(lines.last().expect("a result")), 9634);
}

#[test]
fn samples_replay_under_every_policy_with_the_same_bytes() {
    for (name, references, unlimited) in [(SAMPLES[0], 11_349, 1346), (SAMPLES[1], 38_707, 8728)] {
        let trace = sample(name);
        let arguments = [
            "sim",
            "replay",
            "--json",
            "--trace",
            &trace,
            "--policy",
            "all",
            "--capacity",
            "500",
            "--unlimited",
        ];
        let output = || run(&[&arguments[..], &["--seed", "7"]].concat()).stdout;
        let first = output();
        assert_eq!(first, output(), "{name}: the same seed gives the same bytes");
        let lines = objects(&[&arguments[..], &["--seed", "7"]].concat());
        assert_eq!(number(&lines[0], "/references"), references);
        assert_eq!(lines.len(), 1 + 2 * 8, "6 policies and 2 bounds, 2 sizes");
        assert_eq!(hundredths(lines.last().expect("a result")), unlimited, "{name}");
        let opt = lines.iter().find(|line| line["policy"] == "opt").expect("a result");
        assert!(lines[1..9].iter().all(|line| hundredths(line) <= hundredths(opt)), "{lines:?}");
        assert_eq!(opt["gap_closed"], 1.0, "{opt}");
    }
}

#[test]
fn tiers_and_nodes_are_reported_apart() {
    let trace = sample(SAMPLES[0]);
    let tiers = ["--tier", "DRAM=300,NVMe=20000", "--nodes", "3", "--admission", "second_use"];
    let outcome = replay(&[&["--trace", &trace][..], &tiers].concat()).remove(1);
    assert!(number(&outcome, "/hits_dram") > 0 && number(&outcome, "/hits_peer_dram") > 0, "{outcome}");
    assert!(number(&outcome, "/nvme_written_bytes") > 0, "{outcome}");
    let tiers = ["hits_dram", "hits_nvme", "hits_peer_dram", "hits_peer_nvme"];
    let hits: u64 = tiers.iter().map(|tier| number(&outcome, &format!("/{tier}"))).sum();
    assert_eq!(hits, number(&outcome, "/hits"));
}

#[test]
fn refused_traces_and_arguments_have_a_remedy() {
    let env = reprise_e2e::TestEnv::new();
    let file = |name: &str, content: &[u8]| {
        let path = env.folder().join(name);
        std::fs::write(&path, content).expect("written");
        text(path)
    };
    let line = |ms: u64| {
        format!("{{\"timestamp\":{ms},\"input_length\":512,\"output_length\":1,\"hash_ids\":[{ms}]}}\n")
    };
    let unsorted = file("unsorted.jsonl", (line(5) + &line(4)).as_bytes());
    let damaged = file("damaged.tar.xz", b"\xfd7zXZ\0damaged");
    let session = file("session.json", b"{\"requests\":[]}");
    let cut_off = file("recording.jsonl", b"{\"line\":\"start\",\"version\":1,\"node\":\"n\"}\n");
    let conversation = sample(SAMPLES[0]);
    for (trace, more, words) in [
        (&unsorted, &["--unlimited"][..], &["line 2", "--sort"][..]),
        (&damaged, &["--unlimited"], &["damaged.tar.xz", "cannot read the archive"]),
        (&session, &["--unlimited"], &["no block size", "--block-tokens"]),
        (&cut_off, &["--unlimited"], &["gaps", "--allow-gaps"]),
        (&conversation, &[], &["--capacity", "--unlimited"]),
        (&conversation, &["--policy", "belady", "--unlimited"], &["expected lru", "opt or all"]),
        (&conversation, &["--policy", "opt", "--nodes", "2", "--unlimited"], &["leave out --nodes"]),
        (&conversation, &["--capacity", "1KiB"], &["0 blocks", "expected 1 block"]),
    ] {
        let error = refusal(&[&["--trace", trace][..], more].concat());
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn replay_with_hardware_reports_times_channels_and_prices_with_the_same_bytes() {
    let trace = sample(SAMPLES[0]);
    let tiers =
        ["--tier", "DRAM=300,NVMe=20000", "--nodes", "3", "--hardware", "h100", "--model", "llama-3-8b"];
    let arguments = [&["sim", "replay", "--json", "--trace", &trace][..], &tiers].concat();
    assert_eq!(run(&arguments).stdout, run(&arguments).stdout, "equal arguments give equal bytes");
    let outcome = objects(&arguments).remove(1);
    let of = |name: &str| outcome.pointer(name).and_then(Value::as_f64).expect(name);
    let sources = ["hbm", "dram", "nvme", "peer_dram", "peer_nvme"];
    let hits = sources.map(|source| of(&format!("/hits_{source}")));
    assert!(hits[0] > 0.0 && hits[3] + hits[4] > 0.0, "{outcome}");
    assert_eq!(hits.iter().sum::<f64>(), of("/hits"));
    for time in ["/timed/ttft_ms", "/timed/tpot_ms"] {
        let [p50, p90, p99] = ["p50", "p90", "p99"].map(|share| of(&format!("{time}/{share}")));
        assert!(0.0 < p50 && p50 <= p90 && p90 <= p99, "{outcome}");
    }
    let channels = outcome["timed"]["channels"].as_array().expect("channels");
    let link = channels.iter().find(|channel| channel["channel"] == "link_in").expect("a link");
    assert!(link["bytes"].as_f64() > Some(0.0) && link["utilisation"].as_f64() > Some(0.0), "{link}");
    // Three nodes of an H100 at 5 USD, with 19.2 GiB of DRAM and a drive of 3.84 TB each.
    assert_eq!(of("/timed/drives_per_node"), 1.0);
    assert!((15.9..16.6).contains(&of("/timed/usd_per_hour")), "{outcome}");
    assert!(of("/timed/usd_per_million_tokens") > 0.0 && of("/timed/drive_writes_per_day_max") > 0.0);
    let slow = objects(&[&arguments[..], &["--rate-scale", "0.1"]].concat()).remove(1);
    let p50 = |outcome: &Value| outcome["timed"]["ttft_ms"]["p50"].as_f64().expect("a time");
    assert!(p50(&slow) < p50(&outcome), "a tenth of the rate has shorter queues");
}

#[test]
fn replay_with_hardware_needs_a_model_that_fits() {
    let trace = sample(SAMPLES[0]);
    let with = |more: &[&str]| refusal(&[&["--trace", &trace], more].concat());
    assert!(with(&["--hardware", "h100"]).contains("--model"));
    assert!(with(&["--hardware", "h100", "--model", "llama-3-70b"]).contains("--accelerators"));
    assert!(with(&["--hardware", "h300", "--model", "llama-3-8b"]).contains("h200"));
    let opt = with(&["--hardware", "h100", "--model", "llama-3-8b", "--policy", "opt", "--unlimited"]);
    assert!(opt.contains("leave out"), "{opt}");
}
