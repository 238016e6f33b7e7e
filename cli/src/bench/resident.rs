//! Memory of processes, as the kernel counts it: resident (proc_pid_status(5)), and held by several, each page counted once
//! (proc_pid_smaps(5)).

use std::collections::BTreeSet;

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
    let own = field(&pid.to_string(), "VmHWM:")?;
    // One that has ended meanwhile has no memory left to ask for.
    let others = descendants(pid)?.into_iter().map(|pid| field(&pid.to_string(), "VmHWM:").unwrap_or(0));
    Ok(own + others.sum::<u64>())
}

/// What processes and their descendants hold now, in bytes: anonymous and shared memory, huge pages included. A page that
/// several of them have mapped counts once (the kernel's proportional set size, summed). Pages of programs' files do not count:
/// processes that are not asked about have them, too, and the kernel can drop them.
pub(super) fn held_bytes(roots: &[u32]) -> anyhow::Result<u64> {
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
        // Not part of any PSS, and told whole for each process that has it mapped: an arena is mapped by all that use it.
        huge = huge.max(number(&rollup, "Shared_Hugetlb:")?);
    }
    Ok(bytes + huge)
}

/// What processes and their descendants hold, and the most that they have held since [`begin_peaks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// As [`held_bytes`] counts it.
    pub(super) now: u64,
    /// `now`, and what each process has had resident at its own peak above what it has now. The peaks need not have been at one time,
    /// so it is the most that it may have been. Processes that have ended do not count.
    pub(super) peak: u64,
}

impl Held {
    /// Of processes that run.
    pub(super) fn by(roots: &[u32]) -> anyhow::Result<Held> {
        let now = held_bytes(roots)?;
        let above = |pid: u32| -> anyhow::Result<u64> {
            let process = pid.to_string();
            Ok(field(&process, "VmHWM:")?.saturating_sub(field(&process, "VmRSS:")?))
        };
        // One that has ended meanwhile has no memory left to ask for.
        let above: u64 = trees(roots)?.into_iter().map(|pid| above(pid).unwrap_or(0)).sum();
        Ok(Held { now, peak: now + above })
    }
}

/// Begins the peaks of processes and their descendants anew at what is resident now: what they needed to start does not count.
pub(super) fn begin_peaks(roots: &[u32]) -> anyhow::Result<()> {
    for pid in trees(roots)? {
        match forget_peak_of(&pid.to_string()) {
            // One that has ended meanwhile.
            Err(_) if !roots.contains(&pid) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Processes and their descendants, each once.
fn trees(roots: &[u32]) -> anyhow::Result<BTreeSet<u32>> {
    let mut processes = BTreeSet::new();
    for root in roots {
        processes.insert(*root);
        processes.extend(descendants(*root)?);
    }
    Ok(processes)
}

/// What processes and their descendants have had read from devices so far, in bytes (proc_pid_io(5)).
pub(super) fn device_read_bytes(roots: &[u32]) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for root in roots {
        for pid in descendants(*root)?.into_iter().chain([*root]) {
            // One that has ended meanwhile reads nothing more.
            let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("read_bytes:"));
            bytes += line.and_then(|bytes| bytes.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// All that a process has started and that runs, and what those have started.
fn descendants(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = children(pid)?;
    let mut next = 0;
    while next < found.len() {
        // One that has ended meanwhile has no children.
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

/// Begins the peak anew at what is resident now: what ran before in this process is not counted.
pub(super) fn forget_peak() -> anyhow::Result<()> {
    forget_peak_of("self")
}

fn forget_peak_of(process: &str) -> anyhow::Result<()> {
    // proc_pid_clear_refs(5).
    let path = format!("/proc/{process}/clear_refs");
    std::fs::write(&path, "5").with_context(|| format!("resetting the peak of resident memory in {path}"))
}

fn field(process: &str, name: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    number(&text, name)
}

/// A line's number of KiB, in bytes.
fn number(text: &str, name: &str) -> anyhow::Result<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .with_context(|| format!("the kernel tells no {name} of a process"))?;
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
    fn memory_that_two_processes_share_is_held_once() {
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
                    .expect("a python is where this is built");
                let mut said = String::new();
                let output = child.stdout.as_mut().expect("piped above");
                std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said)
                    .expect("it says when it has touched every page");
                child
            })
            .collect();
        std::fs::remove_file(&path).expect("it is ours");
        let pids: Vec<u32> = mappers.iter().map(std::process::Child::id).collect();
        let held = held_bytes(&pids).expect("they run");
        let one = held_bytes(&pids[..1]).expect("it runs");
        for child in &mut mappers {
            drop(child.stdin.take());
            child.wait().expect("one's own child");
        }
        assert!((BYTES..2 * BYTES).contains(&held), "{held}");
        assert!((BYTES / 2..BYTES).contains(&one), "half of the pages are the other's: {one}");
        assert!(held_bytes(&pids).is_err(), "they have ended");
    }

    #[test]
    fn what_a_process_let_go_of_is_in_its_peak_until_that_begins_anew() {
        const BYTES: u64 = 64 << 20;
        let code = "import sys; m = b'x' * (64 << 20); del m; print('done', flush=True); sys.stdin.read()";
        let mut child = std::process::Command::new("python3")
            .args(["-c", code])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a python is where this is built");
        let mut said = String::new();
        let output = child.stdout.as_mut().expect("piped above");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said)
            .expect("it says when it is done");
        let held = Held::by(&[child.id()]).expect("it runs");
        begin_peaks(&[child.id()]).expect("it is ours");
        let anew = Held::by(&[child.id()]).expect("it runs");
        drop(child.stdin.take());
        child.wait().expect("one's own child");
        assert!(held.now < BYTES && held.peak >= held.now + BYTES / 2, "{held:?}");
        assert!(anew.peak < anew.now + BYTES / 2, "{anew:?}");
        assert!(begin_peaks(&[child.id()]).is_err(), "it has ended");
    }

    #[test]
    fn the_peak_outlives_the_memory_that_made_it_until_it_is_forgotten() {
        // Much more than other tests of the process take or give back meanwhile.
        const BYTES: u64 = 256 << 20;
        forget_peak().expect("one's own process");
        let before = peak_bytes().expect("one's own process");
        let memory = std::hint::black_box(vec![1_u8; 256 << 20]);
        drop(memory);
        let peak = peak_bytes().expect("one's own process");
        assert!(peak >= before + BYTES / 2, "{peak} after {before}");
        forget_peak().expect("one's own process");
        assert!(peak_bytes().expect("one's own process") < peak);
    }
}
