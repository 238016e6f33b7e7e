//! `reprise trace` on a running cluster.

use std::path::Path;
use std::process::Stdio;

use reprise_e2e::process::{ChildProcess, Signal};
use serde_json::Value;

use super::{PATIENCE, number, objects, reprise, run};

/// Number of requests that are recorded.
const REQUESTS: u64 = 60;

/// Records for a second, without calls: the recording ends by itself, complete.
pub(super) fn assert_a_recording_ends_by_itself(folder: &str) {
    let file = Path::new(folder).join("short.jsonl");
    let file = file.to_str().expect("our folders have plain names");
    let lines = objects(&["--json", "trace", "record", "--for", "1s", "--cluster", folder, "--out", file]);
    let summary = lines.last().expect("a summary");
    assert_eq!((&summary["interrupted"], number(summary, "/dropped")), (&false.into(), 0), "{summary}");
    let info = objects(&["trace", "info", file, "--json"]).remove(0);
    assert_eq!(info["recording"]["cut_off"], serde_json::json!([]), "{info}");
}

/// Records a replay, removes its names, and replays it: every block is then in the cluster.
pub(super) fn assert_a_recording_replays(folder: &str) {
    let file =
        |name: &str| Path::new(folder).join(name).to_str().expect("our folders have plain names").to_owned();
    let (recorded, anonymous) = (file("recorded.jsonl"), file("anonymous.jsonl"));
    let mut command =
        reprise(&["--json", "trace", "record", "--for", "200s", "--cluster", folder, "--out", &recorded]);
    command.stdout(Stdio::piped());
    let mut recorder = ChildProcess::spawn(command);
    let lines = recorder.read_lines(4);
    let next = || -> Value {
        let line = lines.recv_timeout(PATIENCE).expect("a line of JSON");
        serde_json::from_str(&line).expect("an object")
    };
    assert_eq!(next()["recording"], 2);
    let requests = REQUESTS.to_string();
    objects(&["replay", "--requests", &requests, "--cluster", folder, "--json"]);
    recorder.signal(Signal::INT);
    let summary = next();
    assert!(recorder.wait(PATIENCE).is_some_and(|status| status.success()));
    assert_eq!((&summary["interrupted"], &summary["dropped"]), (&true.into(), &Value::Null), "{summary}");

    let info = objects(&["trace", "info", &recorded, "--json"]).remove(0);
    assert_eq!((number(&info, "/requests"), number(&info, "/recording/nodes")), (REQUESTS, 2), "{info}");
    for call in ["matches", "loads", "saves"] {
        assert!(number(&info, &format!("/recording/{call}")) > 0, "{call}: {info}");
    }
    assert_eq!(info["recording"]["cut_off"].as_array().map(Vec::len), Some(2), "Ctrl-C cuts a recording off");
    objects(&["trace", "anonymise", &recorded, "--out", &anonymous, "--json"]);
    let without_names = objects(&["trace", "info", &anonymous, "--json"]).remove(0);
    for figure in ["requests", "blocks", "distinct_blocks", "seconds"] {
        assert_eq!(info[figure], without_names[figure], "{figure}");
    }
    let text = std::fs::read_to_string(&anonymous).expect("a file");
    assert!(!text.contains("default") && text.contains("tenant-1"), "names are replaced");

    let blocks = number(&info, "/blocks");
    assert!(blocks >= REQUESTS, "{info}");
    for trace in [&recorded, &anonymous] {
        let replayed = objects(&["replay", "--trace", trace, "--cluster", folder, "--json"]);
        let summary = replayed.last().expect("a replay prints a summary");
        let tiers = ["own_dram", "own_nvme", "peer_dram", "peer_nvme"];
        let hits: u64 = tiers.iter().map(|tier| number(summary, &format!("/hits/{tier}"))).sum();
        assert_eq!(hits + number(summary, "/blocks_saved"), blocks, "every block is replayed: {summary}");
        assert_eq!(
            (number(summary, "/requests"), number(summary, "/mismatches")),
            (REQUESTS, 0),
            "{summary}"
        );
    }
    let refused = run(&["trace", "anonymise", &recorded, "--out", &anonymous]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("choose a new file"), "{stderr}");
}
