//! `reprise admin` on a running cluster.

use reprise_e2e::wait_until;
use serde_json::Value;

use super::{PATIENCE, number, objects};

/// Runs a command on the blocks of the trace's first request; returns the reports of both nodes.
fn admin(folder: &str, action: &[&str]) -> Vec<Value> {
    let command = [&["--json", "admin"], action, &["--trace-line", "1", "--cluster", folder]].concat();
    let reports = objects(&command);
    let nodes: Vec<_> = reports.iter().filter_map(|report| report["node"].as_str()).collect();
    assert_eq!(nodes, ["node-1", "node-2"]);
    reports
}

/// Sums a count over the nodes.
fn sum(reports: &[Value], count: &str) -> u64 {
    reports.iter().map(|report| number(report, &format!("/{count}"))).sum()
}

/// Returns the first block of the request, as `reprise explain` prints it.
fn first_block(folder: &str) -> Value {
    objects(&["--json", "explain", "1", "--cluster", folder]).remove(0)
}

/// Waits until a node would load the first block from its own DRAM.
fn await_in_dram(folder: &str, node: &str) {
    wait_until(&format!("{node} has the block in DRAM"), PATIENCE, || {
        let load = first_block(folder)["loads"][node].clone();
        load.as_str().is_some_and(|load| load.contains("own DRAM")).then_some(())
    });
}

/// Demotes, prefetches, pins, unpins and deletes the blocks of a request, and checks what each command reports.
pub(super) fn assert_commands_change_blocks(folder: &str) {
    let demoted = admin(folder, &["demote"]);
    let on_first = number(&demoted[0], "/found");
    assert!(on_first > 0, "node-1 has saved the blocks: {demoted:?}");
    assert_eq!(number(&demoted[0], "/refused"), 0, "all of them are on NVMe too: {demoted:?}");

    let prefetched = admin(folder, &["prefetch"]);
    assert_eq!(number(&prefetched[0], "/affected"), on_first, "{prefetched:?}");
    await_in_dram(folder, "node-1");
    let fetched = admin(folder, &["prefetch", "--from-peers"]);
    for report in &fetched {
        let found = number(report, "/affected") + number(report, "/unchanged");
        assert_eq!(
            (found, number(report, "/absent")),
            (on_first, 0),
            "each node gets all blocks: {fetched:?}"
        );
    }
    await_in_dram(folder, "node-2");

    let pinned = admin(folder, &["pin", "--ttl", "10m"]);
    let blocks = sum(&pinned, "affected");
    assert_eq!(blocks, 2 * on_first, "both nodes have all blocks: {pinned:?}");
    let refused = admin(folder, &["delete"]);
    assert_eq!((sum(&refused, "affected"), sum(&refused, "pinned")), (0, blocks), "{refused:?}");
    let unpinned = admin(folder, &["unpin"]);
    assert_eq!(sum(&unpinned, "affected"), blocks, "{unpinned:?}");
    assert_eq!(sum(&unpinned, "retention/blocks"), 0, "{unpinned:?}");

    let deleted = admin(folder, &["delete"]);
    assert_eq!((sum(&deleted, "affected"), sum(&deleted, "refused")), (blocks, 0), "{deleted:?}");
    assert_eq!(sum(&admin(folder, &["delete"]), "found"), 0, "nothing is left");
    wait_until("the directory has removed the block", PATIENCE, || {
        let replicas = first_block(folder)["replicas"].clone();
        replicas.as_array().is_some_and(Vec::is_empty).then_some(())
    });
}
