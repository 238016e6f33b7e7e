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
