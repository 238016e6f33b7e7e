//! Fuzz targets: tests that run on committed inputs in `cargo test`, and on generated ones in `make fuzz`.
//!
//! A target is a test in a module `fuzz` of the crate with the parser, so it reaches private functions:
//!
//! ```
//! fn peer_wire() {
//!     let seeds = [b"RPRF".to_vec()];
//!     reprise_fuzz::check("peer_wire", &seeds, |input| assert!(input.len() < 5000));
//! }
//! ```
//!
//! Its name is the name of the test and of the folder `fuzz/corpus/NAME` with its committed inputs. `make fuzz`
//! compiles the tests with counters for coverage, on the stable toolchain (`rustc.sh`), and links libFuzzer
//! (`engine`). Then a panic, a hang, or an input that allocates more than 64 MiB ends the run, and the input is kept.
//!
//! Not included: sanitizers, which need a nightly toolchain. Almost all of the code is safe.

#[cfg(feature = "libfuzzer")]
mod engine;

use std::fs;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

pub use arbitrary::Unstructured;

/// Maximum size of a committed input in bytes.
pub const INPUT_BYTES_MAX: u64 = 16 << 10;

/// Maximum size of all committed inputs in bytes.
pub const CORPUS_BYTES_MAX: u64 = 200 << 10;

/// Runs a target on its seeds, which the test builds, and on its committed inputs; in `make fuzz` on generated ones.
///
/// # Panics
/// The target has panicked, or it has no inputs.
pub fn check(target: &str, seeds: &[Vec<u8>], run: impl Fn(&[u8]) + 'static) {
    #[cfg(feature = "libfuzzer")]
    if let Some(arguments) = engine::arguments() {
        return engine::run(&arguments, seeds, run);
    }
    for (number, seed) in seeds.iter().enumerate() {
        run_one(&format!("seed {number} of {target}"), seed, &run);
    }
    let inputs = committed(&corpus().join(target));
    assert!(
        !inputs.is_empty() || !seeds.is_empty(),
        "{target} has neither seeds nor files in fuzz/corpus/{target}"
    );
    for path in inputs {
        let input = fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        run_one(&path.display().to_string(), &input, &run);
    }
}

/// Runs a target on an input. The name of the input is printed if the target panics.
fn run_one(name: &str, input: &[u8], run: &impl Fn(&[u8])) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(input))) {
        // The panic is what fails the test.
        let _ = writeln!(std::io::stderr(), "the target failed on {name}");
        resume_unwind(panic);
    }
}

/// Returns the folder of all committed inputs. Several checkouts may share one target folder, so its path comes from
/// cargo's environment at run time.
///
/// # Panics
/// This is not a checkout of the repository.
pub fn corpus() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the tests");
    let found =
        Path::new(&manifest).ancestors().map(|folder| folder.join("fuzz/corpus")).find(|path| path.is_dir());
    found.expect("the crate is in the repository")
}

/// Returns the files of a folder in the order of their names; none if there is no folder.
pub fn committed(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn target_runs_on_each_seed_and_a_failure_is_passed_on() {
        let runs = Rc::new(Cell::new(0));
        let counted = Rc::clone(&runs);
        check("of_no_target", &[vec![1], vec![2]], move |_| counted.set(counted.get() + 1));
        assert_eq!(runs.get(), 2);
        let failing = || check("of_no_target", &[vec![1], vec![2]], |input| assert_eq!(input, [1]));
        assert!(catch_unwind(failing).is_err());
        assert!(catch_unwind(|| check("of_no_target", &[], |_| ())).is_err(), "a target without inputs");
    }

    #[test]
    fn committed_inputs_are_small() {
        let files: Vec<PathBuf> = committed(&corpus()).iter().flat_map(|folder| committed(folder)).collect();
        let sizes = files.iter().map(|path| (path, fs::metadata(path).expect("a file").len()));
        let large: Vec<_> = sizes.clone().filter(|(_, bytes)| *bytes > INPUT_BYTES_MAX).collect();
        assert!(large.is_empty(), "inputs of more than {INPUT_BYTES_MAX} bytes: {large:?}");
        let all: u64 = sizes.map(|(_, bytes)| bytes).sum();
        assert!(all <= CORPUS_BYTES_MAX, "{all} bytes of inputs: expected at most {CORPUS_BYTES_MAX}");
    }
}
