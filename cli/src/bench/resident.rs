//! Resident memory of a process, as the kernel counts it.

use anyhow::Context;

/// Anonymous resident memory in bytes: heap and stacks, without shared memory such as an arena.
pub(super) fn anonymous_bytes(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line =
        text.lines().find(|line| line.starts_with("RssAnon:")).context("no RssAnon in the process status")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no number")?.parse().context("not a number")?;
    Ok(kib * 1024)
}
