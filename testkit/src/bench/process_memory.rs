//! Memory of processes as counted by the kernel: resident memory (proc_pid_status(5)), and memory of several
//! processes with each page counted once (proc_pid_smaps(5)).

use std::collections::BTreeSet;

use anyhow::Context;

/// Returns anonymous resident memory in bytes: heap and stacks, without shared memory such as an arena.
pub fn anonymous_bytes(pid: u32) -> anyhow::Result<u64> {
    field(&pid.to_string(), "RssAnon:")
}

/// Returns the peak of this process' resident memory since [`reset_peak`], in bytes, including shared memory.
pub fn peak_bytes() -> anyhow::Result<u64> {
    field("self", "VmHWM:")
}

/// Returns the sum of the peaks of a process and its descendants, in bytes. Shared memory counts for each
/// process.
pub fn tree_peak_bytes(pid: u32) -> anyhow::Result<u64> {
    let own = field(&pid.to_string(), "VmHWM:")?;
    // A process that has ended has no memory.
    let others = descendants(pid)?.into_iter().map(|pid| field(&pid.to_string(), "VmHWM:").unwrap_or(0));
    Ok(own + others.sum::<u64>())
}

/// Returns the memory of processes and their descendants in bytes: anonymous and shared memory, including
/// huge pages. A page that several of them have mapped counts once (the sum of the kernel's proportional set
/// sizes). Pages of program files do not count: other processes share them, and the kernel can drop them.
pub fn held_bytes(roots: &[u32]) -> anyhow::Result<u64> {
    let (mut bytes, mut huge) = (0, 0);
    for pid in trees(roots)? {
        let path = format!("/proc/{pid}/smaps_rollup");
        let rollup = match std::fs::read_to_string(&path) {
            Ok(rollup) => rollup,
            Err(_) if !roots.contains(&pid) => continue,
            Err(error) => return Err(error).with_context(|| format!("reading {path}")),
        };
        for name in ["Pss_Anon:", "Pss_Shmem:", "Private_Hugetlb:"] {
            bytes += number(&rollup, name)?;
        }
        // Not part of the PSS, and reported in full for each process that has mapped it: all users map the
        // same arena.
        huge = huge.max(number(&rollup, "Shared_Hugetlb:")?);
    }
    Ok(bytes + huge)
}

/// Memory of processes and their descendants now, and its peak since [`reset_peaks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Current memory as counted by [`held_bytes`].
    pub now: u64,
    /// `now` plus, for each process, the difference between its peak and its current resident memory. The
    /// peaks may have been at different times, so this is an upper bound. Processes that have ended do not
    /// count.
    pub peak: u64,
}

impl ProcessMemory {
    /// Measures running processes and their descendants.
    pub fn by(roots: &[u32]) -> anyhow::Result<ProcessMemory> {
        let now = held_bytes(roots)?;
        let above = |pid: u32| -> anyhow::Result<u64> {
            let process = pid.to_string();
            Ok(field(&process, "VmHWM:")?.saturating_sub(field(&process, "VmRSS:")?))
        };
        // A process that has ended has no memory.
        let above: u64 = trees(roots)?.into_iter().map(|pid| above(pid).unwrap_or(0)).sum();
        Ok(ProcessMemory { now, peak: now + above })
    }
}

/// Resets the peaks of processes and their descendants to their current memory, so that their start does not
/// count.
pub fn reset_peaks(roots: &[u32]) -> anyhow::Result<()> {
    for pid in trees(roots)? {
        match reset_peak_of(&pid.to_string()) {
            // The process has ended.
            Err(_) if !roots.contains(&pid) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Returns processes and their descendants, each once.
fn trees(roots: &[u32]) -> anyhow::Result<BTreeSet<u32>> {
    let mut processes = BTreeSet::new();
    for root in roots {
        processes.insert(*root);
        processes.extend(descendants(*root)?);
    }
    Ok(processes)
}

/// Returns the bytes that processes and their descendants have read from devices so far (proc_pid_io(5)).
pub fn device_read_bytes(roots: &[u32]) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for root in roots {
        for pid in descendants(*root)?.into_iter().chain([*root]) {
            // A process that has ended does not count.
            let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("read_bytes:"));
            bytes += line.and_then(|bytes| bytes.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// Returns the running descendants of a process.
fn descendants(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = children(pid)?;
    let mut next = 0;
    while next < found.len() {
        // A process that has ended has no children.
        found.extend(children(found[next]).unwrap_or_default());
        next += 1;
    }
    Ok(found)
}

fn children(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).context("threads of a process")? {
        // proc_tid_children(5); a thread that has ended has none.
        let children = std::fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(found)
}

/// Resets the peak to the current memory, so that earlier work of this process does not count.
pub fn reset_peak() -> anyhow::Result<()> {
    reset_peak_of("self")
}

fn reset_peak_of(process: &str) -> anyhow::Result<()> {
    // proc_pid_clear_refs(5).
    let path = format!("/proc/{process}/clear_refs");
    std::fs::write(&path, "5").with_context(|| format!("resetting the peak of resident memory in {path}"))
}

fn field(process: &str, name: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    number(&text, name)
}

/// Returns a line's number of KiB, in bytes.
fn number(text: &str, name: &str) -> anyhow::Result<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .with_context(|| format!("the kernel reports no {name} for the process"))?;
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .context("the line has no number")?
        .parse()
        .context("the number is invalid")?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_includes_the_memory_of_descendants() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "cat & cat; wait"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell is installed");
        let alone = || field(&child.id().to_string(), "VmHWM:").expect("it runs");
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while tree_peak_bytes(child.id()).expect("it runs") <= alone() {
            assert!(std::time::Instant::now() < give_up, "the children's memory is not included");
            std::thread::yield_now();
        }
        drop(child.stdin.take());
        child.wait().expect("a child of this process");
        assert!(tree_peak_bytes(child.id()).is_err(), "it has ended");
    }

    #[test]
    fn shared_memory_of_two_processes_counts_once() {
        const BYTES: u64 = 32 << 20;
        let path = format!("/dev/shm/reprise-held-{}", std::process::id());
        std::fs::write(&path, vec![1_u8; 32 << 20]).expect("shared memory is writable");
        let code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); \
                    s = sum(m[::4096]); print(s, flush=True); sys.stdin.read()";
        let mut mappers: Vec<_> = (0..2)
            .map(|_| {
                let mut child = std::process::Command::new("python3")
                    .args(["-c", code, &path])
                    .stdin(std::process::Stdio::piped())
                    .stdout(std::process::Stdio::piped())
                    .spawn()
                    .expect("python3 is installed");
                let mut line = String::new();
                let output = child.stdout.as_mut().expect("piped above");
                std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line)
                    .expect("it prints a line when it has touched every page");
                child
            })
            .collect();
        std::fs::remove_file(&path).expect("it exists");
        let pids: Vec<u32> = mappers.iter().map(std::process::Child::id).collect();
        let held = held_bytes(&pids).expect("they run");
        let one = held_bytes(&pids[..1]).expect("it runs");
        for child in &mut mappers {
            drop(child.stdin.take());
            child.wait().expect("a child of this process");
        }
        assert!((BYTES..2 * BYTES).contains(&held), "{held}");
        assert!((BYTES / 2..BYTES).contains(&one), "half of the shared pages count: {one}");
        assert!(held_bytes(&pids).is_err(), "they have ended");
    }

    #[test]
    fn released_memory_counts_in_the_peak_until_the_reset() {
        const BYTES: u64 = 64 << 20;
        let code = "import sys; m = b'x' * (64 << 20); del m; print('done', flush=True); sys.stdin.read()";
        let mut child = std::process::Command::new("python3")
            .args(["-c", code])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("python3 is installed");
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("piped above");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line)
            .expect("it prints a line when it is done");
        let held = ProcessMemory::by(&[child.id()]).expect("it runs");
        reset_peaks(&[child.id()]).expect("it exists");
        let reset = ProcessMemory::by(&[child.id()]).expect("it runs");
        drop(child.stdin.take());
        child.wait().expect("a child of this process");
        assert!(held.now < BYTES && held.peak >= held.now + BYTES / 2, "{held:?}");
        assert!(reset.peak < reset.now + BYTES / 2, "{reset:?}");
        assert!(reset_peaks(&[child.id()]).is_err(), "it has ended");
    }

    #[test]
    fn released_memory_of_this_process_counts_until_the_reset() {
        // Much more than other tests of this process allocate or release at the same time.
        const BYTES: u64 = 256 << 20;
        reset_peak().expect("this process");
        let before = peak_bytes().expect("this process");
        let memory = std::hint::black_box(vec![1_u8; 256 << 20]);
        drop(memory);
        let peak = peak_bytes().expect("this process");
        assert!(peak >= before + BYTES / 2, "{peak} after {before}");
        reset_peak().expect("this process");
        assert!(peak_bytes().expect("this process") < peak);
    }
}
