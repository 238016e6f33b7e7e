//! Resident memory of a process, as the kernel counts it (proc_pid_status(5)).

use anyhow::Context;

/// Anonymous resident memory in bytes: heap and stacks, without shared memory such as an arena.
pub(super) fn anonymous_bytes(pid: u32) -> anyhow::Result<u64> {
    field(&pid.to_string(), "RssAnon:")
}

/// The most memory that this process has had resident since [`forget_peak`], in bytes, all of it counted.
pub(super) fn peak_bytes() -> anyhow::Result<u64> {
    field("self", "VmHWM:")
}

/// The most memory that a process and its descendants have had resident, each by itself, in bytes. What several have mapped
/// is counted for each of them.
pub(super) fn tree_peak_bytes(pid: u32) -> anyhow::Result<u64> {
    let mut bytes = field(&pid.to_string(), "VmHWM:")?;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).context("threads of a process")? {
        // proc_tid_children(5); a thread that has ended has none.
        let children = std::fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
            // One that has ended meanwhile has no memory left to ask for.
            bytes += tree_peak_bytes(child).unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// Begins the peak anew at what is resident now: what ran before in this process is not counted.
pub(super) fn forget_peak() -> anyhow::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5").context("resetting the peak of resident memory")
}

fn field(process: &str, name: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .with_context(|| format!("no {name} in the process status"))?;
    let kib: u64 = line.split_whitespace().nth(1).context("no number")?.parse().context("not a number")?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_the_memory_of_a_process_and_of_what_it_has_started() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "cat & cat; wait"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell is everywhere");
        let alone = || field(&child.id().to_string(), "VmHWM:").expect("it runs");
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while tree_peak_bytes(child.id()).expect("it runs") <= alone() {
            assert!(std::time::Instant::now() < give_up, "its children do not count");
            std::thread::yield_now();
        }
        drop(child.stdin.take());
        child.wait().expect("one's own child");
        assert!(tree_peak_bytes(child.id()).is_err(), "it has ended");
    }

    #[test]
    fn the_peak_outlives_the_memory_that_made_it_until_it_is_forgotten() {
        const BYTES: u64 = 64 << 20;
        forget_peak().expect("one's own process");
        let before = peak_bytes().expect("one's own process");
        let memory = std::hint::black_box(vec![1_u8; 64 << 20]);
        drop(memory);
        let peak = peak_bytes().expect("one's own process");
        assert!(peak >= before + BYTES / 2, "{peak} after {before}");
        forget_peak().expect("one's own process");
        assert!(peak_bytes().expect("one's own process") < peak);
    }
}
