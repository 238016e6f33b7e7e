//! Checks before the first benchmark of a run which ones this machine can run, and reports missing requirements.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use serde::Serialize;

use super::reference_pool::REFERENCE_BYTES;
use crate::output::{Audience, bytes_text};
use crate::process::sibling_binary;

/// Programs of a cluster, next to this one.
pub const CLUSTER_PROGRAMS: &[&str] = &["reprise-agent", "reprise-controlplane"];

/// Requirements of a benchmark.
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    /// Name of the benchmark, as on the command line.
    pub name: &'static str,
    /// Programs of the tree that it starts.
    pub programs: &'static [&'static str],
    /// Files that it needs, each with the command that makes it.
    pub files: Vec<(PathBuf, &'static str)>,
    /// Free space in the benchmarks' directory.
    pub disk_bytes: u64,
    /// Available memory.
    pub memory_bytes: u64,
    /// Whether it runs a bare io_uring loop over [`REFERENCE_BYTES`] of registered memory.
    pub bare_loop: bool,
    /// Programs from `PATH` for additional figures.
    pub optional: &'static [&'static str],
}

/// A requirement that this machine lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// The missing requirement, and the value found.
    pub what: String,
    /// How to provide it.
    pub remedy: String,
}

/// Result of the check of one benchmark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// Name of the benchmark.
    pub benchmark: &'static str,
    /// Whether it will run.
    pub runs: bool,
    /// Reasons for which it is skipped.
    pub missing: Vec<Missing>,
    /// Requirements of figures that it omits.
    pub omits: Vec<Missing>,
}

impl Missing {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Missing {
        Missing { what: what.into(), remedy: remedy.into() }
    }
}

impl Readiness {
    /// Returns the result for a benchmark that is never a part of a run of all.
    pub fn excluded(benchmark: &'static str, what: &str, remedy: &str) -> Readiness {
        Readiness { benchmark, runs: false, missing: vec![Missing::new(what, remedy)], omits: Vec::new() }
    }

    fn lines(&self) -> String {
        let mut text = match self.runs {
            true => format!("  {}: runs", self.benchmark),
            false => format!("  {}: skipped", self.benchmark),
        };
        for Missing { what, remedy } in &self.missing {
            text.push_str(&format!("\n    {what}: {remedy}"));
        }
        for Missing { what, remedy } in &self.omits {
            text.push_str(&format!("\n    without its comparison: {what}: {remedy}"));
        }
        text
    }
}

/// Checks the requirements of benchmarks that store files in `directory`.
pub fn check(all: &[Requirements], directory: &Path) -> Vec<Readiness> {
    let registers = all.iter().any(|one| one.bare_loop).then(bare_loop_obstacle).flatten();
    let of = |one: &Requirements| {
        let mut missing = Vec::new();
        for program in one.programs {
            if let Err(error) = sibling_binary(program) {
                missing.push(Missing::new(format!("{error:#}"), "run `make build`"));
            }
        }
        for (file, command) in &one.files {
            if !file.exists() {
                missing
                    .push(Missing::new(format!("{} is missing", file.display()), format!("run `{command}`")));
            }
        }
        missing.extend(disk_shortage(one.disk_bytes, directory));
        missing.extend(memory_shortage(one.memory_bytes));
        missing.extend(registers.clone().filter(|_| one.bare_loop));
        let absent = one.optional.iter().filter(|program| !is_in_path(program));
        let omits = absent.map(|program| {
            Missing::new(format!("{program} is not installed"), "install the package of this name")
        });
        Readiness { benchmark: one.name, runs: missing.is_empty(), missing, omits: omits.collect() }
    };
    all.iter().map(of).collect()
}

/// Prints the results: text, or one JSON object for each benchmark.
///
/// # Errors
/// No benchmark can run.
pub fn report(audience: Audience, results: &[Readiness]) -> anyhow::Result<()> {
    let count = results.iter().filter(|result| result.runs).count();
    audience.print_line(format!("{count} of {} benchmarks will run:", results.len()));
    for result in results {
        audience.emit(result);
        audience.print_line(result.lines());
    }
    audience.print_line("");
    ensure!(count > 0, "no benchmark can run on this machine: see the list of missing requirements");
    Ok(())
}

fn disk_shortage(needed: u64, directory: &Path) -> Option<Missing> {
    // The directory may not exist yet.
    let existing = directory.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let remedy = "free space, or set another directory with --dir";
    let free = match rustix::fs::statvfs(existing) {
        Ok(system) => system.f_bavail.saturating_mul(system.f_frsize),
        Err(error) => {
            return Some(Missing::new(
                format!("cannot read free space of {}: {error}", existing.display()),
                remedy,
            ));
        }
    };
    let what = || {
        let (needed, free) = (bytes_text(needed), bytes_text(free));
        format!("needs {needed} in {}, of which {free} are free", directory.display())
    };
    (free < needed).then(|| Missing::new(what(), remedy))
}

fn memory_shortage(needed: u64) -> Option<Missing> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.split_whitespace().next()?.parse::<u64>().ok()?.saturating_mul(1024);
    let what = || {
        format!("needs {} of memory, of which {} are available", bytes_text(needed), bytes_text(available))
    };
    (available < needed).then(|| Missing::new(what(), "end other programs, or use a larger machine"))
}

/// Tries what the bare loop needs: a ring with its memory registered.
fn bare_loop_obstacle() -> Option<Missing> {
    let config =
        ArenaConfig { bytes: REFERENCE_BYTES, region_bytes: REFERENCE_BYTES, huge: HugePolicy::Prefer };
    let arena = match Arena::new(&config) {
        Ok(arena) => arena,
        Err(error) => {
            return Some(Missing::new(
                format!("cannot allocate {} for the bare loop: {error}", bytes_text(REFERENCE_BYTES)),
                "free memory",
            ));
        }
    };
    let probe = reprise_io::probe(&arena.regions());
    if let Err(error) = probe.io_uring {
        return Some(Missing::new(
            format!("io_uring is not available: {error}"),
            "set the sysctl kernel.io_uring_disabled=0, and permit io_uring in the container's seccomp profile",
        ));
    }
    let error = probe.registered_buffers.err()?;
    Some(Missing::new(
        format!("cannot register {} with io_uring: {error}", bytes_text(REFERENCE_BYTES)),
        "raise the limit on locked memory (`ulimit -l`), or run as root",
    ))
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_without_requirements_runs() {
        let checked =
            check(&[Requirements { name: "match", ..Requirements::default() }], Path::new("/nowhere"));
        assert_eq!(
            checked,
            [Readiness { benchmark: "match", runs: true, missing: Vec::new(), omits: Vec::new() }]
        );
    }

    #[test]
    fn missing_requirements_skip_the_benchmark_and_name_a_remedy() {
        let needs = Requirements {
            name: "store",
            programs: &["no-such-program"],
            files: vec![("/nowhere/etcd".into(), "make etcd")],
            disk_bytes: u64::MAX,
            memory_bytes: u64::MAX,
            ..Requirements::default()
        };
        let checked = check(&[needs], &std::env::temp_dir().join("absent"));
        let [Readiness { runs: false, missing, .. }] = checked.as_slice() else { panic!("{checked:?}") };
        let all: Vec<&str> = missing.iter().map(|one| one.what.as_str()).collect();
        assert_eq!(all.len(), 4, "{all:?}");
        assert!(all[0].contains("no-such-program") && all[1].contains("/nowhere/etcd"), "{all:?}");
        assert!(all[2].contains("are free") && all[3].contains("are available"), "{all:?}");
        assert!(
            missing[1].remedy.contains("make etcd") && missing[2].remedy.contains("--dir"),
            "{missing:?}"
        );
        assert!(checked[0].lines().starts_with("  store: skipped\n"), "{}", checked[0].lines());
    }

    #[test]
    fn missing_optional_program_omits_figures_only() {
        let needs = Requirements { name: "peer", optional: &["no-such-program"], ..Requirements::default() };
        let checked = check(&[needs], Path::new("/"));
        assert!(checked[0].runs && checked[0].missing.is_empty(), "{checked:?}");
        assert!(checked[0].omits[0].what.contains("no-such-program"), "{checked:?}");
    }
}
